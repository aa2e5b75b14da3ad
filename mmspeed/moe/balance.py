"""Level the loads of experts over processes: predict them, move experts between processes, lend shares of hot experts to copies.

Pure functions, in whole numbers wherever a choice hangs on them: every process that has the same counts makes the same plan, whatever its
processor. Plans are made on the host, for all layers at once.

Experts lie in *places*: process r has places r x M to (r + 1) x M - 1. A copy (LLEP, LPLB) takes a share of an expert's rows on a process
beside its home; each process has room for one a layer. *Slots* are what rows are sent to: the M places of a process and its room.

Legend: L layers, G experts and places, P processes, M = G / P, S slots, R rows, T tokens, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mmspeed.compute.operators.permutation import ExpertOrder, order_by_expert

Whole = npt.NDArray[np.int64]
Real = npt.NDArray[np.float64]

KEPT = 0.9  # of a moving average, a step
WHOLE = 1 << 16  # the parts that an expert's rows are counted in
LEAST_GAIN = 100  # a swap lowers the load of a process by at least the mean over this
GOAL = 1.02  # the greatest load over the mean at which nothing is done


class LoadForecast:
    """Predicts the next step's loads by the last step's, their moving average, or its linear trend: for each layer the best one so far.

    The trend is Brown's double exponential smoothing. Errors are relative L1, themselves averaged.
    """

    def __init__(self, layers: int, experts: int) -> None:
        self.ways_WLG: Whole = np.zeros((3, layers, experts), dtype=np.int64)  # what each way predicts
        self.mean_LG: Real = np.zeros((layers, experts))
        self.mean_of_means_LG: Real = np.zeros((layers, experts))
        self.error_WL: Real = np.zeros((3, layers))

    def predict(self) -> Whole:
        """The loads (L, G) of the next step; zeros before the first one."""
        best_L = self.error_WL.argmin(0)
        return self.ways_WLG[best_L, np.arange(len(best_L))]

    def observe(self, load_LG: Whole) -> float:
        """Learn a step's loads; the relative L1 error of what was predicted for them, over all layers."""
        error = float(np.abs(self.predict() - load_LG).sum() / max(load_LG.sum(), 1))
        if not self.mean_LG.any():
            self.mean_LG, self.mean_of_means_LG = load_LG.astype(np.float64), load_LG.astype(np.float64)
        else:
            off_WL = np.abs(self.ways_WLG - load_LG).sum(-1) / np.maximum(load_LG.sum(-1), 1)
            self.error_WL = KEPT * self.error_WL + (1 - KEPT) * off_WL
            self.mean_LG = KEPT * self.mean_LG + (1 - KEPT) * load_LG
            self.mean_of_means_LG = KEPT * self.mean_of_means_LG + (1 - KEPT) * self.mean_LG
        trend_LG = self.mean_LG + (self.mean_LG - self.mean_of_means_LG) / KEPT
        self.ways_WLG = np.rint(np.stack((load_LG, self.mean_LG, np.maximum(trend_LG, 0)))).astype(np.int64)
        return error

    def state_dict(self) -> dict[str, Tensor]:
        """What a resumed run needs to predict the same."""
        return {name: torch.from_numpy(values.copy()) for name, values in vars(self).items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from `state_dict`."""
        vars(self).update({name: state[name].numpy().copy() for name in vars(self)})


def first_places(layers: int, experts: int) -> Whole:
    """The places (L, G) of a new run: experts in order."""
    return np.tile(np.arange(experts), (layers, 1))


def rank_loads(load_LG: Whole, place_LG: Whole, ranks: int) -> Whole:
    """The load of each process, (L, P)."""
    return _at(load_LG, place_LG).reshape(len(load_LG), ranks, -1).sum(-1)


def _at(value_LG: Whole, place_LG: Whole) -> Whole:
    """Values of experts in the order of their places."""
    return np.take_along_axis(value_LG, place_LG.argsort(1), 1)


def rearrange(load_LG: Whole, place_LG: Whole, ranks: int, nodes: int = 1) -> Whole:
    """Places that level the loads of processes, made from `place_LG` by swaps, so that few experts move.

    The fullest process swaps the pair of experts that leaves the fuller of both processes least, until it is at `GOAL` times the mean.
    One that no swap helps stays as it is, and the next one has its turn. An expert that stays on its process keeps its place.
    nodes: experts do not leave their node; for routers that limit the groups of a token.
    """
    layers, experts = load_LG.shape
    each = experts // ranks
    at_LG = _at(load_LG, place_LG)
    who_LG = place_LG.argsort(1)
    node_G = np.arange(experts) // (experts // nodes)
    least_L = load_LG.sum(1) // (ranks * LEAST_GAIN)
    bound_L = GOAL * load_LG.sum(1) / ranks
    stuck_LP = np.zeros((layers, ranks), dtype=bool)
    while True:
        sum_LP = at_LG.reshape(layers, ranks, each).sum(-1)
        open_LP = np.where(stuck_LP, -1, sum_LP)
        full_L = open_LP.argmax(1)
        now = np.flatnonzero(open_LP.max(1) > bound_L)  # layers that are not done; their number is N below
        if not len(now):
            break
        full_N, at_NG = full_L[now], at_LG[now]
        sum_N, own_NM = sum_LP[now, full_N], full_N[:, None] * each + np.arange(each)
        less_NMG = np.take_along_axis(at_NG, own_NM, 1)[:, :, None] - at_NG[:, None, :]
        other_NG = sum_LP[now].repeat(each, 1)
        fuller_NMG = np.maximum(sum_N[:, None, None] - less_NMG, other_NG[:, None, :] + less_NMG)
        away_NG = node_G[None] != (full_N // (ranks // nodes))[:, None]
        fuller_NX = np.where(away_NG[:, None, :], np.iinfo(np.int64).max, fuller_NMG).reshape(len(now), -1)
        best_N = fuller_NX.argmin(1)
        helps_N = fuller_NX[np.arange(len(now)), best_N] < sum_N - least_L[now]
        stuck_LP[now[~helps_N], full_N[~helps_N]] = True
        layer, best = now[helps_N], best_N[helps_N]
        a, b = own_NM[helps_N, best // experts], best % experts
        for values in (at_LG, who_LG):
            values[layer, a], values[layer, b] = values[layer, b], values[layer, a]
    return _kept(place_LG, who_LG.argsort(1) // each, each)


def _kept(place_LG: Whole, rank_LG: Whole, each: int) -> Whole:
    """Places on the processes `rank_LG`: experts that stay on theirs keep their place, others fill what is free, in order."""
    stays_LG = place_LG // each == rank_LG
    free_LG = np.ones_like(stays_LG)
    layer, expert = np.nonzero(stays_LG)
    free_LG[layer, place_LG[layer, expert]] = False
    result_LG = place_LG.copy()
    layer, expert = np.nonzero(~stays_LG)
    order = np.lexsort((expert, rank_LG[layer, expert], layer))
    result_LG[layer[order], expert[order]] = np.nonzero(free_LG)[
        1
    ]  # free places by layer and process; as many each as newcomers
    return result_LG


def worth_moving(
    load_LG: Whole, old_LG: Whole, new_LG: Whole, ranks: int, steps: int, price: int
) -> npt.NDArray[np.bool_]:
    """The layers (L,) in which the fullest process saves more in `steps` steps than the process with the most moves pays for them.

    price: the rows that are computed in the time in which an expert, with its optimizer's state, travels.
    """
    saved_L = rank_loads(load_LG, old_LG, ranks).max(1) - rank_loads(load_LG, new_LG, ranks).max(1)
    comes_LG = _at((old_LG != new_LG).astype(np.int64), new_LG)  # as many come to a process as leave it
    return saved_L * steps > price * comes_LG.reshape(len(load_LG), ranks, -1).sum(-1).max(1)


def in_rows(count: int, rate: float, row_seconds: float) -> int:
    """The rows that a process computes in the time in which bytes travel, `rate` of them a second; equal on all processes if these are."""
    return round(count / rate / row_seconds)


@dataclass(frozen=True)
class Share:
    """A copy of an expert: process `target` takes `part` of `WHOLE` parts of its rows from `source`, where it lives."""

    expert: int
    source: int
    target: int
    part: int


def plan_shares(
    load_LG: Whole, place_LG: Whole, ranks: int, most: int, nodes: int = 1, price: int = 0
) -> list[list[Share]]:
    """The copies of each layer's next step, at most `most`, one on a process.

    The fullest process gives rows of its greatest expert to the emptiest one that has room, until it is at `GOAL` times the mean, and so the
    next; no share is below half of what `GOAL` leaves. Then as many of these shares are kept as give the least time: the rows of the fullest
    process, and `price` for each copy that the busiest process sends or gets.
    nodes: copies lie on the node of their expert. price: the rows that are computed in the time in which an expert's weights travel.
    """
    layers, experts = load_LG.shape
    each, every_L = experts // ranks, np.arange(layers)
    sum_LP = rank_loads(load_LG, place_LG, ranks)
    left_LPM = _at(load_LG, place_LG).reshape(layers, ranks, each)
    who_LPM = place_LG.argsort(1).reshape(layers, ranks, each)
    mean_L, upto_L = sum_LP.sum(1) // ranks, (sum_LP.sum(1) * (1 + GOAL) / 2 / ranks).astype(np.int64)
    node_P = np.arange(ranks) // (ranks // nodes)
    room_LP, sends_LP = np.ones((layers, ranks), dtype=bool), np.zeros((layers, ranks), dtype=np.int64)
    going_L = np.ones(layers, dtype=bool)
    plans: list[list[Share]] = [[] for _ in range(layers)]
    least_L, kept_L = sum_LP.max(1), np.zeros(layers, dtype=np.int64)
    for count in range(1, most + 1):
        source_L = sum_LP.argmax(1)
        fits_LP = room_LP & (node_P == node_P[source_L][:, None])
        target_L = np.where(fits_LP, sum_LP, np.iinfo(np.int64).max).argmin(1)
        local_L = left_LPM[every_L, source_L].argmax(1)
        full_L = sum_LP[every_L, source_L]
        give_L = np.minimum(left_LPM[every_L, source_L, local_L], full_L - mean_L)
        give_L = np.minimum(give_L, upto_L - sum_LP[every_L, target_L])
        going_L &= fits_LP.any(1) & (full_L > GOAL * mean_L) & (give_L > upto_L - mean_L)
        if not going_L.any():
            break
        give_L = np.where(going_L, give_L, 0)
        sum_LP[every_L, source_L] -= give_L
        sum_LP[every_L, target_L] += give_L
        left_LPM[every_L, source_L, local_L] -= give_L
        room_LP[every_L, target_L] &= ~going_L
        sends_LP[every_L, source_L] += going_L
        time_L = sum_LP.max(1) + price * sends_LP.max(1)
        better_L = going_L & (time_L < least_L)
        least_L, kept_L = np.where(better_L, time_L, least_L), np.where(better_L, count, kept_L)
        for layer in np.flatnonzero(going_L):
            source, target = int(source_L[layer]), int(target_L[layer])
            expert = int(who_LPM[layer, source, local_L[layer]])
            part = int(give_L[layer]) * WHOLE // int(load_LG[layer, expert])
            plans[layer].append(Share(expert, source, target, part))
    return [plan[:kept] for plan, kept in zip(plans, kept_L.tolist(), strict=True)]


def shared_loads(load_LG: Whole, place_LG: Whole, plans: Sequence[Sequence[Share]], ranks: int) -> Whole:
    """`rank_loads` where copies take their shares, (L, P)."""
    sum_LP = rank_loads(load_LG, place_LG, ranks)
    for sum_P, load_G, plan in zip(sum_LP, load_LG, plans, strict=True):
        for share in plan:
            rows = int(load_G[share.expert]) * share.part // WHOLE
            sum_P[share.source] -= rows
            sum_P[share.target] += rows
    return sum_LP


@dataclass(frozen=True)
class Slots:
    """What rows of a layer go to: slot s takes the parts `low_S[s]` to `high_S[s]` of `WHOLE` of the rows of expert `expert_S[s]`."""

    expert_S: Tensor
    low_S: Tensor
    high_S: Tensor

    def to(self, device: torch.device) -> Slots:
        """The same on a device."""
        return Slots(*(each.to(device) for each in (self.expert_S, self.low_S, self.high_S)))


def slots(place_LG: Whole, plans: Sequence[Sequence[Share]], ranks: int) -> list[Slots]:
    """The slots of each layer, on the host: each process has its places, and behind them the room for its copy."""
    layers, experts = place_LG.shape
    each = experts // ranks
    table_L3S = np.zeros((layers, 3, ranks, each + 1), dtype=np.int64)
    table_L3S[:, 0, :, :each] = place_LG.argsort(1).reshape(layers, ranks, each)
    table_L3S[:, 2, :, :each] = WHOLE
    for table, place_G, plan in zip(table_L3S, place_LG, plans, strict=True):
        for share in plan:
            home = divmod(int(place_G[share.expert]), each)
            high = table[2][home]
            table[:, share.target, each] = share.expert, high - share.part, high
            table[2][home] = high - share.part
    return [Slots(*rows) for rows in torch.from_numpy(table_L3S).flatten(2).unbind(0)]


def order_by_slot(expert_TK: Tensor, to: Slots, experts: int, sender: int, senders: int) -> tuple[ExpertOrder, Tensor]:
    """Sort (token, choice) pairs by slot; also the slot of each pair, (T, K). Never waits for the device.

    A sender divides its n rows of an expert between slots at the whole numbers next to n x low / WHOLE. It rounds at a point of its own,
    so that the rows of all senders together are divided right even where each has few.
    """
    order = order_by_expert(expert_TK, experts)
    ends_G = order.ends_G.long()
    starts_G = torch.cat((ends_G.new_zeros(1), ends_G[:-1]))
    count_S = (ends_G - starts_G)[to.expert_S]
    phase = WHOLE * (2 * sender + 1) // (2 * senders)
    low_S, high_S = ((count_S * part_S + phase) // WHOLE for part_S in (to.low_S, to.high_S))
    rows = expert_TK.numel()
    ends_S = (high_S - low_S).cumsum(0)
    slot_R = torch.arange(len(ends_S), device=ends_S.device).repeat_interleave(high_S - low_S, output_size=rows)
    from_S = starts_G[to.expert_S] + low_S - (ends_S - (high_S - low_S))
    order_R = order.order_R[from_S[slot_R] + torch.arange(rows, device=ends_S.device)]
    place_P = torch.empty_like(order_R).scatter_(0, order_R, torch.arange(rows, device=order_R.device))
    by_slot = ExpertOrder(order_R, place_P.view_as(expert_TK), ends_S.to(torch.int32))
    return by_slot, slot_R[by_slot.place_TK]
