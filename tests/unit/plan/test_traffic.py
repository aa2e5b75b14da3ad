"""Formulas of what sequence parallelism sends: against the ring's schedules, against each other, and against sums over ranks.

`tests/ranks/test_sequence.py` compares them with the ledger of training steps.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmspeed.config.parallel import ParallelConfig
from mmspeed.parallel.sequence.ring_schedule import backward_steps, forward_steps
from mmspeed.plan.schedules import Pipeline
from mmspeed.plan.traffic import (
    AttentionWorkload,
    EvenRouting,
    NodeRows,
    RankCoordinates,
    Traffic,
    block_traffic,
    carried_bytes,
    ends_traffic,
    expert_lines,
    expert_traffic,
    gradient_traffic,
    node_traffic,
    places,
    ring_blocks,
    stage_traffic,
    step_traffic,
    token_bytes,
)

FACTORISED = ("spatial", "temporal") * 3
CLIP = AttentionWorkload(1, (8, 16, 16), 64, 8, FACTORISED, 16, 12)


def _parallel(**fields: Any) -> ParallelConfig:
    return ParallelConfig(**fields)


def _group(work: AttentionWorkload, parallel: ParallelConfig, span: str) -> list[Traffic]:
    return [block_traffic(work, parallel, place, span) for place in places(parallel)]  # type: ignore[arg-type]


@pytest.mark.parametrize(("ranks", "window"), [(2, None), (5, None), (6, 2), (6, 6), (12, 4)])
def test_blocks_that_a_ring_passes_on_are_those_of_its_schedule(ranks: int, window: int | None) -> None:
    for rank in range(ranks):
        passed = ring_blocks(rank, ranks, window)
        for steps, actual in (
            (forward_steps(rank, ranks, window), passed.forward),
            (backward_steps(rank, ranks, window), passed.keys),
        ):
            hops = [("ring_outer" if hop.outer else "ring", hop.sends) for step in steps for hop in step.keys]
            assert Counter(hops) == Counter((axis, owner) for axis, owners in actual.items() for owner in owners)
        hops = [
            ("ring_outer" if step.grads.outer else "ring", step.grads.sends)
            for step in backward_steps(rank, ranks, window)
            if step.grads
        ]
        assert Counter(hops) == Counter((axis, owner) for axis, owners in passed.gradients.items() for owner in owners)


@pytest.mark.parametrize("n", [2, 4, 8])
def test_even_sizes_give_the_table_of_the_docs(n: int) -> None:
    """X: bytes of a rank's tokens."""
    part = 8 * 256 * 64 * 2 // n
    one_turn, ways = replace(CLIP, spans=FACTORISED[:2], values=0), _parallel(dsp=n)
    (switch,) = {ends_traffic(one_turn, ways, place).total for place in places(ways)}
    assert switch == 2 * part * (n - 1) // n  # one re-sharding, forward and backward
    for parallel in (_parallel(ulysses=n), _parallel(ulysses=n, shard="space")):
        crossing, local = ("temporal", "spatial") if parallel.shard == "frames" else ("spatial", "temporal")
        assert {t.total for t in _group(CLIP, parallel, crossing)} == {8 * part * (n - 1) // n}
        assert {t.total for t in _group(CLIP, parallel, local)} == {0}
    full = replace(CLIP, spans=("full",) * 6)
    assert {t.total for t in _group(full, _parallel(ulysses=n), "full")} == {8 * part * (n - 1) // n}
    assert {t.forward.total() for t in _group(full, _parallel(ring=n), "full")} == {2 * part * (n - 1)}
    assert {t.backward.total() for t in _group(full, _parallel(ring=n), "full")} == {6 * part * (n - 1)}
    assert {t.backward.total() for t in _group(replace(full, element_size=4), _parallel(ring=n), "full")} == {
        4 * 2 * part * (n - 1)
    }
    three = 3 * part * (n - 1)
    for tp in _group(full, _parallel(tp=n), "full"):
        assert tp.forward == tp.backward == {("all_gather", "tp"): three, ("reduce_scatter", "tp"): three}


@settings(max_examples=200, deadline=None)
@given(
    grid=st.tuples(st.integers(1, 9), st.integers(1, 4), st.integers(1, 4)),
    degrees=st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 2)),
    dsp=st.integers(1, 3),
    shard=st.sampled_from(["frames", "space"]),
    full=st.booleans(),
    text=st.sampled_from([None, 3, 30]),
    masked=st.booleans(),
)
def test_uneven_sizes(
    grid: Any, degrees: Any, dsp: int, shard: Any, full: bool, text: int | None, masked: bool
) -> None:
    """Over all ranks, all-to-alls send as much forward as backward, and each gather as much as its sum back."""
    ring, ulysses, tp = degrees
    work = AttentionWorkload(2, grid, 32, 8, ("full",) * 3 if full else FACTORISED[:3], 4, 12, 4, masked)
    parallel = _parallel(dsp=1 if full else dsp, ring=ring, ulysses=ulysses, tp=tp, shard=shard, shard_text=text)
    total = Traffic()
    for place in places(parallel):
        total += ends_traffic(work, parallel, place)
        for span in work.spans:
            total += block_traffic(work, parallel, place, span)
    for axis in ("dsp", "ulysses"):
        assert total.forward["all_to_all", axis] == total.backward["all_to_all", axis]
    for axis in ("sequence", "tp"):
        assert total.forward["all_gather", axis] == total.backward["reduce_scatter", axis]
        assert total.forward["reduce_scatter", axis] == total.backward["all_gather", axis]
    if parallel.group == 1:
        assert not total.total


