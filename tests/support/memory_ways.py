"""A small SoraDiT, its training step under ways of its spans, and what that step computed, kept and exchanged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker, _MemRefType
from torch.distributed.tensor import DTensor

from mmspeed import rng
from mmspeed.config.memory import ActivationPolicy, MemoryConfig
from mmspeed.config.sparse import SparseConfig
from mmspeed.device import Device
from mmspeed.memory import BlockPolicies
from mmspeed.memory.offload.offloader import Offloader
from mmspeed.models import SoraDiT, SoraDiTConfig
from mmspeed.parallel import parallelize
from tests.support.memory_counts import MatmulCounter

BRANCHES = ("attention", "cross_attention", "mlp")
LARGE: tuple[ActivationPolicy, ...] = ("recompute", "selective", "offload", "offload_selective", "offload_recompute")
SMALL = ("norm", "activation")
BLOCKS = 3
SPARSE: dict[str, Any] = {
    "min_tokens": 16,
    "tile": (2, 2, 2),
    "cluster_size": 16,
    "dense_first": 0,
    "dense_last": 0,
    "dense_steps": 0,
    "tau": 1.0,
    "backend": "grouped",
}

Ways = Mapping[str, ActivationPolicy]


def each_way() -> list[dict[str, ActivationPolicy]]:
    """Every way of every span, alone."""
    large: list[dict[str, ActivationPolicy]] = [{name: way} for name in ("block", *BRANCHES) for way in LARGE]
    small: list[dict[str, ActivationPolicy]] = [{name: "recompute"} for name in SMALL]
    return large + small


def combinations() -> list[dict[str, ActivationPolicy]]:
    """Every pair of spans, and every triple of branches, that a config takes: at most two ways of each."""
    results: list[dict[str, ActivationPolicy]] = []
    for attention in LARGE:
        for mlp in LARGE:
            results.append({"attention": attention, "mlp": mlp})
            results.append({"attention": attention, "cross_attention": mlp, "mlp": LARGE[(LARGE.index(mlp) + 1) % 4]})
    results.append({"norm": "recompute", "activation": "recompute"})
    results += [{"activation": "recompute", "attention": way, "cross_attention": way} for way in LARGE]
    for ways in results:
        MemoryConfig.model_validate({"activation_policy": ways})  # raises where a config would
    return results


def name_of(ways: Ways) -> str:
    return " ".join(f"{name}:{way}" for name, way in ways.items()) or "plain"


def make_model(arrangement: str = "factorised", sparse: bool = False, width: int = 48, **changes: Any) -> SoraDiT:
    """Every parameter is off its start, so that no zero hides anything."""
    config = SoraDiTConfig(
        width=width,
        depth=BLOCKS,
        heads=4,
        latent_channels=3,
        text_width=10,
        adaln_rank=4,
        arrangement=arrangement,  # type: ignore[arg-type]
        sparse=SparseConfig(**{**SPARSE, **changes}) if sparse else None,
    )
    model = SoraDiT(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter += 0.1 * rng.normal(parameter.shape, 1, "perturb", name)
    return model


def make_inputs(frames: bool = False, masked: bool = False, latent: tuple[int, int, int] = (4, 8, 8)) -> list[Tensor]:
    """x, t, text and its mask, and the video's mask where `masked`; `frames`: a time for each frame, 0 at the first."""
    x = rng.normal((2, 3, *latent), 0, "x")
    t = torch.tensor([0.2, 0.9])
    if frames:
        t = t[:, None].repeat(1, latent[0])
        t[:, 0] = 0.0
    inputs = [x, t, rng.normal((2, 5, 10), 0, "text"), torch.arange(5) < torch.tensor([[5], [3]])]
    if masked:
        counts = torch.ones(2, *latent, dtype=torch.bool)
        counts[0, -1], counts[1, :, :, -2:] = False, False
        inputs.append(counts)
    return inputs


@dataclass
class Step:
    """What one forward and backward pass gave and took. Bytes are of the device, and 0 where they were not tracked."""

    loss: float
    grads: dict[str, Tensor]
    forward: int  # matrix products
    backward: int
    kept: int  # bytes after the forward pass that are no parameters
    peak: int
    moved: int  # bytes that went to the host


def own(tensor: Tensor) -> Tensor:
    """What this process holds of it."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()


def keeping_of(ways: Ways, offloader: Offloader | None = None, **options: Any) -> BlockPolicies:
    return BlockPolicies((ways,), (offloader or Offloader(Device("cpu", 0), 1 << 10)).group, **options)


def run_step(model: nn.Module, inputs: list[Tensor], offloader: Offloader | None = None, track: bool = False) -> Step:
    """One pass of a model that is ready for training."""
    tracker, count = MemTracker() if track else None, MatmulCounter()
    if tracker is not None:
        tracker.track_external(model, *inputs)
    kept = peak = 0
    with count, tracker or nullcontext():
        out = model(*inputs)
        loss = (out.float() - torch.linspace(-1, 1, out.numel()).view_as(out)).square().mean()
        del out
        if tracker is not None:
            now = tracker.get_tracker_snapshot("current")[torch.device("cpu")]
            kept = sum(n for kind, n in now.items() if kind in (_MemRefType.ACT, _MemRefType.TEMP))
        forward = count.total
        loss.backward()
        if tracker is not None:
            peak = sum(
                n for kind, n in tracker.get_tracker_snapshot("peak")[torch.device("cpu")].items() if kind != "Total"
            )
    grads = {name: own(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return Step(
        loss.item(), grads, forward, count.total - forward, kept, peak, 0 if offloader is None else offloader.moved_out
    )


def step_of(
    ways: Ways,
    make: Callable[[], nn.Module] = make_model,
    inputs: list[Tensor] | None = None,
    dtype: torch.dtype = torch.float32,
    track: bool = False,
    **options: Any,
) -> Step:
    """One step of one process with these ways."""
    offloader = Offloader(Device("cpu", 0), 1 << 10)
    model = parallelize(make(), None, "none", compute_dtype=dtype, keeping=keeping_of(ways, offloader, **options))
    return run_step(model, inputs if inputs is not None else make_inputs(), offloader, track)


def assert_same(actual: Step, plain: Step) -> None:
    """Bit by bit."""
    assert actual.loss == plain.loss and actual.grads.keys() == plain.grads.keys()
    other = [name for name, grad in plain.grads.items() if not torch.equal(actual.grads[name], grad)]
    assert not other, other
