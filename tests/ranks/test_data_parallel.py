"""Law 2 for data parallelism: 2 and 4 ranks, ddp, fsdp and hybrid, against one process in float32.

Gradients are compared, not only parameters: Adam turns the sign of a rounding error in a near-zero gradient into a whole step.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from mmspeed.axes import AxisSizes
from mmspeed.config.schema import TrainConfig
from mmspeed.device import Device
from mmspeed.errors import UserError
from mmspeed.loop.averages import EMA
from mmspeed.loop.optimizers.make_optimizer import make_optimizer
from mmspeed.loop.signals import StopSignals
from mmspeed.memory import BlockPolicies
from mmspeed.mesh import make_mesh
from mmspeed.parallel import no_sync, parallelize, unwrap
from tests.support.covers import slow_but
from tests.support.spawn import run_ranks
from tests.support.steps import train_step
from tests.support.toy import ToyDiT, flow_loss, make_batch, split

RECOMPUTED = BlockPolicies.everywhere({"block": "recompute"})

KEYS = [f"s{i}" for i in range(7)]  # a short last batch: 8 slots, one filler
STEPS = 4
CFG = TrainConfig(lr=1e-2, warmup_steps=0, weight_decay=0.1)
Result = dict[str, Any]

CASES: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "fsdp": {"strategy": "fsdp"},
    "fsdp, recomputed": {"strategy": "fsdp", "checkpointing": True},
    "fsdp, accumulated": {"strategy": "fsdp", "micro": 1},
    "ddp, accumulated": {"strategy": "ddp", "micro": 1},
    "ddp, recomputed, accumulated": {"strategy": "ddp", "micro": 1, "checkpointing": True},
    "hybrid": {"strategy": "fsdp", "replicate": 2},
}


def full(tensor: torch.Tensor) -> np.ndarray:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().numpy().copy()


def run(
    strategy: Any, world: int, rank: int, replicate: int = 1, checkpointing: bool = False, micro: int = 8
) -> Result:
    """Some steps; what they lost, and the gradients of the first."""
    mesh = make_mesh(Device("cpu", 0), AxisSizes(replicate, -1)) if world > 1 else None
    bare = ToyDiT()
    forwards = [0]
    bare.blocks[0].up.register_forward_hook(lambda *_: forwards.__setitem__(0, forwards[0] + 1))  # type: ignore[union-attr]
    model = parallelize(bare, mesh, strategy, keeping=RECOMPUTED if checkpointing else None)
    optimizer = make_optimizer(model, CFG)
    grads: dict[str, np.ndarray] = {}

    def keep(*_: Any) -> None:
        if not grads:
            grads.update({n: full(p.grad) for n, p in unwrap(model).named_parameters() if p.grad is not None})

    optimizer.register_step_pre_hook(keep)
    results = [
        train_step(
            model, split(KEYS, 8, rank, world, min(micro, 8 // world), epoch), flow_loss, optimizer,
            global_samples=7, clip_norm=None, strategy=strategy,
        )
        for epoch in range(STEPS)
    ]  # fmt: skip
    return {
        "losses": [r.loss for r in results],
        "norms": [r.grad_norm for r in results],
        "grads": grads,
        "forwards": forwards[0],
        "micro_batches": STEPS * (8 // world) // min(micro, 8 // world),
        "numel": {n: p.numel() for n, p in unwrap(model).named_parameters()},
        "local": {
            n: (p.to_local() if isinstance(p, DTensor) else p).numel() for n, p in unwrap(model).named_parameters()
        },
        "sharded": all(isinstance(p, DTensor) for p in unwrap(model).parameters()),
    }


def guard(strategy: Any, world: int, rank: int) -> Result:
    """One rank meets a NaN; then a good step."""
    model = parallelize(ToyDiT(), make_mesh(Device("cpu", 0), AxisSizes(1, -1)), strategy)
    optimizer = make_optimizer(model, CFG)
    before = [full(p) for p in model.parameters()]
    call = {"global_samples": 7, "clip_norm": 1.0, "strategy": strategy}
    batches = split(KEYS, 8, rank, world, 1)
    if rank == world - 1:
        batches[0]["latents"][0] = float("nan")
    bad = train_step(model, batches, flow_loss, optimizer, **call)  # type: ignore[arg-type]
    still = all(np.array_equal(full(p), b) for p, b in zip(model.parameters(), before, strict=True))
    good = train_step(model, split(KEYS, 8, rank, world, 1), flow_loss, optimizer, **call)  # type: ignore[arg-type]
    moved = not all(np.array_equal(full(p), b) for p, b in zip(model.parameters(), before, strict=True))
    return {"finite": [bad.finite, good.finite], "bad": bad.bad, "still": still, "moved": moved}


@torch.no_grad()
def swapped(model: nn.Module) -> Result:
    """A forward with the averages in the model, and one after, on shards."""
    ema = EMA(model, 0.5)
    batch = make_batch(KEYS)
    plain = flow_loss(model, batch)
    for p in model.parameters():
        p.add_(0.25)
    ema.update(model)
    with ema.swap(model):
        inside = flow_loss(model, batch)
        values = {n: full(p) for n, p in model.named_parameters()}
    after = flow_loss(model, batch)
    twin = ToyDiT()
    twin.load_state_dict({n: torch.from_numpy(v) for n, v in values.items()}, strict=False)
    return {
        "sharded": all(isinstance(t, DTensor) for t in ema.state_dict().values()),
        "inside": torch.equal(inside, flow_loss(twin, batch)),
        "differ": len({tuple(loss.tolist()) for loss in (plain, inside, after)}),
    }


def half(rank: int, world: int) -> Result:
    """Gradients under bfloat16 on shards, and the number types on the way."""
    model = parallelize(ToyDiT(), make_mesh(Device("cpu", 0), AxisSizes(1, -1)), "fsdp", compute_dtype=torch.bfloat16)
    dtypes: list[torch.dtype] = []
    model.blocks[0].register_forward_pre_hook(lambda m, args: dtypes.append(args[1].dtype))  # type: ignore[index, union-attr]
    model.blocks[0].up.register_forward_pre_hook(lambda m, args: dtypes.append(m.weight.dtype))  # type: ignore[index, union-attr]
    model.blocks[0].up.register_forward_hook(lambda m, args, out: dtypes.append(out.dtype))  # type: ignore[index, union-attr]
    batch = split(KEYS, 8, rank, world, 8 // world)[0]
    (flow_loss(model, batch) * batch.weights_I / 7).sum().backward()
    grads = {n: full(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    return {
        "dtypes": [str(d) for d in dtypes],
        "parameters": {str(p.dtype) for p in model.parameters()},
        "grads": grads,
    }


def work(folder: str) -> Result:
    rank, world = dist.get_rank(), dist.get_world_size()
    results = {name: run(world=world, rank=rank, **case) for name, case in CASES.items()}
    results["guard"] = {strategy: guard(strategy, world, rank) for strategy in ("ddp", "fsdp")}
    results["half"] = half(rank, world)
    model = parallelize(ToyDiT(), make_mesh(Device("cpu", 0), AxisSizes(1, -1)), "fsdp")
    results["ema"] = swapped(model)
    asked = StopSignals(Path(folder))
    heard = [asked.poll()]
    if rank == 0:
        (Path(folder) / "save").touch()
    heard.append(asked.poll())
    with asked:
        if rank == world - 1:
            asked._handle(15, None)
        heard.append(asked.poll())
    results["signals"] = {"heard": heard}
    return results


@pytest.fixture(scope="module")
def truth() -> Result:
    """One process, a plain loop: no train_step, no micro-batches, no fillers."""
    model = ToyDiT()
    optimizer = make_optimizer(model, CFG)
    losses: list[float] = []
    grads: dict[str, np.ndarray] = {}
    for epoch in range(STEPS):
        loss = flow_loss(model, make_batch(KEYS, epoch)).mean()
        loss.backward()
        grads = grads or {n: p.grad.numpy().copy() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "grads": grads}


@pytest.fixture(scope="module", params=slow_but([2, 4], [2]))
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Result]:
    return run_ranks(work, request.param, str(tmp_path_factory.mktemp("run")))


def test_gradients_and_losses_equal_one_process(ranks: list[Result], truth: Result) -> None:
    for name in CASES:
        for result in (rank[name] for rank in ranks):
            assert set(result["grads"]) == set(truth["grads"])
            for parameter, expected in truth["grads"].items():
                # Sums of at most 8 x 12 products in another order: a few eps (1.2e-7) of the largest element.
                gap = np.abs(result["grads"][parameter] - expected).max()
                assert gap <= 2e-6 * np.abs(expected).max(), (name, parameter)
            norm = np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in truth["grads"].values()))
            assert result["norms"][0] == pytest.approx(norm, rel=1e-6), name
            assert result["losses"][0] == pytest.approx(truth["losses"][0], rel=1e-6), name
            # Later steps carry Adam's amplified rounding; lr 1e-2 moves the loss itself by far more than this.
            assert result["losses"] == pytest.approx(truth["losses"], rel=1e-4), name
            assert result["losses"] == ranks[0][name]["losses"], name
    assert abs(truth["losses"][0] - truth["losses"][-1]) > 1e-2


def test_recomputation_is_bitwise_and_runs(ranks: list[Result]) -> None:
    pairs = (("fsdp, recomputed", "fsdp"), ("ddp, recomputed, accumulated", "ddp, accumulated"))
    for on, off in pairs:
        for rank in ranks:
            assert rank[on]["losses"] == rank[off]["losses"]
            assert all(np.array_equal(rank[on]["grads"][n], g) for n, g in rank[off]["grads"].items())
            assert rank[off]["forwards"] == rank[off]["micro_batches"]
            assert rank[on]["forwards"] == 2 * rank[off]["forwards"]


def test_accumulation_ran(ranks: list[Result]) -> None:
    for rank in ranks:
        assert rank["fsdp, accumulated"]["forwards"] == STEPS * 8 // len(ranks) > rank["fsdp"]["forwards"]


def test_shards_hold_their_part(ranks: list[Result]) -> None:
    for name, case in CASES.items():
        sharded = case["strategy"] == "fsdp"
        assert all(rank[name]["sharded"] == sharded for rank in ranks)
        copies = case.get("replicate", 1) if sharded else len(ranks)
        for parameter, numel in ranks[0][name]["numel"].items():
            assert sum(rank[name]["local"][parameter] for rank in ranks) == copies * numel, (name, parameter)
            if sharded and len(ranks) > case.get("replicate", 1):
                assert all(rank[name]["local"][parameter] < numel for rank in ranks)


def test_a_nan_stops_all_ranks_and_is_named(ranks: list[Result]) -> None:
    culprit = {2: "s4.mp4", 4: "s6.mp4"}[len(ranks)]
    for rank in ranks:
        for message in rank["guard"].values():
            assert message == {"finite": [False, True], "bad": [culprit], "still": True, "moved": True}


def test_bfloat16_on_shards_is_near_and_keeps_times_exact(ranks: list[Result]) -> None:
    model = ToyDiT()
    flow_loss(model, make_batch(KEYS)).mean().backward()
    for rank in ranks:
        times, weights, products = rank["half"]["dtypes"]
        assert (times, weights, products) == ("torch.float32", "torch.bfloat16", "torch.bfloat16")
        assert rank["half"]["parameters"] == {"torch.float32"}
        for name, p in model.named_parameters():
            assert p.grad is not None
            gap = np.linalg.norm(rank["half"]["grads"][name] - p.grad.numpy())
            assert 0 < gap < 0.05 * p.grad.norm().item(), name  # 8 bits of mantissa; 0 would mean float32


def test_averages_are_sharded_and_swap_into_shards(ranks: list[Result]) -> None:
    assert all(rank["ema"] == {"sharded": True, "inside": True, "differ": 3} for rank in ranks)


def test_requests_are_agreed(ranks: list[Result]) -> None:
    assert all(rank["signals"]["heard"] == ["none", "save", "stop"] for rank in ranks)


@dataclass
class Halved:
    out: torch.Tensor


class Halves(nn.Module):
    """Two layers of which a call uses one; the largest gradients first fill a bucket of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 4, bias=False), nn.Linear(600, 600, bias=False)

    def forward(self, x: torch.Tensor) -> dict[str, Halved]:
        return {"out": Halved((self.one if x.shape[-1] == 4 else self.other)(x))}


