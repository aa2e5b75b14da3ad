"""Models with replaced blocks, for measuring memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn

from mmspeed.protocols import blocks_of


@contextmanager
def other_blocks(model: nn.Module, make: Callable[[nn.Module], nn.Module]) -> Iterator[None]:
    """Replace each block by another module, inside."""
    named = blocks_of(model)
    for name, block in named:
        _put(model, name, make(block))
    try:
        yield
    finally:
        for name, block in named:
            _put(model, name, block)


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    owner, _, own = name.rpartition(".")
    model.get_submodule(owner).register_module(own, module)
