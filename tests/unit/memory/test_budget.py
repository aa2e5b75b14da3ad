"""Choosing options under a budget: the dynamic program against trying all, and what it takes for a large model."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmspeed.memory.planning.knapsack import Option, choose, least_room, peak_of

options = st.builds(
    Option,
    kept=st.integers(0, 30),
    forward=st.integers(0, 20),
    backward=st.integers(0, 20),
    host=st.integers(0, 20),
    seconds=st.integers(0, 12).map(lambda n: n * 1e-9),
)
instances = st.lists(st.lists(options, min_size=1, max_size=4), min_size=1, max_size=5)
weights = st.one_of(st.sampled_from([1, 2, 3]), st.lists(st.sampled_from([1, 1.5, 2, 4]), min_size=5, max_size=5))
left = st.lists(st.integers(0, 9), min_size=5, max_size=5)


def judged(
    blocks: Sequence[Sequence[Option]], chosen: Sequence[int], weight: Sequence[float], gradients: Sequence[int]
) -> tuple[int, int, int, int]:
    """(peak, host, nanoseconds, kept) of a choice, counted step by step."""
    kept = host = peak = nanoseconds = 0
    for block, option in enumerate(chosen):
        one = blocks[block][option]
        kept += -int(-one.kept * weight[block] // 1)
        host += -int(-one.host * weight[block] // 1)
        peak = max(peak, kept + one.backward + gradients[block], kept + one.forward + gradients[block])
        nanoseconds += round(one.seconds * 1e9)
    return peak, host, nanoseconds, kept


@given(instances, st.integers(0, 150), weights, left, st.one_of(st.none(), st.integers(0, 60)))
def test_equals_trying_all(
    blocks: list[list[Option]], room: int, weight: object, gradients: list[int], host_room: int | None
) -> None:
    each = [weight] * len(blocks) if isinstance(weight, int) else weight[: len(blocks)]  # type: ignore[index]
    gradients = gradients[: len(blocks)]
    best = None
    for chosen in itertools.product(*(range(len(block)) for block in blocks)):
        peak, host, nanoseconds, kept = judged(blocks, chosen, each, gradients)
        if peak <= room and (host_room is None or host <= host_room):
            best = min((nanoseconds, kept), best or (nanoseconds, kept))
    in_flight = weight if isinstance(weight, int) else each
    choice = choose(blocks, room, in_flight, gradients=gradients, host_room=host_room)
    if best is None:
        assert choice is None
        return
    assert choice is not None
    peak, host, nanoseconds, kept = judged(blocks, choice, each, gradients)
    assert (nanoseconds, kept) == best
    assert peak <= room and (host_room is None or host <= host_room)
    assert peak_of(blocks, choice, in_flight, gradients=gradients) == peak


@given(instances, left)
def test_the_least_room_is_the_least_that_has_a_choice(blocks: list[list[Option]], gradients: list[int]) -> None:
    gradients = gradients[: len(blocks)]
    room, chosen = least_room(blocks, gradients=gradients)
    assert peak_of(blocks, chosen, gradients=gradients) == room
    assert choose(blocks, room, gradients=gradients) is not None
    assert choose(blocks, room - 1, gradients=gradients) is None


def many(blocks: int, each: int) -> list[list[Option]]:
    """Options as measured ones are: no two alike, more bytes for less time."""
    return [
        [
            Option(
                10**9 - i * 61_803_399 + b % 2 * 7919,
                2 * 10**7 + i,
                10**7 * i + 1,
                i * 5 % 8 * 3 * 10**7,
                i * i * 1.37e-3,
            )
            for i in range(each)
        ]
        for b in range(blocks)
    ]


def test_a_large_model_fits() -> None:
    blocks = many(42, 15)
    room = int(0.6 * peak_of(blocks, [0] * 42))
    choice = choose(blocks, room, unit=max(1, room >> 14))
    assert choice is not None and peak_of(blocks, choice) <= room


def test_mistakes_are_reported() -> None:
    with pytest.raises(ValueError, match="every block needs an option"):
        choose([[Option(1)], []], 5)
    with pytest.raises(ValueError, match="every block needs"):
        choose([[Option(1)]], 5, [1, 2])
