"""Cost of draws: nanoseconds of one core a number.

python -m tests.claims.draws
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from statistics import median

import torch

from mmspeed import rng

ROUNDS = 15
CASES: dict[str, tuple[int, Callable[[int], object]]] = {
    "normal, 2.1 M": (2_100_000, lambda n: rng.normal((n,), 0, "noise", "k", 0, 0)),
    "normal, 65 k": (1 << 16, lambda n: rng.normal((n,), 0, "noise", "k", 0, 0)),
    "weights, 1 M": (1_000_000, lambda n: rng.symmetric((n,), 0.1, 0, "init", "w")),
    "uniform, 1": (1, lambda n: rng.uniform(0, "timestep", "k", 0, 0)),
    "order of 10 k": (10_000, lambda n: rng.permutation(n, 0, "sample_order", 0)),
    "order of 1 M": (1_000_000, lambda n: rng.permutation(n, 0, "sample_order", 0)),
    "order of 10 M": (10_000_000, lambda n: rng.permutation(n, 0, "sample_order", 0)),
}


def nanoseconds(draw: Callable[[int], object], numbers: int) -> float:
    """The time of a core a number, over enough draws to be timed."""
    draws = max(1, 100_000 // numbers)
    began = time.process_time()  # not the time of others on this machine
    for _ in range(draws):
        draw(numbers)
    return (time.process_time() - began) / draws / numbers * 1e9


def main() -> None:
    """Print a row for each kind of draw: the median over rounds."""
    torch.set_num_threads(1)
    for name, (numbers, draw) in CASES.items():
        rounds = [nanoseconds(draw, numbers) for _ in range(ROUNDS + 1)][1:]  # the first warms up
        sys.stdout.write(f"{name:<16}{median(rounds):>11.2f} ns\n")


if __name__ == "__main__":
    main()
