"""The bench of the order of training on a synthetic data set: the default rule loses nothing and waits least."""

from __future__ import annotations

import pytest

from tests.claims.buckets_simulated import SAME, simulate_buckets


@pytest.mark.slow
def test_the_default_rule_beside_others() -> None:
    full, factorised = simulate_buckets(20_000, "2,8", 0).tables
    rows = {(row.rule, row.ranks): row for row in full.rows}
    assert len(rows) == 6 * 2 and [row.rule for row in factorised.rows] == [SAME, SAME]
    for world in (2, 8):
        ours, equal = rows[SAME, world], rows["dealt out, our sizes", world]
        assert ours.lost == 0 and 1 <= ours.epoch < 1.02
        assert rows["dealt out, hand-tuned", world].imbalance > equal.imbalance > ours.imbalance
        assert rows["same shape, tails drop", world].lost > equal.lost > 0
