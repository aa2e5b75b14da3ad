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
from mmspeed.compute.sparse import SparseOutput, clustered_attention, key_means
from mmspeed.compute.sparse.dispatch import KERNELS, choose_kernel
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


@pytest.mark.parametrize(("backend", "dtype", "tail"), cases(torch.float32, torch.float64, torch.bfloat16))
@pytest.mark.parametrize("size", [0.0, 1e-20, 1e3, 1e6])
def test_extreme_scores_have_no_nan(backend: str, dtype: torch.dtype, tail: str, size: float) -> None:
    plan = plan_of("empty clusters", keep=0.05)
    q, k, v = qkv(plan, dtype=dtype)
    q, k = ((x.detach() * size).requires_grad_() for x in (q, k))
    for x in results([q, k, v], plan, tail=tail, backend=backend):
        assert not x.isnan().any() and not x.isposinf().any()


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
    monkeypatch.setattr("mmspeed.compute.sparse.dispatch.KERNELS", others)
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
