"""Which few of many candidates keep the most: k-medians on a table of values, exactly on a line, else by local search.

Each cell takes the one of the chosen candidates that it values most, and values nothing at 0. Pure and deterministic.

Legend: M candidates, C cells, N chosen candidates.

A value in (0, 1] is what is kept of the cell; with `coded`, values in (1, 2] stand for what is kept less 1, and come before all others
(a bucket that a picture covers before one that it would be enlarged for, whatever they keep).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

_GAIN = 1e-9  # of the whole: what is gained less than this is rounding
_SWAP = 1e-6  # and swaps for less are not worth their time
_BLOCK = 256  # candidates that are looked at together

Worth = Callable[[np.ndarray], np.ndarray]


def worth_of(coded: bool) -> Worth:
    """What values are worth, in the sum."""
    return (lambda values: values - (values > 1)) if coded else (lambda values: values)


def kept_by(values_MC: np.ndarray, weights_C: np.ndarray, chosen: Sequence[int], coded: bool = False) -> float:
    """What the chosen candidates keep of all cells."""
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
    """At most `most` candidates that keep much of the cells (weights sum to 1): fewer where more would keep nothing more.

    From each start (of no more than `most`), candidates are added greedily, then swapped for others while that keeps more
    (Teitz and Bart's interchange, counted for many candidates at once as in FastPAM). The best outcome is given.
    """
    best, best_kept = list[int](), -1.0
    for start in starts:
        chosen, kept = list(start), -1.0
        while (now := kept_by(values_MC, weights_C, chosen, coded)) > kept + _SWAP:
            kept = now
            chosen = _grown(values_MC, weights_C, chosen, most, coded)
            chosen = _pruned(values_MC, weights_C, _swapped(values_MC, weights_C, chosen, coded), coded)
        if now > best_kept + _GAIN:
            best, best_kept = chosen, now
    return best


def _grown(values_MC: np.ndarray, weights_C: np.ndarray, chosen: Sequence[int], most: int, coded: bool) -> list[int]:
    """`chosen` with the candidates that add most, one after the other."""
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
    """`chosen` after swaps of one for another, until none keeps more; the best swap of a block of candidates is done at once."""
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
            added_BC = worth(np.maximum(block_BC, first_C))  # beside all that are chosen
            # Cells whose owner goes fall back on their second; the other cells keep their owner.
            lost_BC = added_BC - worth(np.maximum(block_BC, second_C))
            gain_BN = (added_BC @ weights_C - kept)[:, None] - lost_BC @ weights_CN
            new, old = np.unravel_index(int(np.argmax(gain_BN)), gain_BN.shape)
            if gain_BN[new, old] > _SWAP:
                swapped[old], quiet = at + int(new), 0
                break
            quiet, turn = quiet + 1, turn + 1
    return swapped


def _pruned(values_MC: np.ndarray, weights_C: np.ndarray, chosen: Sequence[int], coded: bool) -> list[int]:
    """`chosen` without those that keep nothing that the others would not keep, or that keep others from keeping more."""
    left = list(chosen)
    for one in chosen:
        others = [other for other in left if other != one]
        if kept_by(values_MC, weights_C, others, coded) >= kept_by(values_MC, weights_C, left, coded) - _GAIN:
            left = others
    return left


def on_a_line(
    values_MC: np.ndarray, weights_C: np.ndarray, places_M: np.ndarray, places_C: np.ndarray, most: int
) -> list[tuple[float, list[int]]]:
    """For each number of candidates from 0 to `most`: what the best so many keep, and which, by dynamic programming.

    Exact where cell c values candidate m at a_m * b_c * exp(-|place_m - place_c|), as crops to aspect ratios do on a log
    scale: a candidate that is best at its own place then has an interval of cells, between its neighbours, and one that is
    not is never needed. Elsewhere what is given is a lower bound of what those candidates keep.
    """
    order_M, order_C = np.argsort(places_M, kind="stable"), np.argsort(places_C, kind="stable")
    values_MC, weights_C = values_MC[np.ix_(order_M, order_C)], weights_C[order_C]
    ends_M = np.searchsorted(places_C[order_C], places_M[order_M], side="right")  # cells up to each candidate's place
    count = len(values_MC)
    head_M = np.array([values_MC[m, : ends_M[m]] @ weights_C[: ends_M[m]] for m in range(count)])
    tail_M = np.array([values_MC[m, ends_M[m] :] @ weights_C[ends_M[m] :] for m in range(count)])
    between_MM = np.full((count, count), -np.inf)  # what neighbours i < j keep of the cells between their places
    for i in range(count):
        for j in range(i + 1, count):
            part = slice(ends_M[i], ends_M[j])
            between_MM[i, j] = np.maximum(values_MC[i, part], values_MC[j, part]) @ weights_C[part]
    found: list[tuple[float, list[int]]] = [(0.0, [])]
    reach_M, came = head_M, list[np.ndarray]()  # what those up to m keep, m being the last
    for number in range(1, min(most, count) + 1):
        if number > 1:
            through_MM = reach_M[:, None] + between_MM
            came.append(through_MM.argmax(axis=0))
            reach_M = through_MM.max(axis=0)
        last = int(np.argmax(reach_M + tail_M))
        total, chosen = float(reach_M[last] + tail_M[last]), [last]
        for step in reversed(came):
            chosen.append(int(step[chosen[-1]]))
        found.append((total, [int(order_M[m]) for m in reversed(chosen)]))
    return found
