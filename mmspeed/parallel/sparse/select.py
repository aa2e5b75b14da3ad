"""Choose the keys that are kept over the ranks of a ring: each rank chooses among its own keys, for the clusters of all ranks.

A cluster's probability of a key is a softmax over the keys of all ranks, so the log-sum-exps of the ranks' parts are gathered; so is each
rank's best score, for the one key that is always kept. Rules that rank keys (`top`, `mass`, a cap) need one cut per cluster through the
keys of all ranks: it is found bit by bit, from sums that are gathered, and is exact.

All that is gathered is joined in the order of the ranks, so all of them see the same numbers.

Legend: G heads of a batch (of which a call may have some), C clusters of the queries of all ranks, U units of this rank: keys, or tiles of
keys, R ranks, J cuts tried at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmspeed.comm.axis import Axis
from mmspeed.comm.exchange import all_gather
from mmspeed.compute.sparse.planners.selection import KeepRule

_TRIED = 15  # cuts at once: four bits a round


@dataclass(frozen=True)
class MassShares:
    """Probabilities of this rank's units for the clusters of all ranks."""

    share_GCU: Tensor  # float32: probability of a key, times the keys seen and the weight; +inf: always kept; -1: no key counts
    best_GCU: Tensor  # bool: the unit of the largest share of all ranks
    size_GU: Tensor  # keys of a unit that count, float
    seen_G: Tensor  # keys that count, of all ranks, float
    true_GCU: Tensor  # `share_GCU` without infinities and weights
    lost_GC1: Tensor  # bool: clusters with a score that is NaN or +inf, on any rank


def gather_each(x: Tensor, ring: Axis) -> Tensor:
    """The `x` of every rank, stacked along a new first dim."""
    return all_gather(x[None].contiguous(), ring, 0)


def shares(
    score_GCU: Tensor,
    size_GU: Tensor,
    seen_G: Tensor,
    always_GU: Tensor | None,
    ring: Axis,
    weight_GU: Tensor | None = None,
) -> MassShares:
    """Probabilities over the keys of all ranks. Every rank makes the call, whatever it holds.

    Args:
        score_GCU: logits of the units' (mean) keys.
        size_GU: keys of a unit that count; 0: no such unit.
        always_GU: units that are always kept.
        weight_GU: what the probability of a unit counts times in its share; None: 1.
    """
    valid_G1U = (size_GU > 0)[:, None]
    score_GCU = score_GCU.masked_fill(~valid_G1U, -torch.inf)
    best_GC, first_GC = _best(score_GCU if weight_GU is None else score_GCU + weight_GU.log()[:, None])
    lse_GC = (score_GCU + size_GU.log()[:, None]).logsumexp(dim=2) if score_GCU.shape[2] else best_GC  # -inf
    both = gather_each(torch.stack((lse_GC, best_GC)), ring)
    lse_GC1 = both[:, 0].logsumexp(dim=0)[..., None]
    true_GCU = (score_GCU - lse_GC1).exp().nan_to_num(0.0).float() * seen_G[:, None, None].float()
    true_GCU = true_GCU.masked_fill(~valid_G1U, -1.0)
    share_GCU = true_GCU
    if weight_GU is not None:
        share_GCU = torch.where(valid_G1U, true_GCU * weight_GU[:, None].float(), true_GCU)
    if always_GU is not None:
        share_GCU = share_GCU.masked_fill(always_GU[:, None] & valid_G1U, torch.inf)
    best = _is_best(both[:, 1], first_GC, score_GCU.shape[2], ring.rank) & valid_G1U
    return MassShares(share_GCU, best, size_GU, seen_G, true_GCU, ~(lse_GC1 < torch.inf))


def choose(masses: MassShares, keep: KeepRule, tau_G: Tensor, ring: Axis) -> Tensor:
    """The units of this rank that each cluster keeps, bool (G, C, U). `tau_G`: for "threshold" and "fraction" (see `threshold_of`).

    A lost cluster keeps all, so that what is no number appears in the output as in that of dense attention.
    """
    share_GCU = masses.share_GCU
    size_GCU = masses.size_GU.to(torch.float64)[:, None].expand_as(share_GCU)
    seen_GC = masses.seen_G.to(torch.float64)[:, None].expand(share_GCU.shape[:2])
    if keep.rule in ("threshold", "fraction"):
        kept = (share_GCU >= tau_G[:, None, None]) & (share_GCU >= 0)
    elif keep.rule == "top":
        kept = heaviest(share_GCU, size_GCU, keep.value * seen_GC, ring, fits=0.5)
    else:
        mass_GCU = size_GCU * masses.true_GCU.clamp(min=0.0) / seen_GC.clamp(min=1.0)[..., None]
        kept = heaviest(share_GCU, mass_GCU, torch.full_like(seen_GC, keep.value), ring)
    if keep.at_most < 1.0:  # beside what is always kept
        most_GC = (keep.at_most * seen_GC).floor().clamp(min=keep.at_least)
        free_GCU = share_GCU.masked_fill(share_GCU == torch.inf, -1.0)
        kept &= heaviest(free_GCU, size_GCU, most_GC, ring, fits=1.0) | (share_GCU == torch.inf)
    kept |= masses.lost_GC1 & (masses.size_GU > 0)[:, None]
    if keep.at_least == 1:
        return kept | masses.best_GCU
    return kept | heaviest(share_GCU, size_GCU, torch.full_like(seen_GC, keep.at_least), ring)


