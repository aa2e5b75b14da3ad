"""The axes of the device mesh and the views of it: one table for all arithmetic of ranks, without processes.

Every view is the same ranks 0 .. world - 1 in the same order, cut into axes in another way; outermost axis first. Pipeline stages are
outermost, since they communicate least; ranks that communicate most are nearest to each other.

Each axis of the dense view belongs to one of four groups, by what its ranks read (STAGES, ITEMS, TOKENS, TOGETHER). From these groups
follow the items that a rank reads, the number of ranks that compute an item together, their order, and the parameters that each holds.

| view    | axes                                                | describes                                                    |
| ------- | --------------------------------------------------- | ------------------------------------------------------------ |
| dense   | pp, dp_replicate, dp_shard, dsp, ring, ulysses, tp  | who computes what: items, tokens, channels                   |
| storage | pp, dp_replicate, shard, tp                         | who holds what; shard is dp_shard x dsp x ring x ulysses     |
| expert  | pp, dp_replicate, edp, ep, etp                      | who holds which experts; edp x ep x etp is shard x tp        |
| nodes   | pp, dp_replicate, edp, ep_outer, ep_inner, etp      | who sends rows to which experts; ep_outer x ep_inner is ep   |
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum

from .errors import UserError, divisors


class AxisName(str, Enum):
    """An axis. It is the string that process groups, ledgers and files know it by."""

    PP = "pp"  # pipeline stages: each has layers of its own
    DP_REPLICATE = "dp_replicate"  # every rank holds all parameters
    DP_SHARD = "dp_shard"  # parameters, gradients and optimizer state are split; so are the items
    DSP = "dsp"  # the tokens of an item are split, along another dim in each kind of block
    RING = "ring"  # the tokens of an item are split, and keys and values are passed round a ring
    ULYSSES = "ulysses"  # the tokens of an item are split, and exchanged for heads
    TP = "tp"  # weight matrices are split
    SHARD = "shard"  # all ranks that parameters are sharded over
    EDP = "edp"  # ranks that shard the same experts and receive tokens of other items
    EP = "ep"  # each rank holds other experts, whole or the part of them that `etp` leaves
    EP_OUTER = "ep_outer"  # the nodes of `ep`
    EP_INNER = "ep_inner"  # the ranks of `ep` within a node
    ETP = "etp"  # the matrices of an expert are split

    __str__ = str.__str__


STAGES = (AxisName.PP,)  # axes whose ranks hold other parameters altogether
ITEMS = (AxisName.DP_REPLICATE, AxisName.DP_SHARD)  # ranks along these always read other items
TOKENS = (
    AxisName.DSP,
    AxisName.RING,
    AxisName.ULYSSES,
)  # ranks along these share an item that is split; else each reads its own
TOGETHER = (AxisName.TP,)  # ranks along these always read the same items
DENSE = (*STAGES, *ITEMS, *TOKENS, *TOGETHER)  # in this order: ranks that compute an item together follow one another
STORAGE = (*STAGES, AxisName.DP_REPLICATE, AxisName.SHARD, *TOGETHER)
EXPERT = (*STAGES, AxisName.DP_REPLICATE, AxisName.EDP, AxisName.EP, AxisName.ETP)
NODES = (*STAGES, AxisName.DP_REPLICATE, AxisName.EDP, AxisName.EP_OUTER, AxisName.EP_INNER, AxisName.ETP)


def together_along(split: bool = True) -> tuple[AxisName, ...]:
    """The axes whose ranks compute an item together: one whose tokens are split over them, or one that is not split."""
    return (*TOKENS, *TOGETHER) if split else TOGETHER


@dataclass(frozen=True)
class Reader:
    """The items that a rank reads: share `index` of `count`; ranks with one index read the same."""

    index: int
    count: int


@dataclass(frozen=True)
class MeshTable:
    """The size of every axis of every view, and what follows from it for a rank."""

    sizes: Mapping[AxisName, int]
    folded: bool = False  # the last pipeline stage lies on the first rank of pp

    def shape(self, view: tuple[AxisName, ...]) -> tuple[int, ...]:
        """The sizes of a view's axes, outermost first."""
        return tuple(self.sizes[axis] for axis in view)

    @property
    def world(self) -> int:
        """Number of ranks."""
        return math.prod(self.shape(DENSE))

    def place(self, rank: int, view: tuple[AxisName, ...] | None = None) -> dict[AxisName, int]:
        """A rank's place on each axis of a view (None: the dense one). Raises ValueError for a rank outside the world."""
        if not 0 <= rank < self.world:
            raise ValueError(f"rank {rank} is not one of {self.world}")
        places = {}
        for axis in reversed(view or DENSE):
            rank, places[axis] = divmod(rank, self.sizes[axis])
        return places

    def along(self, rank: int, axes: tuple[AxisName, ...], view: tuple[AxisName, ...] | None = None) -> tuple[int, int]:
        """A rank's place along several axes of a view as one, and their size."""
        places, index = self.place(rank, view), 0
        for axis in axes:
            index = index * self.sizes[axis] + places[axis]
        return index, math.prod(self.shape(axes))

    def reader(self, rank: int, split: bool = True) -> Reader:
        """The share that a rank reads of items whose tokens are split over a group of ranks, or of items that are not split."""
        return Reader(*self.along(rank, ITEMS if split else ITEMS + TOKENS))

    def in_stage(self, rank: int) -> Reader:
        """A rank's number among the ranks of its pipeline stage, over which the items of a step are dealt."""
        return Reader(*self.along(rank, tuple(axis for axis in DENSE if axis not in STAGES)))

    def knows_loss(self, rank: int) -> bool:
        """True for ranks of the last pipeline stage."""
        index, count = self.along(rank, STAGES)
        return index == (0 if self.folded else count - 1)

    def first_of_group(self, rank: int) -> bool:
        """True for the one rank, of those that compute an item together, that knows the loss and reports it for all."""
        index, _ = self.along(rank, together_along())
        return index == 0 and self.knows_loss(rank)


