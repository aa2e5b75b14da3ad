"""Sparse attention: every kernel against the oracle, the oracle against dense attention and finite differences; plans by dice.

Legend: B batch, A heads, G = B x A, N queries, M keys, D head width, C clusters of queries, K clusters of keys.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from mmspeed import rng
from mmspeed.compute.sparse import ClusterPlan, SparseOutput, TailClusters, clustered_attention, key_means
from mmspeed.compute.sparse.attention import KERNELS, choose_kernel
from mmspeed.compute.sparse.kernels.kernel import SparseKernel
from tests.support.covers import checkered
from tests.support.sparse_plans import (
    PLANS,
    TOLERANCE,
    alike,
    all_kept,
    error,
    gradients,
    plan_of,
    qkv,
    random_plan,
    results,
)

TAILS = ("zero", "summary")


def serving(dtype: torch.dtype, tail: str) -> list[str]:
    """The kernels that serve the CPU, by their own word."""
    plan = random_plan(1, 1, 8, 8, tail_clusters=2)
    q, k, v = qkv(plan, 16, dtype)
    means = None if tail == "zero" or plan.tail is None else key_means(k, v, plan.tail)
    return [name for name, kernel in KERNELS.items() if not kernel.refuses(q, k, v, plan, means)]


def cases(*dtypes: torch.dtype) -> list[Any]:
    """Cases of a kernel, a number type and a tail."""
    every = [(name, dtype, tail) for dtype in dtypes for tail in TAILS for name in serving(dtype, tail)]
    return [pytest.param(*case, id="-".join(map(in_words, case))) for case in every]


def in_words(value: Any) -> str:
    return str(value).replace("torch.", "")


# ---- T1, T2, T3: dense attention, finite differences, the oracle


@pytest.mark.parametrize(("backend", "dtype", "tail"), cases(torch.float32, torch.float64))
@pytest.mark.parametrize("clusters", [1, 5])
def test_all_kept_is_dense_attention(backend: str, dtype: torch.dtype, tail: str, clusters: int) -> None:
    plan = all_kept(2, 3, 37, 41, clusters=clusters, tail_clusters=4)
    tensors = qkv(plan, 16, dtype)
    got = results(tensors, plan, tail=tail, backend=backend, scale=0.3)
    dense = F.scaled_dot_product_attention(*tensors, scale=0.3)
    lse = (tensors[0] @ tensors[1].mT * 0.3).logsumexp(dim=-1).detach()
    alike(got, [dense.detach(), lse, *gradients(dense, tensors)], TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("backend", "dtype", "tail", "keep"), checkered(cases(torch.float64), [0.0, 0.3, 1.5]), ids=in_words
)
def test_gradients_are_finite_differences(backend: str, dtype: torch.dtype, tail: str, keep: float) -> None:
    plan = random_plan(1, 2, 6, 7, clusters=3, keep=keep, tail_clusters=3)
    q, k, v = qkv(plan, 4, dtype)

    def attend(*tensors: Tensor) -> Tensor:
        return clustered_attention(*tensors, plan, tail=tail, backend=backend).out_BAND  # type: ignore[arg-type]

    assert torch.autograd.gradcheck(attend, (q, k, v))


@pytest.mark.parametrize(
    ("backend", "dtype", "tail", "name"),
    checkered([case for case in cases(*TOLERANCE) if case.values[0] != "masked"], [*PLANS]),
    ids=in_words,
)
def test_kernels_equal_the_oracle(backend: str, dtype: torch.dtype, tail: str, name: str) -> None:
    plan = plan_of(name)
    tensors = qkv(plan, 16, dtype)
    got = results(tensors, plan, tail=tail, backend=backend)
    assert got[0].dtype == dtype and got[1].dtype == torch.promote_types(dtype, torch.float32)
    wide = [x.detach().double().requires_grad_() for x in tensors]
    right = results(wide, plan, tail=tail, backend="masked")
    alike(got, right, TOLERANCE[dtype])


@settings(max_examples=60)
@given(
    sizes=st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 70), st.integers(0, 70)),
    clusters=st.integers(1, 12),
    keep=st.sampled_from([0.0, 0.02, 0.2, 0.6, 1.5]),
    width=st.integers(1, 40),
    tail_clusters=st.integers(0, 9),
    dtype=st.sampled_from(list(TOLERANCE)),
    masked=st.booleans(),
    always=st.booleans(),
    seed=st.integers(0, 10_000),
)
def test_any_plan(
    sizes: tuple[int, int, int, int],
    clusters: int,
    keep: float,
    width: int,
    tail_clusters: int,
    dtype: torch.dtype,
    masked: bool,
    always: bool,
    seed: int,
) -> None:
    batch, _, _, keys = sizes
    mask_BM = rng.normal((batch, keys), seed, "mask") > -0.5 if masked else None
    always_M = rng.normal((keys,), seed, "always") > 1.0 if always else None
    plan = random_plan(
        *sizes,
        clusters=clusters,
        keep=keep,
        tail_clusters=tail_clusters,
        key_mask_BM=mask_BM,
        always_keep_M=always_M,
        uneven=2.0,
        seed=seed,
    )
    tail, tensors = "summary" if tail_clusters else "zero", qkv(plan, width, dtype, seed=seed)
    got = results(tensors, plan, tail=tail)
    wide = [x.detach().double().requires_grad_() for x in tensors]
    right = results(wide, plan, tail=tail, backend="masked")
    for x, y in zip(got, right, strict=True):
        assert error(x, y, least=1.0) <= 4 * TOLERANCE[dtype]


# ---- T4: what plans may be


def shuffled(plan: ClusterPlan, q_order_N: Tensor, k_order_M: Tensor) -> ClusterPlan:
    """The plan of queries `q[q_order]` and keys `k[k_order]`."""
    kept_GCM = plan.kept_keys()[..., k_order_M]
    tail = plan.tail and replace(plan.tail, label_GM=plan.tail.label_GM[:, k_order_M])
    return replace(
        plan, q_index_GN=q_order_N.argsort()[plan.q_index_GN], kv_index_Z=kept_GCM.nonzero()[:, 2].int(), tail=tail
    )


@pytest.mark.parametrize(("backend", "dtype", "tail"), cases(torch.float64))
def test_the_order_of_tokens_does_not_matter(backend: str, dtype: torch.dtype, tail: str) -> None:
    plan = random_plan(2, 2, 40, 50, tail_clusters=4)
    tensors = qkv(plan, dtype=dtype)
    q_order, k_order = (
        torch.from_numpy(rng.permutation(40, 1, "q")),
        torch.from_numpy(rng.permutation(50, 1, "k")),
    )
    other = shuffled(plan, q_order, k_order)
    moved = [
        x.detach()[:, :, order].requires_grad_() for x, order in zip(tensors, (q_order, k_order, k_order), strict=True)
    ]
    out = clustered_attention(*tensors, plan, tail=tail, backend=backend).out_BAND  # type: ignore[arg-type]
    again = clustered_attention(*moved, other, tail=tail, backend=backend).out_BAND  # type: ignore[arg-type]
    assert error(again, out[:, :, q_order]) <= 1e-13
    dout = rng.normal(out.shape, 2, "dout").double()
    grads = torch.autograd.grad(out, tensors, dout)
    moved_grads = torch.autograd.grad(again, moved, dout[:, :, q_order])
    for x, y, order in zip(moved_grads, grads, (q_order, k_order, k_order), strict=True):
        assert error(x, y[:, :, order]) <= 1e-12


@pytest.mark.parametrize(("backend", "dtype", "tail"), cases(torch.float32))
def test_queries_alike_see_alike(backend: str, dtype: torch.dtype, tail: str) -> None:
    plan = random_plan(1, 2, 30, 40, clusters=1, tail_clusters=4)
    q, k, v = qkv(plan)
    out = clustered_attention(q[:, :, :1].expand_as(q), k, v, plan, tail=tail, backend=backend).out_BAND
    assert error(out, out[:, :, :1].expand_as(out)) <= 1e-6


@pytest.mark.parametrize(("backend", "dtype", "tail"), cases(torch.float32))
def test_one_kept_key_is_its_value(backend: str, dtype: torch.dtype, tail: str) -> None:
    plan = random_plan(1, 2, 30, 40, keep=0.0, min_keep=1)
    q, k, v = qkv(plan, dtype=dtype)
    out = clustered_attention(q, k, v, plan, backend=backend).out_BAND
    only_GN = plan.kept_mask().int().argmax(dim=3)
    assert error(out, v.gather(2, only_GN[..., None].expand_as(out))) <= 1e-6


@pytest.mark.parametrize(("backend", "dtype", "tail"), cases(torch.float32))
def test_masked_keys_are_nowhere(backend: str, dtype: torch.dtype, tail: str) -> None:
    mask_BM = torch.ones(2, 40, dtype=torch.bool)
    mask_BM[0, 30:], mask_BM[1] = False, False
    plan = random_plan(2, 2, 30, 40, keep=0.4, tail_clusters=4, key_mask_BM=mask_BM)
    tensors = qkv(plan)
    out, lse, dq, dk, dv = results(tensors, plan, tail=tail, backend=backend)
    assert out[1].eq(0).all() and lse[1].eq(-torch.inf).all() and dq[1].eq(0).all()
    hidden_BAMD = ~mask_BM[:, None, :, None].expand_as(dk)
    assert dk[hidden_BAMD].eq(0).all() and dv[hidden_BAMD].eq(0).all()
    other = [x.detach().masked_fill(hidden_BAMD, 1e4) for x in tensors[1:]]
    assert torch.equal(clustered_attention(tensors[0], *other, plan, tail=tail, backend=backend).out_BAND, out)


# ---- T5: what dropped keys get


@pytest.mark.parametrize(("backend", "dtype", "tail"), cases(torch.float64))
def test_gradient_of_dropped_keys(backend: str, dtype: torch.dtype, tail: str) -> None:
    plan = random_plan(1, 2, 30, 40, clusters=3, keep=0.2, tail_clusters=4)
    tensors = qkv(plan, dtype=dtype)
    _, _, _, dk, dv = results(tensors, plan, tail=tail, backend=backend)
    dropped = ~plan.kept_keys().any(dim=1).view(1, 2, 40)
    assert dropped.any()
    if tail == "zero":
        assert dk[dropped].eq(0).all() and dv[dropped].eq(0).all()
        return
    assert plan.tail is not None
    label, head = plan.tail.label_GM, int(dropped[0].any(dim=1).int().argmax())
    for grad in (dk, dv):  # all dropped keys of a cluster move its mean alike
        for cluster in range(plan.tail.clusters):
            rows = grad[0, head][dropped[0, head] & (label[head] == cluster)]
            assert not len(rows) or (rows.abs().max() > 0 and error(rows, rows[:1].expand_as(rows)) <= 1e-12)
    key, step = int(dropped[0, head].int().argmax()), 1e-6
    ends = []
    for sign in (1, -1):
        v = tensors[2].detach().clone()
        v[0, head, key, 2] += sign * step
        ends.append(clustered_attention(*tensors[:2], v, plan, tail=tail, backend=backend).out_BAND)  # type: ignore[call-arg,arg-type,misc]
    dout = rng.normal(ends[0].shape, 0, "sparse", "dout").double()
    slope = ((ends[0] - ends[1]) * dout).sum() / (2 * step)
    assert abs(slope - dv[0, head, key, 2]) <= 1e-7


# ---- T9, T10: the same bits; no NaN


@pytest.mark.parametrize(("backend", "dtype", "tail"), cases(torch.float32, torch.float64, torch.bfloat16))
@pytest.mark.parametrize("size", [0.0, 1e-20, 1e3, 1e6])
def test_extreme_scores_have_no_nan(backend: str, dtype: torch.dtype, tail: str, size: float) -> None:
    plan = plan_of("empty clusters", keep=0.05)
    q, k, v = qkv(plan, dtype=dtype)
    q, k = ((x.detach() * size).requires_grad_() for x in (q, k))
    for x in results([q, k, v], plan, tail=tail, backend=backend):
        assert not x.isnan().any() and not x.isposinf().any()


@pytest.mark.parametrize(("backend", "dtype", "tail"), cases(torch.float64))
def test_equal_keys_are_a_mean(backend: str, dtype: torch.dtype, tail: str) -> None:
    plan = random_plan(1, 2, 30, 40, keep=0.3, min_keep=1, tail_clusters=4)
    q, k, v = qkv(plan, dtype=dtype)
    equal = k.detach()[:, :, :1].expand_as(k)
    out = clustered_attention(q, equal, v, plan, tail=tail, backend=backend).out_BAND
    if tail == "zero":
        kept = plan.kept_mask().double()
        assert error(out, kept @ v / kept.sum(dim=-1, keepdim=True)) <= 1e-12
        return
    fewer = replace(
        plan, tail=TailClusters(torch.zeros_like(plan.tail.label_GM), 1, plan.tail.dropped_GCK.sum(2, keepdim=True))
    )  # type: ignore[union-attr]
    kept, everyone = plan.kept_mask().double(), v.mean(dim=2, keepdim=True)
    right = (kept @ v + (40 - kept.sum(dim=-1, keepdim=True)) * everyone) / 40
    assert error(clustered_attention(q, equal, v, fewer, tail=tail, backend=backend).out_BAND, right) <= 1e-12
    assert not out.isnan().any()


# ---- the function around the kernels


def attended(backend: str = "auto", tail: str = "zero", **options: Any) -> SparseOutput:
    plan = random_plan(2, 2, 30, 40, clusters=5, keep=0.2, tail_clusters=4)
    return clustered_attention(*qkv(plan), plan, tail=tail, backend=backend, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(("backend", "dtype", "tail"), cases(torch.float32, torch.bfloat16))
def test_weights_make_the_output(backend: str, dtype: torch.dtype, tail: str) -> None:
    plan = random_plan(2, 2, 30, 40, clusters=5, keep=0.2, min_keep=1, tail_clusters=4)
    q, k, v = qkv(plan, dtype=dtype)
    got = clustered_attention(q, k, v, plan, tail=tail, backend=backend, return_weights=True)
    weights, of_means = got.stats.weights_BANM, got.stats.tail_weights_BANK
    assert weights is not None and weights[~plan.kept_mask()].eq(0).all() and not weights.requires_grad
    total, out = weights.sum(dim=-1), weights @ v.to(weights.dtype)
    if tail == "summary":
        assert of_means is not None and plan.tail is not None
        total = total + of_means.sum(dim=-1)
        out = out + of_means @ key_means(k, v, plan.tail).v_BAKD.to(of_means.dtype)
    else:
        assert of_means is None
    assert error(total, torch.ones_like(total)) <= 1e-5
    assert error(got.out_BAND.detach(), out.detach()) <= TOLERANCE[dtype]


def test_the_kernel_is_counted_and_its_pairs() -> None:
    counter: Counter[str] = Counter()
    got = attended("grouped", "summary", counter=counter)
    assert counter == {"sparse_grouped": 1} and got.stats.backend == "grouped"
    plan = random_plan(2, 2, 30, 40, clusters=5, keep=0.2, tail_clusters=4)
    assert int(got.stats.pairs) == int(plan.kept_mask().sum()) + 2 * 2 * 30 * 4
    assert torch.allclose(got.stats.kept_BA, plan.kept_mask().float().mean(dim=(2, 3)))
    assert int(attended("grouped").stats.pairs) == int(plan.kept_mask().sum())
    assert attended(counter=counter).stats.backend == "grouped" and counter["sparse_grouped"] == 2


def test_a_named_kernel_never_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = random_plan(1, 1, 8, 8)
    meta = torch.empty(1, 1, 8, 8, device="meta")
    with pytest.raises(ValueError, match="'grouped' does not serve tensors on meta"):
        choose_kernel(meta, meta, meta, plan, None, "grouped")
    with pytest.raises(ValueError, match=r"'nonsense' is not one of auto, .*grouped.*masked"):
        attended("nonsense")
    monkeypatch.setitem(KERNELS, "picky", SparseKernel("picky", lambda *_: "this call", KERNELS["grouped"].attend))
    counter: Counter[str] = Counter()
    with pytest.raises(ValueError, match="'picky' does not serve this call"):
        attended("picky", counter=counter)
    assert not counter


def test_auto_never_computes_all_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    served = serving(torch.float32, "zero")
    others = {name: kernel for name, kernel in KERNELS.items() if name == "masked" or name not in served}
    # not item by item: those would come back in another order, which is that of preference
    monkeypatch.setattr("mmspeed.compute.sparse.attention.KERNELS", others)
    with pytest.raises(ValueError, match="backend='masked' does, in O"):
        attended()


def test_plans_that_do_not_fit() -> None:
    plan = random_plan(1, 2, 30, 40)
    q, k, v = (x.detach() for x in qkv(plan))
    wrong: list[tuple[list[Tensor], str]] = [
        ([q[:, :, :29], k, v], "the plan is of"),
        ([q, k[:, :, :39], v[:, :, :39]], "the plan is of"),
        ([q[:, :1], k[:, :1], v[:, :1]], "the plan is of"),
        ([q[:, :1], k, v], "differ in batch, heads or width"),
        ([q[..., :4], k, v], "differ in batch, heads or width"),
        ([q, k, v[:, :, :39]], "do not fit"),
        ([q[0], k[0], v[0]], "do not fit"),
        ([q.double(), k, v], "cast them to one dtype"),
    ]
    for tensors, message in wrong:
        with pytest.raises(ValueError, match=message):
            clustered_attention(*tensors, plan)  # type: ignore[arg-type]
    elsewhere = replace(plan, q_index_GN=plan.q_index_GN.to("meta"))
    with pytest.raises(ValueError, match="the plan is on meta, the queries are on cpu"):
        clustered_attention(q, k, v, elsewhere)
    with pytest.raises(ValueError, match="needs a plan with clusters of keys"):
        clustered_attention(q, k, v, plan, tail="summary")
    with pytest.raises(ValueError, match="'mean' is not one of zero, summary"):
        clustered_attention(q, k, v, plan, tail="mean")  # type: ignore[arg-type]


def test_autocast() -> None:
    plan = random_plan(1, 2, 30, 40, tail_clusters=4)
    tensors = qkv(plan)
    with torch.autocast("cpu", torch.bfloat16):
        got = clustered_attention(*tensors, plan, tail="summary", backend="grouped")  # type: ignore[arg-type]
        inside = gradients(got.out_BAND, tensors)
    half = [x.detach().bfloat16().requires_grad_() for x in tensors]
    right = results(half, plan, tail="summary", backend="grouped")
    assert got.out_BAND.dtype == torch.bfloat16 and torch.equal(got.out_BAND, right[0])
    assert all(x.dtype == torch.float32 and torch.equal(x, y.float()) for x, y in zip(inside, right[2:], strict=True))
