"""The measured cost of saving: each way is measured, and its shares follow from the medians."""

from __future__ import annotations

import json

import pytest

from mmspeed.bench.reliability.saving import SavingCost, bench_saving

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_all_ways_of_saving_are_measured() -> None:
    cost = bench_saving(rounds=1, megabytes=8)
    assert cost.megabytes == pytest.approx(8, rel=0.1)
    assert min(cost.copy, cost.stall, cost.plain_write, cost.sealed_write) > 0
    assert len(cost.lines()) == 2 and json.loads(cost.to_json())["stall_share"] == cost.stall_share


@pytest.mark.parametrize(("stall", "sealed", "passed"), [(1.2, 10.2, True), (1.3, 10.2, False), (1.2, 10.4, False)])
def test_both_goals_count(stall: float, sealed: float, passed: bool) -> None:
    cost = SavingCost(megabytes=1, copy=1, stall=stall, plain_write=10, sealed_write=sealed)
    assert cost.stall_share == stall and cost.hash_share == pytest.approx(sealed / 10 - 1)
    assert cost.passed() is passed
