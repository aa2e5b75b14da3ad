"""Check that the numbers a run draws are the same on a device as on the CPU, and print a digest to compare machines by."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor

from mmspeed import rng
from mmspeed.device import Device

from .rows import Check, Outcome

PART = "noise"
NAMES = ("s0", "s39990", "s133687")


def noise_checks(device: Device, small: bool) -> Iterator[Check]:
    """Checks of draws and of their rounding."""
    shape = (4, 4, 16, 16) if small else (16, 16, 64, 64)
    yield Check(PART, "draws", lambda: check_draws(device, shape))
    yield Check(PART, "rounding to bfloat16", lambda: check_rounding(device, shape))


def draw(shape: tuple[int, ...], name: str) -> Tensor:
    """The noise of a sample, float32 on the CPU."""
    return rng.normal(shape, 0, "noise", name, 0)


def check_draws(device: Device, shape: tuple[int, ...]) -> Outcome:
    """The draws of some names on the device, bit by bit beside the CPU's, in another order, and different for each name."""
    right = {name: draw(shape, name) for name in NAMES}
    on_device = {name: device.to_device(draw(shape, name)) for name in reversed(NAMES)}
    device.synchronize()
    wrong = [name for name in NAMES if not torch.equal(on_device[name].cpu(), right[name])]
    alike = sum(torch.equal(right[a], right[b]) for a in NAMES for b in NAMES if a < b)
    digest = hashlib.sha256(b"".join(right[name].numpy().tobytes() for name in NAMES)).hexdigest()[:16]
    count = sum(x.numel() for x in right.values())
    figures = {"digest": digest, "numbers": count, "names_alike": alike}
    if wrong:
        return Outcome("failed", f"differ from the CPU's for {', '.join(wrong)}", figures)
    text = f"{count:,} numbers bitwise equal to the CPU's; digest {digest}"
    return Outcome("passed", text + (f"; {alike} pairs of names share their noise" if alike else ""), figures)


def check_rounding(device: Device, shape: tuple[int, ...]) -> Outcome:
    """Noise rounded on the device, bit by bit beside the same on the CPU."""
    noise = draw(shape, NAMES[0])
    on_device = device.to_device(noise).to(torch.bfloat16).cpu()
    wrong = int((on_device.view(torch.int16) != noise.to(torch.bfloat16).view(torch.int16)).sum())
    if wrong:
        return Outcome("failed", f"{wrong:,} of {noise.numel():,} numbers are rounded otherwise than on the CPU")
    return Outcome("passed", f"{noise.numel():,} numbers rounded as on the CPU")
