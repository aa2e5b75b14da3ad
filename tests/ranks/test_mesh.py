"""Gradients of dense, tensor-parallel and expert parameters, and of pipeline stages: norm and clipping are those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from mmspeed.axes import EXPERT, AxisName, AxisSizes
from mmspeed.comm import Axis, all_reduce_sum
from mmspeed.device import Device
from mmspeed.loop.gradients import clip_gradients, squared_norm
from mmspeed.mesh import Mesh, layout_of, make_mesh
from mmspeed.parallel import sum_shared_gradients
from tests.support.expert_models import SHAPES, gradient, placements, spread
from tests.support.spawn import run_ranks

WORLD, CLIP = 4, 0.5
LAYOUTS: dict[str, dict[str, int]] = {
    "experts over all": {"ep": 4},
    "experts over nodes": {"ep": 4, "ep_inner": 2},
    "sharded experts": {"ep": 2},
    "replicas": {"dp_replicate": 2, "ep": 2},
    "experts over tp": {"tp": 2, "ep": 2},
    "tp inside experts": {"tp": 2, "ep": 2, "etp": 2},
    "stages": {"pp": 2, "ep": 2},
    "dense": {"ring": 2, "tp": 2},
}
# each layout once, and what the tests below name
CASES = (
    "experts over all, whole",
    "experts over nodes, whole",
    "sharded experts, sharded",
    "sharded experts, whole",
    "replicas, sharded",
    "experts over tp, whole",
    "tp inside experts, whole",
    "stages, sharded",
    "dense, whole",
)


def norms(mesh: Mesh, sharded_experts: bool) -> dict[str, Any]:
    """Both norms of a layout, the gradients after clipping, and where parameters lie. Stages have parameters of their own."""
    stage = mesh.table.place(mesh.rank)[AxisName.PP]
    model = nn.Module()
    for key, at in placements(mesh, sharded_experts).items():
        whole = gradient(key, stage)
        parameter = nn.Parameter(spread(mesh, torch.zeros_like(whole), at))
        parameter.grad = spread(mesh, whole, at)
        model.register_parameter(key, parameter)
    share = squared_norm(model.parameters(), mesh)
    results: dict[str, Any] = {
        "layouts": {key: layout_of(p) for key, p in model.named_parameters()},
        "own": sum(p.to_local().numel() for p in model.parameters() if isinstance(p, DTensor)),
        "by shares": all_reduce_sum([share])[0] ** 0.5,
        "norm": clip_gradients([model], CLIP, mesh).item(),
        "stage": stage,
    }
    grads = {key: p.grad for key, p in model.named_parameters()}
    results["clipped"] = {key: g.full_tensor().numpy() for key, g in grads.items() if isinstance(g, DTensor)}
    return results


def shared_sums() -> dict[str, Any]:
    """What is summed over tensor-parallel ranks: what they replicate on the storage view; experts lie on another."""
    mesh = make_mesh(Device("cpu", 0), AxisSizes(tp=2, ep=2))
    tensor = Axis.of(mesh.dense, AxisName.TP.value)
    cases = placements(mesh, True)
    parameters = {key: nn.Parameter(spread(mesh, torch.zeros(SHAPES[key]), at)) for key, at in cases.items()}
    for parameter in parameters.values():
        assert isinstance(parameter, DTensor)
        parameter.grad = parameter.detach() + 1
    sum_shared_gradients(parameters.values(), tensor)
    return {key: p.grad.to_local().unique().tolist() for key, p in parameters.items() if isinstance(p.grad, DTensor)}


def engine_layout() -> tuple[Any, tuple[int, ...], bool]:
    """The layout that the sharding engine gives to experts which are split already; it sums over the replicas of these alone."""
    mesh = make_mesh(Device("cpu", 0), AxisSizes(ep=2))
    whole = gradient("experts", 0)
    experts = nn.Module()
    experts.register_parameter("weight", nn.Parameter(spread(mesh, whole, {AxisName.EP: Shard(0)})))
    fully_shard(experts, mesh=mesh.submesh(AxisName.EDP))
    weight = experts.get_parameter("weight")
    assert isinstance(weight, DTensor)
    return layout_of(weight), tuple(weight.to_local().shape), torch.equal(weight.full_tensor(), whole)


def norms_of_all() -> dict[str, Any]:
    meshes = {name: make_mesh(Device("cpu", 0), AxisSizes(**sizes)) for name, sizes in LAYOUTS.items()}
    return {name: norms(meshes[name.split(", ")[0]], name.endswith("sharded")) for name in CASES}


def all_of_it() -> dict[str, Any]:
    return {"norms": norms_of_all(), "sums": shared_sums(), "engine": engine_layout(), "rank": dist.get_rank()}


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_ranks(all_of_it, WORLD)


def test_norms_and_clipping_are_those_of_one_process(results: list[dict[str, Any]]) -> None:
    ranks = [result["norms"] for result in results]
    for case in ranks[0]:
        stages = range(2 if case.startswith("stages") else 1)
        whole = {(key, stage): gradient(key, stage) for key in SHAPES for stage in stages}
        truth = torch.cat([value.flatten() for value in whole.values()]).double().norm().item()
        for rank in ranks:
            actual = rank[case]
            # a few roundings of float32 (6e-8): sums of 252 squares in another order, and a square root
            assert actual["norm"] == pytest.approx(truth, rel=1e-6), case
            assert actual["by shares"] == pytest.approx(truth, rel=1e-6), case
            for key, clipped in actual["clipped"].items():
                torch.testing.assert_close(
                    torch.from_numpy(clipped), whole[key, actual["stage"]] * (CLIP / truth), rtol=1e-5, atol=0
                )


def test_experts_lie_on_their_view_and_are_split(results: list[dict[str, Any]]) -> None:
    actual = results[0]["norms"]
    assert actual["experts over all, whole"]["layouts"]["experts"].parts == (AxisName.EP,)
    assert actual["experts over nodes, whole"]["layouts"]["experts"].parts == (AxisName.EP,)
    assert actual["sharded experts, sharded"]["layouts"]["experts"].parts == (AxisName.EDP, AxisName.EP)
    assert actual["tp inside experts, whole"]["layouts"]["experts"].parts == (AxisName.EP, AxisName.ETP)
    assert actual["experts over tp, whole"]["layouts"]["experts"].replicas == tuple(
        axis for axis in EXPERT if axis not in (AxisName.PP, AxisName.EP)
    )
    assert actual["dense, whole"]["layouts"]["experts"].parts == (AxisName.SHARD,)
    assert actual["experts over all, whole"]["own"] == (12 + 8 * 6 + 4 * 6 * 8) // 4
    assert actual["sharded experts, whole"]["own"] == (12 + 8 * 6) // 4 + 4 * 6 * 8 // 2


def test_tensor_parallel_ranks_sum_what_they_replicate_and_no_experts(results: list[dict[str, Any]]) -> None:
    assert [result["sums"] for result in results] == [{"norm": [2.0], "column": [1.0], "experts": [1.0]}] * WORLD


def test_the_sharding_engine_shards_experts_over_their_replicas(results: list[dict[str, Any]]) -> None:
    for result in results:
        layout, shape, same = result["engine"]
        assert layout.parts == (AxisName.EDP, AxisName.EP) and shape == (1, 6, 8) and same
