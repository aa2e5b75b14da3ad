"""The parts of split sparse attention that need no processes: bits, ranks among all keys, positions of parts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmspeed import rng
from mmspeed.comm import Axis, RowCounts, swap_rows
from mmspeed.compute.sparse.planners.selection import KeepRule, PlannerContext
from mmspeed.config.sparse import SparseConfig
from mmspeed.parallel.sparse.exchange import lists_of, pack_bits, unpack_bits
from mmspeed.parallel.sparse.select import count_shares, heaviest, threshold_of
from mmspeed.parallel.sparse.split_plan import plan_split
from tests.unit.parallel.test_tokens import block_split, layout_at, record_at

ALONE = Axis.alone("ring")


@given(st.integers(0, 3), st.integers(1, 19), st.integers(0, 9), st.integers(1, 100))
def test_bits_and_lists(groups: int, clusters: int, keys: int, most: int) -> None:
    kept = rng.normal((groups, clusters, keys), 0, "bits") > 0.3
    bits = pack_bits(kept)
    assert bits.shape == (groups, keys, -(-clusters // 8))
    assert torch.equal(unpack_bits(bits, clusters), kept)
    index, offsets = lists_of(bits, clusters, most)
    assert torch.equal(index, kept.nonzero()[:, 2].int())
    assert torch.equal(offsets.diff(), kept.sum(2).flatten())


@given(st.integers(1, 12), st.integers(0, 14), st.integers(0, 5), st.integers(1, 4))
def test_the_most_probable(units: int, wanted: int, seed: int, steps: int) -> None:
    share = (rng.normal((2, 3, units), seed, "share").abs() * steps).floor() / steps  # many equal ones
    share[0, 1, 0] = -1.0
    share[1, 0, -1] = torch.inf
    kept = heaviest(share, torch.ones_like(share, dtype=torch.float64), torch.full((2, 3), float(wanted)), ALONE)
    order = share.argsort(dim=2, descending=True, stable=True)
    expected = torch.zeros_like(kept).scatter_(2, order, (torch.arange(units) < wanted).expand_as(order)) & (share >= 0)
    assert torch.equal(kept, expected)


def test_the_last_unit_may_or_may_not_go_beyond() -> None:
    share, weight = torch.tensor([[[3.0, 2.0, 1.0]]]), torch.tensor([[[4.0, 4.0, 1.0]]], dtype=torch.float64)
    for target, fits, count in [
        (5, 0.0, 2),
        (5, 0.5, 1),
        (6, 0.5, 2),
        (7, 1.0, 1),
        (8, 1.0, 2),
        (3, 1.0, 0),
        (99, 0, 3),
    ]:
        assert heaviest(share, weight, torch.tensor([[float(target)]]), ALONE, fits).sum() == count, (target, fits)


def test_a_threshold_for_a_share_of_pairs() -> None:
    share = rng.normal((2, 5, 400), 0, "share").exp()
    share[1] *= 7.0
    tau = threshold_of(count_shares(share, torch.ones_like(share)), 0.2)
    assert torch.allclose((share >= tau[:, None, None]).float().mean((1, 2)), torch.tensor(0.2), atol=0.01)


def test_rows_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="3 rows on rank 0"):
        swap_rows(torch.zeros(3, 2), Axis("ring", None, 2, 0), RowCounts((1, 1), (1, 4)))


def test_queries_that_keep_all_are_refused() -> None:
    x = torch.zeros(1, 1, 4, 2)
    context = PlannerContext(full_queries_N=torch.ones(4, dtype=torch.bool))
    with pytest.raises(ValueError, match="not served over a ring"):
        plan_split(x, x, KeepRule("threshold", 1.0), context, ALONE, [4], SparseConfig())


@pytest.mark.parametrize("processes", [1, 3, 4])
@pytest.mark.parametrize("full", [True, False])
def test_positions_of_all_are_those_of_the_parts(processes: int, full: bool) -> None:
    places = torch.cartesian_prod(torch.arange(3), torch.arange(5), torch.arange(2))
    pos_TSX = places[None] if full else places.view(3, 10, 3)
    for kind, tensor in (("full", 1), ("full", 2)) if full else (("frames", 1), ("space", 2)):
        attends = "rows" if kind == "frames" else "columns"
        parts, whole = [], []
        for rank in range(processes):
            record = record_at(layout_at(1, processes, 1, tensor, rank, 0, kind), kind)
            record.tell("video", (pos_TSX.shape[0], pos_TSX.shape[1]), "test")
            pos_T1X = record.cut(pos_TSX[:, :1], block_split("pos_T1X", kind), attends, "test")  # type: ignore[arg-type]
            pos_1SX = record.cut(pos_TSX[:1], block_split("pos_1SX", kind), attends, "test")  # type: ignore[arg-type]
            if record.crosses(("video",), attends, "test"):  # type: ignore[arg-type]
                parts.append(pos_T1X[:, 0] if kind == "frames" else pos_1SX[0])
                whole.append(record.positions_of_all("video", attends, "test"))  # type: ignore[arg-type]
        assert all(torch.equal(each, torch.cat(parts)) for each in whole)
        assert bool(whole) == (processes > 1)
