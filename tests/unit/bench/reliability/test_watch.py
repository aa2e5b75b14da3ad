"""The measured cost of the watch: its parts are measured, and its shares follow from them."""

from __future__ import annotations

import json

import pytest

from mmspeed.bench.reliability.watch import WatchCost, bench_watch


def test_the_watch_is_measured_and_cheap() -> None:
    cost = bench_watch(rounds=1, calls=200)
    assert min(cost.phases, cost.record, cost.look, cost.ranks) > 0
    assert cost.passed(), cost.lines()
    assert len(cost.lines()) == 2 and json.loads(cost.to_json())["pause"] == cost.pause == 10


def test_shares_count_a_look_as_often_as_it_is_made() -> None:
    cost = WatchCost(phases=100, record=300, look=1000, pause=10, ranks=2100)
    assert cost.watchdog_share == pytest.approx(5e-4) and cost.ranks_share == pytest.approx(2.1e-3)
    assert not cost.passed()
