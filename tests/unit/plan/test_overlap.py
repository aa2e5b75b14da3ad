"""Exchanges behind another micro-batch, on the reckoned clock: published shares, orders, and pairs that equal what they are made of."""

from __future__ import annotations

import itertools
import random
import statistics

import pytest

from mmspeed.plan.overlap import (
    Node,
    Part,
    StageNodes,
    alone,
    alternating,
    best_order,
    drifted,
    exposed,
    nodes_of,
    paired,
)
from mmspeed.plan.schedules import Pipeline, ScheduleName


def layers(exchange: float) -> list[Part]:
    """Two layers of attention and experts, whose four exchanges take so long each."""
    return [Part(0.5, 0.5, 0.4, exchange), Part(0.5, 0.5, 0.5, exchange)] * 2


def share_of(pipeline: Pipeline, batches: int, exchange: float) -> float:
    """The share of a step that exchanges add."""
    return exposed(pipeline, batches, [nodes_of(layers(exchange))] * pipeline.stages, 0.02).share


@pytest.mark.parametrize("exchange, series, most", [(0.25, 0.257, 0.012), (0.4, 0.356, 0.019)])
def test_the_exchanges_of_experts_hide_behind_another_micro_batch(exchange: float, series: float, most: float) -> None:
    def share(ranks: int, batches: int, schedule: ScheduleName = "overlap") -> float:
        return share_of(Pipeline(ranks, 2, 0, schedule), batches, exchange)

    for ranks in (4, 8):
        assert share(ranks, 16 * ranks, "interleaved") == pytest.approx(series, abs=1e-3)
        assert share(ranks, 16 * ranks) <= most
    assert exchange != 0.25 or max(share(8, 64), share(16, 128)) <= 0.022
    assert share(4, 64, "dualpipe_v") < 0.05


def test_least_micro_batches_of_16_stages_of_2() -> None:
    """For less than 2 % where exchanges take 0.345 of what a layer computes: 128, eight a rank."""
    shares = {count: share_of(Pipeline(16, 2, 0, "overlap"), count, 0.25) for count in (127, 128)}
    assert shares[128] < 0.02 <= shares[127]


def test_a_pair_takes_as_long_as_its_passes_compute_where_exchanges_fit() -> None:
    nodes = nodes_of(layers(0.25))
    whole = sum(node.compute + node.weights for side in nodes for node in side)
    assert best_order(nodes) == (pytest.approx(whole), alternating(4, 5))
    assert paired(nodes, (0, 1) * 4 + (1,)) > whole
    assert alone(nodes.forward) == pytest.approx(sum(node.compute + node.exchange for node in nodes.forward))
    assert best_order(nodes_of(layers(3.0)))[0] >= 8 * 3.0  # one lane has all exchanges


def test_another_order_than_turns_hides_exchanges_that_come_late() -> None:
    """The backward pass of a stage whose experts are in its first blocks: the other pass waits for the exchanges that it can hide."""
    nodes = StageNodes((Node(1.0, 0.1),) * 3, (Node(0.5, 0.1),) * 3 + (Node(0.5, 0.9),) * 3)
    usual, (least, order) = paired(nodes), best_order(nodes)
    assert least < 0.9 * usual and paired(nodes, order) == pytest.approx(least)
    assert (order.count(0), order.count(1)) == (3, 6)


def test_a_search_finds_the_best_of_all_orders() -> None:
    """Of a backward pass that computes its forward pass again, with exchanges of random lengths; by turns it takes a tenth longer."""
    drawn, longer = random.Random(1), list[float]()
    every = [tuple(int(place not in ahead) for place in range(9)) for ahead in itertools.combinations(range(9), 3)]
    for _ in range(40):
        exchange = drawn.uniform(0.2, 0.8)
        forward = (Node(0.5, exchange), Node(0.5, exchange), Node(0.0))
        back = (Node(0, exchange), Node(0.5, exchange, 0.4), Node(0, exchange), Node(drawn.random(), 0, 0.4))
        nodes = StageNodes(forward, (*forward[:2], *back))
        least = min(paired(nodes, order) for order in every)
        assert best_order(nodes)[0] == pytest.approx(least)
        longer.append(paired(nodes) / least)
    assert statistics.mean(longer) > 1.08


def test_durations_drift_by_more_than_a_tenth() -> None:
    before = {0: StageNodes((Node(1.0, 0.2),), (Node(2.0, 0.2, 1.0),))}
    for change, far in (({}, False), ({"compute": 1.09}, False), ({"compute": 1.11}, True), ({"exchange": 0.23}, True)):
        now = {0: before[0]._replace(forward=(before[0].forward[0]._replace(**change),))}
        assert drifted(before, now) is far
    assert drifted({}, before) and drifted(before, before | {1: before[0]})


def test_a_pass_alone_computes_gradients_of_weights_while_it_waits() -> None:
    assert alone([Node(0, 1), Node(1, 1, 1), Node(1, 0, 1)]) == pytest.approx(4)
