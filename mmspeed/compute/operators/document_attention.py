"""Causal attention within the documents of packed tokens.

Documents are given by their bounds: cumulative lengths from 0 to the number of tokens, so document i holds the tokens
[bounds[i], bounds[i + 1]). Documents may be empty.

Legend: T tokens of all documents, A heads, K heads of the keys, D head width, W width of the values, Z one more than documents.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from mmspeed.compute import cuda_documents, npu_operators
from mmspeed.compute.attention import with_heads_of
from mmspeed.graphs import outside_graphs

from .base import Implementation, Operator


def numbers_of(bounds_Z: Tensor, tokens: int) -> Tensor:
    """The number of each token's document, (T,), without reading the bounds on the host."""
    places_T = torch.arange(tokens, device=bounds_Z.device, dtype=bounds_Z.dtype)
    return torch.searchsorted(bounds_Z, places_T, right=True) - 1


def positions_of(bounds_Z: Tensor, tokens: int) -> Tensor:
    """The place of each token in its document, int64 (T,)."""
    starts_T = bounds_Z[numbers_of(bounds_Z, tokens)].long()
    return torch.arange(tokens, device=bounds_Z.device) - starts_T


def eager_documents(q_TAD: Tensor, k_TKD: Tensor, v_TKW: Tensor, bounds_Z: Tensor, window: int | None) -> Tensor:
    """softmax(q k^T / sqrt(D)) v over the tokens of a query's own document up to its own place: `out_TAW`.

    window: a query sees so many earlier keys; None: all. The formula over all pairs of tokens, in float32 or better.
    """
    dtype = torch.promote_types(q_TAD.dtype, torch.float32)
    k_ATD, v_ATW = (x[0] for x in with_heads_of(*(x.transpose(0, 1)[None] for x in (q_TAD, k_TKD, v_TKW))))
    score_ATT = (q_TAD.transpose(0, 1).to(dtype) * q_TAD.shape[-1] ** -0.5) @ k_ATD.to(dtype).mT
    number_T, place_T = numbers_of(bounds_Z, len(q_TAD)), torch.arange(len(q_TAD), device=q_TAD.device)
    back_TT = place_T[:, None] - place_T[None]
    seen_TT = (number_T[:, None] == number_T[None]) & (back_TT >= 0)
    if window is not None:
        seen_TT = seen_TT & (back_TT <= window)
    out_ATW = score_ATT.masked_fill(~seen_TT, -torch.inf).softmax(-1) @ v_ATW.to(dtype)
    return out_ATW.transpose(0, 1).to(q_TAD.dtype)


@outside_graphs
def each_document(q_TAD: Tensor, k_TKD: Tensor, v_TKW: Tensor, bounds_Z: Tensor, window: int | None) -> Tensor:
    """The same, one fused call for each document: its result does not depend on the others, bit for bit.

    It reads the bounds on the host.
    """
    bounds = bounds_Z.tolist()
    if bounds[0] != 0 or bounds[-1] != len(q_TAD):
        raise ValueError(
            f"bounds of documents go from 0 to the {len(q_TAD)} tokens, not from {bounds[0]} to {bounds[-1]}"
        )
    outs = []
    for start, end in pairwise(bounds):
        if end > start:
            q, k, v = (x[start:end].transpose(0, 1)[None] for x in (q_TAD, k_TKD, v_TKW))
            k, v = with_heads_of(q, k, v)
            if window is None or window >= end - start - 1:
                out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            else:
                seen = torch.ones(end - start, end - start, dtype=torch.bool, device=q.device).tril().triu(-window)
                out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
            outs.append(out[0].transpose(0, 1))
    return torch.cat(outs) if outs else q_TAD[..., : v_TKW.shape[-1]]


def _each_refuses(q_TAD: Tensor, *_: object) -> str:
    return "the bounds of documents are not known on the meta device" if q_TAD.is_meta else ""


document_attention = Operator(
    "document_attention",
    (
        Implementation("fused", npu_operators.documents, npu_operators.documents_refuse),
        Implementation("varlen", cuda_documents.varlen_documents, cuda_documents.refuses),
        Implementation("each", each_document, _each_refuses),
        Implementation("eager", eager_documents),
    ),
)
