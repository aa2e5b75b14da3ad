"""Experts and pipeline stages over ranks: updates, averages and checkpoints of parameters on every view are those of one process, and
the loss that the last stage alone knows is known to all.

Legend: E width, I items of a micro-batch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement

from mmspeed import rng
from mmspeed.axes import AxisName, AxisSizes
from mmspeed.config.training import TrainConfig
from mmspeed.device import Device
from mmspeed.errors import UserError
from mmspeed.loop.averages import EMA
from mmspeed.loop.checkpoint.manager import CheckpointManager, TrainingState, load, load_weights, step_name
from mmspeed.loop.gradients import clip_gradients
from mmspeed.loop.optimizers.make_optimizer import make_optimizer
from mmspeed.loop.pipeline import runner_of
from mmspeed.loop.step import Learner, StepResult, train_step
from mmspeed.mesh import Mesh, make_mesh
from mmspeed.parallel import parallelize
from mmspeed.parallel.stages import cut_into_stages
from mmspeed.plan.schedules import Pipeline
from mmspeed.protocols import Batch, Item, Term, Terms, Update
from mmspeed.protocols.plan import Block, ModelPlan, declare_plan
from mmspeed.shapes import Bucket
from tests.support.covers import slow_but
from tests.support.expert_models import SHAPES, placements, spread
from tests.support.spawn import run_ranks

CPU, CLIP, STEPS, MICRO_BATCHES = Device("cpu", 0), 0.5, 3, 4
E = 4
Arrays = dict[str, np.ndarray]
EXPERTS: dict[int, dict[str, dict[str, int]]] = {
    2: {"experts": {"ep": 2}, "stages": {"pp": 2}},
    4: {"split experts": {"ep": 2, "etp": 2}, "replicas": {"dp_replicate": 2, "ep": 2}, "stages": {"pp": 2, "ep": 2}},
}
CASES = {
    "known": False,
    "late": False,
    "frozen": True,
    "broken": False,
}  # of the loss; True: nothing of the first stage trains


# -- parameters on the views


def state_of(mesh: Mesh | None, stages: range, purpose: str = "begin") -> TrainingState:
    """Parameters of the stages, whole without a mesh."""
    model = nn.Module()
    for stage in stages:
        held = nn.Module()
        for key, shape in SHAPES.items():
            held.register_parameter(key, nn.Parameter(placed(mesh, key, rng.normal(shape, 0, purpose, key, stage))))
        model.add_module(f"stage{stage}", held)
    return TrainingState(model, make_optimizer(model, TrainConfig(lr=1e-2, weight_decay=0.1)), EMA(model, 0.9))


def placed(mesh: Mesh | None, key: str, value: Tensor) -> Tensor:
    """This process's part of a value of a parameter."""
    at: dict[AxisName, Placement] = {} if mesh is None else placements(mesh, sharded_experts=True)[key]
    return value if mesh is None else spread(mesh, value, at)


def train(mesh: Mesh | None, state: TrainingState) -> list[float]:
    """A few updates by gradients that are drawn; the norms."""
    assert state.ema is not None and state.optimizer is not None
    norms = []
    for step in range(STEPS):
        for name, parameter in state.model.named_parameters():
            key = name.rpartition(".")[2]
            parameter.grad = placed(mesh, key, rng.normal(SHAPES[key], 0, "gradient", name, step))
        norms.append(clip_gradients([state.model], CLIP, mesh).item())
        state.optimizer.step()
        state.ema.update(state.model)
    return norms


def whole(state: TrainingState) -> Arrays:
    """Every tensor of the state, gathered."""
    assert isinstance(state.optimizer, torch.optim.Optimizer) and state.ema is not None
    tensors: dict[str, Tensor] = {f"model.{n}": p for n, p in state.model.named_parameters()}
    tensors |= {f"ema.{n}": t for n, t in state.ema.state_dict().items()}
    for name, p in state.model.named_parameters():
        tensors |= {f"optimizer.{name}.{key}": value for key, value in state.optimizer.state[p].items()}
    return gathered(tensors)


