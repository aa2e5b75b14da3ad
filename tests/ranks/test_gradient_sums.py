"""The sharding engine sums gradients, so that parameters on meshes of different sizes need no factors of their own.

Legend: N items, E width.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from mmspeed import rng
from mmspeed.comm import Axis, all_gather, reduce_scatter
from mmspeed.parallel.data_parallel import sum_gradients
from tests.support.spawn import run_ranks


def average_gradients(model: nn.Module) -> None:
    """As torch leaves `fully_shard`."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(None)  # type: ignore[arg-type]
            module.set_force_sum_reduction_for_comms(False)


E, ITEMS = 6, 8


class Experts(nn.Module):
    """A layer that all items pass, and two experts, of which each item passes one. Of `axis`'s ranks each holds an expert."""

    def __init__(self, axis: Axis) -> None:
        super().__init__()
        self.axis = axis
        self.dense = nn.Linear(E, E)
        self.experts = nn.ModuleList(nn.Linear(E, E) for _ in range(2))
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(rng.normal(parameter.shape, 0, name))
        if axis.size == 2:
            self.experts = nn.ModuleDict({str(axis.rank): self.experts[axis.rank]})  # type: ignore[assignment]

    def forward(self, x_NE: Tensor, expert_N: Tensor) -> Tensor:
        x_NE = torch.tanh(self.dense(x_NE))
        all_NE, which_N = all_gather(x_NE, self.axis, 0), all_gather(expert_N, self.axis, 0)
        out_NE = torch.zeros_like(all_NE)
        for name, expert in self.experts.named_children():
            out_NE = out_NE + expert(all_NE) * (which_N == int(name))[:, None]
        return reduce_scatter(out_NE, self.axis, 0)


def items(numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Inputs, and the expert of each: one has five of the eight, and ranks meet them unevenly."""
    x_NE = torch.stack([rng.normal((E,), 0, "item", number) for number in numbers])
    return x_NE, torch.tensor([0 if number % 3 else 1 for number in numbers])


def backward(model: Experts, numbers: Sequence[int]) -> dict[str, Tensor]:
    (model(*items(numbers)).square().sum() * (1 / ITEMS)).backward()
    results = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        results[name] = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
    return results


def experts() -> dict[str, dict[str, float]]:
    """Gradients over one process' own, by parameter, with sums and with averages; how far they are from a multiple of it."""
    rank = dist.get_rank()
    mesh: DeviceMesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("holders", "experts"))
    everyone = init_device_mesh("cpu", (4,))
    truth = backward(Experts(Axis.alone("experts")), range(ITEMS))
    results: dict[str, dict[str, float]] = {}
    for kind, put in {"sums": sum_gradients, "averages": average_gradients}.items():
        model = Experts(Axis.of(mesh, "experts"))
        for expert in model.experts.children():
            fully_shard(expert, mesh=mesh["holders"])
        fully_shard(model, mesh=everyone)
        put(model)
        grads = backward(model, range(2 * rank, 2 * rank + 2))
        ratios = {
            name: ((grad * truth[name]).sum() / truth[name].square().sum()).item() for name, grad in grads.items()
        }
        results[kind] = ratios
        results[f"{kind} off"] = {
            name: ((grad - ratios[name] * truth[name]).norm() / truth[name].norm()).item()
            for name, grad in grads.items()
        }
    return results


def test_parameters_on_another_mesh_need_no_factor_of_their_own() -> None:
    ranks = run_ranks(experts, 4)
    held = set()
    for actual in ranks:
        assert len(actual["sums"]) == 4
        held |= set(actual["sums"])
        for name in actual["sums"]:
            # sums of at most 8 x 6 products in another order
            assert actual["sums"][name] == pytest.approx(1.0, rel=1e-6), name
            assert actual["averages"][name] == pytest.approx(0.25 if name.startswith("dense") else 0.5, rel=1e-6), name
            assert actual["sums off"][name] < 1e-6 and actual["averages off"][name] < 1e-6, name
    assert held == {f"{of}.{kind}" for of in ("dense", "experts.0", "experts.1") for kind in ("weight", "bias")}
