"""Check the swap to the host's memory and the optimizer's tiers: right numbers, and copies that go on beside the computation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from mmspeed import rng
from mmspeed.bench.memory import CLOSE, BenchModel, PolicySetting, largest_distance
from mmspeed.bench.memory_tiers import TierModelSize, measure_tiers
from mmspeed.config.memory import ActivationPolicy
from mmspeed.device import Device
from mmspeed.log import format_bytes
from mmspeed.memory.offload.copies import HostPool, copies_for

from .oracle import number_types
from .rates import seconds_of
from .rows import Check, Outcome, State

Ways = dict[str, ActivationPolicy]
PART = "swap and tiers"
OVERLAP_GOAL = 0.5  # least share of the shorter of copies and computation that is hidden by the other
COPIED, SMALL_COPIED = 256 << 20, 1 << 20  # bytes
SMALL_FROM = 1 << 10  # bytes; smaller tensors are not offloaded
SETTING = PolicySetting(width=1152, heads=16, rank=256, depth=4, latent=(8, 64, 64), arrangement="full")
SMALL = PolicySetting(width=96, heads=4, rank=8, depth=2, latent=(2, 16, 16))
TIERS, SMALL_TIERS = TierModelSize(width=768, depth=6, heads=12, rank=128), TierModelSize(96, 2, 4, 8)


def swapping_checks(device: Device, small: bool) -> Iterator[Check]:
    """Checks of copies each way, of offloaded activations and of the tiers."""
    nbytes = SMALL_COPIED if small else COPIED
    for out in (True, False):
        name = "copies to the host" if out else "copies from the host"
        yield Check(PART, name, partial(check_copies, device, nbytes, out), 5.0)
    setting = SMALL if small else replace(SETTING, dtype="bfloat16" if device.supports_bf16() else "float32")
    yield Check(PART, "offloaded blocks", lambda: check_offload(device, setting), 1.0 if small else 15.0)
    size = SMALL_TIERS if small else TIERS
    yield Check(PART, "optimizer tiers", lambda: check_tiers(device, size), 1.0 if small else 30.0)


def check_copies(device: Device, nbytes: int, out: bool) -> Outcome:
    """Copies between the device and page-locked memory: the same bytes, their rate, and how far products hide them."""
    engine, pool = copies_for(device), HostPool(device)
    words = rng.normal((nbytes // 4,), 0, "qualify", "bytes")
    source = device.to_device(words).view(torch.uint8)
    target = torch.zeros_like(source)
    buffer = pool.take(nbytes)
    engine.out(source, buffer).wait()
    engine.back(buffer, target).wait()
    device.synchronize()
    if not torch.equal(target, source):
        return Outcome("failed", f"{format_bytes(nbytes)} came back with other bytes")

    def copy() -> None:
        job = engine.out(source, buffer) if out else engine.back(buffer, target)
        job.wait()

    alone = seconds_of(device, copy)
    figures = {"bytes": nbytes, "bytes_per_s": nbytes / alone}
    text = f"{nbytes / alone / 1e9:.3g} GB/s, the bytes are right"
    if device.kind == "cpu":
        return Outcome("passed", f"{text}; made at once: both are one memory", figures)
    hidden = overlap(device, copy, alone)
    figures["overlap"] = hidden
    state: State = "passed" if hidden >= OVERLAP_GOAL else "short"
    return Outcome(state, f"{text}; {hidden:.0%} hidden behind products (goal {OVERLAP_GOAL:.0%})", figures)


def overlap(device: Device, copy: Callable[[], None], alone: float) -> float:
    """The share of the shorter of a copy and products of about its length that the other hides, 0 to 1."""
    dtype = number_types(device)[0]
    a = torch.randn(4096, 4096, device=device.torch_device).to(dtype)
    one = seconds_of(device, lambda: a @ a)
    count = max(1, round(alone / one))

    def products() -> None:
        for _ in range(count):
            a @ a

    def both() -> None:
        begun = device.side_stream()
        with begun:
            copy()
        products()

    busy, together = seconds_of(device, products), seconds_of(device, both)
    return max(0.0, min(1.0, (busy + alone - together) / min(busy, alone)))


def check_offload(device: Device, setting: PolicySetting) -> Outcome:
    """A step whose blocks keep their tensors in the host's memory: the gradients of a plain step, and its time beside that."""
    stage = BenchModel(replace(setting, device=device.kind))
    if device.kind == "cpu":  # the small model's tensors are all below the usual bound
        stage.offloader.from_bytes = SMALL_FROM
    plain: Ways = {}
    offloaded: Ways = {"block": "offload"}
    truth, again = gradients(stage, plain), gradients(stage, plain)
    repeats = all(map(torch.equal, truth, again))
    del again
    before = stage.offloader.moved_out
    grads = gradients(stage, offloaded)
    moved = stage.offloader.moved_out - before
    bitwise = len(grads) == len(truth) and all(map(torch.equal, grads, truth))
    distance = 0.0 if bitwise else largest_distance(grads, truth)
    del grads, truth
    stage.use(plain)
    base = seconds_of(device, stage.step, 3)
    stage.use(offloaded)
    seconds = seconds_of(device, stage.step, 3)
    figures = {"moved": moved, "seconds": seconds, "plain_seconds": base, "bitwise": bitwise, "distance": distance}
    how = "bitwise equal" if bitwise else f"within {distance:.0e} of plain's"
    if not repeats:
        how += " (this device's kernels do not repeat their own bits)"
    text = f"{format_bytes(moved)} swapped, gradients {how}, {seconds / base:.2f} of a plain step's time"
    # not (a <= b), since a distance may be NaN
    wrong = not moved or (repeats and not bitwise) or not (distance <= CLOSE[setting.dtype])
    return Outcome("failed" if wrong else "passed", text, figures)


def gradients(stage: BenchModel, ways: Ways) -> list[Tensor]:
    """The gradients of a step."""
    stage.use(ways)
    stage.forward().backward()
    grads = [p.grad for p in stage.model.parameters() if p.grad is not None]
    stage.model.zero_grad(set_to_none=True)
    return grads


def check_tiers(device: Device, size: TierModelSize) -> Outcome:
    """All tiers of the optimizer: the same bits, bytes as meant, and the cost of the host's memory."""
    rows = measure_tiers(size, rounds=2, device=device.kind)
    wrong = [row.name for row in rows if not row.passed()]
    slowest = max(rows, key=lambda row: row.time)
    figures = {
        row.name: {"seconds": row.seconds, "time": row.time, "device": row.device, "host": row.host} for row in rows
    }
    if wrong:
        return Outcome("failed", f"other bits, or other bytes than meant: {'; '.join(wrong)}", figures)
    text = f"{len(rows)} tiers bitwise equal, bytes as meant; the slowest takes {slowest.time:.2f} of plain's time"
    return Outcome("passed", f"{text} ({slowest.name})", figures)