def gathered(tensors: dict[str, Tensor]) -> Arrays:
    whole = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in tensors.items()}
    return {n: t.detach().numpy().copy() for n, t in whole.items()}


def same(one: Arrays, other: Arrays) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[n], other[n]) for n in one)


def stages_of(mesh: Mesh) -> range:
    stage = mesh.table.place(mesh.rank)[AxisName.PP]
    return range(stage, stage + 1)


def saved_and_loaded(sizes: dict[str, int], folder: Path) -> dict[str, Any]:
    """Train, save, load into other parameters; load into a model that lacks one."""
    mesh = make_mesh(CPU, AxisSizes(**sizes))
    state = state_of(mesh, stages_of(mesh))
    norms = train(mesh, state)
    manager = CheckpointManager(folder)
    manager.save(STEPS, state, blocking=True)
    other = state_of(mesh, stages_of(mesh), "other")
    manager.load(folder / step_name(STEPS), other.model, other.optimizer, other.ema)
    averages = state_of(mesh, stages_of(mesh), "other").model
    load_weights(folder / step_name(STEPS), averages, alone=False)
    at_save = whole(state)
    results = {"norms": norms, "whole": at_save, "loaded": same(whole(other), at_save)}
    loaded = gathered(averages.state_dict())
    results["exported"] = all(np.array_equal(value, at_save[f"ema.{n}"]) for n, value in loaded.items())
    del next(iter(other.model.children()))._parameters["norm"]
    try:
        manager.load(folder / step_name(STEPS), other.model)
    except UserError as error:
        results["lacking"] = str(error)
    return results


# -- the loss of the last stage


def layers(frozen: bool) -> nn.Module:
    """A model of two layers, of which the first trains unless it is frozen."""
    model = nn.Sequential(nn.Linear(E, E), nn.Linear(E, E))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(rng.normal(parameter.shape, 0, name))
    model[0].requires_grad_(not frozen)
    declare_plan(model, ModelPlan((Block("0"), Block("1")), carried=("input",)))
    return model


def items(count: int, broken: bool) -> list[Batch]:
    """Micro-batches of two items each, of weight 1; with `broken` the second item of the first has a target that is not finite."""
    results = []
    for number in range(count):
        names = [f"item {2 * number}", f"item {2 * number + 1}"]
        target_IE = torch.stack([rng.normal((E,), 0, "target", name) for name in names])
        if broken and number == 0:
            target_IE[1, 0] = torch.inf
        x_IE = torch.stack([rng.normal((E,), 0, "x", name) for name in names])
        tensors = {"x": x_IE, "target": target_IE}
        results.append(Batch(tensors, [Item(name, source=name) for name in names], torch.ones(2), Bucket(1, 8, 8)))
    return results


def squared_error(passed: tuple[Tensor, Batch]) -> Terms:
    """The squared error of each item, and its largest part, which does not train."""
    predicted_IE, batch = passed
    error_IE = (predicted_IE - batch["target"]).square()
    largest = Term(error_IE.detach().amax(1), batch.weights_I, trains=False)
    return {"loss": Term(error_IE.mean(1), batch.weights_I), "largest": largest}


def staged(mesh: Mesh | None, case: str) -> dict[str, Any]:
    """Two steps of the model of two layers, in stages; without a mesh it is whole."""
    model = layers(frozen=CASES[case])
    if mesh is not None:
        (group,) = mesh.across_stages()
        cut_into_stages(model, group, Pipeline(2))
        model = parallelize(model, mesh, "fsdp")
    runner = runner_of(model, "none" if mesh is None else "fsdp", CPU.torch_device)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad] or [torch.zeros(1)], lr=0.1)
    batches = items(MICRO_BATCHES, broken=case == "broken")
    reader = mesh.reader() if mesh is not None else None
    own = batches if reader is None else batches[reader.index :: reader.count]
    divisors = {"samples": None if case == "late" else 2.0 * MICRO_BATCHES}
    learner = Learner(Update(), runner, optimizer, lambda batch: (model(batch["x"]), batch), squared_error)
    results: list[StepResult] = [
        train_step({"model": model}, [learner], own, divisors, clip_norm=CLIP, mesh=mesh) for _ in range(2)
    ]
    return {
        "numbers": [(result.loss, result.grad_norm, dict(result.terms)) for result in results],
        "verdict": [(result.finite, result.bad) for result in results],
        "weights": gathered(dict(model.named_parameters())),
    }


