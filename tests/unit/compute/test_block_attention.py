"""Block attention: every kernel against the formula in float64; blocks merged equal the whole; calls fit the operators' schemas."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mmspeed import rng
from mmspeed.compute import block_attention as blocks
from mmspeed.compute import block_kernels, npu_blocks
from mmspeed.compute.block_attention import KERNELS, block_backward, block_forward, merge
from tests.support.npu_library import npu_library, skip_with_torch_npu

# relative to values of order one: rounding of sums of up to 40 products, and for half types of probabilities and results
TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-6, torch.float16: 1e-2, torch.bfloat16: 8e-2}
SHAPES = {"plain": (5, 9, 4), "grouped": (7, 3, 2), "one": (1, 1, 1), "causal": (7, 7, 4), "causal-grouped": (9, 9, 1)}


def inputs(
    queries: int, keys: int, key_heads: int, dtype: torch.dtype, masked: bool
) -> tuple[list[Tensor], Tensor | None]:
    """q, k, v, dout and a mask in which sample 0 sees nothing and sample 1 not its first keys."""
    sizes = {"q": (4, queries), "k": (key_heads, keys), "v": (key_heads, keys), "dout": (4, queries)}
    tensors = [rng.normal((3, *size, 8), 0, "block", name).to(dtype) for name, size in sizes.items()]
    if not masked:
        return tensors, None
    mask = rng.normal((3, keys), 0, "block", "mask") > -0.5
    mask[0], mask[1, : keys // 2], mask[2, 0] = False, False, True
    return tensors, mask


def formula(tensors: list[Tensor], mask: Tensor | None, causal: bool, scale: float) -> list[Tensor]:
    """out, lse, dq, dk, dv in float64."""
    q, k, v = (x.double().clone().requires_grad_() for x in tensors[:3])
    times = q.shape[1] // k.shape[1]
    score = q @ k.repeat_interleave(times, 1).mT * scale
    seen = torch.ones_like(score, dtype=torch.bool)
    seen = seen.tril() if causal else seen
    seen = seen if mask is None else seen & mask[:, None, None]
    out = (score.masked_fill(~seen, -1e300).softmax(-1) * seen) @ v.repeat_interleave(times, 1)
    lse = score.masked_fill(~seen, -torch.inf).logsumexp(-1)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, (q, k, v), tensors[3].double())]


def close(got: Tensor, right: Tensor, dtype: torch.dtype) -> bool:
    limit = TOLERANCE[dtype]
    return torch.allclose(got.double(), right, rtol=limit, atol=limit)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("backend", ["cpu_flash", "eager"])
def test_kernels_equal_the_formula(backend: str, dtype: torch.dtype) -> None:
    for shape, masked in itertools.product(SHAPES, (False, True)):
        check_kernel(backend, dtype, masked, shape)


def check_kernel(backend: str, dtype: torch.dtype, masked: bool, shape: str) -> None:
    causal, counter = "causal" in shape, Counter[str]()
    (q, k, v, dout), mask = inputs(*SHAPES[shape], dtype, masked)
    right = formula([q, k, v, dout], mask, causal, 0.4)
    options: dict[str, Any] = {"causal": causal, "scale": 0.4, "backend": backend, "counter": counter}
    out, lse = block_forward(q, k, v, mask, **options)
    assert out.dtype == dtype and lse.dtype == torch.promote_types(dtype, torch.float32)
    whole_out, whole_lse = right[0].to(dtype), right[1].to(lse.dtype)
    grads = block_backward(dout, q, k, v, whole_out, whole_lse, mask, **options)
    for value, truth in zip((out, lse, *grads), right, strict=True):
        assert close(value, truth, dtype)
    assert counter == {backend: 1, f"{backend}_backward": 1}


@pytest.mark.parametrize("backend", ["cpu_flash", "eager"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_blocks_merged_equal_the_whole(backend: str, dtype: torch.dtype) -> None:
    tensors, mask = inputs(5, 11, 2, dtype, True)
    q, k, v, dout = tensors
    assert mask is not None
    mask[2, 4:8] = False  # a block that one sample does not see
    right = formula(tensors, mask, False, 8**-0.5)
    out, lse = torch.zeros(q.shape), torch.full(q.shape[:3], -torch.inf)
    parts = [slice(0, 4), slice(4, 8), slice(8, 8), slice(8, 11)]
    for part in parts:
        out, lse = merge(out, lse, *block_forward(q, k[:, :, part], v[:, :, part], mask[:, part], backend=backend))
    assert out.dtype == torch.promote_types(dtype, torch.float32)
    assert close(out, right[0], dtype) and close(lse, right[1], dtype)
    wholes = out.to(dtype), lse
    each = [block_backward(dout, q, k[:, :, p], v[:, :, p], *wholes, mask[:, p], backend=backend) for p in parts]
    assert close(sum(x[0].double() for x in each), right[2], dtype)  # type: ignore[arg-type]
    assert close(torch.cat([x[1] for x in each], dim=2), right[3], dtype)
    assert close(torch.cat([x[2] for x in each], dim=2), right[4], dtype)


@given(st.lists(st.sampled_from([-torch.inf, -80.0, 0.0, 3.0, 90.0]), min_size=2, max_size=6))
@settings(max_examples=60, deadline=None)
def test_merging_is_a_weighted_mean(levels: list[float]) -> None:
    outs = [rng.normal((1, 1, 1, 4), 0, "merge", str(i)) * (level > -torch.inf) for i, level in enumerate(levels)]
    out, lse = torch.zeros(1, 1, 1, 4), torch.full((1, 1, 1), -torch.inf)
    for part, level in zip(outs, levels, strict=True):
        out, lse = merge(out, lse, part, torch.full((1, 1, 1), level))
    if max(levels) == -torch.inf:
        assert out.eq(0).all() and lse.eq(-torch.inf).all()
        return
    weights = torch.tensor(levels, dtype=torch.float64).softmax(0)
    right = sum(w * part.double() for w, part in zip(weights, outs, strict=True))
    assert torch.allclose(out.double(), right, atol=1e-5)  # type: ignore[arg-type]
    assert torch.allclose(lse.double(), torch.tensor(levels, dtype=torch.float64).logsumexp(0), atol=1e-5)


@pytest.mark.parametrize(("batch", "queries", "keys"), [(3, 0, 5), (3, 5, 0), (0, 5, 5), (0, 0, 0)])
def test_nothing_to_attend_to(batch: int, queries: int, keys: int) -> None:
    q, k = torch.ones(batch, 2, queries, 8), torch.ones(batch, 2, keys, 8)
    counter: Counter[str] = Counter()
    out, lse = block_forward(q, k, k, torch.ones(batch, keys, dtype=torch.bool), counter=counter)
    assert out.shape == q.shape and out.eq(0).all() and lse.eq(-torch.inf).all() and lse.shape == q.shape[:3]
    dq, dk, dv = block_backward(q, q, k, k, out, lse, counter=counter)
    assert (dq.shape, dk.shape, dv.shape) == (q.shape, k.shape, k.shape) and not counter
    assert dq.eq(0).all() and dk.eq(0).all() and dv.eq(0).all()


def test_eager_queries_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_kernels, "EAGER_SCORES", 3 * 4 * 9 * 2)  # two queries at a time
    check_kernel("eager", torch.float64, True, "causal-grouped")
    check_kernel("eager", torch.float64, True, "plain")


class SeenOutput(TorchDispatchMode):
    """Keeps the output that the memory-efficient operator's backward is given."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "efficient_attention_backward" in str(func):
            self.output = args[5]
        return func(*args, **(kwargs or {}))


