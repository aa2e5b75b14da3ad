"""Selection of the keys that a group of queries keeps: the rules, and the lists of kept keys.

The default rule is a threshold: a key is kept where the probability that a cluster's mean query gives it is at least tau / M.
One threshold for all clusters keeps the most probability for a number of pairs (it is the condition of the optimum), while the same
number of keys for each, or the same cumulative probability, spends pairs where they gain little. Where means stand for dropped keys, the
probability counts times what the mean misses of the key (`lost_variance` in `clusters`).

Legend: B batch, A heads, G = B x A, N queries, M keys, D head width, C clusters of queries, K clusters of keys, X position axes,
Z kept keys of all clusters, R rows (a cluster of a head each), g and c some groups and some clusters of them, S a sample.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from .csr import KeyListBuilder, KeyLists, blocks, flat_lists
from .topk import largest, strided, tau_of_share

Rule = Literal["threshold", "fraction", "mass", "top"]
# (share_gcM, weight_gc, groups): probability x keys seen, for some clusters of some groups, +inf at keys that are always kept, -1 at
# masked ones; number of queries of these clusters
Observe = Callable[[Tensor, Tensor, slice], None]

# elements of C x M of a sample of the batch that may be kept for a second pass; above, they are computed twice
_HOLD = {"cpu": 1 << 23}
_HOLD_ELSE = 1 << 27
_SAMPLED = 1 << 19  # sampled pairs of a cluster and a key for the threshold of a fraction


@dataclass(frozen=True)
class KeepRule:
    """The rule by which a cluster of queries keeps keys. Always-kept keys are exempt from the cap, and count in every share."""

    rule: Rule
    # threshold: tau, keeps keys of probability (x weight) >= tau / (keys seen). fraction: share of all pairs of a sample of the batch,
    # by one threshold for all its heads. mass: cumulative probability of a cluster. top: share of the keys, the same for each cluster.
    value: float
    at_least: int = 1  # keys, those of the largest probability (x weight)
    at_most: float = 1.0  # share of the keys, the largest probability (x weight) first

    def __post_init__(self) -> None:
        if self.rule not in ("threshold", "fraction", "mass", "top"):
            raise ValueError(f"rule {self.rule!r} is not one of threshold, fraction, mass, top")
        if not self.value >= 0 or (self.rule != "threshold" and not 0 < self.value <= 1):
            raise ValueError(f"rule {self.rule} does not take the value {self.value}")
        if self.at_least < 1 or not 0 < self.at_most <= 1:
            raise ValueError(f"at_least {self.at_least} is 1 or more, at_most {self.at_most} in (0, 1]")

    @property
    def by_threshold(self) -> bool:
        """True for rules with one threshold for all clusters."""
        return self.rule in ("threshold", "fraction")


@dataclass(frozen=True)
class PlannerContext:
    """The inputs of a planner beside queries and keys."""

    key_mask_BM: Tensor | None = None  # bool: keys that count
    always_keep: Tensor | None = None  # bool, of M or B x M: keys that every cluster keeps (text, a first frame)
    full_queries_N: Tensor | None = None  # bool: queries that keep every key (text): one more cluster, the last
    positions_NX: Tensor | None = None  # int: places of the queries (t, h, w); negative: no place
    key_positions_MX: Tensor | None = None  # those of the queries when None
    scale: float | None = None  # of the scores; D ** -0.5 when None
    observe: Observe | None = None


@dataclass(frozen=True)
class KeyMasks:
    """The masks of a context, checked."""

    keys: int  # M
    heads: int  # A
    seen_BM: Tensor | None  # keys that count; None: all
    always_BM: Tensor | None  # of these, the ones that are always kept
    count_B: Tensor  # keys seen, int64
    full_F: Tensor | None  # indices of the queries that keep all keys
    choosing: Tensor | None  # indices of the others; None: all queries

    @staticmethod
    def of(context: PlannerContext, batch: int, heads: int, queries: int, keys: int, device: torch.device) -> KeyMasks:
        """Raises ValueError for masks of other shapes."""
        seen, always, full = context.key_mask_BM, context.always_keep, context.full_queries_N
        if seen is not None:
            if seen.shape != (batch, keys) or seen.dtype != torch.bool:
                raise ValueError(
                    f"key_mask_BM is bool of the shape {(batch, keys)}, not {seen.dtype} {tuple(seen.shape)}"
                )
            seen = seen.to(device)
        if always is not None:
            if always.shape not in ((keys,), (batch, keys)) or always.dtype != torch.bool:
                raise ValueError(f"always_keep is bool of {keys} keys, not {always.dtype} {tuple(always.shape)}")
            always = always.to(device).expand(batch, keys)
            always = always if seen is None else always & seen
        count_B = torch.full((batch,), keys, device=device) if seen is None else seen.sum(dim=1)
        full_F, choosing = None, None
        if full is not None:
            if full.shape != (queries,) or full.dtype != torch.bool:
                raise ValueError(f"full_queries_N is bool of {queries} queries, not {full.dtype} {tuple(full.shape)}")
            full = full.to(device)
            full_F, choosing = full.nonzero()[:, 0], (~full).nonzero()[:, 0]
            if not len(full_F):
                full_F, choosing = None, None
        return KeyMasks(keys, heads, seen, always, count_B, full_F, choosing)

    def seen(self, groups: slice) -> Tensor | None:
        """Keys that count in some groups, (g, 1, M); None: all."""
        return None if self.seen_BM is None else self._rows(self.seen_BM, groups)

    def always(self, groups: slice) -> Tensor | None:
        """Keys that are always kept in some groups, (g, 1, M); None: none."""
        return None if self.always_BM is None else self._rows(self.always_BM, groups)

    def count(self, groups: slice) -> Tensor:
        """Keys seen by some groups, (g, 1, 1)."""
        return self._rows(self.count_B[:, None], groups)

    def _rows(self, x_BM: Tensor, groups: slice) -> Tensor:
        sample = torch.arange(groups.start, groups.stop, device=x_BM.device) // self.heads
        return x_BM[sample][:, None]


# scores (scaled, with -inf at masked keys) of some clusters of some groups, in new memory: (groups, clusters) -> score_gcM
Score = Callable[[slice, slice], Tensor]


def choose_keys(
    score: Score,
    keep: KeepRule,
    masks: KeyMasks,
    weight_GC: Tensor,
    *,
    label_GM: Tensor | None = None,
    labels: int = 0,
    observe: Observe | None = None,
    key_weight_GM: Tensor | None = None,
) -> KeyLists:
    """The kept keys of each cluster; a full cluster, if there is one, is last in each group, after those of `weight_GC`.

    Args:
        weight_GC: queries of each cluster; an empty cluster keeps no key.
        label_GM: cluster of each key, for counting kept keys; `labels` at masked keys.
        key_weight_GM: what the probability of a key counts times, under one threshold; positive and finite. None: 1.
    """
    groups, clusters = weight_GC.shape
    device = weight_GC.device
    log_weight = None if key_weight_GM is None or not keep.by_threshold else key_weight_GM.log()[:, None]
    tau_G, log_shares = _thresholds(score, keep, masks, weight_GC, log_weight)
    has_full = masks.full_F is not None
    rows = clusters + has_full
    any_empty = bool((weight_GC == 0).any())
    lists = KeyListBuilder(groups, rows, masks.keys, device, label_GM, labels)
    for g, c in blocks(groups, rows, masks.keys, device):
        chosen = slice(c.start, min(c.stop, clusters))
        keep_gcM = torch.empty(g.stop - g.start, c.stop - c.start, masks.keys, dtype=torch.bool, device=device)
        part = keep_gcM[:, : chosen.stop - chosen.start]
        recompute = partial(score, g, chosen)
        if part.shape[1]:
            score_gcM = None
            if log_shares is None:  # with "fraction" the log shares may be held, and scores are not needed
                score_gcM = recompute()
                x_gcM = _log_share(score_gcM, masks, g, log_weight)
            else:
                x_gcM = log_shares[g, chosen]
            if observe is not None:
                observe(_share(x_gcM, masks, g), weight_GC[g, chosen], g)
            if keep.rule == "top" and score_gcM is not None:
                _keep_top(keep.value, score_gcM, masks, g, part)
            elif keep.rule == "mass":
                _keep_mass(keep.value, x_gcM, masks, g, part)
            else:
                torch.ge(x_gcM, tau_G[g].to(x_gcM.dtype).log()[:, None, None], out=part)
            # a NaN score makes its whole row NaN: all keys are kept, and the NaN appears in the output
            lost_gc = x_gcM[..., 0].isnan() | x_gcM[..., -1].isnan()
            part |= lost_gc[..., None]
            seen = masks.seen(g)
            if seen is not None:
                part &= seen
            if any_empty:
                part &= (weight_GC[g, chosen] > 0)[..., None]
        if c.stop > clusters:
            seen = masks.seen(g)
            keep_gcM[:, -1:] = True if seen is None else seen
        flat_Z, length_gc = flat_lists(keep_gcM)
        if part.shape[1] and _mend(
            keep, recompute, part, length_gc, weight_GC[g, chosen], lost_gc, masks, g, log_weight
        ):
            flat_Z, length_gc = flat_lists(keep_gcM)
        lists.add(g, c, flat_Z, length_gc)
    return lists.finish(tau_G)


def _log_share(score_gcM: Tensor, masks: KeyMasks, groups: slice, log_weight_G1M: Tensor | None) -> Tensor:
    """Log of the probability of each key x keys seen (x its weight): 0 at an even share. +inf at keys that are always kept."""
    x_gcM = score_gcM.log_softmax(dim=-1)
    x_gcM += masks.count(groups).clamp(min=1).log()
    if log_weight_G1M is not None:
        x_gcM += log_weight_G1M[groups]
    always = masks.always(groups)
    return x_gcM if always is None else x_gcM.masked_fill_(always, torch.inf)


def _share(x_gcM: Tensor, masks: KeyMasks, groups: slice) -> Tensor:
    share_gcM = x_gcM.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).exp_()
    seen = masks.seen(groups)
    return share_gcM if seen is None else share_gcM.masked_fill_(~seen, -1.0)


def _keep_top(share: float, score_gcM: Tensor, masks: KeyMasks, groups: slice, out_gcM: Tensor) -> None:
    """Write True at the same share of the keys for each cluster."""
    rank_gcM, always = _ranked(score_gcM, masks.seen(groups)), masks.always(groups)
    if always is not None:
        rank_gcM = rank_gcM.masked_fill_(always, torch.inf)
    count_g1 = (masks.count(groups)[..., 0] * share).round().long().clamp(min=1)
    out_gcM.copy_(largest(rank_gcM, count_g1.expand(-1, score_gcM.shape[1])))
    if always is not None:
        out_gcM |= always


def _keep_mass(share: float, x_gcM: Tensor, masks: KeyMasks, groups: slice, out_gcM: Tensor) -> None:
    """Write True at the most probable keys of each cluster that hold `share` of its probability."""
    sorted_gcM, order_gcM = x_gcM.nan_to_num(nan=-torch.inf, posinf=torch.inf).sort(
        dim=-1, descending=True, stable=True
    )
    p_gcM = (sorted_gcM - masks.count(groups).clamp(min=1).log()).exp_()
    always = masks.always(groups)
    if always is None:
        before_gcM = p_gcM.cumsum(dim=-1) - p_gcM
    else:  # ranked first, with the probability that the others leave
        p_gcM = p_gcM.masked_fill_(sorted_gcM == torch.inf, 0.0)
        before_gcM = p_gcM.cumsum(dim=-1) - p_gcM + (1.0 - p_gcM.sum(dim=-1, keepdim=True))
        before_gcM = before_gcM.masked_fill_(sorted_gcM == torch.inf, -1.0)
    out_gcM.scatter_(-1, order_gcM, before_gcM < share)


def _mend(
    keep: KeepRule,
    score: Callable[[], Tensor],
    out_gcM: Tensor,
    length_gc: Tensor,
    weight_gc: Tensor,
    lost_gc: Tensor,
    masks: KeyMasks,
    groups: slice,
    log_weight_G1M: Tensor | None,
) -> bool:
    """Correct rows that keep too few or too many keys, but for lost ones, which keep all; True where there were any.

    Most blocks have none, and need no scores again.
    """
    length_gc = length_gc[:, : out_gcM.shape[1]]
    seen_g1, seen, always = masks.count(groups)[..., 0], masks.seen(groups), masks.always(groups)
    least_g1 = seen_g1.clamp(max=keep.at_least)
    short_gc = (length_gc < least_g1) & (weight_gc > 0)
    free_g1 = 0 if always is None else always.sum(dim=-1)
    cap_g1 = (seen_g1 * keep.at_most).floor().long().clamp(min=keep.at_least)
    long_gc = (length_gc > cap_g1 + free_g1) & ~lost_gc
    if not (short_gc | long_gc).any():
        return False
    score_gcM = score()
    if log_weight_G1M is not None:
        score_gcM += log_weight_G1M[groups]
    rank_gcM = _ranked(score_gcM, seen)
    g, c = long_gc.nonzero(as_tuple=True)
    if len(g):
        rank_RM = rank_gcM[g, c].masked_fill_(~out_gcM[g, c], -torch.inf)
        if always is not None:
            rank_RM = rank_RM.masked_fill_(always[g, 0], -torch.inf)
        kept_RM = largest(rank_RM, cap_g1[g, 0])
        out_gcM[g, c] = kept_RM if always is None else kept_RM | always[g, 0]
    g, c = short_gc.nonzero(as_tuple=True)
    if len(g):
        out_gcM[g, c] |= largest(rank_gcM[g, c], least_g1[g, 0])
    return True


def _ranked(score_gcM: Tensor, seen: Tensor | None) -> Tensor:
    """Scores that can be ranked: NaN is below all numbers, and masked keys are below NaN."""
    low = torch.finfo(score_gcM.dtype).min
    rank_gcM = score_gcM.nan_to_num(nan=low, posinf=torch.inf, neginf=low)
    return rank_gcM if seen is None else rank_gcM.masked_fill_(~seen, -torch.inf)


def _thresholds(
    score: Score, keep: KeepRule, masks: KeyMasks, weight_GC: Tensor, log_weight_G1M: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """(tau_G, log shares of all pairs if they are held): the threshold of each group; 0 for rules without one."""
    groups, clusters = weight_GC.shape
    device = weight_GC.device
    if keep.rule != "fraction":
        value = keep.value if keep.rule == "threshold" else 0.0
        return torch.full((groups,), value, dtype=torch.float32, device=device), None
    elements = groups * clusters * masks.keys
    log_shares, parts = None, []
    stride = max(1, masks.heads * clusters * masks.keys // _SAMPLED)
    for g, c in blocks(groups, clusters, masks.keys, device):
        x_gcM = _log_share(score(g, c), masks, g, log_weight_G1M)
        if elements <= _HOLD.get(device.type, _HOLD_ELSE):
            log_shares = x_gcM.new_empty(groups, clusters, masks.keys) if log_shares is None else log_shares
            log_shares[g, c] = x_gcM
        parts.append((g, c, strided(x_gcM, stride, c.start)))
    if not parts:
        return torch.zeros(groups, device=device), None
    sample_GCS = parts[0][2].new_empty(groups, clusters, parts[0][2].shape[-1])
    for g, c, part_gcS in parts:
        sample_GCS[g, c] = part_gcS
    taus = []
    for start in range(0, groups, masks.heads):
        one = slice(start, start + masks.heads)
        share = keep.value
        if masks.seen_BM is not None:  # of the pairs with keys that are seen
            share = share * float(masks.count_B[start // masks.heads]) / masks.keys
        weight = weight_GC[one, :, None].expand_as(sample_GCS[one])
        taus.append(tau_of_share(sample_GCS[one], weight, share).expand(masks.heads))
    return torch.cat(taus), log_shares
