"""Kernels of torch_npu: run from end to end on operators that carry the signatures of its published wheel and compute by the formula."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from mmspeed import rng
from mmspeed.compute.sparse import ClusterMeans, ClusterPlan, clustered_attention
from mmspeed.compute.sparse.kernels import npu_kernels, packed
from mmspeed.compute.sparse.planners.selection import KeepRule, PlannerContext
from mmspeed.compute.sparse.planners.tiles import plan_tiles
from tests.support.npu_library import npu_library, skip_with_torch_npu
from tests.support.packed_attention import packed_backward, packed_forward
from tests.support.sparse_plans import draw, random_plan, with_oracle

LIMITS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
CALLS: list[str] = []


def fusion(query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str, **options: Any) -> Any:
    assert input_layout == "TND" and head_num == query.shape[1] == key.shape[1] == 1 and options["keep_prob"] == 1.0
    assert options["atten_mask"] is None and options["sparse_mode"] == 0
    ends = options["actual_seq_qlen"], options["actual_seq_kvlen"]
    out, *rows = packed_forward(query, key, value, *ends, options["scale"])
    CALLS.append(f"{len(ends[0])} sequences")
    eight = [x[..., None].expand(*x.shape, 8).contiguous() for x in rows]
    return out, *eight, query.new_empty(0), 0, 0, 0


def fusion_grad(
    query: Tensor, key: Tensor, value: Tensor, dy: Tensor, head_num: int, input_layout: str, **options: Any
) -> Any:
    assert input_layout == "TND" and head_num == query.shape[1] == key.shape[1] == 1 and options["keep_prob"] == 1.0
    top, total, out = options["softmax_max"], options["softmax_sum"], options["attention_in"]
    assert top.shape == total.shape == (len(query), 1, 8) and top.dtype == total.dtype == torch.float32
    assert top.is_contiguous() and total.is_contiguous()
    lse = top[..., 3] + total[..., 3].log()
    ends = options["actual_seq_qlen"], options["actual_seq_kvlen"]
    grads = packed_backward(dy, query, key, value, out, lse, *ends, options["scale_value"])
    return *grads, query.new_empty(0), query.new_empty(0)


def dense_mask(mask: Tensor, shape: list[int], query: Tensor, key: Tensor) -> Tensor:
    """The mask (B, A, N, M) of all pairs, from a block mask. Makes the operator's checks."""
    assert shape[1] % 128 == 0 and shape[0] > 0 and mask.dtype == torch.int8
    wanted = (*query.shape[:2], -(-query.shape[2] // shape[0]), -(-key.shape[2] // shape[1]))
    assert mask.shape == wanted
    dense = mask.bool().repeat_interleave(shape[0], dim=2).repeat_interleave(shape[1], dim=3)
    return dense[:, :, : query.shape[2], : key.shape[2]]


def block_sparse(
    query: Tensor, key: Tensor, value: Tensor, block_sparse_mask: Tensor, block_shape: Any, **o: Any
) -> Any:
    assert o["q_input_layout"] == o["kv_input_layout"] == "BNSD" and o["num_key_value_heads"] == key.shape[1]
    assert query.dtype in (torch.float16, torch.bfloat16) and query.shape[-1] in (64, 128)
    assert o["inner_precise"] == 0 and o["softmax_lse_flag"] == 1
    seen = dense_mask(block_sparse_mask, block_shape, query, key)
    score = (query.float() @ key.float().mT * o["scale_value"]).masked_fill(~seen, -torch.inf)
    return (score.softmax(-1) @ value.float()).to(query.dtype), score.logsumexp(-1, keepdim=True)


def block_sparse_backward(
    d_out: Tensor, query: Tensor, key: Tensor, value: Tensor, attention_out: Tensor, softmax_lse: Tensor, **o: Any
) -> Any:
    assert o["q_input_layout"] == o["kv_input_layout"] == "BNSD" and o["num_key_value_heads"] == key.shape[1]
    assert query.shape[-1] == 128 and softmax_lse.shape == (*query.shape[:3], 1) and softmax_lse.dtype == torch.float32
    assert o["actual_seq_lengths"] is None and o["actual_seq_lengths_kv"] is None
    seen = dense_mask(o["block_sparse_mask"], o["block_shape"], query, key)
    q, k, v, dout, out = (x.float() for x in (query, key, value, d_out, attention_out))
    p = (q @ k.mT * o["scale_value"] - softmax_lse).exp() * seen
    ds = p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True)) * o["scale_value"]
    return tuple(x.to(query.dtype) for x in (ds @ k, ds.mT @ q, p.mT @ dout))


OPERATORS: dict[str, Callable[..., Any]] = {
    "npu_fusion_attention": fusion,
    "npu_fusion_attention_grad": fusion_grad,
    "npu_block_sparse_attention": block_sparse,
    "npu_block_sparse_attention_backward": block_sparse_backward,
}


