"""Operators of language models by torch_npu's fused kernels, whose gradients are torch_npu's own, but for those of experts.

Calls are held against the schemas of its wheel; no device has run them.

Legend: B batch, T tokens, N tokens of a sequence, A heads, K heads of the keys, D head width, H half of D, W width of the values, Z one
more than documents. Of experts: K choices of a token, R = T x K rows, E width, G groups, I width of the input, O width of the output.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mmspeed.compute.autocast import autocast_alike
from mmspeed.compute.rope import rope_dtype

HALF_AND_SINGLE = (torch.float16, torch.bfloat16, torch.float32)
SEQUENCES = 2048  # the most of one call
CORNER = 2048  # side of the mask that stands for causal and banded ones of any size
WIDEST = 512
FROM_THE_END, BAND = 3, 4  # modes: causal, aligned with the last query and key; a window before each query
MOST_PAIRS, MOST_CHOICES = 2**24 - 2, 512  # pairs of token and choice in one permutation, choices of a token
MOST_GROUPS, WIDEST_ROW = 1024, 65535  # of a grouped product
BY_ROWS, BY_INNER = (
    0,
    2,
)  # what the groups of a grouped product divide: the rows of the left matrix, or the dim that is summed over


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


def permutation_refuses(operator: str, x: Tensor, place_TK: Tensor, rows: int) -> str:
    """The reason why torch_npu's permutations do not serve; "" where they do. `rows`: those of the order."""
    pairs, choices = place_TK.numel(), place_TK.shape[1]
    if reason := refuses(operator)(x):
        return reason
    if rows != pairs or not pairs:
        return f"{pairs} pairs of token and choice become {rows} rows: it takes one row of each, and some"
    if pairs > MOST_PAIRS or choices > MOST_CHOICES:
        return f"it takes up to {MOST_PAIRS} pairs and {MOST_CHOICES} choices, not {pairs} and {choices}"
    return ""


def _rows_of(x_TE: Tensor, place_TK: Tensor) -> Tensor:
    """A row of each pair, at its place: the kernel sorts the places, each of which is there once."""
    rows_RE: Tensor = torch.ops.npu.npu_moe_token_permute(x_TE, place_TK.to(torch.int32))[0]
    return rows_RE


def _sums_of(rows_RE: Tensor, place_TK: Tensor) -> Tensor:
    ones_TK = torch.ones(place_TK.shape, dtype=rows_RE.dtype, device=rows_RE.device)  # without them, K is 1
    out_TE: Tensor = torch.ops.npu.npu_moe_token_unpermute(rows_RE, place_TK.flatten().to(torch.int32), ones_TK)
    return out_TE


class _Permute(torch.autograd.Function):
    """A row of each pair. Backward is the other kernel."""

    @staticmethod
    def forward(ctx: Any, x_TE: Tensor, place_TK: Tensor) -> Tensor:
        ctx.save_for_backward(place_TK)
        return _rows_of(x_TE, place_TK)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _sums_of(grads[0], *ctx.saved_tensors), None


class _Combine(torch.autograd.Function):
    """The sum of each token's rows. Backward is the other kernel; torch_npu's own would keep the rows, for a gradient of the ones."""

    @staticmethod
    def forward(ctx: Any, rows_RE: Tensor, place_TK: Tensor) -> Tensor:
        ctx.save_for_backward(place_TK)
        return _sums_of(rows_RE, place_TK)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _rows_of(grads[0], *ctx.saved_tensors), None


def permute(x_TE: Tensor, place_TK: Tensor) -> Tensor:
    """The token of each pair at the pair's place, `rows_RE`."""
    return _Permute.apply(x_TE, place_TK)  # type: ignore[no-any-return]


def combine(rows_RE: Tensor, place_TK: Tensor) -> Tensor:
    """The sum of the rows at the places of each token, `out_TE`."""
    return _Combine.apply(rows_RE, place_TK)  # type: ignore[no-any-return]


def grouped_refuses(x_RI: Tensor, weight_GOI: Tensor, ends_G: Tensor) -> str:
    """The reason why `grouped_product` does not serve; "" where it does."""
    if reason := refuses("npu_grouped_matmul")(x_RI):
        return reason
    x_0I, weight_0OI = autocast_alike(x_RI[:0], weight_GOI[:0])
    if x_0I.dtype != weight_0OI.dtype:
        return f"it takes one number type, not {x_0I.dtype} x {weight_0OI.dtype}"
    if not len(x_RI):
        return "there are no rows"
    groups, width = len(weight_GOI), max(weight_GOI.shape[1:])
    if groups > MOST_GROUPS or width > WIDEST_ROW:
        return f"it takes up to {MOST_GROUPS} groups and widths up to {WIDEST_ROW}, not {groups} and {width}"
    return ""


def grouped_product(x_RI: Tensor, weight_GOI: Tensor, ends_G: Tensor) -> Tensor:
    """`out_RO` = `x W_g^T` of each group's rows. The last end must be R (unchecked)."""
    x_RI, weight_GOI = autocast_alike(x_RI, weight_GOI)
    weight_GOI = weight_GOI if weight_GOI.mT.is_contiguous() else weight_GOI.contiguous()
    return _GroupedProduct.apply(x_RI.contiguous(), weight_GOI, ends_G.long())  # type: ignore[no-any-return]


def outer_refuses(left_RO: Tensor, right_RI: Tensor, ends_G: Tensor) -> str:
    """The reason why `grouped_outer` does not serve; "" where it does."""
    like_GOI = left_RO.new_empty(len(ends_G), left_RO.shape[1], right_RI.shape[1], device="meta")
    return grouped_refuses(right_RI, like_GOI, ends_G)


def grouped_outer(left_RO: Tensor, right_RI: Tensor, ends_G: Tensor) -> Tensor:
    """`out_GOI` = `left_g^T right_g` over each group's rows."""
    ends_G = ends_G.long()
    out_GOI = _grouped(left_RO.mT, right_RI, ends_G, BY_INNER)
    without_rows_G = torch.diff(ends_G, prepend=ends_G.new_zeros(1)) == 0
    return out_GOI.masked_fill_(without_rows_G[:, None, None], 0)  # the kernel's description promises nothing of such


def _grouped(left: Tensor, right: Tensor, ends_G: Tensor, groups_of: int) -> Tensor:
    product: Tensor = torch.ops.npu.npu_grouped_matmul(
        [left], [right], group_list=ends_G, split_item=3, group_type=groups_of, group_list_type=0
    )[0]
    return product


class _GroupedProduct(torch.autograd.Function):
    """The products of rows by group; torch_npu's kernel has no gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x_RI: Tensor, weight_GOI: Tensor, ends_G: Tensor) -> Tensor:
        ctx.save_for_backward(x_RI, weight_GOI, ends_G)
        return _grouped(x_RI, weight_GOI.mT, ends_G, BY_ROWS)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x_RI, weight_GOI, ends_G = ctx.saved_tensors
        of_x, of_weight, _ = ctx.needs_input_grad
        grad_RO = grads[0].contiguous()
        grad_GOI = None
        if of_weight:
            grad_GOI = grouped_outer(grad_RO, x_RI, ends_G)
        return _grouped(grad_RO, weight_GOI, ends_G, BY_ROWS) if of_x else None, grad_GOI, None
