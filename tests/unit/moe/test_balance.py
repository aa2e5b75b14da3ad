"""Plans that level experts' loads: what they keep whole, what they gain, and that they are the same everywhere."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmspeed.moe.balance import (
    WHOLE,
    LoadForecast,
    Share,
    Whole,
    first_places,
    in_rows,
    order_by_slot,
    plan_shares,
    rank_loads,
    rearrange,
    slots,
    worth_moving,
)
from tests.claims.balance import draw, levelled, outcome, packed_anew
from tests.claims.expert_trace import EXPERTS, LAYERS, STEPS, counts

SHAPES = [(1, 1, 1), (2, 1, 3), (4, 2, 2), (8, 4, 4), (6, 3, 8)]  # processes, nodes, experts of a process


def _loads(seed: int, layers: int, experts: int) -> Whole:
    rng = np.random.default_rng(seed)
    return (np.exp(rng.normal(0, rng.uniform(0, 2.5), (layers, experts))) * rng.integers(0, 5000)).astype(np.int64)


def _parts(plan: list[Share], load_G: Whole, sum_P: Whole) -> np.ndarray:
    result = sum_P.astype(np.float64)
    for share in plan:
        rows = load_G[share.expert] * share.part / WHOLE
        result[share.source] -= rows
        result[share.target] += rows
    return result


def test_drawn_loads_are_levelled_with_less_moved_than_packing_anew() -> None:
    load_NLG = draw(128, 1.0, 0, 100)[:, None]
    fixed, moved, shared, packed = (
        outcome(load_NLG, arranged, warm=40)
        for arranged in (
            levelled(load_NLG, 8, 0, moving=False), levelled(load_NLG, 8, 0), levelled(load_NLG, 8, 4), packed_anew(load_NLG, 8, 4)
        )
    )  # fmt: skip
    assert fixed.over > 1.3 and moved.over < 1.13 and shared.over < 1.05 < packed.over
    assert 0 < shared.copies <= 4 and 0 < shared.moved < packed.moved / 4


def test_the_recorded_trace_is_whole() -> None:
    rows_NL = counts().sum(2)
    assert counts().shape == (STEPS, LAYERS, EXPERTS) and (rows_NL[:, 0] == rows_NL[:, 1]).all()
    assert np.median(rows_NL) == rows_NL.max() == 16 * 256 * 4 and rows_NL.min() > 0


@pytest.mark.parametrize(("ranks", "nodes", "each"), SHAPES)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), drift=st.floats(0, 1), most=st.integers(0, 6))
def test_plans(ranks: int, nodes: int, each: int, seed: int, drift: float, most: int) -> None:
    first, later = (_loads(s, 3, ranks * each) for s in (seed, seed + 1))
    old = rearrange(first, first_places(3, ranks * each), ranks, nodes)
    load = ((1 - drift) * first + drift * later).astype(np.int64)
    new = rearrange(load, old, ranks, nodes)
    assert (np.sort(new, 1) == first_places(3, ranks * each)).all()
    assert (new // (each * ranks // nodes) == first_places(3, ranks * each) // (each * ranks // nodes)).all()
    assert ((new != old) == (new // each != old // each)).all()  # who stays on its process keeps its place
    assert (rank_loads(load, new, ranks).max(1) <= rank_loads(load, old, ranks).max(1)).all()
    assert (rearrange(load.copy(order="F"), old, ranks, nodes) == new).all()
    plans = plan_shares(load, new, ranks, most, nodes)
    assert plans == plan_shares(load.copy(order="F"), new, ranks, most, nodes)
    for layer, plan in enumerate(plans):
        sum_P = rank_loads(load, new, ranks)[layer]
        assert len(plan) <= most and len({share.target for share in plan}) == len(plan)
        for share in plan:
            assert share.source == new[layer, share.expert] // each != share.target and 0 < share.part <= WHOLE
            assert share.source // (ranks // nodes) == share.target // (ranks // nodes)
        assert _parts(plan, load[layer], sum_P).max() <= sum_P.max()
    for to in slots(new, plans, ranks):
        whole_G = torch.zeros(ranks * each, dtype=torch.int64).scatter_add_(0, to.expert_S, to.high_S - to.low_S)
        assert (whole_G == WHOLE).all()
    assert plan_shares(load, new, ranks, most, nodes, price=int(load.sum()) + 1) == [[], [], []]


@pytest.mark.parametrize(
    ("load", "ranks", "wanted"),
    [
        ([100, 20, 20, 20], 4, [Share(0, 0, to, 20 * WHOLE // 100) for to in (1, 2, 3)]),
        ([60, 60, 60, 40, 10, 10], 3, [Share(0, 0, 2, 40 * WHOLE // 60)]),  # the second process finds no room
        ([70, 65, 20, 10, 20, 10], 3, [Share(0, 0, 1, WHOLE // 2), Share(1, 0, 2, 35 * WHOLE // 65)]),
    ],
)
def test_shares_of_small_loads(load: list[int], ranks: int, wanted: list[Share]) -> None:
    assert plan_shares(np.array([load]), first_places(1, len(load)), ranks, 9) == [wanted]


@pytest.mark.parametrize(
    ("load", "ranks", "wanted"),
    [
        ([120, 0, 60, 50, 10, 10, 10, 10], 4, [120, 60, 70, 20]),  # no swap helps the fullest, so the next has its turn
        ([600, 430, 595, 375], 2, [1030, 970]),  # the best swap gains too little
        ([600, 430, 585, 385], 2, [1015, 985]),
    ],
)
def test_swaps_of_small_loads(load: list[int], ranks: int, wanted: list[int]) -> None:
    load_1G, place_1G = np.array([load]), first_places(1, len(load))
    assert rank_loads(load_1G, rearrange(load_1G, place_1G, ranks), ranks).tolist() == [wanted]


@pytest.mark.parametrize(("senders", "tokens"), [(1, 4000), (3, 500), (8, 1), (64, 2)])
def test_senders_divide_rows_alone_and_right_together(senders: int, tokens: int) -> None:
    ranks, each = 4, 2
    place = np.array([[3, 1, 2, 0, 4, 5, 7, 6]])
    plan = [Share(3, 0, 1, WHOLE // 2), Share(3, 0, 2, WHOLE // 4), Share(6, 3, 0, WHOLE // 3)]
    (to,) = slots(place, [plan], ranks)
    assert to.expert_S.view(ranks, each + 1)[:, :each].flatten().tolist() == [3, 1, 2, 0, 4, 5, 7, 6]
    total_S = torch.zeros(ranks * (each + 1))
    load_G = torch.zeros(8)
    for sender in range(senders):
        expert_TK = torch.from_numpy(np.random.default_rng(sender).permuted(np.tile([3, 6, 0], (tokens, 1)), axis=1))
        order, slot_TK = order_by_slot(expert_TK, to, 8, sender, senders)
        assert (to.expert_S[slot_TK] == expert_TK).all()
        slot_R = slot_TK.flatten()[order.order_R]
        assert slot_R.tolist() == sorted(slot_R.tolist()) and order.order_R[order.place_TK].flatten().tolist() == list(
            range(tokens * 3)
        )
        count_S = torch.bincount(slot_R, minlength=len(total_S))
        assert count_S.cumsum(0).tolist() == order.ends_G.tolist()
        total_S += count_S
        load_G += torch.bincount(expert_TK.flatten(), minlength=8)
    exact_S = load_G[to.expert_S] * (to.high_S - to.low_S) / WHOLE
    assert (total_S - exact_S).abs().max() <= 1 and total_S.sum() == senders * tokens * 3


def test_moves_and_copies_pay_for_their_bytes() -> None:
    load = np.array([[90, 10, 30, 30], [40, 40, 40, 40]])
    old, new = first_places(2, 4), np.array([[0, 2, 1, 3], [0, 1, 2, 3]])  # 100, 60 -> 120, 40
    assert worth_moving(load, new, old, 2, 20, 399).tolist() == [True, False]
    assert worth_moving(load, new, old, 2, 20, 400).tolist() == [False, False]
    assert in_rows(10**9, 5e10, 1e-6) == 20000
    (few, _), (more, _) = (plan_shares(load, old, 2, 1, price=price) for price in (21, 18))
    assert few == [] and more == [Share(0, 0, 1, 20 * WHOLE // 90)]


def test_forecasts_follow_the_best_way_of_each_layer_and_resume() -> None:
    rng, forecast, walk = np.random.default_rng(0), LoadForecast(3, 4), np.full(4, 9000)
    assert (forecast.predict() == 0).all()
    for step in range(80):
        walk = walk + rng.integers(-90, 90, 4)
        noisy = 1000 + rng.integers(-300, 300, 4)
        trend = np.array([100, 200, 8000, 300]) + step * np.array([80, 40, -60, 0])
        error = forecast.observe(np.stack((walk, noisy, trend)))
    assert forecast.error_WL.argmin(0).tolist() == [0, 1, 2] and 0 < error < 0.2
    assert np.abs(forecast.predict()[2] - trend - [80, 40, -60, 0]).max() < 9
    resumed = LoadForecast(3, 4)
    resumed.load_state_dict(forecast.state_dict())
    for each in (forecast, resumed):
        each.observe(np.stack((walk, noisy, trend)))
    assert (resumed.predict() == forecast.predict()).all() and (resumed.error_WL == forecast.error_WL).all()
