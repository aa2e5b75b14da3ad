"""The shares of packed documents on a ring: even work and tokens, each token once, and pieces that are the mask of documents."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmspeed.comm.axis import Axis
from mmspeed.compute.operators.document_attention import eager_documents
from mmspeed.parallel.document_shares import TOKEN_LIMIT, WORK_LIMIT, DocumentShares, share_documents
from mmspeed.parallel.sequence.ring import ring_attention
from mmspeed.parallel.sequence.zigzag import cut_rows, document_pieces

PACKS = 60


def random_pack(generator: np.random.Generator, tokens: int, median: int) -> tuple[int, ...]:
    """Log-normal lengths that fill a pack."""
    lengths: list[int] = []
    while (left := tokens - sum(lengths)) > 0:
        lengths.append(min(left, max(1, int(generator.lognormal(np.log(median), 1.2)))))
    return tuple(lengths)


@pytest.mark.parametrize(
    ("tokens", "ranks"), [(4_096, 2), (32_768, 8), pytest.param(131_072, 32, marks=pytest.mark.slow)]
)
def test_random_packs_are_even(tokens: int, ranks: int) -> None:
    generator = np.random.default_rng(tokens + ranks)
    for _ in range(PACKS):
        lengths = random_pack(generator, tokens, 400)
        shares = share_documents(lengths, ranks)
        assert shares.excess() == "", (lengths, shares.cut)
        assert shares.imbalance <= WORK_LIMIT and shares.spread <= TOKEN_LIMIT
        assert sum(shares.work) == sum(length * (length + 1) // 2 for length in lengths)


def test_short_documents_stay_whole() -> None:
    shares = share_documents((512,) * 256, 8)  # 32 for each rank
    assert shares.cut == () and set(shares.sizes) == {16_384} and shares.excess() == ""
    one_long = share_documents((60_000, *(512,) * 128), 4)
    assert one_long.cut == (0,) and one_long.shared_sizes == (15_000,) * 4


def test_packs_that_cannot_be_even_say_by_how_much() -> None:
    assert "tokens differ by 100.0% from the mean" in share_documents((1,), 2).excess()
    assert "attention work of the busiest rank is 2.000 x the mean" in share_documents((1,), 2).excess()
    three = share_documents((1, 1, 1), 2)
    assert three.sizes in ((2, 1), (1, 2)) and "33.3%" in three.excess()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.integers(1, 5))
def test_each_token_is_held_once(lengths: list[int], ranks: int) -> None:
    shares = share_documents(tuple(lengths), ranks)
    assert sorted(shares.order.tolist()) == list(range(sum(lengths)))
    assert sum(shares.sizes) == sum(lengths) and len(shares.sizes) == ranks
    assert sorted((*shares.cut, *(document for whole in shares.whole for document in whole))) == [*range(len(lengths))]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=6), st.integers(1, 4), st.data())
def test_pieces_are_the_mask_of_documents(lengths: list[int], ranks: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, len(lengths)))
    order = sorted(range(len(lengths)), key=lambda document: -lengths[document])
    whole: list[list[int]] = [[] for _ in range(ranks)]
    for place, document in enumerate(order[count:]):
        whole[place % ranks].append(document)
    shares = DocumentShares(tuple(lengths), tuple(order[:count]), tuple(map(tuple, whole)))
    number_T = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    wanted = (number_T[:, None] == number_T[None]) & torch.ones(len(number_T), len(number_T), dtype=torch.bool).tril()
    starts = [0, *accumulate(shares.sizes)]
    seen = torch.zeros_like(wanted, dtype=torch.int)
    for rank in range(ranks):
        own = shares.order[starts[rank] : starts[rank + 1]]
        for owner in range(ranks):
            other = shares.order[starts[owner] : starts[owner + 1]]
            half = shares.shared_sizes[rank] // 2
            for piece in document_pieces(rank, owner, shares.cut_lengths, ranks):
                for part in [*cut_rows(piece, 0, half), *cut_rows(piece, half, shares.shared_sizes[rank])]:
                    rows, keys = own[part.q_start : part.q_stop], other[part.k_start : part.k_stop]
                    block = torch.ones(len(rows), len(keys), dtype=torch.int)
                    seen[rows[:, None], keys[None]] += block.tril() if part.causal else block
        behind = own[shares.shared_sizes[rank] :].split(shares.whole_lengths(rank))
        for places in behind:
            seen[places[:, None], places[None]] += torch.ones(len(places), len(places), dtype=torch.int).tril()
    assert torch.equal(seen, wanted.int())


def test_documents_of_one_length_are_one_call_of_a_kernel() -> None:
    lengths, counter = (9, 9, 9, 5), Counter[str]()
    q, k, v = (torch.randn(1, heads, sum(lengths), 8, requires_grad=True) for heads in (4, 2, 2))
    out = ring_attention(
        q, k, v, None, Axis.alone("ring"), [sum(lengths)], causal=True, documents=lengths, counter=counter
    )  # fmt: skip
    bounds_Z = torch.tensor([0, *lengths]).cumsum(0)
    wanted = eager_documents(*(x[0].transpose(0, 1) for x in (q, k, v)), bounds_Z, None)
    gradient = torch.randn_like(wanted)
    got, truth = (torch.autograd.grad(x, (q, k, v), gradient) for x in (out[0].transpose(0, 1), wanted))
    torch.testing.assert_close(out[0].transpose(0, 1), wanted)
    torch.testing.assert_close(got, truth)
    assert counter == {"cpu_flash": 2, "cpu_flash_backward": 2}


@settings(max_examples=60)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=8), st.integers(1, 4), st.integers(0, 50))
def test_ranges_within_a_window_are_its_mask(lengths: list[int], ranks: int, window: int) -> None:
    """Each query of a cut document is in one range of one rank, with the keys that it sees and none of other documents."""
    longest_first = sorted(range(len(lengths)), key=lambda document: -lengths[document])
    cut, rest = tuple(longest_first[::2]), tuple(longest_first[1::2])
    shares = DocumentShares(tuple(lengths), cut, (rest, *((),) * (ranks - 1)))
    numbers = [document for document in cut for _ in range(lengths[document])]
    assert sorted(shares.cut_order.tolist()) == list(range(len(numbers)))
    queries = []
    for rank in range(ranks):
        held = []
        for first, query, end in shares.window_ranges(rank, window):
            start = numbers.index(numbers[query])
            assert first == max(start, query - window) and len(set(numbers[first:end])) == 1
            held += range(query, end)
        begin = sum(shares.shared_sizes[:rank])
        assert held == shares.cut_order[begin : begin + shares.shared_sizes[rank]].tolist()
        queries += held
    assert sorted(queries) == list(range(len(numbers)))