def test_the_memory_efficient_backward_gets_its_output_tokens_first() -> None:
    """Its kernel for half types reads the output as (B, N, A, D) whatever the strides say: an H200 gave gradients that were not finite."""
    q = torch.empty(2, 3, 5, 8, device="meta", dtype=torch.bfloat16)
    with SeenOutput() as seen:
        block_backward(q, q, q, q, q, q[..., 0].float(), backend="cuda_efficient")
    assert seen.output.shape == q.shape and seen.output.transpose(1, 2).is_contiguous()


def test_a_batch_beyond_the_grid_goes_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "MAX_FUSED_BATCH", 2)
    q = torch.empty(5, 2, 3, 8, device="meta", dtype=torch.bfloat16)
    out, lse = block_forward(q, q, q, backend="cuda_flash")
    assert out.shape == q.shape and lse.shape == (5, 2, 3)
    assert [x.shape for x in block_backward(q, q, q, q, out, lse, backend="cuda_flash")] == [q.shape] * 3


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("backend", "dtype", "masked"), [
    ("cuda_flash", torch.bfloat16, False),
    ("cuda_efficient", torch.float32, False),
    ("cuda_efficient", torch.bfloat16, True),
])  # fmt: skip
def test_calls_of_cuda_operators_fit(backend: str, dtype: torch.dtype, masked: bool, causal: bool) -> None:
    """Against the operators' own shape functions, on tensors without data."""
    q, k = (torch.empty(2, heads, 7, 16, device="meta", dtype=dtype) for heads in (4, 2))
    if backend == "cuda_flash":
        k = q  # its shape function knows no grouped heads
    mask = torch.empty(2, 7, device="meta", dtype=torch.bool) if masked else None
    out, lse = block_forward(q, k, k, mask, causal=causal, backend=backend)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == (q.shape, dtype, q.shape[:3], torch.float32)
    grads = block_backward(q, q, k, k, out, lse, mask, causal=causal, backend=backend)
    assert [(x.shape, x.dtype) for x in grads] == [(q.shape, dtype), (k.shape, dtype), (k.shape, dtype)]


