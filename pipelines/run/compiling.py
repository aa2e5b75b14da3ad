"""Whether the blocks of a run are compiled: what `train.compile: auto` chooses, and why."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from mmspeed.config import RunConfig
from mmspeed.config.memory import not_compiled
from mmspeed.device import Device, tries_graphs
from mmspeed.parallel import is_spread
from mmspeed.protocols.plan import blocks_of
from mmspeed.replay import recorded_modules

KNOWN = (
    "mmspeed",
    "diffusers",
    "torch",
    "builtins",
    "typing",
)  # packages whose blocks are compiled in tests, and bases
PACKED = "mmspeed.models.language"


class Compiling(NamedTuple):
    """A choice, and the reason of one that the config left open."""

    on: bool
    why: str = ""

    @property
    def line(self) -> str | None:
        """The choice for people; None where the config made it, or where nothing is ever compiled by itself."""
        if not self.why:
            return None
        return f"blocks are {'' if self.on else 'not '}compiled (train.compile: auto): {self.why}"


EAGER = Compiling(False)


def compiling(config: RunConfig, device: Device, model: nn.Module | None = None) -> Compiling:
    """The choice for a model before it is parallelized; None: as far as it does not depend on one."""
    if config.train.compile != "auto":
        return Compiling(config.train.compile)
    if device.kind == "cpu":
        return EAGER
    reason = _against(config, device, model)
    return Compiling(
        not reason, reason or "one process computes a sample, and nothing in `memory` or in the model is against it"
    )


def _against(config: RunConfig, device: Device, model: nn.Module | None) -> str | None:
    """What is not known to be safe, or cannot be compiled; None where blocks can."""
    if not tries_graphs(device):
        return f"torch.compile is not tried on {device.name}"
    if (reason := not_compiled(config.memory)) is not None:
        return reason
    if config.parallel.weights_wait:
        return f"gradients of weights wait in parallel.schedule {config.parallel.schedule}"
    if config.parallel.group > 1 or (model is not None and is_spread(model)):
        return "exchanges between processes that compute one sample break graphs"
    if model is None:
        return None
    if recorded_modules(model):
        return "plans of sparse attention and routers break graphs"
    kinds = {kind for _, block in blocks_of(model) for kind in type(block).__mro__}
    if any(kind.__module__.startswith(PACKED) for kind in kinds):
        return "attention within packed documents is not tried compiled; try train.compile: true"
    strange = sorted(kind.__name__ for kind in kinds if kind.__module__.partition(".")[0] not in KNOWN)
    return f"{', '.join(strange)} is of a package that no test compiles; try train.compile: true" if strange else None
