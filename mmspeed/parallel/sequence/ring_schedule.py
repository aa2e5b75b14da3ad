"""Schedule a ring, apart from devices: which block each rank holds in each step, and which messages are sent meanwhile.

`forward_steps` and `backward_steps` list the steps of one rank: whose block it holds, what is sent before the step's compute, and where the
gradients go after it; `run_forward` and `run_backward` carry a schedule out over a `Link`. Only the step that needs a message waits for it,
so a message overlaps with the compute of the step before.

Single ring of R ranks (Ring Attention, Liu et al. 2023): blocks go from rank r to r + 1. Double ring (LoongTrain, Gu et al. 2024), R / w
windows of w neighbours: in each round the blocks of one window rotate inside another over the fast links. The blocks for the next round are
sent between windows over the slow links when the round begins, hidden behind the whole round. A single ring is a double ring with w = 1.

Backward: the final output and log-sum-exp are known, so each block's gradients are independent. A rank's own block needs no message, so its
queries are divided and it is computed in two parts: the first, at the start, hides the arrival of the first keys, and the rest, at the very
end, hides the return of the last gradients. In between the other blocks pass through, and the gradients of their keys and values travel on
with them. In a double ring it is the round of a rank's own window that is divided so. When a step's compute takes as long as its messages,
and queries are divided in the ratio of the bytes of keys to those of gradients, all communication is hidden, forward and backward.

Legend: R ranks of the ring, w ranks of a window.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import Tensor

Rows = Literal["all", "first", "rest"]
Shapes = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Hop:
    """A rank's part in a message: the block of `sends` (or its gradients) goes to rank `to`, that of `brings` comes from `source`.

    outer: the message goes between windows of a double ring.
    """

    to: int
    source: int
    sends: int
    brings: int
    outer: bool = False


@dataclass(frozen=True)
class RingStep:
    """A step of a schedule: attend to the block of `owner` with these rows of the queries.

    keys: sent before the compute. After it, gradients that were received for `owner` are added to the step's own.
    grads: where this sum is sent; None: it stays, for a later step or as the result.
    """

    owner: int
    rows: Rows = "all"
    keys: tuple[Hop, ...] = ()
    grads: Hop | None = None


class PendingBlock(Protocol):
    """A message in transit."""

    def wait(self) -> list[Tensor]: ...


class Link(Protocol):
    """The transport of messages between ranks."""

    def start(self, tensors: Sequence[Tensor], hop: Hop, shapes: Shapes) -> PendingBlock:
        """Start to send the tensors and to receive tensors of `shapes`; neither blocks."""
        ...


def forward_steps(rank: int, ranks: int, window: int | None = None) -> list[RingStep]:
    """Schedule the forward pass. Raises ValueError for a window that does not divide the ring."""
    grid = _RingPosition.at(rank, ranks, window)
    steps = []
    for turn in range(grid.windows):
        for offset in range(grid.width):
            steps.append(RingStep(grid.owner(turn, offset), "all", grid.key_hops(turn, offset)))
    return steps


def backward_steps(rank: int, ranks: int, window: int | None = None) -> list[RingStep]:
    """Schedule the backward pass: own window with the first queries, all other windows, own window with the rest of the queries."""
    grid = _RingPosition.at(rank, ranks, window)
    if ranks == 1:
        return [RingStep(rank)]
    width, steps = grid.width, []
    for turn in range(grid.windows):
        for offset in range(width):
            last = offset == width - 1
            keys, grads = grid.key_hops(turn, offset), None
            if not last:  # gradients follow their block
                grads = grid.inner(turn, offset)
            elif 0 < turn < grid.windows - 1:
                grads = grid.outer(turn, offset)
            elif turn:
                grads = grid.home()
            if turn == grid.windows - 1 and last and width > 1:  # the last round begins with the neighbour's block
                keys += (grid.inner(0, 0),)
            steps.append(RingStep(grid.owner(turn, offset), "all" if turn else "first", keys, grads))
    for offset in range(1, width):
        keys = (grid.inner(0, offset),) if offset < width - 1 else ()
        steps.append(RingStep(grid.owner(0, offset), "rest", keys, grid.inner(0, offset)))
    return [*steps, RingStep(rank, "rest")]


@dataclass(frozen=True)
class _RingPosition:
    """A rank's position: `place` of `width` in window `of` of `windows`. In a single ring, each window is one rank."""

    of: int
    place: int
    windows: int
    width: int

    @classmethod
    def at(cls, rank: int, ranks: int, window: int | None) -> _RingPosition:
        width = 1 if window is None or window >= ranks else window
        if width < 1 or ranks % width:
            raise ValueError(f"a ring of {ranks} ranks cannot be cut into windows of {window}")
        return cls(rank // width, rank % width, ranks // width, width)

    def rank(self, window: int, place: int) -> int:
        return window % self.windows * self.width + place % self.width

    def owner(self, turn: int, offset: int) -> int:
        """The owner of the block that this rank holds in round `turn`, after `offset` hops within the window."""
        return self.rank(self.of - turn, self.place - offset)

    def inner(self, turn: int, offset: int) -> Hop:
        """The hop to the next place of the window."""
        to, source = self.rank(self.of, self.place + 1), self.rank(self.of, self.place - 1)
        return Hop(to, source, self.owner(turn, offset), self.owner(turn, offset + 1))

    def outer(self, turn: int, offset: int) -> Hop:
        """The hop to the same place of the next window."""
        to, source = self.rank(self.of + 1, self.place), self.rank(self.of - 1, self.place)
        return Hop(to, source, self.owner(turn, offset), self.owner(turn + 1, offset), self.width > 1)

    def home(self) -> Hop:
        """The last hop of gradients, summed over all other windows: they are one window and one place before their owner."""
        to, source = self.rank(self.of + 1, self.place + 1), self.rank(self.of - 1, self.place - 1)
        return Hop(to, source, to, self.rank(self.of, self.place), self.width > 1)

    def key_hops(self, turn: int, offset: int) -> tuple[Hop, ...]:
        within = (self.inner(turn, offset),) if offset < self.width - 1 else ()
        return (*within, self.outer(turn, 0)) if offset == 0 and turn < self.windows - 1 else within


def run_forward(
    steps: Sequence[RingStep],
    rank: int,
    own: Sequence[Tensor],
    link: Link,
    shapes: Callable[[int], Shapes],
    compute: Callable[[RingStep, Sequence[Tensor]], Any],
) -> None:
    """Carry out a forward schedule. `own` is this rank's block; `shapes(owner)` are those of the block of a rank."""
    coming: dict[int, PendingBlock] = {}
    for step in steps:
        compute(step, _begin(step, rank, own, link, shapes, coming))


def run_backward(
    steps: Sequence[RingStep],
    rank: int,
    own: Sequence[Tensor],
    link: Link,
    shapes: Callable[[int], Shapes],
    compute: Callable[[RingStep, Sequence[Tensor]], list[Tensor]],
    grad_shapes: Callable[[int], Shapes],
) -> list[Tensor]:
    """Carry out a backward schedule and return the summed gradients of `own`.

    `compute` returns a step's gradients of the block, as new tensors; other arguments as those of `run_forward`.
    """
    coming: dict[int, PendingBlock] = {}
    sums: dict[int, list[PendingBlock]] = {}
    for step in steps:
        block = _begin(step, rank, own, link, shapes, coming)
        grads = compute(step, block)
        for before in sums.pop(step.owner, []):
            for grad, other in zip(grads, before.wait(), strict=True):
                grad.add_(other)
        if step.grads is None:
            sums.setdefault(step.owner, []).append(_LocalBlock(grads))
        else:
            arriving = link.start(grads, step.grads, grad_shapes(step.grads.brings))
            sums.setdefault(step.grads.brings, []).append(arriving)
    (result,) = sums.pop(rank)
    return result.wait()


def _begin(
    step: RingStep,
    rank: int,
    own: Sequence[Tensor],
    link: Link,
    shapes: Callable[[int], Shapes],
    coming: dict[int, PendingBlock],
) -> Sequence[Tensor]:
    """Wait for the step's block, start the step's messages, and return the block."""
    block = own if step.owner == rank else coming.pop(step.owner).wait()
    for hop in step.keys:
        coming[hop.brings] = link.start(own if hop.sends == rank else block, hop, shapes(hop.brings))
    return block


@dataclass(frozen=True)
class _LocalBlock:
    """Tensors that stay on this rank, in place of a message."""

    tensors: list[Tensor]

    def wait(self) -> list[Tensor]:
        return self.tensors
