"""Run all checks of `mmspeed qualify` on a device within a time limit."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from mmspeed.device import Device, pick
from mmspeed.errors import UserError, nearest
from mmspeed.version import __version__

from .experts import expert_checks
from .kernels import dense_checks
from .noise import noise_checks
from .operators import operator_checks
from .rates import rate_checks
from .rows import Check, Outcome, QualifyResult, error_text, run_checks
from .sparse_kernels import sparse_checks
from .steps import step_checks
from .swapping import swapping_checks

CheckMaker = Callable[[Device, bool], Iterator[Check]]
# What decides whether training is right comes first, what takes longest last.
PARTS: dict[str, tuple[CheckMaker, ...]] = {
    "noise": (noise_checks,),
    "kernels": (dense_checks, sparse_checks, operator_checks),
    "rates": (rate_checks, expert_checks),
    "swap": (swapping_checks,),
    "steps": (step_checks,),
}
MARGIN = 0.02  # share of the time that is left for the table


def qualify(
    device: str = "auto",
    minutes: float = 8.0,
    parts: Sequence[str] = (),
    progress: Callable[[str], None] = lambda text: None,
) -> QualifyResult:
    """Run every kernel of a device against its oracle, and measure rates, swaps and steps; a CPU runs all of it in small.

    Args:
        device: a kind of device; auto takes the fastest there is. Its first device is used, or that of LOCAL_RANK.
        minutes: the most that it takes; checks that no longer fit are skipped by name, and the device does not pass.
        parts: some of PARTS; all when empty.
        progress: called with the name of each check before it runs.

    Raises UserError for an unknown part or device, and for minutes that are not positive.
    """
    began = time.monotonic()
    if not 0 < minutes < float("inf"):
        raise UserError(f"--minutes is {minutes:g}: write a positive number of minutes, such as 8")
    for part in parts:
        if part not in PARTS:
            raise UserError(f"--only: {part!r} is not one of {', '.join(PARTS)}{nearest(part, list(PARTS))}")
    where = pick(device)
    chosen = [(name, maker) for name, makers in PARTS.items() if not parts or name in parts for maker in makers]
    checks = [check for name, maker in chosen for check in checks_of(name, maker, where)]
    deadline = began + 60 * minutes * (1 - MARGIN)
    rows, hung = run_checks(checks, where, deadline, progress)
    versions = {"mmspeed": __version__, "torch": torch.__version__, "Python": platform.python_version()}
    return QualifyResult(where.name, where.kind, versions, minutes, time.monotonic() - began, rows, hung)


def checks_of(part: str, maker: CheckMaker, device: Device) -> list[Check]:
    """The checks of a maker; one that fails with its error where it cannot make them on this device."""
    try:
        return list(maker(device, device.kind == "cpu"))
    except (RuntimeError, ImportError) as error:
        return [Check(part, "preparation", partial(Outcome, "failed", error_text(error)))]