def heaviest(share_GCU: Tensor, weight_GCU: Tensor, target_GC: Tensor, ring: Axis, fits: float = 0.0) -> Tensor:
    """The fewest units of largest share, of all ranks, whose weights sum to the target; all, where none do. Bool, (G, C, U).

    fits: the share of the last unit's weight that must lie within the target; 0: it may go beyond; 1: it does not.

    Among equals, those of the lowest rank and the lowest index come first. Units of negative share are never taken. Weights are
    float64.
    """
    # the bits of floats that are not negative are in the floats' own order
    bits_GCU = share_GCU.clamp(min=0.0).float().contiguous().view(torch.int32).masked_fill(share_GCU < 0, -1)
    weight_GCU = weight_GCU.masked_fill(share_GCU < 0, 0.0)
    falling = bits_GCU.sort(dim=2, descending=True, stable=True)
    sums = torch.nn.functional.pad(weight_GCU.gather(2, falling.indices).cumsum(dim=2), (1, 0))
    rising = (-falling.values.long()).contiguous()

    def weight_from(cut_GCJ: Tensor) -> Tensor:
        """The weight of the units at or above a cut, on all ranks."""
        places = torch.searchsorted(rising, (-cut_GCJ).contiguous(), right=True)
        return gather_each(sums.gather(2, places), ring).sum(dim=0)

    cut_GC1 = torch.zeros((*target_GC.shape, 1), dtype=torch.int64, device=share_GCU.device)
    tried_J = torch.arange(1, _TRIED + 1, device=share_GCU.device)
    for step in (1 << shift for shift in range(28, -1, -4)):
        enough = weight_from(cut_GC1 + tried_J * step) >= target_GC[..., None]
        cut_GC1 = cut_GC1 + enough.sum(dim=2, keepdim=True) * step
    tie_GCU = (bits_GCU == cut_GC1) & (share_GCU >= 0)
    tied = torch.where(tie_GCU, weight_GCU, 0.0)
    lower = gather_each(tied.sum(dim=2), ring)[: ring.rank].sum(dim=0)[..., None]
    missing = target_GC[..., None] - weight_from(cut_GC1 + 1)
    before_GCU = lower + tied.cumsum(dim=2) - tied
    last_GCU = before_GCU + fits * tied <= missing if fits else before_GCU < missing
    return (bits_GCU > cut_GC1) | (tie_GCU & last_GCU)


def threshold_of(counts_SL: Tensor, keep: float) -> Tensor:
    """The tau that keeps the part `keep` of the pairs of each sample S; from `count_shares` of all ranks. Float32, (S)."""
    from_above = counts_SL.flip(1).cumsum(dim=1)
    enough = from_above >= keep * from_above[:, -1:]
    place = counts_SL.shape[1] - 1 - enough.to(torch.int8).argmax(dim=1)
    return (place << _COARSE).to(torch.int32).view(torch.float32)


_COARSE = 16  # bits of a share that do not count when pairs are counted: steps of a hundredth


def count_shares(share_GCU: Tensor, weight_GCU: Tensor) -> Tensor:
    """The number of pairs by their share, for each head: float64, (G, 32768). `weight_GCU`: pairs of a cluster and a unit."""
    place = share_GCU.clamp(min=0.0).contiguous().view(torch.int32).long() >> _COARSE
    counts = torch.zeros(share_GCU.shape[0], 1 << (31 - _COARSE), dtype=torch.float64, device=share_GCU.device)
    weight = torch.where(share_GCU < 0, 0.0, weight_GCU.to(torch.float64))
    return counts.scatter_add_(1, place.flatten(1), weight.flatten(1))


def _best(score_GCU: Tensor) -> tuple[Tensor, Tensor]:
    """The largest score of each cluster, and the first unit that has it."""
    if not score_GCU.shape[2]:
        nothing = score_GCU.new_full(score_GCU.shape[:2], -torch.inf)
        return nothing, torch.zeros_like(nothing, dtype=torch.int64)
    best = score_GCU.amax(dim=2)
    places = torch.arange(score_GCU.shape[2], device=score_GCU.device)
    return best, torch.where(score_GCU == best[..., None], places, score_GCU.shape[2]).amin(dim=2)


def _is_best(best_RGC: Tensor, first_GC: Tensor, units: int, rank: int) -> Tensor:
    """True at the unit of largest score of all ranks, if it is this rank's: that of the lowest rank among equals."""
    most = best_RGC.amax(dim=0)
    best_here = (best_RGC[rank] == most) & (best_RGC[:rank] < most).all(dim=0)
    return best_here[..., None] & (torch.arange(units, device=first_GC.device) == first_GC[..., None])
