"""Loads of processes that hold experts, by how they are levelled: `python -m tests.claims.balance` prints the table.

Loads are drawn (a log-normal popularity that drifts, 524,288 rows a step; four seeds), or those of our own model (`expert_trace`), of which
each layer is taken like a seed. Every 20 steps experts move; before each step copies are planned by what is predicted for it. Beside ours
stand experts in order and EPLB, which packs all experts anew, and as many replicas, by the moving average; written from its description.

A moved expert takes its weights and two moments in float32 along, a copy its weights there and their gradient back in bfloat16; bytes are
those of an expert of Qwen3-30B-A3B, of a layer and step, over all processes.

Legend: N steps, L seeds or layers, G experts, P processes, M experts of a process, S slots.
"""

from __future__ import annotations

import argparse
import heapq
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mmspeed.moe.balance import (
    KEPT,
    WHOLE,
    LoadForecast,
    Whole,
    first_places,
    plan_shares,
    rearrange,
    slots,
)

from .expert_trace import counts

EVERY, WARM = 20, 100
PARAMETERS = 3 * 2048 * 768
MOVED_BYTES, COPIED_BYTES = 12 * PARAMETERS, 4 * PARAMETERS
Held = npt.NDArray[np.float64]  # (L, P, G): the part of an expert's rows that a process takes


@dataclass(frozen=True)
class Drawn:
    """Drawn loads; goals: the greatest load of a process over the mean, by the most copies."""

    experts: int
    ranks: int
    sigma: float
    goals: dict[int, float]


DRAWN = (
    Drawn(128, 8, 0.5, {4: 1.03}),
    Drawn(128, 8, 1.0, {4: 1.05}),
    Drawn(256, 32, 0.5, {4: 1.07}),
    Drawn(256, 32, 1.0, {4: 1.23, 16: 1.09}),
)


def draw(experts: int, sigma: float, seed: int, steps: int) -> Whole:
    """Loads (N, G)."""
    rng = np.random.default_rng(seed)
    log_G, results = rng.normal(0, sigma, experts), []
    for _ in range(steps):
        log_G = log_G * 0.998 + rng.normal(0, sigma * np.sqrt(1 - 0.998**2), experts)
        results.append(rng.multinomial(524288, np.exp(log_G) / np.exp(log_G).sum()))
    return np.array(results)


def levelled(load_NLG: Whole, ranks: int, most: int, moving: bool = True) -> Iterator[tuple[Held, Whole]]:
    """What processes hold in each step, and the home of each expert (L, G), by mmspeed: at most `most` copies."""
    _, layers, experts = load_NLG.shape
    forecast, place_LG = LoadForecast(layers, experts), first_places(layers, experts)
    for step, load_LG in enumerate(load_NLG):
        if moving and step and step % EVERY == 0:
            place_LG = rearrange(forecast.predict(), place_LG, ranks)
        held_LPG = np.zeros((layers, ranks, experts))
        for held_PG, to in zip(
            held_LPG, slots(place_LG, plan_shares(forecast.predict(), place_LG, ranks, most), ranks), strict=True
        ):
            rank_S = np.arange(len(to.expert_S)) // (len(to.expert_S) // ranks)
            np.add.at(held_PG, (rank_S, to.expert_S.numpy()), (to.high_S - to.low_S).numpy() / WHOLE)
        yield held_LPG, place_LG // (experts // ranks)
        forecast.observe(load_LG)


