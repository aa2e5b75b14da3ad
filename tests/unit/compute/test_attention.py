"""The one attention function against its eager oracle, and rotary positions."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mmspeed import rng
from mmspeed.compute import attention as attention_file
from mmspeed.compute.attention import attention, choose_backend
from mmspeed.compute.rope import apply_rope, axis_pairs, grid_positions, rope_cos_sin

# Rounding of the inputs is shared; what differs is the order of sums of up to 40 products (float32) and the rounding of
# the probabilities to 8 bits (bfloat16), relative to values of order one.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


def qkv(shape: tuple[int, int, int, int, int], dtype: torch.dtype = torch.float32, grad: bool = False) -> list[Tensor]:
    """q, k, v for (B, A, N, M, D)."""
    b, a, n, m, d = shape
    sizes = {"q": (b, a, n, d), "k": (b, a, m, d), "v": (b, a, m, d)}
    return [rng.normal(size, 0, "test", name).to(dtype).requires_grad_(grad) for name, size in sizes.items()]


def naive(q: Tensor, k: Tensor, v: Tensor, mask: list[list[bool]] | None) -> tuple[Tensor, Tensor]:
    """Attention by loops over queries and only the keys that count, in float64: the oracle's oracle."""
    out, lse = torch.zeros(q.shape, dtype=torch.float64), torch.full(q.shape[:3], -torch.inf, dtype=torch.float64)
    for b, a, n in torch.cartesian_prod(*[torch.arange(size) for size in q.shape[:3]]).tolist():
        keep = [m for m in range(k.shape[2]) if mask is None or mask[b][m]]
        if keep:
            score = k[b, a, keep].double() @ q[b, a, n].double() / q.shape[-1] ** 0.5
            lse[b, a, n] = score.exp().sum().log()
            out[b, a, n] = (score.exp() / score.exp().sum()) @ v[b, a, keep].double()
    return out, lse


shapes = st.tuples(
    st.integers(1, 3), st.integers(1, 3), st.integers(1, 9), st.integers(1, 9), st.sampled_from([2, 8, 18])
)


