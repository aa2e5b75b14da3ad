"""The function for all dense attention, and its eager oracle.

The backend of a call with `backend="auto"`:

    wanted                                                       backend
    output only (with or without a key mask)                     sdpa
    output and log-sum-exp, no mask, no gradient recorded,       sdpa (the fused operator that returns both)
      and a fused operator takes this device, dtype and width
    output and log-sum-exp, anything else                        eager

The fused operators return a log-sum-exp that has no gradient, and whose value at fully masked rows differs by kernel;
that is why they serve only calls that record no gradient and have no mask. Ring attention calls them inside an autograd
function. A named backend that does not support the call raises ValueError instead of falling back.

Legend: B batch, G rows or columns that attend apart, A heads, N queries, M keys, D head width.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from mmspeed.torch_internals import cpu_flash, cuda_efficient, cuda_flash

from .block_kernels import repeat

Backend = Literal["auto", "sdpa", "eager"]

# Fused CUDA kernels put batch (or batch x heads) on a grid axis that holds 65535 blocks.
MAX_FUSED_BATCH = 65_535


@overload
def attention(
    q_BAND: Tensor,
    k_BAMD: Tensor,
    v_BAMD: Tensor,
    key_mask_BM: Tensor | None = None,
    *,
    return_lse: Literal[False] = False,
    backend: Backend = "auto",
    counter: Counter[str] | None = None,
) -> Tensor: ...


@overload
def attention(
    q_BAND: Tensor,
    k_BAMD: Tensor,
    v_BAMD: Tensor,
    key_mask_BM: Tensor | None = None,
    *,
    return_lse: Literal[True],
    backend: Backend = "auto",
    counter: Counter[str] | None = None,
) -> tuple[Tensor, Tensor]: ...


def attention(
    q_BAND: Tensor,
    k_BAMD: Tensor,
    v_BAMD: Tensor,
    key_mask_BM: Tensor | None = None,
    *,
    return_lse: bool = False,
    backend: Backend = "auto",
    counter: Counter[str] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(q k^T / sqrt(D)) v, of the dtype of `q_BAND` and of its shape, but for the width of the values where that is another.

    Keys and values may have fewer heads, by a whole factor: each serves as many heads of queries, one after the other.
    `key_mask_BM` is bool, True at keys that count. A query whose keys are all masked gives zeros, a log-sum-exp of
    -inf, and no gradient. With `return_lse` the natural-log log-sum-exp of the scaled scores comes too: `lse_BAN`, in
    float32 (float64 for float64 inputs). The eager backend computes in float32. `counter`, when given, counts calls by
    backend: "sdpa", "sdpa_lse" or "eager".

    Raises ValueError for a mask of the wrong shape or dtype, for heads that do not fit, and when the named backend does not support the
    call.
    """
    _check_mask(k_BAMD, key_mask_BM)
    k_BAMD, v_BAMD = with_heads_of(q_BAND, k_BAMD, v_BAMD)
    chosen = choose_backend(q_BAND, k_BAMD, v_BAMD, key_mask_BM, return_lse, backend)
    if counter is not None:
        counter["sdpa_lse" if return_lse and chosen == "sdpa" else chosen] += 1
    if chosen == "eager":
        out_BAND, lse_BAN = _eager(q_BAND, k_BAMD, v_BAMD, key_mask_BM)
        return (out_BAND, lse_BAN) if return_lse else out_BAND
    if return_lse:
        fused = fused_lse_op(q_BAND)
        assert fused is not None  # choose_backend has checked
        return fused(q_BAND, k_BAMD, v_BAMD)
    return _sdpa(q_BAND, k_BAMD, v_BAMD, key_mask_BM)


