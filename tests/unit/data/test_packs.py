"""Packs of documents: every token of an epoch in exactly one of them, and steps of equal cost."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmspeed.data.sampling import packs as packing
from mmspeed.data.sampling.packs import PackMode, Packs, TokenRanges, joined, pack, steps_of_equal_cost, whole_documents

MODES = st.sampled_from(["documents", "stream"])
LENGTHS = st.lists(st.integers(0, 40), max_size=60)
LIKE_TEXT = 400, 1.2  # median and sigma of a log-normal distribution of lengths


def like_text(count: int, seed: int = 0) -> npt.NDArray[np.int64]:
    median, sigma = LIKE_TEXT
    return np.maximum(1, np.exp(np.random.default_rng(seed).normal(np.log(median), sigma, count))).astype(np.int64)


def tokens_of(ranges: TokenRanges) -> list[tuple[int, int]]:
    """Every token as (document, place)."""
    rows = zip(ranges.document.tolist(), ranges.begin.tolist(), ranges.count.tolist(), strict=True)
    return [(document, begin + place) for document, begin, count in rows for place in range(count)]


def all_tokens(lengths: list[int]) -> list[tuple[int, int]]:
    return [(document, place) for document, length in enumerate(lengths) for place in range(length)]


@given(LENGTHS, st.integers(1, 30), MODES, st.integers(0, 3))
@settings(max_examples=50, deadline=None)
def test_every_token_is_in_exactly_one_pack(lengths: list[int], length: int, mode: PackMode, epoch: int) -> None:
    packs = pack(whole_documents(lengths), length, mode, 7, epoch)
    assert sorted(tokens_of(packs.ranges)) == all_tokens(lengths)
    assert packs.ranges.count.min(initial=1) >= 1 and packs.tokens().max(initial=0) <= length
    assert sum(len(packs.pieces(number)) for number in range(len(packs))) == len(packs.ranges)
    squares = [sum(count**2 for _, _, count in packs.pieces(number)) for number in range(len(packs))]
    assert packs.squares().tolist() == squares
    if mode == "documents":  # cut only where it must be: into full packs and a rest
        pieces = np.bincount(packs.ranges.document, minlength=len(lengths)).tolist()
        assert pieces == [-(-size // length) for size in lengths]
        assert packs.cut == sum(size > length for size in lengths)
    else:
        assert (packs.tokens()[:-1] == length).all() and len(packs) == -(-sum(lengths) // length)


def test_ranges_that_touch_are_joined() -> None:
    ranges = TokenRanges(np.array([1, 0, 1, 1]), np.array([4, 0, 0, 9]), np.array([3, 2, 4, 1]))
    assert [each.tolist() for each in (joined(ranges).document, joined(ranges).begin, joined(ranges).count)] == [
        [0, 1, 1],
        [0, 0, 9],
        [2, 7, 1],
    ]
    whole = whole_documents([30, 7])
    rest = pack(whole, 8, "documents", 0).rest(np.zeros(0, np.int64))
    assert rest.count.tolist() == whole.count.tolist() and rest.document.tolist() == [0, 1]


def same(one: Packs, other: Packs) -> bool:
    return np.array_equal(one.offsets, other.offsets) and all(
        np.array_equal(getattr(one.ranges, name), getattr(other.ranges, name))
        for name in ("document", "begin", "count")
    )


@pytest.mark.parametrize("mode", ["documents", "stream"])
def test_packs_are_a_pure_function_of_names(mode: PackMode) -> None:
    ranges = whole_documents(like_text(500))
    packs = pack(ranges, 512, mode, 3, 0)
    assert same(packs, pack(ranges, 512, mode, 3, 0))
    assert not same(packs, pack(ranges, 512, mode, 3, 1)) and not same(packs, pack(ranges, 512, mode, 4, 0))


def test_windows_are_packed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "WINDOW", 100)
    lengths = like_text(450)
    packs = pack(whole_documents(lengths), 512, "documents", 3, 0)
    assert sorted(tokens_of(packs.ranges)) == all_tokens(lengths.tolist())


@pytest.mark.parametrize("mode", ["documents", "stream"])
def test_little_padding_and_steps_of_equal_cost(mode: PackMode) -> None:
    """10,000 documents of the lengths of web text, packs of 4,096, 64 ranks with one pack each."""
    packs = pack(whole_documents(like_text(10_000)), 4_096, mode, 0, 0)
    assert packs.padding <= 0.005
    cost = packs.tokens() + packs.squares() / (6 * 2_048)  # of a width of 2,048
    steps = steps_of_equal_cost(cost, 64, 0, 0)
    assert sorted(np.concatenate(steps).tolist()) == list(range(len(packs)))
    assert [len(step) for step in steps[:-1]] == [64] * (len(packs) // 64)
    shares = [cost[step].max() / cost[step].mean() for step in steps[:-1]]
    assert np.mean(shares) <= 1.02
    at_random = [part.max() / part.mean() for part in np.split(cost[: len(cost) // 64 * 64], len(cost) // 64)]
    assert mode == "stream" or np.mean(at_random) > 1.1  # without sorting
