"""Operators of language models by torch_npu's fused kernels, whose gradients are torch_npu's own.

Calls are held against the schemas of its wheel; no device has run them.

Legend: B batch, T tokens, N tokens of a sequence, A heads, K heads of the keys, D head width, H half of D, W width of the values, Z one
more than documents.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from mmspeed.compute.rope import rope_dtype

HALF_AND_SINGLE = (torch.float16, torch.bfloat16, torch.float32)
SEQUENCES = 2048  # the most of one call
CORNER = 2048  # side of the mask that stands for causal and banded ones of any size
WIDEST = 512
FROM_THE_END, BAND = 3, 4  # modes: causal, aligned with the last query and key; a window before each query


def refuses(operator: str) -> Callable[..., str]:
    """A function of a call's arguments: the reason why torch_npu's `operator` does not serve, "" where it does."""

    def reason(x: Tensor, *_: object) -> str:
        if x.device.type != "npu":
            return f"it is a kernel of NPUs, not of {x.device.type}"
        if not hasattr(torch.ops.npu, operator):
            return f"this torch_npu has no {operator}"
        return "" if x.dtype in HALF_AND_SINGLE else f"it takes half and single types, not {x.dtype}"

    return reason


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`weight * x / sqrt(mean(x^2) + eps)` over the last dim."""
    return torch.ops.npu.npu_rms_norm(x, weight.to(x.dtype), eps)[0]  # type: ignore[no-any-return]


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up; the kernel takes both as halves of one tensor."""
    return torch.ops.npu.npu_swiglu(torch.cat((gate, up), dim=-1), -1)  # type: ignore[no-any-return]


def rotate(x_BNAD: Tensor, turn_2BNH: Tensor) -> Tensor:
    """`x_BNAD` with channel i rotated against channel i + D/2, in `rope_dtype`, returned in its dtype."""
    dtype = rope_dtype(x_BNAD.dtype)
    cos_BN1D, sin_BN1D = torch.cat((turn_2BNH, turn_2BNH), dim=-1)[:, :, :, None].to(dtype).unbind(0)
    return torch.ops.npu.npu_rotary_mul(x_BNAD.to(dtype), cos_BN1D, sin_BN1D).to(x_BNAD.dtype)  # type: ignore[no-any-return]


def rotate_refuses(x_BNAD: Tensor, turn_2BNH: Tensor) -> str:
    """The reason why `rotate` does not serve; "" where it does."""
    if turn_2BNH.requires_grad:
        return "the tables need a gradient"
    return refuses("npu_rotary_mul")(x_BNAD)


def documents_refuse(q_TAD: Tensor, k_TKD: Tensor, v_TKW: Tensor, bounds_Z: Tensor, window: int | None) -> str:
    """The reason why `documents` does not serve; "" where it does."""
    width = q_TAD.shape[-1]
    if width > WIDEST or v_TKW.shape[-1] > width:
        return f"it takes widths of heads up to {WIDEST}, not {width} and {v_TKW.shape[-1]}"
    return refuses("npu_fusion_attention")(q_TAD)


def documents(q_TAD: Tensor, k_TKD: Tensor, v_TKW: Tensor, bounds_Z: Tensor, window: int | None) -> Tensor:
    """Causal attention within documents, `out_TAW`; narrower values are padded to the width of the keys. Reads the bounds on the host."""
    wide_TKD = F.pad(v_TKW, (0, q_TAD.shape[-1] - v_TKW.shape[-1]))
    mask = torch.ones(CORNER, CORNER, dtype=torch.bool, device=q_TAD.device).triu(1)  # True: not seen
    ends = sorted(set(bounds_Z.tolist()) - {0})  # without empty documents
    outs, start = [], 0
    for first in range(0, len(ends), SEQUENCES):
        part = ends[first : first + SEQUENCES]
        own = slice(start, part[-1])
        within = [end - start for end in part]
        banded = {} if window is None else {"pre_tockens": window, "next_tockens": 0}
        results = torch.ops.npu.npu_fusion_attention(
            q_TAD[own], k_TKD[own], wide_TKD[own], q_TAD.shape[1], "TND",
            atten_mask=mask, scale=q_TAD.shape[-1] ** -0.5, actual_seq_qlen=within, actual_seq_kvlen=within,
            sparse_mode=FROM_THE_END if window is None else BAND, **banded,
        )  # fmt: skip
        outs.append(results[0])
        start = part[-1]
    return torch.cat(outs)[..., : v_TKW.shape[-1]] if outs else q_TAD[..., : v_TKW.shape[-1]]
