"""Engines sum gradients and the loss is divided beforehand: the same bits as the average of a loss times the ranks, in no more passes.

`averaged` is the step as it was: the engine divides by its ranks, and the loss is scaled by their number. For 2^k ranks both are exact.

Legend: N items, E width.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from mmspeed import rng
from mmspeed.axes import AxisSizes
from mmspeed.comm import Axis, all_gather, reduce_scatter
from mmspeed.config.parallel import ParallelConfig
from mmspeed.device import Device
from mmspeed.loop.gradients import clip_gradients
from mmspeed.mesh import Mesh, make_mesh
from mmspeed.parallel import (
    TokenLayout,
    make_half,
    make_layout,
    no_sync,
    parallelize,
    sum_shared_gradients,
    take_float32_gradients,
    unwrap,
)
from mmspeed.parallel.data_parallel import sum_gradients
from mmspeed.protocols import Batch
from tests.support.covers import slow_but
from tests.support.sequence_steps import Case as SoraCase
from tests.support.sequence_steps import Still
from tests.support.sequence_steps import build as build_sora
from tests.support.sequence_steps import loss_of as sora_loss
from tests.support.sequence_steps import make_batch as sora_batch
from tests.support.spawn import run_ranks
from tests.support.steps import train_step
from tests.support.toy import ToyDiT, flow_loss, split

KEYS = [f"s{i}" for i in range(7)]  # of 8 slots; 1 / 7 is rounded


@dataclass(frozen=True)
class Setting:
    """An engine, and what a step is made of."""

    strategy: Any
    replicate: int = 1
    micro: int = 8
    half: bool = False
    tp: int = 1


SETTINGS: dict[int, dict[str, Setting]] = {
    1: {"alone": Setting("none"), "fsdp": Setting("fsdp"), "ddp": Setting("ddp")},
    2: {
        "fsdp": Setting("fsdp"),
        "fsdp, accumulated": Setting("fsdp", micro=1),
        "fsdp, bfloat16 parameters": Setting("fsdp", half=True),
        "fsdp, bfloat16 parameters, accumulated": Setting("fsdp", micro=1, half=True),
        "ddp": Setting("ddp", 2),
        "ddp, accumulated": Setting("ddp", 2, micro=1),
        "ddp, bfloat16 parameters": Setting("ddp", 2, half=True),
        "tp": Setting("fsdp", tp=2),
    },
    4: {
        "fsdp": Setting("fsdp"),
        "fsdp, accumulated": Setting("fsdp", micro=1),
        "fsdp, bfloat16 parameters": Setting("fsdp", half=True),
        "hybrid": Setting("fsdp", 2),
        "hybrid, accumulated": Setting("fsdp", 2, micro=1),
        "hybrid, bfloat16 parameters, accumulated": Setting("fsdp", 2, micro=1, half=True),
        "ddp": Setting("ddp", 4),
        "ddp, accumulated": Setting("ddp", 4, micro=1),
        "ddp, bfloat16 parameters": Setting("ddp", 4, half=True),
        "tp and fsdp": Setting("fsdp", tp=2),
        "tp and hybrid": Setting("fsdp", 2, tp=2),
    },
}
SORA = SoraCase(1, 1, "switch")

Fingerprint = dict[str, str]
Loss = Callable[[nn.Module, Batch], Tensor]


class Passes(TorchDispatchMode):
    """Counts operators: their calls, and the numbers that they make."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.numbers: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__.rstrip("_")
        self.calls[name] += 1
        self.numbers[name] += out.numel() if isinstance(out, Tensor) else 0
        return out

    def scalings(self) -> tuple[int, int]:
        """Calls and numbers of products and quotients, element by element."""
        return self.calls["mul"] + self.calls["div"], self.numbers["mul"] + self.numbers["div"]


class Bench:
    """A setting's mesh, model and batches on this rank."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.rank, self.world = setting, dist.get_rank(), dist.get_world_size()
        parallel = ParallelConfig(tp=setting.tp)
        self.mesh: Mesh = make_mesh(Device("cpu", 0), AxisSizes(setting.replicate, -1, tp=setting.tp))
        self.layout = make_layout(self.mesh, parallel) if setting.tp > 1 else TokenLayout()

    def model(self, averages: bool) -> nn.Module:
        """Ready for training; `averages`: by an engine as torch makes it."""
        setting = self.setting
        bare: nn.Module = build_sora(SORA) if setting.tp > 1 else ToyDiT()
        if setting.half:
            make_half(bare)
        replicas = setting.strategy == "ddp" and not setting.half
        model = parallelize(
            bare,
            self.mesh,
            "none" if replicas and averages else setting.strategy,
            layout=self.layout,
            compute_dtype=torch.bfloat16 if setting.half else torch.float32,
        )
        if averages and replicas:
            return DistributedDataParallel(model, broadcast_buffers=False, gradient_as_bucket_view=True)
        if averages:
            average_gradients(model)
        if setting.half:
            take_float32_gradients(model)
        return model

    def batches(self) -> list[Batch]:
        if self.setting.tp == 1:
            return split(KEYS, 8, self.rank, self.world, min(self.setting.micro, 8 // self.world))
        return [sora_batch(SORA, [self.rank // self.setting.tp], 1 / self.setting.tp)]

    @property
    def loss(self) -> Loss:
        return (lambda model, batch: sora_loss(SORA, model, batch)) if self.setting.tp > 1 else flow_loss

    @property
    def samples(self) -> int:
        return 3 if self.setting.tp > 1 else len(KEYS)

    def summed(self, count: Passes | None = None, change: Callable[[nn.Module], None] | None = None) -> Fingerprint:
        """A step of the loop."""
        model, batches = self.model(averages=False), self.batches()
        grads: dict[str, Tensor] = {}
        if change is not None:
            change(model)
        optimizer = Still(model.parameters())
        optimizer.register_step_pre_hook(lambda *_: grads.update(gradients(model)))
        with count or Passes():
            result = train_step(
                model, batches, self.loss, optimizer,
                global_samples=self.samples, clip_norm=None, strategy=self.setting.strategy, tensor=self.layout.tensor,
            )  # fmt: skip
        return fingerprint(grads, result.loss, result.grad_norm)

    def averaged(self, count: Passes | None = None) -> Fingerprint:
        """The same step with averages, and a loss times the ranks that they are taken over."""
        model, losses, batches = self.model(averages=True), [], self.batches()
        engine = self.world // self.setting.tp
        with count or Passes():
            for number, batch in enumerate(batches):
                with no_sync(model, self.setting.strategy, last=number == len(batches) - 1):
                    loss_B = self.loss(model, batch)
                    loss = (loss_B * batch.weights_I).sum()
                    (loss * (engine / self.samples)).backward()
                losses.append(loss.detach())
            sum_shared_gradients(model.parameters(), self.layout.tensor)
            norm = clip_gradients([model], None).item()
        total = torch.stack(losses).sum().double()
        dist.all_reduce(total)
        return fingerprint(gradients(model), total.item() / self.samples, norm)


def average_gradients(model: nn.Module) -> None:
    """As torch leaves `fully_shard`."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(None)  # type: ignore[arg-type]
            module.set_force_sum_reduction_for_comms(False)


