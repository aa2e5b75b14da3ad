"""Passes that take turns run their nodes in the order that is asked for, and end together where one of them fails."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from mmspeed.parallel.turns import Turns
from mmspeed.plan.overlap import BACKWARD, FORWARD, Order


def nodes_run(turns: Turns, counts: tuple[int, int], order: Order | None, fails: tuple[int, int] | None = None) -> str:
    """The nodes of a pair in the order in which they ran: passes of so many nodes, with an exchange behind each but the last."""
    ran: list[str] = []

    def side(number: int) -> Callable[[], None]:
        def run() -> None:
            for place in range(counts[number]):
                ran.append("FB"[number])
                if (number, place) == fails:
                    raise ValueError(f"node {place}")
                if place < counts[number] - 1:
                    assert turns.give() == number

        return run

    turns.both(side(FORWARD), side(BACKWARD), order)
    return "".join(ran)


@pytest.mark.parametrize(
    "counts, order, ran",
    [
        ((3, 3), None, "BFBFBF"),
        ((2, 4), None, "BFBFBB"),
        ((2, 4), "BBBFBF", "BBBFBF"),
        ((3, 3), "FFBBFB", "FFBBFB"),
        ((3, 3), "FFFBBB", "FFFBBB"),
        ((3, 2), "BFBF", "BFBFF"),  # more nodes than the order knows
        ((2, 2), "BBBBFF", "BBFF"),  # fewer
        ((1, 1), None, "BF"),
    ],
)
def test_nodes_run_in_order(counts: tuple[int, int], order: str | None, ran: str) -> None:
    turns = Turns(torch.device("cpu"))
    for _ in range(3):
        assert nodes_run(turns, counts, None if order is None else tuple(map("FB".index, order))) == ran
    assert turns.give() is None  # no pair runs


@pytest.mark.parametrize("fails", [(FORWARD, 0), (FORWARD, 2), (BACKWARD, 0), (BACKWARD, 1)])
def test_a_pass_that_fails_ends_the_other(fails: tuple[int, int]) -> None:
    turns = Turns(torch.device("cpu"))
    with pytest.raises(ValueError, match=f"node {fails[1]}"):
        nodes_run(turns, (3, 3), None, fails)
    assert nodes_run(turns, (2, 2), None) == "BFBF"