def test_images_and_one_process_send_nothing() -> None:
    image = replace(CLIP, grid=(1, 16, 16), image=True)
    for parallel in (_parallel(dsp=4), _parallel(ring=2, ulysses=2, shard_text=1), _parallel(dsp=2, ring=2)):
        assert all(not step_traffic(image, parallel, place) for place in places(parallel))
    assert not step_traffic(CLIP, _parallel(), RankCoordinates())


def test_recomputation_makes_the_forward_exchanges_of_its_blocks_again() -> None:
    parallel = _parallel(ulysses=4, tp=2)
    plain = step_traffic(CLIP, parallel, RankCoordinates(0, 1, 1))
    again = step_traffic(CLIP, parallel, RankCoordinates(0, 1, 1), recomputed=(1, 2))
    more = [block_traffic(CLIP, parallel, RankCoordinates(0, 1, 1), span).forward for span in ("temporal", "spatial")]
    assert again == plain + more[0] + more[1] and again.total() > plain.total()


def test_shared_gradients_are_summed_as_a_ring_does_it() -> None:
    assert gradient_traffic(1000, 4) == {("all_reduce", "tp"): 1500}
    assert not gradient_traffic(1000, 1)


def test_places_are_in_the_order_of_the_ranks() -> None:
    actual = list(places(_parallel(dsp=2, ring=2, ulysses=3, tp=2)))
    ranks = itertools.product(range(2), range(2), range(3), range(2))
    assert actual == [RankCoordinates(ring, ulysses, tp, dsp) for dsp, ring, ulysses, tp in ranks]


def test_rows_between_nodes() -> None:
    """The formula beside drawn choices; and the bytes of 2 x 2 processes, 16 experts, 6 of a token, at width 512 in bfloat16."""
    for nodes, flat, by_node in ((2, 4.00, 1.00), (4, 6.00, 2.71), (8, 7.00, 4.63), (16, 7.50, 6.12)):
        assert EvenRouting(256, 8).rows_between(nodes) == pytest.approx((flat, by_node), abs=0.005)
    tokens, top_k = 20_000, 6
    chosen_TK = torch.rand(tokens, 16, generator=torch.Generator().manual_seed(0)).topk(top_k).indices
    there_TK = chosen_TK // 8 == 1  # on the other node
    choices, crossing = int(there_TK.sum()), int(there_TK.any(1).sum())
    assert crossing / choices == pytest.approx(EvenRouting(16, top_k).reaches(2) / 3.0, rel=0.01)
    flat = expert_traffic([0, choices], [0, choices], 0, 16, 512)
    rows = NodeRows([0, crossing], [0, crossing], [0], [0], 0, 0)
    by_node = node_traffic(rows, 16, 512, top_k)
    assert by_node.over("ep").total / flat.total <= 0.36


