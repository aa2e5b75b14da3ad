"""Spans: the parts of a block that can each be told what backward finds of them.

A model names them where it computes, `region(self, "mlp", self._mlp, x)`, and knows nothing else of memory. `set_policies` tells a block
its ways.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import torch
from torch import nn

from mmspeed.config.memory import ActivationPolicy
from mmspeed.memory.offload.swap_group import OffloadGroup
from mmspeed.mixin import mix_in
from mmspeed.protocols import NamesRegions
from mmspeed.replay import in_region

from .block_checkpoint import by_position
from .discard import discarded
from .region import OpPolicy, RegionPolicy, run_region

T = TypeVar("T")
ActivationPolicies = Mapping[str, ActivationPolicy]  # by span; one that is not named saves all

POLICIES: dict[str, RegionPolicy] = {
    "recompute": RegionPolicy(),
    "selective": RegionPolicy(matmul="save", attention="save"),
    "offload_selective": RegionPolicy(matmul="offload", attention="offload", exchange="offload", inputs="offload"),
}


@dataclass(frozen=True)
class RegionRunner:
    """How a span is run. `groups` makes a group for each run, where something is swapped."""

    way: ActivationPolicy
    policy: RegionPolicy | None
    op_policies: dict[Any, OpPolicy]
    groups: Callable[[], OffloadGroup] | None
    rng: bool
    exchange_again: bool = False

    def __deepcopy__(self, memo: Any) -> RegionRunner:
        return self  # nothing in it changes; a copy of a model swaps to the same place

    def run(self, run: Callable[..., T], *args: Any, before: Callable[..., Any] | None = None) -> T:
        if self.way == "recompute_output":
            if before is None:
                raise ValueError("only a span that says what comes before its product can be discard")
            return cast(T, discarded(before, cast(Any, run), *args, exchange_again=self.exchange_again))
        if before is not None:
            run = _joined(before, run)
        group = self.groups() if self.groups is not None else None
        if self.policy is None:
            assert group is not None
            try:
                with group.hooks():
                    return run(*args)
            finally:
                group.close()
        return cast(T, run_region(run, *args, policy=self.policy, fates=self.op_policies, group=group, rng=self.rng))


def region(
    owner: nn.Module, name: str, run: Callable[..., T], *args: Any, before: Callable[..., Any] | None = None
) -> T:
    """`run(*args)`, as the way of the span `name` says; inside of another span that is not saved, as it stands.

    before: `run(before(*args))`, where the span is what comes before a matrix product.
    """
    course = runners_of(owner).get(name)
    if course is None or not torch.is_grad_enabled() or in_region():
        return run(*args) if before is None else run(before(*args))
    return course.run(run, *args, before=before)


def runners_of(module: nn.Module) -> Mapping[str, RegionRunner]:
    """The runners that `set_policies` gave to a module of a block, by region; none of any other module."""
    runners: Mapping[str, RegionRunner] = getattr(module, "_courses", {})
    return runners


def regions_of(block: nn.Module) -> tuple[str, ...]:
    """The regions that a block names; none of a block that names no regions."""
    return tuple(block.spans) if isinstance(block, NamesRegions) else ()


def _joined(before: Callable[..., Any], run: Callable[..., T]) -> Callable[..., T]:
    return lambda *args: run(before(*args))


def region_runner(
    way: ActivationPolicy, groups: Callable[[], OffloadGroup] | None, *, exchange_again: bool = False, rng: bool = False
) -> RegionRunner | None:
    """How a span of a way is run; None for `save`. Raises ValueError for a way that swaps without `groups`."""
    if way == "save":
        return None
    policy = POLICIES.get(way)
    if policy is not None and exchange_again:
        policy = replace(policy, exchange="recompute")
    swaps = way != "recompute_output" and (policy is None or policy.swaps)
    if swaps and groups is None:
        raise ValueError(f"the way {way} needs somewhere to swap to")
    return RegionRunner(
        way, policy, policy.op_policies() if policy is not None else {}, groups if swaps else None, rng, exchange_again
    )


def set_policies(
    block: nn.Module,
    ways: ActivationPolicies,
    groups: Callable[[], OffloadGroup] | None = None,
    *,
    exchange_again: bool = False,
) -> None:
    """Tell a block the ways of its spans, in place. The span `block` is the whole of it, of a model that names no spans too.

    groups: makes a place to swap to for each run of a span that swaps. Raises ValueError where one is needed and None is given.
    """
    courses = {
        name: region_runner(way, groups, exchange_again=exchange_again, rng=name == "block" and _draws(block))
        for name, way in ways.items()
    }
    told = {name: course for name, course in courses.items() if course is not None}
    if "block" in told:
        mix_in(block, _WholeBlockRegion)
    for part in block.modules():
        part._courses = told  # type: ignore[assignment]


class _WholeBlockRegion(nn.Module):
    """Mixed in before a block's own class: its forward is the span `block`."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        run, given = by_position(super().forward, args, kwargs)
        return region(self, "block", run, *given)


def _draws(block: nn.Module) -> bool:
    """Whether a block may draw random numbers: only one that declares its spans is known not to."""
    return not regions_of(block)
