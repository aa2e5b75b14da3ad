"""Select the few of many candidates that keep the most: k-medians on a table of values, exact on a line, else by local search.

Each cell takes the chosen candidate that it values most; no candidate counts as 0. Pure and deterministic.

Legend: M candidates, C cells, N chosen candidates.

A value in (0, 1] is the kept share of the cell; with `coded`, values in (1, 2] stand for the kept share plus 1, and rank before all
others (a bucket that a picture covers before one that it would be enlarged for, whatever they keep).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

_GAIN = 1e-9  # of the total: smaller gains are rounding
_SWAP = 1e-6  # swaps for a smaller gain are not worth their time
_BLOCK = 256  # candidates that are evaluated together

Worth = Callable[[np.ndarray], np.ndarray]


def worth_of(coded: bool) -> Worth:
    """A function from values to kept shares."""
    return (lambda values: values - (values > 1)) if coded else (lambda values: values)


def kept_by(values_MC: np.ndarray, weights_C: np.ndarray, chosen: Sequence[int], coded: bool = False) -> float:
    """The share of all cells that the chosen candidates keep."""
    if not chosen:
        return 0.0
    return float(worth_of(coded)(values_MC[list(chosen)].max(axis=0)) @ weights_C)


def search(
    values_MC: np.ndarray,
    weights_C: np.ndarray,
    most: int,
    starts: Sequence[Sequence[int]] = ((),),
    coded: bool = False,
) -> list[int]:
    """Search for at most `most` candidates that keep much of the cells (weights sum to 1): fewer if more would not keep more.

    From each start (of no more than `most`), candidates are added greedily, then swapped for others while that keeps more
    (Teitz and Bart's interchange, evaluated for many candidates at a time as in FastPAM). The best result is returned.
    """
    best, best_kept = list[int](), -1.0
    for start in starts:
        chosen, kept = list(start), -1.0
        while (total := kept_by(values_MC, weights_C, chosen, coded)) > kept + _SWAP:
            kept = total
            chosen = _grown(values_MC, weights_C, chosen, most, coded)
            chosen = _pruned(values_MC, weights_C, _swapped(values_MC, weights_C, chosen, coded), coded)
        if total > best_kept + _GAIN:
            best, best_kept = chosen, total
    return best


def _grown(values_MC: np.ndarray, weights_C: np.ndarray, chosen: Sequence[int], most: int, coded: bool) -> list[int]:
    """The candidates `chosen`, extended greedily by those that add most."""
    worth, grown = worth_of(coded), list(chosen)
    held_C = values_MC[grown].max(axis=0) if grown else np.zeros(len(weights_C))
    while len(grown) < most:
        gains = [
            worth(np.maximum(values_MC[at : at + _BLOCK], held_C)) @ weights_C
            for at in range(0, len(values_MC), _BLOCK)
        ]
        gain_M = np.concatenate(gains) - worth(held_C) @ weights_C
        new = int(np.argmax(gain_M))
        if gain_M[new] <= _GAIN:
            break
        grown.append(new)
        held_C = np.maximum(held_C, values_MC[new])
    return grown


def _swapped(values_MC: np.ndarray, weights_C: np.ndarray, chosen: Sequence[int], coded: bool) -> list[int]:
    """The candidates `chosen` after swaps, until none keeps more; the best swap of a block of candidates is applied immediately."""
    worth, swapped, cells = worth_of(coded), list(chosen), np.arange(len(weights_C))
    blocks = range(0, len(values_MC), _BLOCK)
    quiet = turn = 0  # blocks in a row without a swap
    while swapped and quiet < len(blocks):
        held_NC = values_MC[swapped]
        owner_C, first_C = held_NC.argmax(axis=0), held_NC.max(axis=0)
        held_NC[owner_C, cells] = 0
        second_C = held_NC.max(axis=0)
        weights_CN = np.zeros((len(cells), len(swapped)))
        weights_CN[cells, owner_C] = weights_C
        kept = float(worth(first_C) @ weights_C)
        while quiet < len(blocks):
            at = blocks[turn % len(blocks)]
            block_BC = values_MC[at : at + _BLOCK]
            added_BC = worth(np.maximum(block_BC, first_C))  # in addition to all that are chosen
            # Cells whose owner is removed fall back to their second; the other cells keep their owner.
            lost_BC = added_BC - worth(np.maximum(block_BC, second_C))
            gain_BN = (added_BC @ weights_C - kept)[:, None] - lost_BC @ weights_CN
            new, old = np.unravel_index(int(np.argmax(gain_BN)), gain_BN.shape)
            if gain_BN[new, old] > _SWAP:
                swapped[old], quiet = at + int(new), 0
                break
            quiet, turn = quiet + 1, turn + 1
    return swapped


def _pruned(values_MC: np.ndarray, weights_C: np.ndarray, chosen: Sequence[int], coded: bool) -> list[int]:
    """The candidates `chosen` without those whose removal does not reduce the kept share."""
    remaining = list(chosen)
    for one in chosen:
        others = [other for other in remaining if other != one]
        if kept_by(values_MC, weights_C, others, coded) >= kept_by(values_MC, weights_C, remaining, coded) - _GAIN:
            remaining = others
    return remaining


def on_a_line(
    values_MC: np.ndarray, weights_C: np.ndarray, places_M: np.ndarray, places_C: np.ndarray, most: int
) -> list[tuple[float, list[int]]]:
    """The best candidates for each number from 0 to `most`, as (kept share, candidates), by dynamic programming.

    Exact if cell c values candidate m at a_m * b_c * exp(-|place_m - place_c|), as crops to aspect ratios do on a log
    scale: a candidate that is best at its own place then has an interval of cells, between its neighbours, and one that is
    not is never needed. Otherwise the result is a lower bound of the share that those candidates keep.
    """
    order_M, order_C = np.argsort(places_M, kind="stable"), np.argsort(places_C, kind="stable")
    values_MC, weights_C = values_MC[np.ix_(order_M, order_C)], weights_C[order_C]
    ends_M = np.searchsorted(places_C[order_C], places_M[order_M], side="right")  # cells up to each candidate's place
    count = len(values_MC)
    head_M = np.array([values_MC[m, : ends_M[m]] @ weights_C[: ends_M[m]] for m in range(count)])
    tail_M = np.array([values_MC[m, ends_M[m] :] @ weights_C[ends_M[m] :] for m in range(count)])
    between_MM = np.full((count, count), -np.inf)  # kept by neighbours i < j of the cells between their places
    for i in range(count):
        for j in range(i + 1, count):
            part = slice(ends_M[i], ends_M[j])
            between_MM[i, j] = np.maximum(values_MC[i, part], values_MC[j, part]) @ weights_C[part]
    best_sets: list[tuple[float, list[int]]] = [(0.0, [])]
    reach_M, predecessors = head_M, list[np.ndarray]()  # kept by the candidates up to m, if m is the last
    for number in range(1, min(most, count) + 1):
        if number > 1:
            through_MM = reach_M[:, None] + between_MM
            predecessors.append(through_MM.argmax(axis=0))
            reach_M = through_MM.max(axis=0)
        last = int(np.argmax(reach_M + tail_M))
        total, chosen = float(reach_M[last] + tail_M[last]), [last]
        for step in reversed(predecessors):
            chosen.append(int(step[chosen[-1]]))
        best_sets.append((total, [int(order_M[m]) for m in reversed(chosen)]))
    return best_sets