# -- on 2 and on 4 processes


def all_of_it(folder: str) -> dict[str, Any]:
    world = dist.get_world_size()
    results: dict[str, Any] = {
        name: saved_and_loaded(sizes, Path(folder) / f"{world}, {name}") for name, sizes in EXPERTS[world].items()
    }
    mesh = make_mesh(CPU, AxisSizes(pp=2, dp_replicate=world // 2, dp_shard=1))
    return {"states": results, "staged": {case: staged(mesh, case) for case in CASES}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("experts")


@pytest.fixture(scope="module", params=slow_but([2, 4], [2]))
def ranks(folder: Path, request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_ranks(all_of_it, request.param, str(folder))


def merged(actual: list[dict[str, Any]], name: str) -> Arrays:
    """The tensors of all stages, as the ranks of each hold them."""
    return {key: value for rank in actual for key, value in rank["states"][name]["whole"].items()}


def test_updates_and_averages_of_experts_are_those_of_one_process(ranks: list[dict[str, Any]]) -> None:
    for name in EXPERTS[len(ranks)]:
        truth = state_of(None, range(2 if name == "stages" else 1))
        norms, expected = train(None, truth), whole(truth)
        assert merged(ranks, name).keys() == expected.keys()
        for rank in ranks:
            # norms are sums of squares in another order: a few roundings of float32 (6e-8), and AdamW's share of each number is as exact
            assert rank["states"][name]["norms"] == pytest.approx(norms, rel=1e-6)
            for key, value in rank["states"][name]["whole"].items():
                np.testing.assert_allclose(value, expected[key], rtol=1e-5, atol=1e-7, err_msg=key)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_checkpoints_of_experts_come_back_bit_for_bit(folder: Path, ranks: list[dict[str, Any]]) -> None:
    for name in EXPERTS[len(ranks)]:
        states = [rank["states"][name] for rank in ranks]
        assert all(state["loaded"] and state["exported"] for state in states)
        (lacking,) = {state["lacking"] for state in states}
        assert "which the model here does not have" in lacking and ".norm`" in lacking
        alone = state_of(None, range(2 if name == "stages" else 1), "other")
        load(folder / f"{len(ranks)}, {name}" / step_name(STEPS), alone.model, alone.optimizer, alone.ema)
        assert same(whole(alone), merged(ranks, name))


@pytest.mark.parametrize("case", CASES)
def test_all_stages_know_the_loss_of_the_last(ranks: list[dict[str, Any]], case: str) -> None:
    truth = staged(None, case)
    for rank in ranks:
        actual = rank["staged"][case]
        assert actual["verdict"] == truth["verdict"]
        assert actual["numbers"] == ranks[0]["staged"][case]["numbers"] or case == "broken"  # nan is not itself
        for (loss, norm, terms), (own_loss, own_norm, own_terms) in zip(
            truth["numbers"], actual["numbers"], strict=True
        ):
            # sums over two replicas in another order: a few roundings of float32 (6e-8)
            assert own_loss == pytest.approx(loss, rel=1e-6, nan_ok=True)
            assert own_norm == pytest.approx(norm, rel=1e-6, nan_ok=True)
            assert own_terms == pytest.approx(terms, rel=1e-6, nan_ok=True)
        for name, weight in actual["weights"].items():
            np.testing.assert_allclose(weight, truth["weights"][name], rtol=1e-5, atol=1e-7)
    assert (truth["verdict"][0] == (False, ["item 1"])) == (case == "broken")
