"""Mixins: classes put before a module's own, by which a technique changes the module's forward.

Unlike a wrapper, a mixin leaves state-dict names as they are; unlike a patch, it lets a deep copy compute with its own parameters.
Nothing outside of the module changes.
"""

from __future__ import annotations

from functools import cache
from typing import Any, TypeVar

from torch import nn

M = TypeVar("M", bound=nn.Module)


def mix_in(module: nn.Module, mixin: type[M], rename: bool = True) -> M:
    """Put `mixin` before a module's class, in place, unless it is there already. Returns the module.

    `rename`: the class's name shows the mixin, such as RecomputedSoraBlock; else the class keeps its own name, which may be written to
    files.
    """
    if not isinstance(module, mixin):
        module.__class__ = _mixed(type(module), mixin, rename)  # type: ignore[arg-type]
    assert isinstance(module, mixin)
    return module


@cache
def _mixed(own: Any, mixin: Any, rename: bool) -> type[nn.Module]:
    # one class for all modules of a kind: torch.compile makes a graph for each class, and gives up silently after eight
    if rename:
        return type(f"{mixin.__name__.lstrip('_')}{own.__name__}", (mixin, own), {})
    return type(own.__name__, (mixin, own), {"__module__": own.__module__, "__qualname__": own.__qualname__})
