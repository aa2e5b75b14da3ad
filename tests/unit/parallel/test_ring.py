"""The ring's schedules carried out by threads that pass messages, their time on a controlled clock, and the zigzag order."""

from __future__ import annotations

import queue
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mmspeed.comm.axis import Axis
from mmspeed.parallel.sequence.ring import first_rows, ring_attention
from mmspeed.parallel.sequence.ring_schedule import (
    Hop,
    PendingBlock,
    RingStep,
    Shapes,
    backward_steps,
    forward_steps,
    run_backward,
    run_forward,
)
from mmspeed.parallel.sequence.zigzag import Piece, causal_pieces, cut_rows, zigzag_lengths, zigzag_order

RINGS = [(1, 1), (2, 1), (3, 3), (4, 2), (5, 1), (6, 3), (8, 2)]


# ---- the schedule moves the right things


@dataclass
class Wires:
    """Messages between threads: those of a pair come in the order in which they were sent, as over a process group."""

    rank: int
    lines: dict[tuple[int, int], queue.Queue[Sequence[Tensor]]]
    hops: list[Hop] = field(default_factory=list)

    def start(self, tensors: Sequence[Tensor], hop: Hop, shapes: Shapes) -> PendingBlock:
        self.hops.append(hop)
        self.lines[self.rank, hop.to].put(tensors)
        return _Line(self.lines[hop.source, self.rank])


@dataclass
class _Line:
    line: queue.Queue[Sequence[Tensor]]
    got: list[Tensor] | None = None

    def wait(self) -> list[Tensor]:
        return list(self.line.get(timeout=20))


def carry_out(ranks: int, window: int | None) -> list[tuple[list[int], Tensor, list[Hop], list[Hop]]]:
    """What each rank saw forward, the sum of gradients it got, and the hops it took part in."""
    lines: dict[tuple[int, int], queue.Queue[Sequence[Tensor]]] = defaultdict(queue.Queue)

    def rank_does(rank: int) -> tuple[list[int], Tensor, list[Hop], list[Hop]]:
        own, forward, backward, saw = [torch.tensor([rank])], Wires(rank, lines), Wires(rank, lines), []

        def attend(step: RingStep, block: Sequence[Tensor]) -> list[Tensor]:
            assert block[0].item() == step.owner  # the block that the schedule says is here
            saw.append(step.owner)
            share = torch.zeros(ranks, 2)
            share[rank] = torch.tensor({"all": [1.0, 1.0], "first": [1.0, 0.0], "rest": [0.0, 1.0]}[step.rows])
            return [share]

        run_forward(forward_steps(rank, ranks, window), rank, own, forward, lambda _: [], attend)
        seen, saw = saw, []
        (sums,) = run_backward(
            backward_steps(rank, ranks, window), rank, own, backward, lambda _: [], attend, lambda _: []
        )
        return seen, sums, forward.hops, backward.hops

    with ThreadPoolExecutor(ranks) as pool:
        for pair in [(a, b) for a in range(ranks) for b in range(ranks)]:
            lines[pair] = queue.Queue()
        return [future.result() for future in [pool.submit(rank_does, rank) for rank in range(ranks)]]


@pytest.mark.parametrize(("ranks", "window"), RINGS)
def test_every_rank_sees_each_block_once_and_gets_each_ranks_gradients_once(ranks: int, window: int) -> None:
    for seen, sums, _, _ in carry_out(ranks, window):
        assert sorted(seen) == list(range(ranks))
        assert sums.eq(1.0).all()  # of each rank, of the first rows and of the rest


