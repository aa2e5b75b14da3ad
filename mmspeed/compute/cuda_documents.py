"""Attention within documents by torch's variable-length kernel (flash attention, Dao 2023) on CUDA.

Legend: T tokens, A heads, K heads of the keys, D head width, W width of the values, Z one more than documents.
"""

from __future__ import annotations

from functools import cache, partial
from importlib.util import find_spec
from inspect import signature

import torch
import torch.nn.functional as F
from torch import Tensor

from mmspeed.compute.autocast import autocast_alike

WIDEST = 256


def refuses(q_TAD: Tensor, k_TKD: Tensor, v_TKW: Tensor, bounds_Z: Tensor, window: int | None) -> str:
    """The reason why the kernel does not serve; "" where it does."""
    if q_TAD.device.type != "cuda":
        return f"it is a kernel of CUDA, not of {q_TAD.device.type}"
    q_TAD, *_ = autocast_alike(q_TAD[:0])
    if q_TAD.dtype not in (torch.float16, torch.bfloat16):
        return f"it takes half types, not {q_TAD.dtype}"
    width = q_TAD.shape[-1]
    if width % 8 or width > WIDEST or v_TKW.shape[-1] > width:
        return f"it takes widths of heads that are multiples of 8 up to {WIDEST}, not {width} and {v_TKW.shape[-1]}"
    return "" if find_spec("torch.nn.attention.varlen") is not None else "this torch has no varlen_attn"


@cache
def _takes_shared_heads() -> bool:
    """True where torch's kernel lets heads of queries share those of keys; looked up once, as each block calls it."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in signature(varlen_attn).parameters


def varlen_documents(q_TAD: Tensor, k_TKD: Tensor, v_TKW: Tensor, bounds_Z: Tensor, window: int | None) -> Tensor:
    """Causal attention within documents, `out_TAW`; narrower values are padded to the width of the keys."""
    from torch.nn.attention.varlen import varlen_attn

    q_TAD, k_TKD, v_TKW = autocast_alike(q_TAD, k_TKD, v_TKW)
    width, tokens = v_TKW.shape[-1], len(q_TAD)
    wide_TKD = v_TKW if width == q_TAD.shape[-1] else F.pad(v_TKW, (0, q_TAD.shape[-1] - width))
    bounds_Z = bounds_Z.to(torch.int32)
    attend = partial(varlen_attn, window_size=(-1 if window is None else window, 0))
    if k_TKD.shape[1] != q_TAD.shape[1]:
        if _takes_shared_heads():
            attend = partial(attend, enable_gqa=True)
        else:  # torch 2.11
            k_TKD, wide_TKD = (x.repeat_interleave(q_TAD.shape[1] // x.shape[1], dim=1) for x in (k_TKD, wide_TKD))
    out = attend(q_TAD, k_TKD, wide_TKD, bounds_Z, bounds_Z, tokens, tokens)
    assert isinstance(out, Tensor)
    return out[..., :width]
