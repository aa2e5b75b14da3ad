"""Models with only some of their blocks, or with blocks that do nothing: what memory is measured with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from torch import nn

from mmspeed.protocols import blocks_of, declare_plan, plan_of


def keep_blocks(model: nn.Module, places: Sequence[int]) -> None:
    """Leave a model only the blocks at these places, in place; they keep their order, and its plan names them anew.

    What a plan says of the first block of a list is then true of the first that is left.
    """
    kept: dict[str, list[nn.Module]] = {name.rpartition(".")[0]: [] for name, _ in blocks_of(model)}
    named = blocks_of(model)
    names = {}
    for place in sorted(places):
        name, block = named[place]
        owner = name.rpartition(".")[0]
        names[place] = f"{owner}.{len(kept[owner])}"
        kept[owner].append(block)
    for owner, blocks in kept.items():
        _put(model, owner, nn.ModuleList(blocks))
    plan = plan_of(model)
    if plan is not None:
        declare_plan(
            model, replace(plan, blocks=tuple(replace(plan.blocks[place], name=name) for place, name in names.items()))
        )


@contextmanager
def other_blocks(model: nn.Module, make: Callable[[nn.Module], nn.Module]) -> Iterator[None]:
    """Inside, another module stands in the place of each block."""
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
