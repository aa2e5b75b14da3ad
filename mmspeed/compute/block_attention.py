"""Attention of queries to a part of the keys, for attention to a sequence block by block.

`block_forward` returns a block's output and its log-sum-exp; `merge` joins two of them; `block_backward` returns a block's share of
the gradients from the output and the log-sum-exp of the WHOLE attention (FlashAttention-2's backward: with lse known, each
block's probabilities are exp(score - lse) and need no other block). None of them records gradients; `parallel.ring` calls them
inside an autograd function.

The kernel of a call ("auto" takes the first that supports it):

    device   kernel           number types               key mask   heads of width
    cpu      cpu_flash        all                        yes        any
    cuda     cuda_flash       half types                 no         multiples of 8, up to 256
    cuda     cuda_efficient   half types, float32        yes        multiples of 8 (float32: of 4)
    npu      npu_fusion       half types, float32        yes        any
    any      eager            all; computes in float32   yes        any

"sdpa" is "auto" without eager. A named kernel that does not support the call raises ValueError.

Legend: B batch, A heads, N queries, M keys, D head width.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from . import cuda_blocks, npu_blocks
from .block_kernels import CPU, EAGER, BlockKernel, dead_rows

KERNELS = {kernel.name: kernel for kernel in (CPU, cuda_blocks.FLASH, cuda_blocks.EFFICIENT, npu_blocks.FUSION, EAGER)}

# Fused kernels put batch on a grid axis that holds 65535 blocks.
MAX_FUSED_BATCH = 65_535
# A log-sum-exp for rows that see no key in any block: exp(score - this) is 0 in every kernel, and never inf - inf.
NOTHING_SEEN = 1e30


def block_forward(
    q_BAND: Tensor,
    k_BAMD: Tensor,
    v_BAMD: Tensor,
    key_mask_BM: Tensor | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    backend: str = "auto",
    counter: Counter[str] | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention to the keys of a block alone: `out_BAND` in the dtype of the queries, `lse_BAN` in float32 (float64 for float64).

    `key_mask_BM` is bool, True at keys that count. A query that sees no key has output 0 and log-sum-exp -inf. Keys and values may have
    fewer heads, by a whole factor, and values another width, which is the output's. `causal` (query n sees keys up to n) needs N == M. N,
    M and B may be 0. `scale` is D ** -0.5 when None. `counter` counts calls by kernel; a block without queries or keys is no call.

    Raises ValueError for shapes that do not fit and for a named kernel that does not support the call.
    """
    call = _CheckedCall.of(q_BAND, k_BAMD, v_BAMD, key_mask_BM, causal, scale)
    width = v_BAMD.shape[-1]
    q_BAND, k_BAMD, v_BAMD = _of_one_width(q_BAND, k_BAMD, v_BAMD)
    kernel = choose_kernel(q_BAND, k_BAMD, key_mask_BM, causal, backend)
    if q_BAND.numel() == 0 or k_BAMD.numel() == 0:
        lse_BAN = q_BAND.new_full(q_BAND.shape[:3], -torch.inf, dtype=_wide(q_BAND.dtype))
        return q_BAND.new_zeros(*q_BAND.shape[:3], width), lse_BAN
    if counter is not None:
        counter[kernel.name] += 1
    parts = [
        kernel.forward(
            _rows(q_BAND[part]), _rows(k_BAMD[part]), _rows(v_BAMD[part]), call.mask(part), causal, call.scale
        )
        for part in _batches(q_BAND)
    ]
    out_BAND, lse_BAN = (
        parts[0] if len(parts) == 1 else (torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts]))
    )
    if key_mask_BM is not None:  # kernels differ in their results for rows that see no key
        dead_B1N = dead_rows(key_mask_BM, causal)
        out_BAND = out_BAND.masked_fill(dead_B1N[..., None], 0.0)
        lse_BAN = lse_BAN.masked_fill(dead_B1N, -torch.inf)
    return out_BAND[..., :width], lse_BAN


