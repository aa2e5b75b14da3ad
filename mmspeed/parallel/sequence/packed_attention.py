"""Attend within documents that the ranks of a ring share (`mmspeed.parallel.documents`), each rank's part over Ulysses ranks.

Heads are exchanged for the joined part of a ring's place. Its whole documents are one call of the operator `document_attention`, without
messages; the keys of its parts of cut documents go round the ring, and with none cut nothing does.

Bytes that a rank sends, beside those of the exchange of heads (`hybrid_attention`): the formulas of `ring`, whose M are the tokens of cut
documents.

Legend: B = 1 row, A heads, K heads of the keys, N tokens that this rank holds, D head width, W width of the values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from mmspeed.compute.autocast import autocast_alike
from mmspeed.compute.operators.documents import document_attention
from mmspeed.graphs import outside_graphs
from mmspeed.parallel.documents import DocumentShares

from .hybrid_attention import SequenceAxes, of_nothing, with_heads_exchanged
from .layouts import Layout, memory_order, tokens_first
from .ring import ring_attention


@outside_graphs
def packed_attention(
    q_BAND: Tensor,
    k_BKND: Tensor,
    v_BKNW: Tensor,
    shares: DocumentShares,
    axes: SequenceAxes,
    sizes: Sequence[int],
    *,
    window: int | None = None,
    backend: str = "auto",
    counter: Counter[str] | None = None,
    layout: Layout = "BNAD",
) -> Tensor:
    """Causal attention of this rank's tokens within their documents: `out_BANW`.

    sizes: tokens of all ranks of the group, in the order of `shares`. window: a query sees so many earlier keys; None: all. Other arguments
    as those of `hybrid_attention`. Every rank makes the call, and its backward. Raises ValueError for a window within a cut document.
    """
    longest = max(shares.cut_lengths, default=0)
    if window is not None and window < longest - 1:
        raise ValueError(f"a window of {window} keys within a document of {longest} tokens that a ring shares")
    q_BAND, k_BKND, v_BKNW = autocast_alike(q_BAND, k_BKND, v_BKNW)
    rank, order = axes.ring.rank, tokens_first("BAND") if axes.ulysses.size > 1 else memory_order(layout)
    shared, whole = shares.shared_sizes[rank], shares.whole_lengths(rank)

    def attend(q_BAND: Tensor, k_BKND: Tensor, v_BKNW: Tensor, mask: Tensor | None) -> Tensor:
        apart = [x.split((shared, x.shape[2] - shared), 2) for x in (q_BAND, k_BKND, v_BKNW)]
        parts_BNAW = []
        if shares.cut:
            q, k, v = (part[0] for part in apart)
            out_BANW = ring_attention(
                q, k, v, None, axes.ring, shares.shared_sizes, causal=True, documents=shares.cut_lengths,
                window=axes.window, outer=axes.outer, backend=backend, counter=counter, order=order,
            )  # fmt: skip
            parts_BNAW.append(out_BANW.transpose(1, 2))
        if sum(whole):
            bounds_Z = torch.tensor([0, *whole], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(q_BAND.device)
            q_TAD, k_TKD, v_TKW = (part[1][0].transpose(0, 1) for part in apart)
            parts_BNAW.append(document_attention(q_TAD, k_TKD, v_TKW, bounds_Z, window)[None])
        if not parts_BNAW:
            return of_nothing(q_BAND, k_BKND, v_BKNW)
        return (parts_BNAW[0] if len(parts_BNAW) == 1 else torch.cat(parts_BNAW, 1)).transpose(1, 2)

    return with_heads_exchanged(
        q_BAND, k_BKND, v_BKNW, None, axes, sizes, sizes, attend, layout=layout, reads="strided"
    )  # fmt: skip
