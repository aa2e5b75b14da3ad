"""Give the regions of a block, parts of it that a plan names, an activation policy each.

A model knows nothing of them. `set_policies` changes a block's modules by a mixin, so that their forwards follow their policies.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import torch
from torch import nn

from mmspeed.config.memory import SMALL, SMALL_WAYS, ActivationPolicy
from mmspeed.errors import UserError, nearest
from mmspeed.memory.offload.offloader import OffloadGroup
from mmspeed.mixin import mix_in
from mmspeed.protocols.plan import BlockParts, PreparesInput, Region, check_adapter, modules_like, parts_of
from mmspeed.replay import in_region

from .block_checkpoint import by_position
from .region import OpPolicy, RegionPolicy, run_region

T = TypeVar("T")
ActivationPolicies = Mapping[str, ActivationPolicy]  # by region; one that is not named saves all

POLICIES: dict[str, RegionPolicy] = {
    "recompute": RegionPolicy(),
    "selective": RegionPolicy(matmul="save", attention="save"),
    "offload_selective": RegionPolicy(matmul="offload", attention="offload", exchange="offload", inputs="offload"),
    "offload_recompute": RegionPolicy(exchange="offload", inputs="offload"),
}


@dataclass(frozen=True)
class RegionRunner:
    """A runner of a region under its policy. `groups` makes a group for each run, where something is offloaded."""

    way: ActivationPolicy
    policy: RegionPolicy | None
    op_policies: dict[Any, OpPolicy]
    groups: Callable[[], OffloadGroup] | None
    rng: bool

    def __deepcopy__(self, memo: Any) -> RegionRunner:
        return self  # nothing in it changes; a copy of a model offloads to the same place

    def run(self, run: Callable[..., T], *args: Any) -> T:
        """The result of `run(*args)`."""
        group = self.groups() if self.groups is not None else None
        if self.policy is None:
            assert group is not None
            try:
                with group.hooks():
                    return run(*args)
            finally:
                group.close()
        return cast(T, run_region(run, *args, policy=self.policy, fates=self.op_policies, group=group, rng=self.rng))


class RegionModule(nn.Module):
    """Mixed in before a module's own class: its forward is a region, unless it runs inside of another that is not saved."""

    _runner: RegionRunner | None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        runner = self._runner
        if runner is None or not torch.is_grad_enabled() or in_region():
            return super().forward(*args, **kwargs)
        run, arguments = by_position(super().forward, args, kwargs)
        return runner.run(run, *arguments)


class PreparationRegion(nn.Module):
    """Mixed in before a linear layer that prepares its input: the preparation is a region."""

    _runner: RegionRunner | None

    def forward(self, *args: Any) -> Any:
        runner = self._runner
        if runner is None or not torch.is_grad_enabled() or in_region():
            return super().forward(*args)
        own = cast(PreparesInput, super())
        return runner.run(lambda *args: own.project(own.prepare(*args)), *args)


def runners_of(module: nn.Module) -> list[RegionRunner]:
    """The runners that `set_policies` gave to a module of a block; none for any other module."""
    runner = module._runner if isinstance(module, RegionModule | PreparationRegion) else None
    return [runner] if runner is not None else []


def regions_of(block: nn.Module) -> tuple[str, ...]:
    """The names of a block's regions, without `block` itself; none for a block that declares none."""
    parts = parts_of(block)
    return tuple(name for name in parts.regions if region_modules(block, name, parts))


def region_runner(
    way: ActivationPolicy, groups: Callable[[], OffloadGroup] | None, *, exchange_again: bool = False, rng: bool = False
) -> RegionRunner | None:
    """The runner of a region with a policy; None for `save`. Raises ValueError for a policy that offloads without `groups`."""
    if way == "save":
        return None
    policy = POLICIES.get(way)
    if policy is not None and exchange_again:
        policy = replace(policy, exchange="recompute")
    swaps = policy is None or policy.swaps
    if swaps and groups is None:
        raise ValueError(f"the policy {way} needs somewhere to offload to")
    return RegionRunner(way, policy, policy.op_policies() if policy is not None else {}, groups if swaps else None, rng)


def set_policies(
    block: nn.Module,
    ways: ActivationPolicies,
    groups: Callable[[], OffloadGroup] | None = None,
    *,
    exchange_again: bool = False,
) -> None:
    """Give the regions of a block their policies, in place. The region `block` is the whole block, and every block has it.

    groups: makes a group to offload to for each run of a region that offloads. Raises ValueError where one is needed and `groups` is None,
    UserError for a region that the block lacks.
    """
    parts = parts_of(block)
    check_policies(block, ways)
    for module in block.modules():
        if isinstance(module, RegionModule | PreparationRegion):
            module._runner = None
    for name, way in ways.items():
        runner = region_runner(way, groups, exchange_again=exchange_again, rng=parts.draws)
        if runner is None:
            continue
        if name == "block":
            mix_in(block, RegionModule)._runner = runner
            continue
        for module in region_modules(block, name, parts):
            if parts.regions[name].small:
                mix_in(module, PreparationRegion, rename=False)._runner = runner
            else:
                mix_in(module, RegionModule, rename=False)._runner = runner


def check_policies(block: nn.Module, ways: ActivationPolicies) -> None:
    """Raises UserError for a region that a block lacks, a policy that a region cannot have, and a region within another."""
    parts, names = parts_of(block), [name for name, way in ways.items() if way != "save"]
    own = {name: region_modules(block, name, parts) if name != "block" else [block] for name in names}
    for name in names:
        small = name != "block" and parts.regions[name].small
        if small and ways[name] not in SMALL_WAYS:
            raise UserError(f"memory.activation_policy: {name} can be {' or '.join(SMALL_WAYS)}, not {ways[name]}")
    for outer, inner in itertools.permutations(own, 2):
        within = {id(part) for module in own[outer] for part in module.modules()}
        if outer != inner and any(id(module) in within for module in own[inner]):
            raise UserError(
                f"memory.activation_policy: {inner} lies in {outer} in {type(block).__name__}, so only one of them can have a policy"
            )


def _serves_for(name: str) -> str:
    """Advice for a model in which no module makes a norm or an activation alone; empty for other regions."""
    return "; `block: selective` computes norms and activations again, and keeps products and attention" * (
        name in SMALL
    )


def region_modules(block: nn.Module, name: str, parts: BlockParts | None = None) -> list[nn.Module]:
    """The modules of a block's region, none where it is optional and not here.

    Raises UserError for a region that the block lacks, or a small one that is no preparing layer.
    """
    parts = parts_of(block) if parts is None else parts
    if name not in parts.regions:
        known = ("block", *parts.regions)
        raise UserError(
            f"memory.activation_policy: {type(block).__name__} has no region {name} (it has {', '.join(known)})"
            f"{nearest(name, known) or _serves_for(name)}"
        )
    region: Region = parts.regions[name]
    modules = [
        module
        for pattern in region.modules
        for _, module in modules_like(block, pattern, f"plan, region {name!r}", region.optional)
    ]
    for module in modules:
        check_adapter(module, f"memory.activation_policy: region {name!r} of {type(block).__name__}")
    if region.small and not all(isinstance(module, PreparesInput) for module in modules):
        raise UserError(
            f"plan: region {name!r} of {type(block).__name__} is small, so its modules must be linear layers that prepare their input"
        )
    return modules