def block_backward(
    dout_BAND: Tensor,
    q_BAND: Tensor,
    k_BAMD: Tensor,
    v_BAMD: Tensor,
    out_BAND: Tensor,
    lse_BAN: Tensor,
    key_mask_BM: Tensor | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    backend: str = "auto",
    counter: Counter[str] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The shares (dq_BAND, dk_BAMD, dv_BAMD) of a block in the gradients, in the dtype of the queries.

    `out_BAND` and `lse_BAN` are those of the whole attention, over all blocks; a query whose lse is -inf has no gradient. The
    counter counts "<kernel>_backward". Otherwise as `block_forward`.
    """
    call = _CheckedCall.of(q_BAND, k_BAMD, v_BAMD, key_mask_BM, causal, scale)
    widths = q_BAND.shape[-1], k_BAMD.shape[-1], v_BAMD.shape[-1]
    if q_BAND.numel() == 0 or k_BAMD.numel() == 0:
        return torch.zeros_like(q_BAND), torch.zeros_like(k_BAMD), torch.zeros_like(v_BAMD)
    q_BAND, k_BAMD, v_BAMD, dout_BAND, out_BAND = _of_one_width(q_BAND, k_BAMD, v_BAMD, dout_BAND, out_BAND)
    kernel = choose_kernel(q_BAND, k_BAMD, key_mask_BM, causal, backend)
    if counter is not None:
        counter[kernel.name + "_backward"] += 1
    lse_BAN = lse_BAN.masked_fill(lse_BAN == -torch.inf, NOTHING_SEEN)
    parts = [
        kernel.backward(
            _rows(dout_BAND[part]),
            _rows(q_BAND[part]),
            _rows(k_BAMD[part]),
            _rows(v_BAMD[part]),
            _rows(out_BAND[part]),
            lse_BAN[part].contiguous(),
            call.mask(part),
            causal,
            call.scale,
        )
        for part in _batches(q_BAND)
    ]
    grads = parts[0] if len(parts) == 1 else tuple(torch.cat(each) for each in zip(*parts, strict=True))
    dq_BAND, dk_BAMD, dv_BAMD = (grad[..., :width] for grad, width in zip(grads, widths, strict=True))
    return dq_BAND, dk_BAMD, dv_BAMD


def merge(out_a_BAND: Tensor, lse_a_BAN: Tensor, out_b_BAND: Tensor, lse_b_BAN: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of attention to two disjoint sets of keys, from those of each, in float32 (float64 for float64).

    A side that sees no key (lse -inf) changes nothing; two such sides give 0 and -inf.
    """
    top_BAN = torch.maximum(lse_a_BAN, lse_b_BAN)
    top_BAN = top_BAN.masked_fill(top_BAN == -torch.inf, 0.0)
    a_BAN, b_BAN = (lse_a_BAN - top_BAN).exp(), (lse_b_BAN - top_BAN).exp()
    sum_BAN = a_BAN + b_BAN
    share_BAN = 1.0 / sum_BAN.masked_fill(sum_BAN == 0.0, 1.0)
    out_BAND = out_a_BAND.to(sum_BAN.dtype) * (a_BAN * share_BAN)[..., None]
    out_BAND.addcmul_(out_b_BAND.to(sum_BAN.dtype), (b_BAN * share_BAN)[..., None])
    return out_BAND, top_BAN + sum_BAN.log()


def choose_kernel(
    q_BAND: Tensor, k_BAMD: Tensor, key_mask_BM: Tensor | None, causal: bool, backend: str = "auto"
) -> BlockKernel:
    """The kernel of a call, by the table at the head of this file. Raises ValueError as `block_forward` does."""
    if backend not in ("auto", "sdpa") and backend not in KERNELS:
        raise ValueError(f"attention backend {backend!r} is not one of auto, sdpa, {', '.join(KERNELS)}")
    if backend in KERNELS:
        reason = KERNELS[backend].refuses(q_BAND, k_BAMD, key_mask_BM, causal)
        if reason:
            raise ValueError(f"attention backend {backend!r} does not serve {reason}; use backend='auto' or 'eager'")
        return KERNELS[backend]
    for name, kernel in KERNELS.items():
        if name == "eager" and backend == "sdpa":
            continue
        if not kernel.refuses(q_BAND, k_BAMD, key_mask_BM, causal):
            return kernel
    heads = f"{q_BAND.dtype} heads of width {q_BAND.shape[-1]} on {q_BAND.device.type}"
    raise ValueError(f"attention backend 'sdpa' has no fused kernel for {heads}; use backend='auto' or 'eager'")


@dataclass(frozen=True)
class _CheckedCall:
    """The checked arguments of a call."""

    key_mask_BM: Tensor | None
    scale: float

    @classmethod
    def of(
        cls,
        q_BAND: Tensor,
        k_BAMD: Tensor,
        v_BAMD: Tensor,
        key_mask_BM: Tensor | None,
        causal: bool,
        scale: float | None,
    ) -> _CheckedCall:
        (batch, heads, queries, width), (_, key_heads, keys, _) = q_BAND.shape, k_BAMD.shape
        fits = k_BAMD.shape == (batch, key_heads, keys, width) and k_BAMD.shape[:3] == v_BAMD.shape[:3]
        if not fits or (heads != key_heads and (key_heads == 0 or heads % key_heads)):
            shapes = ", ".join(str(tuple(x.shape)) for x in (q_BAND, k_BAMD, v_BAMD))
            raise ValueError(f"queries, keys and values of shapes {shapes} do not fit")
        if not q_BAND.dtype == k_BAMD.dtype == v_BAMD.dtype:
            raise ValueError(
                f"queries, keys and values are {q_BAND.dtype}, {k_BAMD.dtype} and {v_BAMD.dtype}: cast them to one dtype"
            )
        if causal and queries != keys:
            raise ValueError(f"a causal block has as many queries as keys, not {queries} and {keys}")
        if key_mask_BM is not None and (key_mask_BM.dtype != torch.bool or key_mask_BM.shape != (batch, keys)):
            got = f"{key_mask_BM.dtype} {tuple(key_mask_BM.shape)}"
            raise ValueError(f"the key mask must be bool of shape (batch, keys) = {(batch, keys)}, not {got}")
        return cls(key_mask_BM, width**-0.5 if scale is None else scale)

    def mask(self, part: slice) -> Tensor | None:
        return None if self.key_mask_BM is None else self.key_mask_BM[part]


def _batches(q_BAND: Tensor) -> list[slice]:
    """Slices of the batch that fused kernels accept."""
    batch, step = q_BAND.shape[0], MAX_FUSED_BATCH
    if q_BAND.device.type == "cpu" or batch <= step:
        return [slice(None)]
    return [slice(start, start + step) for start in range(0, batch, step)]


def _of_one_width(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors with zeros behind each head, up to the widest: kernels take queries, keys and values of one width.

    Zeros add nothing to a score, and the channels that they give are cut off again.
    """
    width = max(x.shape[-1] for x in tensors)
    return tuple(x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in tensors)


def _rows(x: Tensor) -> Tensor:
    """`x` with contiguous rows, as the kernels need; the gradient of a sum, for example, is an expanded scalar."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
