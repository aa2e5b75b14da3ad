"""The measured cost of comparing samples with their hashes at each read."""

from __future__ import annotations

import json

from mmspeed.bench.reliability.reading import ReadingCost, bench_reading


def test_reading_is_measured_and_cheap() -> None:
    cost = bench_reading(rounds=3, samples=1)
    assert cost.megabytes > 8 and cost.checked > cost.plain > 0
    assert cost.passed(), cost.lines()
    assert "GB/s" in cost.lines()[0] and json.loads(cost.to_json())["share"] == cost.share


def test_a_share_above_the_goal_does_not_pass() -> None:
    assert not ReadingCost(megabytes=100, checked=0.012, plain=0.001).passed()
    assert ReadingCost(megabytes=100, checked=0.010, plain=0.001).passed()