@dataclass(frozen=True)
class AxisSizes:
    """The requested sizes of a mesh's axes.

    One of dp_replicate and dp_shard may be -1: it takes what the others leave. `ep` ranks share the experts, groups of `ep_inner` of them
    (all, when None) within a node; each expert's matrices are split over `etp`. With `folded` the last pipeline stage lies on the first
    rank of pp, beside the first stage.
    """

    dp_replicate: int = 1
    dp_shard: int = -1
    ring: int = 1
    ulysses: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    ep_inner: int | None = None
    etp: int = 1
    dsp: int = 1
    folded: bool = False


def mesh_table(world: int, asked: AxisSizes | None = None) -> MeshTable:
    """The table of a world of ranks; None: all ranks shard.

    Raises UserError when the product of the axes is not the world size, or the ranks of a replica are no multiple of ep x etp.
    """
    asked = asked or AxisSizes()
    requested = asdict(asked)
    sizes: dict[AxisName, int] = {axis: requested[axis.value] for axis in DENSE}
    free = [axis for axis, size in sizes.items() if size == -1]
    if len(free) > 1:
        raise UserError("parallel: only one of dp_replicate and dp_shard may be -1")
    known = math.prod(sizes.values()) * (-1 if free else 1)
    if free and known > 0 and world % known == 0:
        sizes[free[0]] = world // known
    elif free or known != world:
        factors = " x ".join(f"{axis}={size}" for axis, size in sizes.items() if size != 1) or "one device"
        raise UserError(f"parallel: {factors} does not make the {world} processes of this run; change one, or --nproc")
    shard = math.prod(sizes[axis] for axis in (*ITEMS, *TOKENS) if axis != AxisName.DP_REPLICATE)
    ep, etp, copy = asked.ep, asked.etp, shard * math.prod(sizes[axis] for axis in TOGETHER)
    inner = ep if asked.ep_inner is None else asked.ep_inner
    if min(ep, inner, etp) < 1 or ep % inner:
        raise UserError(f"parallel: ep {ep}, ep_inner {inner} and etp {etp} must be at least 1, and ep_inner divide ep")
    if copy % (ep * etp):
        experts_over = f"ep {ep}" if etp == 1 else f"ep {ep} x etp {etp}"
        raise UserError(
            f"parallel: {experts_over} does not divide the {copy} devices that share one copy of the parameters: use one of "
            f"{divisors(copy)}, or raise dp_shard (more processes: --nproc)"
        )
    experts = {
        AxisName.EDP: copy // (ep * etp),
        AxisName.EP: ep,
        AxisName.EP_OUTER: ep // inner,
        AxisName.EP_INNER: inner,
        AxisName.ETP: etp,
    }
    return MeshTable({**sizes, AxisName.SHARD: shard, **experts}, asked.folded)
