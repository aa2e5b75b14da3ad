"""Choose which keys are kept over the ranks of a ring: each rank chooses among its own keys, for the query clusters of all ranks.

The probabilities are a softmax over the keys of all ranks, so each rank's log-sum-exp is gathered. So is its best score, since every
cluster keeps its best key. Rules that rank keys (`top`, `mass`, a cap) need, per cluster, a cut through the keys of all ranks in order of
probability. It is found exactly, by a search over the bits of the cut that gathers sums of weights.

Gathered values are always combined in the order of the ranks, so all ranks compute the same numbers.

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

_TRIED = 15  # cuts tried at once: each round finds four more bits


@dataclass(frozen=True)
class MassShares:
    """The share of attention that each query cluster, of any rank, gives to this rank's units."""

    share_GCU: Tensor  # float32: a key's probability x number of keys that count x weight; +inf: always kept; -1: no key counts
    best_GCU: Tensor  # bool: the unit of the largest share over all ranks
    size_GU: Tensor  # float: number of keys of a unit that count
    seen_G: Tensor  # float: number of keys that count, of all ranks
    true_GCU: Tensor  # `share_GCU` without infinities and weights
    lost_GC1: Tensor  # bool: clusters with a score that is NaN or +inf, on any rank


def gather_each(x: Tensor, ring: Axis) -> Tensor:
    """All-gather `x`, stacked along a new first dim: one entry per rank."""
    return all_gather(x[None].contiguous(), ring, 0)


def shares(
    score_GCU: Tensor,
    size_GU: Tensor,
    seen_G: Tensor,
    always_GU: Tensor | None,
    ring: Axis,
    weight_GU: Tensor | None = None,
) -> MassShares:
    """Compute the clusters' probabilities of this rank's units, with the softmax over the keys of all ranks. Every rank must make the call.

    Args:
        score_GCU: logits of the units' keys; for tiles, of their mean key.
        size_GU: the number of keys of a unit that count; 0: no such unit.
        always_GU: units that are always kept.
        weight_GU: a factor of each unit's share; None: 1.
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
    """Choose the units of this rank that each cluster keeps: bool, (G, C, U). `tau_G`: for the rules "threshold" and "fraction".

    A cluster with a NaN or +inf score keeps all, so that the NaN appears in the output, as it does in dense attention.
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
    """Choose the fewest units, largest share first over all ranks, whose weights reach the target: bool, (G, C, U) of this rank's units.

    Chooses all where even all do not reach it. Among equal shares, those of the lowest rank and then the lowest index come first. Units of
    negative share are never chosen. Weights are float64.

    fits: how much of the last unit's weight must lie within the target. 0: it may overshoot; 1: it must not; 0.5: at least half lies
    within.
    """
    # non-negative floats are ordered as their bits are, read as integers
    bits_GCU = share_GCU.clamp(min=0.0).float().contiguous().view(torch.int32).masked_fill(share_GCU < 0, -1)
    weight_GCU = weight_GCU.masked_fill(share_GCU < 0, 0.0)
    falling = bits_GCU.sort(dim=2, descending=True, stable=True)
    sums = torch.nn.functional.pad(weight_GCU.gather(2, falling.indices).cumsum(dim=2), (1, 0))
    rising = (-falling.values.long()).contiguous()

    def weight_from(cut_GCJ: Tensor) -> Tensor:
        """The total weight, over all ranks, of the units whose share is at or above a cut."""
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
    """The tau that keeps the fraction `keep` of the pairs of each sample S, from the summed `count_shares` of all ranks: float32, (S,)."""
    from_above = counts_SL.flip(1).cumsum(dim=1)
    enough = from_above >= keep * from_above[:, -1:]
    place = counts_SL.shape[1] - 1 - enough.to(torch.int8).argmax(dim=1)
    return (place << _COARSE).to(torch.int32).view(torch.float32)


_COARSE = 16  # lowest bits of a float32 share that the histogram ignores: bins about a hundredth wide, relatively


def count_shares(share_GCU: Tensor, weight_GCU: Tensor) -> Tensor:
    """Histogram of the shares of each head: float64, (G, 32768). `weight_GCU`: the number of query-key pairs of a cluster and a unit."""
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
    """True at this rank's unit that has the largest score of all ranks; among equals, only the lowest rank has one."""
    most = best_RGC.amax(dim=0)
    best_here = (best_RGC[rank] == most) & (best_RGC[:rank] < most).all(dim=0)
    return best_here[..., None] & (torch.arange(units, device=first_GC.device) == first_GC[..., None])