@pytest.mark.parametrize("nodes", [2, 4, 8, 16])
def test_a_router_that_limits_groups_reaches_fewer_nodes(nodes: int) -> None:
    """The formula beside drawn choices: 6 of 32 experts, in 2 of 8 groups; nodes have several groups, one, or a part of one."""
    drawn = torch.rand(20_000, 8, generator=torch.Generator().manual_seed(nodes))
    allowed = torch.zeros(20_000, 8).scatter_(1, drawn.topk(2).indices, 1.0).repeat_interleave(4, 1)
    chosen_TK = torch.multinomial(allowed, 6, generator=torch.Generator().manual_seed(1))
    reached = (chosen_TK // (32 // nodes) == 0).any(1).float().mean().item()
    assert reached == pytest.approx(EvenRouting(32, 6, 8, 2).reaches(nodes), abs=0.015)
    assert reached < EvenRouting(32, 6).reaches(nodes)


def test_the_shorter_exchange_is_named_by_link() -> None:
    """Between 2 nodes of 2: 3 rows of 1,024 bytes and a gate there and back, beside one row with 6 ids and gates."""
    flat, by_node = token_bytes(EvenRouting(16, 6), 4, 2, 512, 2)
    assert flat.between == pytest.approx(3 * 2 * (2 * 1024 + 4), rel=1e-4) and flat.within == flat.between / 2
    assert by_node.between == pytest.approx(EvenRouting(16, 6).reaches(2) * 2 * (2 * 1024 + 48), rel=1e-4)
    assert by_node.within == pytest.approx(2 * flat.within, rel=1e-4)
    for ep, inner, words in (
        (2, None, "a token sends 12.3 kB forward and backward, on one node of 2"),
        (16, None, "on 2 nodes of 8; with parallel.ep_inner=8 it would send 4.2 kB to other nodes and 21.5 kB within"),
        (4, 2, "on 2 nodes of 2; without parallel.ep_inner it would send 12.3 kB to other nodes and 6.2 kB within"),
    ):
        [line] = expert_lines(_parallel(ep=ep, ep_inner=inner), EvenRouting(16, 6), 512, 2)
        assert words in line and ("the other is shorter" in line) == (ep == 16)
    assert expert_lines(_parallel(), EvenRouting(16, 6), 512, 2) == []


@pytest.mark.parametrize(
    ("pipeline", "activations", "gradients"),
    [
        (Pipeline(1, 3), [0], [0]),
        (Pipeline(4), [1, 1, 1, 0], [0, 1, 1, 1]),
        (Pipeline(2, 3), [3, 2], [2, 3]),
        (Pipeline(3, 2, schedule="zbv"), [1, 2, 1], [1, 2, 1]),  # out and back; the last rank turns
    ],
)
def test_stages_send_to_those_on_other_ranks(pipeline: Pipeline, activations: list[int], gradients: list[int]) -> None:
    sizes = [carried_bytes(tokens, 64, sums=2) for tokens in (10, 3)]
    assert sizes == [10 * 64 * 2 + 8, 3 * 64 * 2 + 8]
    sent = [stage_traffic(pipeline, rank, sizes) for rank in range(pipeline.ranks)]
    assert [one.forward["activations", "pp"] for one in sent] == [sum(sizes) * count for count in activations]
    assert [one.backward["gradients", "pp"] for one in sent] == [sum(sizes) * count for count in gradients]
