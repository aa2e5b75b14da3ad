"""What an operator for packed sequences computes, by the formula: stands in for the fused ones of devices that are not there.

Legend: T queries and S keys of all sequences, A heads, D head width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


def sequences(query_ends: Sequence[int], key_ends: Sequence[int]) -> Iterator[tuple[slice, slice]]:
    """Queries and keys of each sequence; none may be without either."""
    assert len(query_ends) == len(key_ends) > 0
    start = (0, 0)
    for ends in zip(query_ends, key_ends, strict=True):
        assert ends[0] > start[0] and ends[1] > start[1]
        yield slice(start[0], ends[0]), slice(start[1], ends[1])
        start = ends


def packed_forward(
    q_TAD: Tensor, k_SAD: Tensor, v_SAD: Tensor, query_ends: Sequence[int], key_ends: Sequence[int], scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(out_TAD, top_TA, total_TA): row maxima of the scores, and sums of their exponentials beside these."""
    assert query_ends[-1] == len(q_TAD) and key_ends[-1] == len(k_SAD) == len(v_SAD)
    out, top, total = torch.empty_like(q_TAD), *(torch.empty(q_TAD.shape[:2]) for _ in range(2))
    for t, s in sequences(query_ends, key_ends):
        score = torch.einsum("tad,sad->tas", q_TAD[t].float(), k_SAD[s].float()) * scale
        top[t] = score.amax(-1)
        p = (score - top[t][..., None]).exp()
        total[t] = p.sum(-1)
        out[t] = torch.einsum("tas,sad->tad", p / total[t][..., None], v_SAD[s].float()).to(out.dtype)
    return out, top, total


def packed_backward(
    dout_TAD: Tensor,
    q_TAD: Tensor,
    k_SAD: Tensor,
    v_SAD: Tensor,
    out_TAD: Tensor,
    lse_TA: Tensor,
    query_ends: Sequence[int],
    key_ends: Sequence[int],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq_TAD, dk_SAD, dv_SAD) with the given output and log-sum-exp, which may be of more than these keys."""
    dq, dk, dv = torch.empty_like(q_TAD), torch.empty_like(k_SAD), torch.empty_like(v_SAD)
    for t, s in sequences(query_ends, key_ends):
        q, k, v, dout, out = (x.float() for x in (q_TAD[t], k_SAD[s], v_SAD[s], dout_TAD[t], out_TAD[t]))
        p = (torch.einsum("tad,sad->tas", q, k) * scale - lse_TA[t][..., None]).exp()
        ds = p * (torch.einsum("tad,sad->tas", dout, v) - (dout * out).sum(-1, keepdim=True)) * scale
        dq[t] = torch.einsum("tas,sad->tad", ds, k).to(dq.dtype)
        dk[s] = torch.einsum("tas,tad->sad", ds, q).to(dk.dtype)
        dv[s] = torch.einsum("tas,tad->sad", p, dout).to(dv.dtype)
    return dq, dk, dv
