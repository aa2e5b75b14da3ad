"""Kernels of CUDA's own operators: what can be known of them without a device. Calls fit the operators, masks and merging are right."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from mmspeed import rng
from mmspeed.compute.sparse import ClusterMeans, ClusterPlan, clustered_attention
from mmspeed.compute.sparse.kernels import flex, packed, varlen
from mmspeed.compute.sparse.kernels import tail as coarse
from mmspeed.compute.sparse.kernels.masked import weights
from mmspeed.compute.sparse.planners.selection import KeepRule, PlannerContext
from mmspeed.compute.sparse.planners.tiles import plan_tiles
from tests.support.covers import checkered
from tests.support.packed_attention import packed_backward, packed_forward
from tests.support.sparse_plans import draw, near, random_plan, with_oracle

# ---- varlen: the operators computed by the formula on CPU, and asked for their shapes on tensors without data


def flash(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **o: Any) -> Any:
    assert rest[4:] == (0.0, False, False) and set(o) == {"scale"}
    ends = _ends(rest[0], rest[2]), _ends(rest[1], rest[3])
    out, top, total = packed_forward(q, k, v, *ends, o["scale"])
    lse_AT = (top + total.log()).mT.contiguous()
    return out, lse_AT, *(q.new_empty(0) for _ in range(3))


def flash_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any, **o: Any
) -> Any:
    assert rest[4:6] == (0.0, False) and lse.shape == (1, len(q)) and lse.dtype == torch.float32
    ends = _ends(rest[0], rest[2]), _ends(rest[1], rest[3])
    return packed_backward(dout, q, k, v, out, lse.mT, *ends, o["scale"])


def _ends(ends: Tensor, most: int) -> list[int]:
    assert ends.dtype == torch.int32 and ends[0] == 0 and int(ends.diff().max()) == most
    return ends[1:].tolist()


@pytest.fixture
def flash_on_cpu() -> Iterator[None]:
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", flash, "CPU")
    library.impl("_flash_attention_backward", flash_backward, "CPU")
    yield
    library._destroy()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tail", ["zero", "summary"])
@pytest.mark.parametrize("uneven", [1.0, 3.0])
def test_varlen_equals_the_oracle(
    flash_on_cpu: None, monkeypatch: pytest.MonkeyPatch, uneven: float, tail: str, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(packed, "BATCH_BYTES", 40 * 16 * dtype.itemsize)  # several batches
    monkeypatch.setattr(coarse, "SCORES", 100)  # and queries in parts
    plan = random_plan(2, 2, 37, 61, clusters=6, uneven=uneven, tail_clusters=3)

    def attend(q: Tensor, k: Tensor, v: Tensor, means: ClusterMeans | None) -> tuple[Tensor, Tensor]:
        return varlen.VARLEN.attend(q, k, v, plan, means, 0.25)

    limit = 1e-5 if dtype == torch.float32 else 2e-2
    with_oracle(attend, plan, draw(plan, 16, dtype), tail, limit, scale=0.25)


@pytest.mark.parametrize("width", [64, 128])
def test_varlen_calls_fit_the_operators(width: int) -> None:
    """Against the operators' own shape functions."""
    q, k = (torch.empty(n, 1, width, device="meta", dtype=torch.bfloat16) for n in (9, 20))
    index = torch.empty(0, dtype=torch.int64)
    batch = packed.PackedBatch(index, index, [4, 9], [13, 20], 5, 13)
    out, lse = varlen.varlen_forward(q, k, k, batch, 0.1)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == (q.shape, q.dtype, (9,), torch.float32)
    grads = varlen.varlen_backward(q, q, k, k, out, lse, batch, 0.1)
    assert [(x.shape, x.dtype) for x in grads] == [(x.shape, x.dtype) for x in (q, k, k)]


def test_what_varlen_does_not_serve() -> None:
    plan = random_plan(1, 1, 4, 4)
    x = torch.zeros(1, 1, 4, 16)
    assert varlen.VARLEN.refuses(x, x, x, plan, None) == "tensors on cpu"
    assert "float32 heads" in varlen.width_refused(x, x)
    assert "width 12" in varlen.width_refused(x[..., :12].half(), x[..., :12].half())
    assert varlen.width_refused(x.half(), x.half()) == ""


# ---- flex: eager on CPU, forward


