"""Apply activation policies to all blocks of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from mmspeed.config.memory import ActivationPolicy, MemoryConfig, parse_bytes
from mmspeed.device import Device
from mmspeed.errors import UserError
from mmspeed.memory.chunks import set_chunks
from mmspeed.memory.offload.offloader import Offloader, OffloadGroup
from mmspeed.protocols.plan import parts_of

from .block_checkpoint import recompute
from .regions import ActivationPolicies, check_policies, set_policies

SWAPPED: dict[str, ActivationPolicy] = {
    "offload": "save",
    "offload_selective": "selective",
    "offload_recompute": "recompute",
}  # the way without swapping


@dataclass(frozen=True)
class BlockPolicies:
    """The ways of a model's spans, block by block.

    Args:
        ways: of each block; a single entry applies to all blocks.
        groups: makes a group to swap to for each run of a span that swaps; as `Offloader.group` does.
        exchange_again: whether recomputation repeats exchanges between devices.
        mlp_chunk: tokens that an MLP computes at a time; None: all.
    """

    ways: tuple[ActivationPolicies, ...] = field(default_factory=lambda: ({},))
    groups: Callable[[], OffloadGroup] | None = None
    exchange_again: bool = False
    mlp_chunk: int | None = None

    @classmethod
    def everywhere(
        cls, ways: ActivationPolicies, blocks: int = 1, keep_last: bool = False, **settings: Any
    ) -> BlockPolicies:
        """The same ways for all blocks. `keep_last`: except that the last one, which backward needs at once, swaps nothing."""
        last = {name: SWAPPED.get(way, way) for name, way in ways.items()} if keep_last else ways
        return cls((*[ways] * (blocks - 1), last), **settings)

    def of(self, block: int) -> ActivationPolicies:
        return self.ways[block] if len(self.ways) > 1 else self.ways[0]

    def apply(self, block: nn.Module, number: int, compiled: bool = False, around_graphs: bool = False) -> None:
        """Set the ways of block `number`, in place. `compiled`: torch.compile compiles it; `around_graphs`: see `recompute`.

        Raises UserError for a span that the block does not name, for `mlp_chunk` where there is no such MLP, and for another way than
        `block: recompute` on a compiled block.
        """
        ways = {name: way for name, way in self.of(number).items() if way != "save"}
        check_keeping(block, ways, self.mlp_chunk, compiled)
        if self.mlp_chunk is not None:
            set_chunks(block, self.mlp_chunk)
        if compiled and ways:
            recompute(block, around_graphs, self.exchange_again)
        elif ways:
            set_policies(block, ways, self.groups, exchange_again=self.exchange_again)


def check_keeping(block: nn.Module, ways: ActivationPolicies, mlp_chunk: int | None, compiled: bool) -> None:
    """Raises UserError for settings that `BlockPolicies.apply` refuses; changes nothing."""
    if mlp_chunk is not None and not parts_of(block).chunks:
        raise UserError(f"memory.mlp_chunk: {type(block).__name__} has no MLP that computes in parts; leave it out")
    check_policies(block, ways)
    kept = {name: way for name, way in ways.items() if way != "save"}
    if compiled and kept and kept != {"block": "recompute"}:
        raise UserError(
            "memory.activation_policy: with train.compile, `block: recompute` is the only policy beside `save`"
        )


def make_keeping(
    memory: MemoryConfig, blocks: int, device: Device, choice: Sequence[ActivationPolicies] | None = None
) -> BlockPolicies:
    """The policies of a config's memory section for a model of so many blocks.

    choice: the ways of each block, as chosen under a budget.
    """
    swap = Offloader(device, parse_bytes(memory.offload_from))
    settings = {"groups": swap.group, **memory.model_dump(include={"exchange_again", "mlp_chunk"})}
    if choice is not None:
        return BlockPolicies(tuple(choice), **settings)  # type: ignore[arg-type]
    policies: ActivationPolicies = {str(name): way for name, way in memory.activation_policy.items()}
    return BlockPolicies.everywhere(policies, blocks, memory.keep_last, **settings)
