"""A histogram of probability over pairs, in counts that add up exactly over heads, samples, micro-batches and ranks.

The share of a pair is the probability that a query's cluster gives a key, times the number of keys: 1 where attention is flat; and times
the key's weight, where there is one (`choose_keys`). The threshold tau has the same unit, so the counts show how many pairs any tau would
keep.

Legend: G heads of a batch, C clusters of queries, M keys.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

LOWEST, HIGHEST = -24, 16  # log2 of the range of shares
BINS_PER_OCTAVE = 32
BINS = (HIGHEST - LOWEST) * BINS_PER_OCTAVE
KEYS_COUNTED = 2048  # of a head, spread evenly: a subsample is enough


class ShareCounts:
    """Counts of pairs by the log of their share; integers, so that sums do not depend on the order."""

    def __init__(self) -> None:
        self.counts: Tensor | None = None  # int64, BINS

    def add(self, share_GCM: Tensor, weight_GC: Tensor, groups: slice | None = None) -> None:
        """Count pairs. `groups`, their heads, is not used.

        `share_GCM` is +inf at keys that are always kept and negative at masked ones; `weight_GC` are the queries of each cluster.
        """
        step = max(1, share_GCM.shape[2] // KEYS_COUNTED)
        share = share_GCM[:, :, step // 2 :: step]
        place = ((share.clamp(min=2.0**LOWEST).log2() - LOWEST) * BINS_PER_OCTAVE).clamp(max=BINS - 1).long()
        # each counted key stands for `step` keys, so that long and short sequences, and parts of one, weigh by their pairs
        weight = weight_GC[..., None].expand_as(place) * (share >= 0) * step
        if self.counts is None:
            self.counts = torch.zeros(BINS, dtype=torch.int64, device=share.device)
        self.counts.scatter_add_(0, place.flatten(), weight.flatten().long())

    def values(self) -> list[float]:
        """The counts, exact in float64."""
        return [0.0] * BINS if self.counts is None else self.counts.tolist()


def threshold(counts: list[float], keep: float) -> float | None:
    """The tau that keeps the share `keep` of the counted pairs; None when there are none.

    Within a bin, pairs are assumed to be uniform in the log.
    """
    total = math.fsum(counts)
    if total <= 0:
        return None
    if keep >= 1:
        return 0.0
    wanted, above = keep * total, 0.0
    for place in range(BINS - 1, -1, -1):
        if above + counts[place] >= wanted:
            part = (wanted - above) / counts[place] if counts[place] else 0.0
            return 2.0 ** (LOWEST + (place + 1 - part) / BINS_PER_OCTAVE)
        above += counts[place]
    return 0.0