def divide_by_one(model: nn.Module) -> None:
    """What `sum_gradients` would be with the number 1."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """The gradients of the bare model's parameters, as they lie here."""
    return {name: p.grad for name, p in unwrap(model).named_parameters() if p.grad is not None}


def fingerprint(grads: dict[str, Tensor], loss: float, norm: float) -> Fingerprint:
    """A hash of each gradient, whole, and the bits of loss and norm."""
    results = {"loss": loss.hex(), "norm": norm.hex()}
    for name, grad in grads.items():
        whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
        assert whole.dtype == torch.float32 and whole.abs().sum() > 0, name
        results[name] = hashlib.sha256(whole.contiguous().numpy().tobytes()).hexdigest()
    return results


def groups_of(model: nn.Module) -> list[tuple[str, Any]]:
    """The engine's groups of parameters, with the module that each is of."""
    results = []
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()  # type: ignore[no-untyped-call]
            groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
            results += [(name, group) for group in groups if group is not None]
    return results


def compare() -> dict[str, Any]:
    """Each setting, summed and averaged."""
    results = {}
    for name, setting in SETTINGS[dist.get_world_size()].items():
        bench, now, before, dividing = Bench(setting), Passes(), Passes(), Passes()
        steps = bench.summed(now), bench.averaged(before)
        bench.summed(dividing, divide_by_one)
        model = bench.model(averages=False)
        groups = groups_of(model)
        results[name] = {
            "steps": steps,
            "passes": (now.scalings(), before.scalings(), dividing.scalings()),
            "numbers": (now.numbers.total(), before.numbers.total()),
            "set": {
                at: (group.gradient_divide_factor == 1, group.force_sum_reduction_for_comms) for at, group in groups
            },
            "wrapped": sum(isinstance(module, FSDPModule) for module in model.modules()),
            "shards": bench.mesh.storage["shard"].size(),
            "parameters": len(list(model.parameters())),
            "local": sum(local(p).numel() for p in unwrap(model).parameters()),
        }
    return results


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@pytest.fixture(scope="module", params=slow_but(SETTINGS, {1}), ids=str)
def compared(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    ranks = run_ranks(compare, request.param)
    assert all(rank.keys() == SETTINGS[request.param].keys() for rank in ranks)
    return ranks


def test_sums_are_the_averages_of_before_bit_for_bit(compared: list[dict[str, Any]]) -> None:
    for rank in compared:
        for name, actual in rank.items():
            now, before = actual["steps"]
            assert now == before, (name, [key for key in now if now[key] != before[key]])
            assert len(now) == actual["parameters"] + 2, name  # each has a gradient


def test_no_pass_over_gradients_is_added(compared: list[dict[str, Any]]) -> None:
    for rank in compared:
        for name, actual in rank.items():
            (calls, numbers), (calls_before, numbers_before), (calls_by_one, numbers_by_one) = actual["passes"]
            assert calls <= calls_before and numbers <= numbers_before, name
            # a few are scalars of the loop, which `averaged` does without
            assert actual["numbers"][0] <= actual["numbers"][1] + 16, name
            if name.startswith("ddp") and "bfloat16" not in name:  # it divided each gradient on the way into its bucket
                assert numbers_before - numbers == actual["local"], name
            if actual["wrapped"] and actual["shards"] == 1:  # why the divisor is not the number 1
                assert calls_by_one - calls == len(actual["set"]) and numbers_by_one > numbers, name
            elif actual["wrapped"]:
                assert (calls_by_one, numbers_by_one) == (calls, numbers), name


def test_every_sharded_module_sums(compared: list[dict[str, Any]]) -> None:
    """Neither of torch's calls reaches the modules within a module."""
    for rank in compared:
        for name, actual in rank.items():
            sharded = "fsdp" in name or "hybrid" in name or "bfloat16" in name or name == "tp"
            assert actual["wrapped"] == len(actual["set"]) == (0 if not sharded else 5 if "tp" in name else 4), name
            assert all(both == (True, True) for both in actual["set"].values()), name


# -- parameters on another mesh


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
