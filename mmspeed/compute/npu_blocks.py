"""Block attention by torch_npu's fused operator, which returns the row maxima and sums of the softmax, each repeated eight times.

Legend: B batch, A heads, K heads of the keys, N queries, n a part of them, M keys, D head width.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .block_kernels import HALF, BlockKernel

MASK_BYTES = 1 << 28  # of the mask over queries x keys in one call of the operator


def _npu_refuses(q: Tensor, k: Tensor, key_mask: Tensor | None, causal: bool) -> str:
    if not hasattr(torch.ops.npu, "npu_fusion_attention"):
        return "a machine without torch_npu"
    return "" if q.dtype in (*HALF, torch.float32) else f"{q.dtype}"


def _npu_masks(
    q_BAND: Tensor, keys: int, key_mask_BM: Tensor | None, causal: bool
) -> Iterator[tuple[slice, dict[str, Any]]]:
    """Parts of the queries, and the operator's mask of each: True at hidden keys.

    Causal alone takes its triangle of 2048 x 2048, whatever the length. A key mask has to be expanded over the queries, which are
    therefore split into parts, so that it does not fill the memory.
    """
    if key_mask_BM is None:
        if causal:
            triangle = torch.ones(2048, 2048, dtype=torch.bool, device=q_BAND.device).triu_(1)
            yield slice(None), {"atten_mask": triangle, "sparse_mode": 2}
        else:
            yield slice(None), {}
        return
    queries, step = q_BAND.shape[2], max(1, MASK_BYTES // key_mask_BM.numel())
    for start in range(0, queries, step):
        part = slice(start, min(start + step, queries))
        hidden_B1nM = (~key_mask_BM)[:, None, None, :].expand(-1, 1, part.stop - start, -1)
        if causal:
            rows = torch.arange(start, part.stop, device=q_BAND.device)[:, None]
            hidden_B1nM = hidden_B1nM | (torch.arange(keys, device=q_BAND.device) > rows)
        yield part, {"atten_mask": hidden_B1nM.contiguous(), "sparse_mode": 1}


def _npu_forward(
    q_BAND: Tensor, k_BKMD: Tensor, v_BKMD: Tensor, key_mask_BM: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    outs, lses = [], []
    for part, mask in _npu_masks(q_BAND, k_BKMD.shape[2], key_mask_BM, causal):
        results = torch.ops.npu.npu_fusion_attention(
            q_BAND[:, :, part].contiguous(), k_BKMD, v_BKMD, q_BAND.shape[1], "BNSD", scale=scale, **mask
        )
        outs.append(results[0])
        lses.append(results[1][..., 0].float() + results[2][..., 0].float().log())
    return (outs[0], lses[0]) if len(outs) == 1 else (torch.cat(outs, dim=2), torch.cat(lses, dim=2))


def _npu_backward(
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
    lse_BAN8 = lse_BAN[..., None].expand(*lse_BAN.shape, 8)  # exp(score - max) / sum with max = lse and sum = 1
    dqs, dk_BKMD, dv_BKMD = [], None, None
    for part, mask in _npu_masks(q_BAND, k_BKMD.shape[2], key_mask_BM, causal):
        top = lse_BAN8[:, :, part].contiguous()
        dq, dk, dv = torch.ops.npu.npu_fusion_attention_grad(
            q_BAND[:, :, part].contiguous(),
            k_BKMD,
            v_BKMD,
            dout_BAND[:, :, part].contiguous(),
            q_BAND.shape[1],
            "BNSD",
            softmax_max=top,
            softmax_sum=torch.ones_like(top),
            attention_in=out_BAND[:, :, part].contiguous(),
            scale_value=scale,
            **mask,
        )[:3]
        dqs.append(dq)
        dk_BKMD = dk.float() if dk_BKMD is None else dk_BKMD.add_(dk)
        dv_BKMD = dv.float() if dv_BKMD is None else dv_BKMD.add_(dv)
    assert dk_BKMD is not None and dv_BKMD is not None  # there is at least one part
    return torch.cat(dqs, dim=2), dk_BKMD.to(k_BKMD.dtype), dv_BKMD.to(v_BKMD.dtype)


FUSION = BlockKernel("npu_fusion", _npu_refuses, _npu_forward, _npu_backward)