@pytest.mark.parametrize(("ranks", "window"), RINGS)
def test_hops_are_as_many_as_the_formulas_say_and_stay_near(ranks: int, window: int) -> None:
    w = 1 if window >= ranks else window
    rounds = ranks // w
    for rank, (_, _, forward, backward) in enumerate(carry_out(ranks, window)):
        inner = [[hop for hop in hops if hop.to // w == rank // w] for hops in (forward, backward)]
        assert len(inner[0]) == (rounds * (w - 1) if w > 1 else 0)
        assert len(forward) - len(inner[0]) == rounds - 1
        assert len(inner[1]) == (2 * (rounds + 1) * (w - 1) if w > 1 else 0)  # keys and gradients
        assert len(backward) - len(inner[1]) == 2 * (rounds - 1)
        for hop in forward + backward:
            near = hop.to // w == rank // w
            assert hop.outer == (w > 1 and not near)
            assert near or hop.to // w == (rank // w + 1) % rounds
            if near:
                assert hop.to % w == (rank % w + 1) % w


def test_a_window_that_does_not_divide() -> None:
    with pytest.raises(ValueError, match="ring of 6 ranks cannot be cut into windows of 4"):
        forward_steps(0, 6, 4)
    alone, x = Axis.alone("ring"), torch.zeros(1, 2, 5, 8)
    with pytest.raises(ValueError, match="and 5 on rank 0"):
        ring_attention(x, x, x, None, alone, [4])


# ---- the schedule hides the messages


@dataclass(frozen=True)
class Costs:
    """Seconds: of a block's compute, and of a message by what it carries and which link it takes."""

    compute: float
    keys: float
    grads: float
    outer_keys: float = 0.0
    outer_grads: float = 0.0

    def message(self, hop: Hop, grads: bool) -> float:
        inner, outer = (self.grads, self.outer_grads) if grads else (self.keys, self.outer_keys)
        return outer if hop.outer else inner

    def step(self, step: RingStep) -> float:
        share = self.keys / (self.keys + self.grads) if self.grads else 0.0
        return self.compute * {"all": 1.0, "first": share, "rest": 1.0 - share}[step.rows]


class Clock:
    """Virtual time: messages take their time on a link one after the other, compute takes its own, `wait` waits."""

    def __init__(self, costs: Costs, blocking: bool = False) -> None:
        self.costs, self.blocking = costs, blocking
        self.now, self.computed, self.sent = 0.0, 0.0, 0.0
        self.free: Counter[bool] = Counter()

    def start(self, tensors: Sequence[Tensor], hop: Hop, shapes: Shapes) -> PendingBlock:
        took = self.costs.message(hop, grads=len(tensors) == 2)
        self.free[hop.outer] = max(self.now, self.free[hop.outer]) + took  # type: ignore[assignment]
        self.sent += took
        due = self.free[hop.outer]
        if self.blocking:
            self.now = due
        return _Due(self, due, list(tensors))

    def compute(self, step: RingStep, block: Sequence[Tensor]) -> list[Tensor]:
        self.now += self.costs.step(step)
        self.computed += self.costs.step(step)
        return [torch.zeros(1), torch.zeros(1)]

    def hidden(self) -> float:
        """The part of the messages' time that cost nothing."""
        return 1.0 - (self.now - self.computed) / self.sent


@dataclass
class _Due:
    clock: Clock
    due: float
    tensors: list[Tensor]

    def wait(self) -> list[Tensor]:
        self.clock.now = max(self.clock.now, self.due)
        return self.tensors


def hidden(clock: Clock, ranks: int, window: int | None, backward: bool) -> float:
    """Every rank does the same at the same time, so one stands for all; three tensors are a block, two its gradients."""
    own = [torch.zeros(1)] * 3
    if backward:
        run_backward(backward_steps(0, ranks, window), 0, own, clock, lambda _: [], clock.compute, lambda _: [])
    else:
        run_forward(forward_steps(0, ranks, window), 0, own, clock, lambda _: [], clock.compute)
    return clock.hidden()


# a block's compute takes as long as its messages; backward, keys and gradients together, in float32 and in half types
SINGLE = {
    "forward": (Costs(1.0, 1.0, 0.0), False),
    "backward": (Costs(1.0, 1 / 2, 1 / 2), True),
    "backward half": (Costs(1.0, 1 / 3, 2 / 3), True),
}
# between windows a message takes as long as a whole round computes; backward, keys and gradients together
DOUBLE = {
    "forward": (Costs(1.0, 1.0, 0.0, 2.0), False),
    "backward": (Costs(1.0, 1 / 4, 1 / 4, 1.0, 1.0), True),
    "backward half": (Costs(1.0, 1 / 9, 2 / 9, 2 / 3, 4 / 3), True),
}


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("case", SINGLE)
def test_a_single_ring_hides_all(case: str, ranks: int) -> None:
    costs, backward = SINGLE[case]
    assert hidden(Clock(costs), ranks, None, backward) > 1 - 1e-9
    assert abs(hidden(Clock(costs, blocking=True), ranks, None, backward)) < 1e-9


@pytest.mark.parametrize("ranks", [4, 8])
@pytest.mark.parametrize("case", DOUBLE)
def test_a_double_ring_hides_all(case: str, ranks: int) -> None:
    costs, backward = DOUBLE[case]
    assert hidden(Clock(costs), ranks, 2, backward) > 1 - 1e-9
    assert abs(hidden(Clock(costs, blocking=True), ranks, 2, backward)) < 1e-9


# ---- zigzag


@given(st.integers(0, 70), st.integers(1, 7))
@settings(max_examples=80, deadline=None)
def test_zigzag_holds_each_place_once_and_comes_back(length: int, ranks: int) -> None:
    order, lengths = zigzag_order(length, ranks), zigzag_lengths(length, ranks)
    assert sorted(order.tolist()) == list(range(length)) and sum(lengths) == length
    x = torch.arange(length)
    assert torch.equal(x[order][order.argsort()], x)
    assert max(lengths) - min(lengths) <= 2


@given(st.integers(0, 40), st.integers(1, 5), st.data())
@settings(max_examples=80, deadline=None)
def test_pieces_are_the_causal_mask(length: int, ranks: int, data: st.DataObject) -> None:
    """The pieces of all pairs of ranks, cut into rows anywhere, cover each (query, earlier key) once and nothing else."""
    places = zigzag_order(length, ranks).split(list(zigzag_lengths(length, ranks)))
    covered = torch.zeros(length, length, dtype=torch.int)
    for rank in range(ranks):
        cut = data.draw(st.integers(0, len(places[rank])))
        for owner in range(ranks):
            for piece in causal_pieces(rank, owner, length, ranks):
                for part in (*cut_rows(piece, 0, cut), *cut_rows(piece, cut, len(places[rank]))):
                    n, m = part.q_stop - part.q_start, part.k_stop - part.k_start
                    assert n == m or not part.causal
                    seen = torch.ones(n, m, dtype=torch.int)
                    rows, keys = places[rank][part.q_start : part.q_stop], places[owner][part.k_start : part.k_stop]
                    covered[rows[:, None], keys[None]] += seen.tril() if part.causal else seen
    assert torch.equal(covered, torch.ones(length, length, dtype=torch.int).tril())


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_zigzag_work_is_equal_in_every_step(ranks: int) -> None:
    length = 16 * ranks
    for steps in zip(*[forward_steps(rank, ranks) for rank in range(ranks)], strict=True):
        work = {
            sum(piece.work for piece in causal_pieces(rank, step.owner, length, ranks))
            for rank, step in enumerate(steps)
        }
        assert len(work) == 1
    total = sum(piece.work for owner in range(ranks) for piece in causal_pieces(0, owner, length, ranks))
    assert total == length * (length + 1) / 2 / ranks


def test_rows_of_a_triangle() -> None:
    assert cut_rows(Piece(0, 6, 0, 6, causal=True), 2, 5) == [Piece(2, 5, 0, 2), Piece(2, 5, 2, 5, causal=True)]
    assert cut_rows(Piece(3, 6, 0, 9), 0, 4) == [Piece(3, 4, 0, 9)] and cut_rows(Piece(3, 6, 0, 9), 0, 3) == []


def test_first_rows_are_as_the_bytes() -> None:
    assert first_rows(12, 4) == 6 and first_rows(12, 2) == 4 and first_rows(12, 8) == 6
    assert first_rows(100, 4, causal=True) == 71  # half of a triangle's scores lie in its first 71 %
