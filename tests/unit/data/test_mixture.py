"""Repeats and shares of data sets: how often an epoch uses what, and that in the long run nothing is used more than another."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmspeed.data.sampling.mixture import BucketUses, SamplePool, rates, uses_of
from mmspeed.shapes import Bucket

BUCKET = Bucket(17, 64, 96)


def pool(size: int, rate: float, dataset: str = "a", first: int = 0) -> SamplePool:
    return SamplePool(BUCKET, dataset, np.arange(first, first + size), uses_of([size], rate)[0])


def test_rates_of_repeats_weights_and_temperature() -> None:
    sizes = {"web": 900, "own": 100}
    assert rates(sizes) == {"web": 1.0, "own": 1.0}
    assert rates(sizes, {"web": 1, "own": 5}) == {"web": 1.0, "own": 5.0}
    even = rates(sizes, weights={"web": 1.0, "own": 1.0})
    assert even == {"web": pytest.approx(500 / 900), "own": pytest.approx(5.0)}
    assert rates(sizes, 2, temperature=1.0) == {"web": pytest.approx(2.0), "own": pytest.approx(2.0)}
    warm = rates(sizes, temperature=2.0)  # shares of sqrt(900) : sqrt(100)
    assert warm["web"] * 900 / (warm["own"] * 100) == pytest.approx(3.0)
    assert warm["web"] * 900 + warm["own"] * 100 == pytest.approx(1000)
    assert rates(sizes, temperature=1e9)["own"] == pytest.approx(5.0, rel=1e-3)
    assert rates({"web": 10, "empty": 0}, weights={"web": 1.0, "empty": 3.0}) == {"web": 1.0, "empty": 0.0}
    assert rates(sizes, weights={"web": 1.0}) == {"web": pytest.approx(1000 / 900), "own": 0.0}
    for extreme in (rates(sizes, temperature=1e-3), rates(sizes, temperature=1e-320)):
        assert extreme["web"] == pytest.approx(1000 / 900) and 0 < extreme["own"] < 1e-9, "little, but not left out"
    for weight in (1e308, 1e-320):
        assert rates(sizes, weights={"web": weight, "own": weight}) == even
    assert 0 < rates(sizes, weights={"web": 1e308, "own": 1e-320})["own"] < 1e-300


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.floats(0.01, 5))
def test_rounding_does_not_add_up_over_the_pools_of_a_data_set(sizes: list[int], rate: float) -> None:
    uses = uses_of(sizes, rate)
    assert all((count >= 1) == (size > 0) for size, count in zip(sizes, uses, strict=True))
    if rate >= 1:
        assert sum(uses) == pytest.approx(rate * sum(sizes), abs=0.51)
    assert sum(uses_of([1] * 1000, 1.4)) == 1400 and sum(uses_of([1] * 50 + [10_000], 0.01)) == 100
    assert uses_of(sizes, 3.0) == [3 * size for size in sizes] and not any(uses_of(sizes, 0.0))


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 23), st.sampled_from([0.05, 0.3, 0.5, 0.99, 1.0, 1.5, 2.0, 3.7]), st.integers(0, 5))
def test_an_epoch_names_no_use_twice(size: int, rate: float, epoch: int) -> None:
    source = pool(size, rate)
    uses = BucketUses([source], epoch, seed=1)[:]
    assert len(uses) == source.uses == max(1, round(rate * size))
    assert len(set(uses)) == len(uses), "two uses of one name would meet the same noise"
    times = Counter(place for place, _ in uses)
    assert set(times) <= set(range(size)) and max(times.values()) <= source.uses // size + 2
    assert all(repeat < times[place] + 1 for place, repeat in uses)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 15), st.sampled_from([0.2, 0.5, 0.8, 1.0, 1.3, 2.0]), st.integers(1, 30))
def test_over_the_epochs_every_sample_is_used_as_often_as_any_other(size: int, rate: float, epochs: int) -> None:
    source, times = pool(size, rate), Counter(dict.fromkeys(range(size), 0))
    for epoch in range(epochs):
        times.update(place for place, _ in BucketUses([source], epoch, seed=3)[:])
    assert max(times.values()) - min(times.values()) <= 1


def test_pools_of_a_bucket_are_shuffled_together_and_any_part_can_be_asked_for() -> None:
    pools = [pool(6, 1.0), pool(4, 2.5, "b", first=6)]
    uses = BucketUses(pools, 2, seed=0)
    assert Counter(place >= 6 for place, _ in uses[:]) == {False: 6, True: 10}
    assert uses[:][3:9] == uses[3:9]
    assert uses[:] != BucketUses(pools, 3, seed=0)[:] != BucketUses(pools, 3, seed=1)[:]
    sets = [place >= 6 for place, _ in uses[:]]
    assert sets not in (sorted(sets), sorted(sets, reverse=True))