def with_heads_of(q_BAND: Tensor, k_BKMD: Tensor, v_BKMD: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values with as many heads as queries. Raises ValueError where those of the queries are no multiple."""
    heads, key_heads = q_BAND.shape[1], k_BKMD.shape[1]
    if v_BKMD.shape[1] != key_heads or (heads != key_heads and (key_heads == 0 or heads % key_heads)):
        raise ValueError(f"{heads} heads of queries cannot share {key_heads} of keys and {v_BKMD.shape[1]} of values")
    return repeat(k_BKMD, heads), repeat(v_BKMD, heads)


def attention_apart(
    q_BGAND: Tensor,
    k_BGAMD: Tensor,
    v_BGAMD: Tensor,
    key_mask_BM: Tensor | None = None,
    *,
    backend: Backend = "auto",
    counter: Counter[str] | None = None,
) -> Tensor:
    """`attention` of each of G columns of a sample for itself: `out_BGAND`. The mask's B is B x G.

    Columns and heads lie side by side in a projection of tokens (B, N, G, A D), so G x A are the kernel's heads where it takes so many;
    B and G are one dim of no view, and values are copied to make them one.
    """
    many = q_BGAND.shape[1] * q_BGAND.shape[2]
    fits = q_BGAND.device.type == "cpu" or (q_BGAND.device.type == "cuda" and many <= MAX_FUSED_BATCH)
    dim = 1 if fits and key_mask_BM is None and many else 0
    q, k, v = (x.flatten(dim, dim + 1) for x in (q_BGAND, k_BGAMD, v_BGAMD))
    return attention(q, k, v, key_mask_BM, backend=backend, counter=counter).unflatten(
        dim, q_BGAND.shape[dim : dim + 2]
    )


def choose_backend(
    q_BAND: Tensor,
    k_BAMD: Tensor,
    v_BAMD: Tensor,
    key_mask_BM: Tensor | None,
    return_lse: bool,
    backend: Backend = "auto",
) -> Literal["sdpa", "eager"]:
    """The backend of a call, by the table at the head of this file. Raises ValueError as `attention` does."""
    if backend == "eager":
        return "eager"
    if backend not in ("auto", "sdpa"):
        raise ValueError(f"attention backend {backend!r} is not one of auto, sdpa, eager")
    if not return_lse:
        return "sdpa"
    records = torch.is_grad_enabled() and any(x.requires_grad for x in (q_BAND, k_BAMD, v_BAMD))
    reason = ""
    if key_mask_BM is not None:
        reason = "a log-sum-exp under a key mask"
    elif records:
        reason = "a log-sum-exp with a gradient"
    elif v_BAMD.shape[-1] != q_BAND.shape[-1]:
        reason = f"a log-sum-exp for values of width {v_BAMD.shape[-1]} beside keys of {q_BAND.shape[-1]}"
    elif fused_lse_op(q_BAND) is None:
        reason = f"a log-sum-exp for {q_BAND.dtype} heads of width {q_BAND.shape[-1]} on {q_BAND.device.type}"
    if reason and backend == "sdpa":
        raise ValueError(f"attention backend 'sdpa' cannot give {reason}; use backend='auto' or 'eager'")
    return "eager" if reason else "sdpa"


def _check_mask(k_BAMD: Tensor, key_mask_BM: Tensor | None) -> None:
    if key_mask_BM is None:
        return
    expected = (k_BAMD.shape[0], k_BAMD.shape[2])
    if key_mask_BM.dtype != torch.bool or tuple(key_mask_BM.shape) != expected:
        got = f"{key_mask_BM.dtype} {tuple(key_mask_BM.shape)}"
        raise ValueError(f"the key mask must be bool of shape (batch, keys) = {expected}, not {got}")


def _eager(q_BAND: Tensor, k_BAMD: Tensor, v_BAMD: Tensor, key_mask_BM: Tensor | None) -> tuple[Tensor, Tensor]:
    """The oracle: the formula written out, in float32 or better, with gradients through output and log-sum-exp."""
    dtype = torch.promote_types(q_BAND.dtype, torch.float32)
    with torch.autocast(q_BAND.device.type, enabled=False):
        score_BANM = (q_BAND.to(dtype) * q_BAND.shape[-1] ** -0.5) @ k_BAMD.to(dtype).mT
        dead_B111 = None
        if key_mask_BM is not None:
            # a softmax over -inf alone has NaN gradients: fully masked rows run unmasked and are set to 0 below
            dead_B111 = ~key_mask_BM.any(dim=-1)[:, None, None, None]
            score_BANM = score_BANM.masked_fill(~(key_mask_BM[:, None, None, :] | dead_B111), -torch.inf)
        out_BAND = score_BANM.softmax(dim=-1) @ v_BAMD.to(dtype)
        lse_BAN = score_BANM.logsumexp(dim=-1)
    if dead_B111 is not None:
        out_BAND = out_BAND.masked_fill(dead_B111, 0.0)
        lse_BAN = lse_BAN.masked_fill(dead_B111[..., 0], -torch.inf)
    return out_BAND.to(q_BAND.dtype), lse_BAN


def _sdpa(q_BAND: Tensor, k_BAMD: Tensor, v_BAMD: Tensor, key_mask_BM: Tensor | None) -> Tensor:
    """Attention by torch's fused operator. Fully masked rows are set to 0 here, since kernels differ for them."""
    if q_BAND.device.type != "cpu" and q_BAND.shape[0] > MAX_FUSED_BATCH:
        return _split_batch(q_BAND, k_BAMD, v_BAMD, key_mask_BM, MAX_FUSED_BATCH)
    if key_mask_BM is None:
        return F.scaled_dot_product_attention(q_BAND, k_BAMD, v_BAMD)
    dead_B1 = ~key_mask_BM.any(dim=-1, keepdim=True)
    out_BAND = F.scaled_dot_product_attention(
        q_BAND, k_BAMD, v_BAMD, attn_mask=(key_mask_BM | dead_B1)[:, None, None, :]
    )
    return out_BAND.masked_fill(dead_B1[:, :, None, None], 0.0)


def _split_batch(q_BAND: Tensor, k_BAMD: Tensor, v_BAMD: Tensor, key_mask_BM: Tensor | None, limit: int) -> Tensor:
    """The result of `_sdpa` over parts of at most `limit` samples."""
    parts = []
    for start in range(0, q_BAND.shape[0], limit):
        part = slice(start, start + limit)
        mask = None if key_mask_BM is None else key_mask_BM[part]
        parts.append(_sdpa(q_BAND[part], k_BAMD[part], v_BAMD[part], mask))
    return torch.cat(parts)


FusedLse = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def fused_lse_op(q_BAND: Tensor) -> FusedLse | None:
    """The fused operator that returns (out_BAND, lse_BAN) for tensors like `q_BAND`, or None when there is none."""
    kind, width, half = q_BAND.device.type, q_BAND.shape[-1], q_BAND.dtype in (torch.float16, torch.bfloat16)
    if kind == "cpu":
        return _cpu_lse
    if kind != "cuda" or q_BAND.shape[0] > MAX_FUSED_BATCH:
        return None
    if half and width % 8 == 0 and width <= 256:
        return _cuda_flash_lse
    if q_BAND.dtype == torch.float32 and width % 4 == 0:
        return _cuda_efficient_lse
    return None


def _cpu_lse(q_BAND: Tensor, k_BAMD: Tensor, v_BAMD: Tensor) -> tuple[Tensor, Tensor]:
    out_BAND, lse_BAN = cpu_flash(q_BAND, k_BAMD, v_BAMD)
    return out_BAND, lse_BAN


def _cuda_flash_lse(q_BAND: Tensor, k_BAMD: Tensor, v_BAMD: Tensor) -> tuple[Tensor, Tensor]:
    out_BAND, lse_BAN = cuda_flash(q_BAND, k_BAMD, v_BAMD)[:2]
    return out_BAND, lse_BAN


def _cuda_efficient_lse(q_BAND: Tensor, k_BAMD: Tensor, v_BAMD: Tensor) -> tuple[Tensor, Tensor]:
    results = cuda_efficient(q_BAND, k_BAMD, v_BAMD, None, True)
    return results[0], results[1][..., : q_BAND.shape[2]]  # this kernel pads the queries of its log-sum-exp