def unused(how: str) -> Any:
    """What a backward says that reaches a part of the parameters, or the gradient of one of them."""
    bare = Halves()
    bare.other.requires_grad_(how != "frozen")
    model = parallelize(bare, make_mesh(Device("cpu", 0), AxisSizes(-1, 1)), "ddp")
    if how == "earlier":  # of a micro-batch before
        with no_sync(model, "ddp", last=False):
            model(torch.ones(1, 600))["out"].out.sum().backward()
    x = torch.full((1, 600 if how == "small" else 4), dist.get_rank() + 1.0, requires_grad=True)
    if how == "frozen":
        torch.autograd.grad(model(x)["out"].out.sum(), x)  # needs no gradient of a parameter
    try:
        model(x)["out"].out.sum().backward()
    except UserError as error:
        return str(error)
    assert bare.one.weight.grad is not None
    return bare.one.weight.grad.unique().tolist()


@pytest.mark.parametrize(
    ("how", "said"),
    [("large", "first other.weight"), ("small", "first one.weight"), ("earlier", "an earlier micro-batch"), ("frozen", "")],
)  # fmt: skip
def test_replicas_refuse_parameters_without_gradient(how: str, said: str) -> None:
    for result in run_ranks(unused, 2, how):
        assert result == [3.0] if how == "frozen" else "got no gradient" in result and said in result
