"""Exchanges behind another micro-batch, on the reckoned clock: published shares, orders, and pairs that equal what they are made of."""

from __future__ import annotations

import pytest

from mmspeed.plan.overlap import Node, Part, alone, best_order, exposed, nodes_of, paired
from mmspeed.plan.schedules import Pipeline, ScheduleName


def layers(exchange: float) -> list[Part]:
    """Two layers of attention and experts, whose four exchanges take so long each."""
    return [Part(0.5, 0.5, 0.4, exchange), Part(0.5, 0.5, 0.5, exchange)] * 2


@pytest.mark.parametrize("exchange, series, most", [(0.25, 0.257, 0.012), (0.4, 0.356, 0.019)])
def test_the_exchanges_of_experts_hide_behind_another_micro_batch(exchange: float, series: float, most: float) -> None:
    def share(ranks: int, batches: int, schedule: ScheduleName = "overlap") -> float:
        return exposed(Pipeline(ranks, 2, 0, schedule), batches, layers(exchange), 0.02).share

    for ranks in (4, 8):
        assert share(ranks, 16 * ranks, "interleaved") == pytest.approx(series, abs=1e-3)
        assert share(ranks, 16 * ranks) <= most
    assert exchange != 0.25 or max(share(8, 64), share(16, 128)) <= 0.022
    assert share(4, 64, "dualpipe_v") < 0.05


def test_least_micro_batches_of_16_stages_of_2() -> None:
    """For less than 2 % where exchanges take 0.345 of what a layer computes: 128, eight a rank."""
    shares = {count: exposed(Pipeline(16, 2, 0, "overlap"), count, layers(0.25), 0.02).share for count in (127, 128)}
    assert shares[128] < 0.02 <= shares[127]


def test_a_pair_takes_as_long_as_its_passes_compute_where_exchanges_fit() -> None:
    forward, backward = nodes_of(layers(0.25))
    whole = sum(node.compute + node.weights for node in (*forward, *backward))
    assert best_order(forward, backward) == (pytest.approx(whole), -1)
    assert paired(forward, backward, 1) > whole
    assert alone(forward) == pytest.approx(sum(node.compute + node.exchange for node in forward))
    far = best_order(*nodes_of(layers(3.0)))[0]  # one lane has all exchanges
    assert far >= 8 * 3.0


def test_a_pass_alone_computes_gradients_of_weights_while_it_waits() -> None:
    assert alone([Node(0, 1), Node(1, 1, 1), Node(1, 0, 1)]) == pytest.approx(4)