@settings(max_examples=30, deadline=None)
@given(shape=shapes, data=st.data())
def test_every_backend_equals_the_formula_by_loops(shape: tuple[int, int, int, int, int], data: st.DataObject) -> None:
    b, _, _, m, _ = shape
    mask = data.draw(st.none() | st.lists(st.lists(st.booleans(), min_size=m, max_size=m), min_size=b, max_size=b))
    mask_BM = None if mask is None else torch.tensor(mask)
    q, k, v = qkv(shape)
    want, want_lse = naive(q, k, v, mask)
    eager, eager_lse = attention(q, k, v, mask_BM, return_lse=True, backend="eager")
    auto, auto_lse = attention(q, k, v, mask_BM, return_lse=True)
    for out in (eager, auto, attention(q, k, v, mask_BM, backend="sdpa")):
        torch.testing.assert_close(out.double(), want, rtol=0, atol=2e-6)
    for lse in (eager_lse, auto_lse):
        assert lse.dtype == torch.float32
        torch.testing.assert_close(lse.double(), want_lse, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masked", [False, True])
def test_sdpa_gives_the_output_and_gradients_of_eager(dtype: torch.dtype, masked: bool) -> None:
    mask_BM = torch.arange(40) < torch.tensor([40, 17, 0])[:, None] if masked else None
    results = {}
    for backend in ("eager", "sdpa"):
        leaves = qkv((3, 2, 33, 40, 24), dtype, grad=True)
        out = attention(*leaves, mask_BM, backend=backend)
        assert out.dtype == dtype
        weights = rng.normal(tuple(out.shape), 0, "test", "weights").to(dtype)
        results[backend] = [out, *torch.autograd.grad((out * weights).sum(), leaves)]
    for eager, sdpa in zip(results["eager"], results["sdpa"], strict=True):
        assert sdpa.isfinite().all()
        torch.testing.assert_close(sdpa.float(), eager.float(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_a_row_without_keys_gives_zeros_and_no_gradient(backend: attention_file.Backend) -> None:
    mask_BM = torch.tensor([[True, True, False], [False, False, False]])
    leaves = qkv((2, 2, 4, 3, 8), grad=True)
    out = attention(*leaves, mask_BM, backend=backend)
    assert out[1].abs().max() == 0 and out[0].abs().min() > 0
    for grad in torch.autograd.grad(out.square().sum() + out.sum(), leaves):
        assert grad.isfinite().all() and grad[1].abs().max() == 0 and grad[0].abs().max() > 0


def test_gradient_through_log_sum_exp() -> None:
    leaves = [leaf.detach().double().requires_grad_() for leaf in qkv((2, 1, 3, 4, 2))]
    mask_BM = torch.tensor([[True, True, False, True], [True] * 4])
    run = lambda *qkv: attention(*qkv, mask_BM, return_lse=True)  # noqa: E731
    assert torch.autograd.gradcheck(run, leaves)
    dead = torch.tensor([[False] * 4, [True] * 4])
    out, lse = attention(*leaves, dead, return_lse=True)
    assert torch.equal(lse[0], torch.full_like(lse[0], -torch.inf))
    for grad in torch.autograd.grad(out.sum() + lse[1].sum(), leaves[:2]):
        assert grad.isfinite().all() and grad[0].abs().max() == 0


def test_dispatch_is_as_documented_and_counted() -> None:
    counter: Counter[str] = Counter()
    mask_BM = torch.ones(2, 4, dtype=torch.bool)
    plain, recording = qkv((2, 1, 3, 4, 8)), qkv((2, 1, 3, 4, 8), grad=True)
    attention(*recording, counter=counter)
    attention(*recording, mask_BM, counter=counter)
    assert counter == {"sdpa": 2}
    attention(*plain, return_lse=True, counter=counter)
    with torch.no_grad():
        attention(*recording, return_lse=True, counter=counter)
    assert counter == {"sdpa": 2, "sdpa_lse": 2}
    _, lse = attention(*recording, return_lse=True, counter=counter)
    assert lse.requires_grad
    attention(*plain, mask_BM, return_lse=True, counter=counter)
    attention(*plain, backend="eager", counter=counter)
    assert counter == {"sdpa": 2, "sdpa_lse": 2, "eager": 3}
    assert choose_backend(*[x.to("meta") for x in plain], None, return_lse=True) == "eager"


def test_a_named_backend_never_falls_back() -> None:
    mask_BM = torch.ones(2, 4, dtype=torch.bool)
    with pytest.raises(ValueError, match="under a key mask"):
        attention(*qkv((2, 1, 3, 4, 8)), mask_BM, return_lse=True, backend="sdpa")
    with pytest.raises(ValueError, match="with a gradient"):
        attention(*qkv((2, 1, 3, 4, 8), grad=True), return_lse=True, backend="sdpa")
    with pytest.raises(ValueError, match="not one of auto, sdpa, eager"):
        attention(*qkv((2, 1, 3, 4, 8)), backend="flash")  # type: ignore[call-overload]


@pytest.mark.parametrize(
    "mask", [torch.ones(2, 4), torch.ones(2, 5, dtype=torch.bool), torch.ones(4, dtype=torch.bool)]
)
def test_a_wrong_mask_is_refused(mask: Tensor) -> None:
    with pytest.raises(ValueError, match=r"bool of shape \(batch, keys\) = \(2, 4\)"):
        attention(*qkv((2, 1, 3, 4, 8)), mask)


@pytest.mark.parametrize("masked", [False, True])
def test_batches_beyond_a_kernel_grid_are_split(masked: bool) -> None:
    leaves = qkv((5, 2, 3, 4, 8))
    mask_BM = torch.arange(4) < torch.tensor([4, 1, 0, 2, 3])[:, None] if masked else None
    split = attention_file._split_batch(*leaves, mask_BM, limit=2)
    torch.testing.assert_close(split, attention(*leaves, mask_BM, backend="eager"), rtol=0, atol=2e-6)


def test_eager_stays_float32_under_autocast() -> None:
    leaves = qkv((1, 2, 8, 8, 16))
    want = attention(*leaves, backend="eager")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(attention(*leaves, backend="eager"), want)


def test_grid_positions_are_row_major_and_offset() -> None:
    pos = grid_positions((2, 2, 3), offset=(5, 0, 1))
    assert pos.dtype == torch.int64
    assert pos.tolist() == [[t, h, w] for t in (5, 6) for h in (0, 1) for w in (1, 2, 3)]


@pytest.mark.parametrize("width, axes", [(16, 3), (72, 3), (64, 1), (14, 2)])
def test_axis_pairs_share_the_head_evenly(width: int, axes: int) -> None:
    pairs = axis_pairs(width, axes)
    assert sum(pairs) == width // 2 and len(pairs) == axes
    assert max(pairs) - min(pairs) <= 1 and sorted(pairs) == list(pairs)


@pytest.mark.parametrize("width, axes", [(13, 1), (4, 3)])
def test_axis_pairs_refuse_what_does_not_split(width: int, axes: int) -> None:
    with pytest.raises(ValueError, match=f"head width {width}"):
        axis_pairs(width, axes)


def test_rope_turns_and_keeps_norms() -> None:
    q, _, _ = qkv((1, 2, 24, 24, 16))
    cos, sin = rope_cos_sin(grid_positions((2, 3, 4)), 16)
    turned = apply_rope(q, cos, sin)
    assert torch.equal(turned[:, :, 0], q[:, :, 0])  # position (0, 0, 0)
    assert (turned[:, :, 1:] - q[:, :, 1:]).norm(dim=-1).min() > 0.1
    torch.testing.assert_close(turned.norm(dim=-1), q.norm(dim=-1), rtol=1e-6, atol=0)
    assert apply_rope(q.bfloat16(), cos, sin).dtype == torch.bfloat16
    for axis in range(3):  # every axis moves something, and moves it apart from the others
        step = torch.zeros(2, 3, dtype=torch.int64)
        step[1, axis] = 1
        moved = rope_cos_sin(step, 16)[1][1].abs() > 0
        first = sum(axis_pairs(16, 3)[:axis])
        assert moved.nonzero().flatten().tolist() == list(range(first, first + axis_pairs(16, 3)[axis]))
