"""Attention on one process under a structure that a model gives: masks of keys, causal order, windows, documents.

Legend: B batch, G rows or columns that attend apart, A heads, N queries, M keys, D head width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmspeed.protocols.plan import Structure

from .attention import attention, attention_apart


class Attend(nn.Module):
    """Dense attention as a module, so that a plan can name it."""

    def forward(self, q_BAND: Tensor, k_BAMD: Tensor, v_BAMD: Tensor, structure: Structure) -> Tensor:
        """`out_BAND`; `out_BGAND` of queries, keys and values BGAND, whose mask's B is B x G. Raises ValueError for another mask."""
        return structured_attention(q_BAND, k_BAMD, v_BAMD, structure)


def structured_attention(q_BAND: Tensor, k_BAMD: Tensor, v_BAMD: Tensor, structure: Structure) -> Tensor:
    """Dense attention on one process under a structure, of the shape of the queries. Raises ValueError for a mask of another shape."""
    plain = not structure.causal and structure.window is None and structure.documents_BN is None
    if q_BAND.dim() == 5 and plain:
        return attention_apart(q_BAND, k_BAMD, v_BAMD, structure.key_mask_BN)
    if q_BAND.dim() == 5:
        q, k, v = (x.flatten(0, 1) for x in (q_BAND, k_BAMD, v_BAMD))
        return structured_attention(q, k, v, structure).unflatten(0, q_BAND.shape[:2])
    if not plain:
        return F.scaled_dot_product_attention(
            q_BAND, k_BAMD, v_BAMD, attn_mask=_seen(structure, q_BAND.shape[2], k_BAMD.shape[2], q_BAND.device)
        )
    return attention(q_BAND, k_BAMD, v_BAMD, structure.key_mask_BN)


def _seen(structure: Structure, queries: int, keys: int, device: torch.device) -> Tensor:
    """True where a query sees a key, (B or 1, 1, N, M)."""
    apart_NM = torch.arange(keys, device=device)[None] - torch.arange(queries, device=device)[:, None]
    seen = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=device)
    if structure.causal:
        seen = seen & (apart_NM <= 0)
    if structure.window is not None:
        seen = seen & (apart_NM.abs() <= structure.window)
    if structure.documents_BN is not None:
        documents = structure.documents_BN
        seen = seen & (documents[:, None, :, None] == documents[:, None, None, :])
    if structure.key_mask_BN is not None:
        seen = seen & structure.key_mask_BN[:, None, None]
    return seen