def test_what_a_named_kernel_does_not_serve() -> None:
    x = torch.zeros(1, 2, 4, 8)
    mask = torch.ones(1, 4, dtype=torch.bool)
    with pytest.raises(ValueError, match="'cuda_flash' does not serve tensors on cpu"):
        block_forward(x, x, x, backend="cuda_flash")
    with pytest.raises(ValueError, match="'cuda_flash' does not serve a key mask"):
        block_forward(*[x.to("meta", torch.bfloat16)] * 3, mask.to("meta"), backend="cuda_flash")
    with pytest.raises(ValueError, match=r"'cuda_efficient' does not serve torch.float32 heads of width 6"):
        block_forward(*[torch.zeros(1, 2, 4, 6, device="meta")] * 3, backend="cuda_efficient")
    with pytest.raises(ValueError, match="'sdpa' has no fused kernel for"):
        block_forward(*[x.to("meta", torch.float64)] * 3, backend="sdpa")
    with pytest.raises(ValueError, match="'fastest' is not one of"):
        block_forward(x, x, x, backend="fastest")
    with pytest.raises(ValueError, match="as many queries as keys"):
        block_forward(x, x[:, :, :3], x[:, :, :3], causal=True)
    with pytest.raises(ValueError, match="key mask must be bool"):
        block_forward(x, x, x, mask[:, :3])
    with pytest.raises(ValueError, match="do not fit"):
        block_forward(x[:, :1], x, x)


# ---- NPU: operators with the signatures of the published torch_npu, computed by the formula from what the call says


def npu_forward(query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str, **options: Any) -> Any:
    assert head_num == query.shape[1] and input_layout == "BNSD" and options["keep_prob"] == 1.0
    score = _npu_scores(query, key, options["scale"], options["atten_mask"], options["sparse_mode"])
    top = score.amax(-1, keepdim=True)
    p = (score - top).exp()
    out = (p / p.sum(-1, keepdim=True)).to(query.dtype) @ value.repeat_interleave(query.shape[1] // value.shape[1], 1)
    eight = [x.expand(*x.shape[:-1], 8).contiguous() for x in (top, p.sum(-1, keepdim=True))]
    return out, *eight, query.new_empty(0), 0, 0, 0


def npu_backward(
    query: Tensor, key: Tensor, value: Tensor, dy: Tensor, head_num: int, input_layout: str, **options: Any
) -> Any:
    assert head_num == query.shape[1] and input_layout == "BNSD" and options["keep_prob"] == 1.0
    top, total, out = options["softmax_max"], options["softmax_sum"], options["attention_in"]
    assert top.shape == total.shape == (*query.shape[:3], 8) and top.dtype == torch.float32
    score = _npu_scores(query, key, options["scale_value"], options["atten_mask"], options["sparse_mode"])
    p = (score - top[..., :1]).exp() / total[..., :1]
    times = query.shape[1] // key.shape[1]
    k, v = (x.repeat_interleave(times, 1).float() for x in (key, value))
    dout = dy.float()
    ds = p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True)) * options["scale_value"]
    dk, dv = (x.unflatten(1, (-1, times)).sum(2).to(query.dtype) for x in (ds.mT @ query.float(), p.mT @ dout))
    return (ds @ k).to(query.dtype), dk, dv, query.new_empty(0), query.new_empty(0)


def _npu_scores(query: Tensor, key: Tensor, scale: float, hidden: Tensor | None, sparse_mode: int) -> Tensor:
    score = query.float() @ key.repeat_interleave(query.shape[1] // key.shape[1], 1).float().mT * scale
    n, m = score.shape[-2:]
    if sparse_mode == 2:  # the upper left causal triangle, given compressed
        assert hidden is not None and hidden.shape == (2048, 2048) and hidden[0, 1] and not hidden[1, 0]
        return score.masked_fill(torch.ones(n, m, dtype=torch.bool).triu(1), -40_000.0)
    if hidden is None:
        assert sparse_mode == 0
        return score
    assert sparse_mode == 1 and hidden.dtype == torch.bool and hidden.shape == (query.shape[0], 1, n, m)
    return score.masked_fill(hidden, -40_000.0)


@pytest.fixture
def npu_operators() -> Iterator[None]:
    formulas = {"npu_fusion_attention": npu_forward, "npu_fusion_attention_grad": npu_backward}
    with npu_library(formulas, ("attention",)):
        yield


def test_npu_calls_fit_the_published_signatures(npu_operators: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(npu_blocks, "MASK_BYTES", 3 * 9 * 2)  # masked queries in several parts
    for shape, masked in itertools.product(SHAPES, (False, True)):
        check_kernel("npu_fusion", torch.float32, masked, shape)


def test_npu_needs_its_package() -> None:
    skip_with_torch_npu()
    x = torch.zeros(1, 1, 2, 8)
    with pytest.raises(ValueError, match="without torch_npu"):
        block_forward(x, x, x, backend="npu_fusion")
    assert set(KERNELS) == {"cpu_flash", "cuda_flash", "cuda_efficient", "npu_fusion", "eager"}