@pytest.fixture
def operators() -> Iterator[None]:
    CALLS.clear()
    with npu_library(OPERATORS, ("attention", "sparse")):
        yield


def check(plan: ClusterPlan, backend: str, tail: Any, width: int, dtype: torch.dtype) -> None:
    """out, lse and all gradients against the oracle."""

    def attend(q: Tensor, k: Tensor, v: Tensor, means: ClusterMeans | None) -> tuple[Tensor, Tensor]:
        done = clustered_attention(q, k, v, plan, tail=tail, means=means, backend=backend)
        return done.out_BAND, done.lse_BAN

    with_oracle(attend, plan, draw(plan, width, dtype), tail, LIMITS[dtype])


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("tail", ["zero", "summary"])
@pytest.mark.parametrize("sort", ["ragged", "empty", "few", "none"])
def test_packed_sequences_equal_the_oracle(
    operators: None, monkeypatch: pytest.MonkeyPatch, sort: str, tail: str, dtype: torch.dtype
) -> None:
    """Clusters without queries or keys are in no call; keys are gathered in several batches."""
    monkeypatch.setattr(packed, "BATCH_BYTES", 40 * 16 * dtype.itemsize)
    options: dict[str, dict[str, Any]] = {
        "ragged": {},
        "empty": {"clusters": 9, "uneven": 3.0},
        "few": {"keep": 0.02},
        "none": {"keep": 0.0},
    }
    plan = random_plan(2, 2, 37, 61, tail_clusters=3, **options[sort])
    check(plan, "npu_tnd", tail, 16, dtype)
    used = int(((plan.sizes() > 0) & (plan.lengths() > 0)).sum())
    assert sum(int(call.split()[0]) for call in CALLS) == used
    assert len(CALLS) > 1 or sort in ("few", "none")


def test_a_call_takes_so_many_sequences(operators: None) -> None:
    few = packed.packed_kernel("few", *_parts_of_tnd(), most_sequences=3)
    plan = random_plan(1, 2, 37, 61, clusters=5, uneven=0.0)
    q, k, v, _ = draw(plan, 16, torch.float32)
    few.attend(q, k, v, plan, None, 0.25)
    assert all(int(call.split()[0]) <= 3 for call in CALLS) and len(CALLS) == 4


def _parts_of_tnd() -> tuple[Any, Any, Any]:
    return npu_kernels._packed_refuses, npu_kernels._packed_forward, npu_kernels._packed_backward


def tiled(width: int = 128, dtype: torch.dtype = torch.bfloat16, frames: int = 5, **more: Any) -> ClusterPlan:
    """128 tokens of a tile; the last tile has half of them."""
    positions = torch.tensor(list(itertools.product(range(frames), range(8), range(8))))
    q, k = (rng.normal((2, 2, len(positions), width), 0, "tiled", name).to(dtype) for name in "qk")
    return plan_tiles(
        q, k, KeepRule("top", 0.4), PlannerContext(positions_NX=positions, **more), tile=(2, 8, 8), tail=True
    )


@pytest.mark.parametrize("tail", ["zero", "summary"])
@pytest.mark.parametrize("frames", [4, 5])
def test_block_masks_equal_the_oracle(operators: None, frames: int, tail: str) -> None:
    plan = tiled(frames=frames)
    assert plan.kept_share().mean() < 0.7
    check(plan, "npu_block", tail, 128, torch.bfloat16)


def test_what_block_masks_do_not_serve(operators: None) -> None:
    plan = tiled()

    def refused(plan: ClusterPlan, width: int = 128, dtype: torch.dtype = torch.bfloat16, train: bool = False) -> str:
        x = torch.zeros(2, 2, plan.queries, width, dtype=dtype, requires_grad=train)
        return npu_kernels.NPU_BLOCK.refuses(x, x, x, plan, None)

    assert refused(plan) == refused(plan, 64) == refused(plan, train=True) == ""
    assert "width 64 in training" in refused(plan, 64, train=True)
    assert "float32" in refused(plan, dtype=torch.float32)
    assert "not made of tiles" in refused(random_plan(2, 2, 9, 9))
    seen = torch.ones(2, plan.keys, dtype=torch.bool)
    seen[1, 7] = False
    assert "masked keys" in refused(tiled(key_mask_BM=seen))
    rows = torch.arange(plan.queries) == 0
    assert "several sizes" in refused(tiled(full_queries_N=rows))  # the first tile of queries is smaller


def test_order_of_choice_and_machines_without_the_package() -> None:
    skip_with_torch_npu()
    x = torch.zeros(2, 2, 320, 128, dtype=torch.bfloat16)
    for backend in ("npu_tnd", "npu_block"):
        with pytest.raises(ValueError, match="torch_npu"):
            clustered_attention(x, x, x, tiled(), backend=backend)
