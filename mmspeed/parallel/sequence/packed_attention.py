"""Attend within packed documents that the ranks of a ring share (`mmspeed.parallel.document_shares`), with Ulysses inside each ring place.

After the all-to-all of Ulysses a rank has all tokens of its ring place. Its whole documents are one call of the operator
`document_attention`, without messages; only the keys of its parts of cut documents go round the ring. If a window hides keys of a cut
document, the keys of all ranks are gathered instead. Each range of queries that a rank holds then becomes a document of its own: the keys
from the first that its first query sees, with the queries at the end.

Bytes that a rank sends, besides those of the exchange of heads (`hybrid_attention`): the formulas of `ring`, whose M are the tokens of cut
documents; within a window (R - 1) M K (D + W) e forward, and (all - M) K (D + W) e backward.

Legend: B = 1 row, A heads, K heads of the keys, N tokens that this rank holds, M tokens of cut documents, D head width, W width of the
values, R ranks of the ring, e element size, T queries and keys of ranges.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from mmspeed.comm import Axis, all_gather
from mmspeed.compute.autocast import autocast_alike
from mmspeed.compute.operators.document_attention import document_attention
from mmspeed.graphs import outside_graphs
from mmspeed.parallel.document_shares import DocumentShares, places_of
from mmspeed.protocols.plan import AttentionLayout

from .hybrid_attention import SequenceAxes, memory_order, of_nothing, tokens_first, with_heads_exchanged
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
    layout: AttentionLayout = "BNAD",
) -> Tensor:
    """Attend causally with this rank's tokens within their documents: `out_BANW`.

    Args:
        sizes: the number of tokens of each rank of the group, in the order of `shares`.
        window: how many earlier keys a query sees besides its own; None: all.

    Other arguments as those of `hybrid_attention`. Every rank makes the call, and its backward.
    """
    hides = window is not None and window < max(shares.cut_lengths, default=0) - 1
    q_BAND, k_BKND, v_BKNW = autocast_alike(q_BAND, k_BKND, v_BKNW)
    rank, order = axes.ring.rank, tokens_first("BAND") if axes.ulysses.size > 1 else memory_order(layout)
    shared, whole = shares.shared_sizes[rank], shares.whole_lengths(rank)

    def attend(q_BAND: Tensor, k_BKND: Tensor, v_BKNW: Tensor, mask: Tensor | None) -> Tensor:
        apart = [x.split((shared, x.shape[2] - shared), 2) for x in (q_BAND, k_BKND, v_BKNW)]
        parts_BNAW = []
        q, k, v = (part[0] for part in apart)
        if shares.cut and hides and window is not None:
            parts_BNAW.append(_within_window(q, k, v, shares, axes.ring, window))
        elif shares.cut:
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


def _within_window(
    q_BAND: Tensor, k_BKMD: Tensor, v_BKMW: Tensor, shares: DocumentShares, ring: Axis, window: int
) -> Tensor:
    """Attend within a window with this rank's tokens of cut documents: (B, N, A, W)."""
    both = all_gather(torch.cat((k_BKMD, v_BKMW), -1), ring, 2, shares.shared_sizes)  # one message
    ranges = shares.window_ranges(ring.rank, window)
    if not ranges:
        return of_nothing(q_BAND, *both.split((k_BKMD.shape[-1], v_BKMW.shape[-1]), -1)).transpose(1, 2)
    device, starts = q_BAND.device, [0, *accumulate(end - first for first, _, end in ranges)]
    seen_T = places_of([(first, end) for first, _, end in ranges])
    asked = [
        (start + query - first, start + end - first) for start, (first, query, end) in zip(starts, ranges, strict=False)
    ]
    asked_N = places_of(asked).to(device)
    both_TKX = both[0].transpose(0, 1).index_select(0, shares.cut_places[seen_T].to(device))
    k_TKD, v_TKW = both_TKX.split((k_BKMD.shape[-1], v_BKMW.shape[-1]), -1)
    q_NAD = q_BAND[0].transpose(0, 1)
    q_TAD = q_NAD.new_zeros(len(seen_T), *q_NAD.shape[1:]).index_copy(0, asked_N, q_NAD)
    bounds_Z = torch.tensor(starts, dtype=torch.int32, device=device)
    out_TAW: Tensor = document_attention(q_TAD, k_TKD, v_TKW, bounds_Z, window)
    return out_TAW.index_select(0, asked_N)[None]
