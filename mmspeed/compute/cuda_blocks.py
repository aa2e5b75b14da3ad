"""Block attention by CUDA's fused operators: flash for half types without a mask, memory-efficient for the rest.

Legend: B batch, A heads, K heads of the keys, N queries, M keys, D head width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mmspeed.torch_internals import cuda_efficient, cuda_efficient_backward, cuda_flash, cuda_flash_backward

from .block_kernels import HALF, BlockKernel, bias, fold, repeat


def _old(q: Tensor) -> bool:
    return q.device.type == "cuda" and torch.cuda.get_device_capability(q.device) < (8, 0)


def _flash_refuses(q: Tensor, k: Tensor, key_mask: Tensor | None, causal: bool) -> str:
    if q.device.type not in ("cuda", "meta"):
        return f"tensors on {q.device.type}"
    if key_mask is not None:
        return "a key mask"
    if _old(q):
        return "devices before compute capability 8.0"
    fits = q.dtype in HALF and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    return "" if fits else f"{q.dtype} heads of width {q.shape[-1]}"


def _flash_forward(
    q_BAND: Tensor, k_BKMD: Tensor, v_BKMD: Tensor, key_mask_BM: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    out_BAND, lse_BAN = cuda_flash(q_BAND, k_BKMD, v_BKMD, 0.0, causal, False, scale=scale)[:2]
    return out_BAND, lse_BAN[..., : q_BAND.shape[2]]


def _flash_backward(
    dout_BAND: Tensor,
    q_BAND: Tensor,
    k_BKMD: Tensor,
    v_BKMD: Tensor,
    out_BAND: Tensor,
    lse_BAN: Tensor,
    key_mask_BM: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    seed, unused = (torch.zeros(size, dtype=torch.uint64, device=q_BAND.device) for size in (2, 0))  # no dropout
    lengths = (None, None, q_BAND.shape[2], k_BKMD.shape[2])
    inputs = (dout_BAND, q_BAND, k_BKMD, v_BKMD, out_BAND, lse_BAN)
    dq, dk, dv = cuda_flash_backward(*inputs, *lengths, 0.0, causal, seed, unused, scale=scale)
    return dq, dk, dv


def _efficient_refuses(q: Tensor, k: Tensor, key_mask: Tensor | None, causal: bool) -> str:
    if q.device.type not in ("cuda", "meta"):
        return f"tensors on {q.device.type}"
    if q.dtype == torch.bfloat16 and _old(q):
        return "bfloat16 on devices before compute capability 8.0"
    fits = (q.dtype in HALF and q.shape[-1] % 8 == 0) or (q.dtype == torch.float32 and q.shape[-1] % 4 == 0)
    return "" if fits else f"{q.dtype} heads of width {q.shape[-1]}"


def _efficient_bias(q_BAND: Tensor, key_mask_BM: Tensor | None) -> Tensor | None:
    if key_mask_BM is None:
        return None
    bias_B11M = bias(key_mask_BM, q_BAND.dtype, multiple=16)  # this kernel reads rows that begin at whole 32 bytes
    return bias_B11M.expand(*q_BAND.shape[:3], -1)


def tokens_first(x_BAND: Tensor) -> Tensor:
    """`x_BAND` laid out in memory as (B, N, A, D), as the operator's backward of half types reads its output without asking for strides."""
    return x_BAND.transpose(1, 2).contiguous().transpose(1, 2)


def _efficient_forward(
    q_BAND: Tensor, k_BKMD: Tensor, v_BKMD: Tensor, key_mask_BM: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    k_BAMD, v_BAMD = repeat(k_BKMD, q_BAND.shape[1]), repeat(v_BKMD, q_BAND.shape[1])
    out_BAND, lse_BAN = cuda_efficient(
        q_BAND, k_BAMD, v_BAMD, _efficient_bias(q_BAND, key_mask_BM), True, 0.0, causal, scale=scale
    )[:2]
    return out_BAND, lse_BAN[..., : q_BAND.shape[2]]  # it pads the queries of its log-sum-exp


def _efficient_backward(
    dout_BAND: Tensor,
    q_BAND: Tensor,
    k_BKMD: Tensor,
    v_BKMD: Tensor,
    out_BAND: Tensor,
    lse_BAN: Tensor,
    key_mask_BM: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    k_BAMD, v_BAMD = repeat(k_BKMD, q_BAND.shape[1]), repeat(v_BKMD, q_BAND.shape[1])
    padded = F.pad(lse_BAN, (0, -lse_BAN.shape[-1] % 32), value=torch.inf)
    seed, offset = (torch.zeros((), dtype=torch.int64, device=q_BAND.device) for _ in range(2))  # no dropout
    inputs = (dout_BAND, q_BAND, k_BAMD, v_BAMD, _efficient_bias(q_BAND, key_mask_BM), tokens_first(out_BAND), padded)
    dq, dk, dv, _ = cuda_efficient_backward(*inputs, seed, offset, 0.0, [True, True, True, False], causal, scale=scale)
    return dq, fold(dk, k_BKMD.shape[1]), fold(dv, k_BKMD.shape[1])


FLASH = BlockKernel("cuda_flash", _flash_refuses, _flash_forward, _flash_backward)
EFFICIENT = BlockKernel("cuda_efficient", _efficient_refuses, _efficient_forward, _efficient_backward)