def tiled(tile: tuple[int, int, int], masked: bool) -> ClusterPlan:
    """495 tokens, of which the last eleven have no place; tiles of many sizes."""
    positions = torch.tensor(list(itertools.product(range(4), range(11), range(11))))
    positions = torch.cat((positions, torch.full((11, 3), -1)))
    context = PlannerContext(positions_NX=positions)
    if masked:
        seen = torch.ones(2, len(positions), dtype=torch.bool)
        seen[0, -5:], seen[1, 17:60] = False, False
        text = torch.arange(len(positions)) >= len(positions) - 11
        context = PlannerContext(positions_NX=positions, key_mask_BM=seen, always_keep=text, full_queries_N=text)
    q, k = (rng.normal((2, 2, len(positions), 16), 0, "flex", name) for name in "qk")
    return plan_tiles(q, k, KeepRule("top", 0.3), context, tile=tile, tail=True)


@pytest.mark.parametrize(
    ("tile", "masked", "tail"),
    checkered([(2, 4, 4), (4, 11, 6), (2, 8, 8)], [False, True], ["zero", "summary"]),
)
def test_flex_equals_the_oracle(tile: tuple[int, int, int], masked: bool, tail: Any) -> None:
    plan = tiled(tile, masked)
    q, k, v, _ = draw(plan, 16, torch.float32)
    done, right = (clustered_attention(q, k, v, plan, tail=tail, backend=name) for name in ("flex", "masked"))
    assert done.stats.backend == "flex"
    assert near(done.out_BAND, right.out_BAND, 1e-5) and near(done.lse_BAN, right.lse_BAN, 1e-5)


@pytest.mark.parametrize("masked", [False, True])
def test_flex_leaves_blocks_out_and_runs_whole_ones_without_a_mask(masked: bool) -> None:
    """Tiles of 2 x 8 x 8: one whole block of 128 for each of two layers, the others smaller."""
    plan = tiled((2, 8, 8), masked)
    assert plan.tiles is not None
    queries = flex.filled(plan.q_offsets_GC, plan.q_index_GN)
    keys = flex.filled(plan.tiles.key_offsets_R[None], plan.tiles.key_index_M[None])
    mask = flex.block_mask(plan, plan.tiles, queries, keys)
    full = mask.full_kv_num_blocks
    assert full is not None and mask.full_kv_indices is not None
    assert mask.kv_indices.data_ptr() != mask.full_kv_indices.data_ptr()
    blocks = int(mask.kv_num_blocks.sum() + full.sum())
    assert blocks < mask.kv_indices.numel() and int(full.sum()) > 0
    assert flex.FLEX.pairs(plan, False) == blocks * 128**2
    whole = keys.live[0].unflatten(0, (-1, 128)).all(dim=1)
    for row, count in zip(mask.full_kv_indices.flatten(0, 2), full.flatten(), strict=True):
        assert whole[row[:count].long()].all()


def test_flex_has_no_gradients_on_cpu_and_serves_tiles_only() -> None:
    plan = tiled((2, 8, 8), False)
    x = torch.zeros(2, 2, plan.queries, 16, requires_grad=True)
    assert flex.FLEX.refuses(x, x, x, plan, None) == "gradients on cpu"
    assert flex.FLEX.refuses(x.detach(), x.detach(), x.detach(), plan, None) == ""
    assert "not made of tiles" in flex.FLEX.refuses(x, x, x, random_plan(2, 2, 9, 9), None)


# ---- the part that several kernels merge: attention to the means


@pytest.mark.parametrize("keep", [0.3, 0.0])
def test_coarse_part_merged_has_the_gradients_of_one_softmax(monkeypatch: pytest.MonkeyPatch, keep: float) -> None:
    monkeypatch.setattr(coarse, "SCORES", 40)
    plan = random_plan(1, 2, 13, 17, keep=keep, tail_clusters=3)
    assert plan.tail is not None
    plan.tail.dropped_GCK[:, 1] = 0  # a cluster that sees no mean; with keep 0, nothing

    def attend(q: Tensor, k: Tensor, v: Tensor, means: ClusterMeans | None) -> tuple[Tensor, Tensor]:
        assert means is not None
        fine, _, lse = weights(q, k, plan, None, 0.3)
        return coarse.merge_parts(fine @ v, lse, *coarse.coarse(q, plan, means, 0.3))

    with_oracle(attend, plan, draw(plan, 8, torch.float64), "summary", 1e-12, scale=0.3)
