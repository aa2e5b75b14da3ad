"""Compute attention on one process under a model's structure: masks of keys, causal order, windows, documents.

Legend: B batch, G rows or columns that attend apart, A heads, K heads of the keys, N queries, M keys, D head width, W width of the values.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmspeed.protocols.plan import Structure

from .attention import attention, attention_apart, with_heads_of
from .operators.document_attention import document_attention


class Attend(nn.Module):
    """Dense attention as a module, so that a plan can name it."""

    def forward(self, q_BAND: Tensor, k_BAMD: Tensor, v_BAMD: Tensor, structure: Structure) -> Tensor:
        """The output `out_BAND`; `out_BGAND` for queries, keys and values BGAND, whose mask's B is B x G. Raises ValueError else."""
        return structured_attention(q_BAND, k_BAMD, v_BAMD, structure)


def structured_attention(
    q_BAND: Tensor, k_BKMD: Tensor, v_BKMW: Tensor, structure: Structure, place_N: Tensor | None = None
) -> Tensor:
    """Dense attention on one process under a structure: `out_BANW`, or `out_BGANW`; queries that see no key give 0.

    Keys and values may have fewer heads, by a whole factor, and values another width. `place_N`: the place of each token in its sequence;
    None: tokens are in order. Raises ValueError for shapes that do not fit.
    """
    plain = not structure.causal and structure.window is None and structure.documents_BN is None
    if structure.bounds_Z is not None:
        return _within_bounds(q_BAND, k_BKMD, v_BKMW, structure, structure.bounds_Z)
    if q_BAND.dim() == 5 and plain:
        return attention_apart(q_BAND, k_BKMD, v_BKMW, structure.key_mask_BN)
    if q_BAND.dim() == 5:
        q, k, v = (x.flatten(0, 1) for x in (q_BAND, k_BKMD, v_BKMW))
        return structured_attention(q, k, v, structure, place_N).unflatten(0, q_BAND.shape[:2])
    if plain:
        return attention(q_BAND, k_BKMD, v_BKMW, structure.key_mask_BN)
    _check(q_BAND, k_BKMD, structure)
    k_BAMD, v_BAMW = with_heads_of(q_BAND, k_BKMD, v_BKMW)
    if place_N is None and structure.window is structure.documents_BN is structure.key_mask_BN is None:
        return F.scaled_dot_product_attention(q_BAND, k_BAMD, v_BAMW, is_causal=True)
    seen_B1NM = _seen(structure, torch.arange(q_BAND.shape[2], device=q_BAND.device) if place_N is None else place_N)
    dead_B1N1 = ~seen_B1NM.any(-1, keepdim=True)  # kernels differ in their output for rows that see nothing
    out_BANW = F.scaled_dot_product_attention(q_BAND, k_BAMD, v_BAMW, attn_mask=seen_B1NM | dead_B1N1)
    return out_BANW.masked_fill(dead_B1N1, 0.0)


def _within_bounds(q_BAND: Tensor, k_BKMD: Tensor, v_BKMW: Tensor, structure: Structure, bounds_Z: Tensor) -> Tensor:
    """Causal attention within documents that follow one another, over the tokens of all rows."""
    if (
        not structure.causal
        or structure.key_mask_BN is not None
        or structure.documents_BN is not None
        or q_BAND.dim() != 4
    ):
        raise ValueError("attention within the bounds of documents is causal, of (B, A, N, D), and takes no other mask")
    q_TAD, k_TKD, v_TKW = (x.transpose(1, 2).flatten(0, 1) for x in (q_BAND, k_BKMD, v_BKMW))
    out_TAW: Tensor = document_attention(q_TAD, k_TKD, v_TKW, bounds_Z, structure.window)
    return out_TAW.unflatten(0, (q_BAND.shape[0], q_BAND.shape[2])).transpose(1, 2)


def _check(q_BAND: Tensor, k_BKMD: Tensor, structure: Structure) -> None:
    batch, _, queries, _ = q_BAND.shape
    if k_BKMD.shape[2] != queries:
        raise ValueError(
            f"causal order, a window and documents need as many keys as queries, not {queries} queries and {k_BKMD.shape[2]} keys"
        )
    for what, each in (("key mask", structure.key_mask_BN), ("documents", structure.documents_BN)):
        if each is not None and tuple(each.shape) != (batch, queries):
            raise ValueError(
                f"the {what} must have the shape (batch, keys) = {(batch, queries)}, not {tuple(each.shape)}"
            )


def _seen(structure: Structure, place_N: Tensor) -> Tensor:
    """True where a query sees a key, (B or 1, 1, N, N)."""
    apart_NN = place_N[None] - place_N[:, None]
    seen = torch.ones_like(apart_NN, dtype=torch.bool)[None, None]
    if structure.causal:
        seen = seen & (apart_NN <= 0)
    if structure.window is not None:
        seen = seen & (apart_NN.abs() <= structure.window)
    if structure.documents_BN is not None:
        documents = structure.documents_BN
        seen = seen & (documents[:, None, :, None] == documents[:, None, None, :])
    if structure.key_mask_BN is not None:
        seen = seen & structure.key_mask_BN[:, None, None]
    return seen
