"""The functions that torch.compile makes graphs of, and those that it leaves out."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch
from torch import nn

from .mixin import mix_in
from .torch_internals import GraphsBetweenBreaks, allow_recompiles, disable_dynamo

# Decorator: a graph breaks at the function, which runs eagerly. `torch.compiler.disable` does the same, but loads the compiler when a
# file is imported; this does so at the first call.
outside_graphs = disable_dynamo

Backend = str | Callable[..., Any]

# Graphs of one function. At torch's own limit, 8, it continues without graphs, with a warning: too few for blocks of two spans with
# images and videos, batches of one and of several, and parts of other shapes.
MOST_GRAPHS = 64


class _Compiled(nn.Module):
    """Runs the forward of the block that it is mixed into as graphs; mixins before this one stay outside of them."""

    _backend: Backend

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        forward_of_block = cast(Any, super().forward).__func__
        compiled = _graphs_of(forward_of_block, self._backend)
        if torch.compiler.is_compiling():  # part of a larger graph
            return compiled(self, *args, **kwargs)
        with GraphsBetweenBreaks():
            return compiled(self, *args, **kwargs)


def compile_forward(block: nn.Module, backend: Backend = "inductor") -> None:
    """Make graphs of the forward of `block`, as it is now, in place. Blocks of one class share them."""
    allow_recompiles(MOST_GRAPHS)
    mix_in(block, _Compiled)
    cast(_Compiled, block)._backend = backend


@cache
def _graphs_of(forward: Callable[..., Any], backend: Backend) -> Callable[..., Any]:
    return torch.compile(forward, backend=backend)