def packed(load_G: Held, ranks: int, replicas: int) -> Held:
    """What processes hold (P, G) by EPLB: replicas of the experts with the most rows a copy, then copies by their rows to the emptiest."""
    copies_G = np.ones(len(load_G), dtype=np.int64)
    for _ in range(replicas):
        copies_G[(load_G / copies_G).argmax()] += 1
    held_PG, room = np.zeros((ranks, len(load_G))), -(-copies_G.sum() // ranks)
    heap = [(0.0, rank, room) for rank in range(ranks)]
    for expert in np.repeat(np.arange(len(load_G)), copies_G)[
        np.argsort(-np.repeat(load_G / copies_G, copies_G), kind="stable")
    ]:
        load, rank, left = heapq.heappop(heap)
        held_PG[rank, expert] += 1 / copies_G[expert]
        if left > 1:
            heapq.heappush(heap, (load + load_G[expert] / copies_G[expert], rank, left - 1))
    return held_PG


def packed_anew(load_NLG: Whole, ranks: int, replicas: int) -> Iterator[tuple[Held, Whole]]:
    """As of `levelled`, by EPLB. The home of an expert with replicas is where it was, if that is still among them, else the first."""
    _, layers, experts = load_NLG.shape
    home_LG = first_places(layers, experts) // (experts // ranks)
    held_LPG = (home_LG[:, None] == np.arange(ranks)[:, None]).astype(np.float64)
    mean_LG = load_NLG[0].astype(np.float64)
    for step, load_LG in enumerate(load_NLG):
        if step and step % EVERY == 0:
            held_LPG = np.stack([packed(load_G, ranks, replicas) for load_G in mean_LG])
            stays_LG = np.take_along_axis(held_LPG, home_LG[:, None], 1)[:, 0] > 0
            home_LG = np.where(stays_LG, home_LG, held_LPG.argmax(1))
        yield held_LPG, home_LG
        mean_LG = KEPT * mean_LG + (1 - KEPT) * load_LG


@dataclass(frozen=True)
class Outcome:
    """Means over steps and seeds: the greatest load over the mean; experts that move and copies that travel in a step."""

    over: float
    moved: float
    copies: float

    @property
    def mb(self) -> float:
        """Megabytes."""
        return (self.moved * MOVED_BYTES + self.copies * COPIED_BYTES) / 1e6


def outcome(load_NLG: Whole, arranged: Iterator[tuple[Held, Whole]], warm: int = WARM) -> Outcome:
    """Follow what processes hold over a trace."""
    rows, before_LG = [], None
    for load_LG, (held_LPG, home_LG) in zip(load_NLG, arranged, strict=True):
        load_LP = (held_LPG * load_LG[:, None, :]).sum(2)
        moved = 0 if before_LG is None else (home_LG != before_LG).sum()
        copies = (held_LPG > 0).sum() - home_LG.size
        rows.append((float((load_LP.max(1) / load_LP.mean(1)).mean()), moved / len(load_LG), copies / len(load_LG)))
        before_LG = home_LG
    return Outcome(*np.mean(rows[warm:], 0).tolist())


def ways(load_NLG: Whole, ranks: int) -> Iterator[tuple[str, int, Outcome]]:
    """(name, copies at most, what came of it) of each way."""
    yield "experts in order", 0, outcome(load_NLG, levelled(load_NLG, ranks, 0, moving=False))
    yield "moved", 0, outcome(load_NLG, levelled(load_NLG, ranks, 0))
    for most in (4, 16):
        yield f"copies {most}", most, outcome(load_NLG, levelled(load_NLG, ranks, most, moving=False))
        yield f"moved, copies {most}", most, outcome(load_NLG, levelled(load_NLG, ranks, most))
    for replicas in (0, 4, 16):
        yield f"EPLB, replicas {replicas}", 0, outcome(load_NLG, packed_anew(load_NLG, ranks, replicas))


def main() -> None:
    """Print the table; exit with 1 where a goal is missed."""
    argparse.ArgumentParser(description=main.__doc__).parse_args()
    passed = True
    print(
        "| loads | way | max/mean | goal | experts moved a step | copies a step | MB |\n|---|---|---|---|---|---|---|"
    )
    for case in (*DRAWN, None):
        if case is None:
            name, ranks, trace = "our own, 64 experts, 8 processes", 8, counts()
        else:
            name, ranks = f"{case.experts} experts, {case.ranks} processes, sigma {case.sigma}", case.ranks
            trace = np.stack([draw(case.experts, case.sigma, seed, WARM + 200) for seed in range(4)], 1)
        for way, most, result in ways(trace, ranks):
            goal = case.goals.get(most) if case is not None and way.startswith("moved, copies") else None
            passed &= goal is None or result.over <= goal
            figures = f"{result.over:.3f} | {goal or ''} | {result.moved:.2f} | {result.copies:.1f} | {result.mb:.0f}"
            print(f"| {name} | {way} | {figures} |", flush=True)
    print("PASS" if passed else "FAIL")
    raise SystemExit(0 if passed else 1)


if __name__ == "__main__":
    main()
