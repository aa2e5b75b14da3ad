"""Cost of draws: nanoseconds of one core a number, of each version of the generator, and their ratio.

python -m tests.claims.draws
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch

from mmspeed import rng
from mmspeed.rng import VERSIONS, Seed

ROUNDS = 15
CASES: dict[str, tuple[int, Callable[[Seed, int], object]]] = {
    "normal, 2.1 M": (2_100_000, lambda seed, n: rng.normal((n,), seed, "noise", "k", 0, 0)),
    "normal, 65 k": (1 << 16, lambda seed, n: rng.normal((n,), seed, "noise", "k", 0, 0)),
    "weights, 1 M": (1_000_000, lambda seed, n: rng.symmetric((n,), 0.1, seed, "init", "w")),
    "uniform, 1": (1, lambda seed, n: rng.uniform(seed, "timestep", "k", 0, 0)),
    "order of 10 k": (10_000, lambda seed, n: rng.permutation(n, seed, "sample_order", 0)),
    "order of 1 M": (1_000_000, lambda seed, n: rng.permutation(n, seed, "sample_order", 0)),
    "order of 10 M": (10_000_000, lambda seed, n: rng.permutation(n, seed, "sample_order", 0)),
}


def nanoseconds(draw: Callable[[], object], numbers: int) -> float:
    """The time of a core a number, over enough draws to be timed."""
    draws = max(1, 100_000 // numbers)
    began = time.process_time()  # not the time of others on this machine
    for _ in range(draws):
        draw()
    return (time.process_time() - began) / draws / numbers * 1e9


def main() -> None:
    """Print a row for each kind of draw: medians over rounds, in each of which both versions draw in turn."""
    torch.set_num_threads(1)
    sys.stdout.write(f"{'draw':<16}" + "".join(f"{f'version {version}':>14}" for version in VERSIONS) + "    ratio\n")
    for name, (numbers, draw) in CASES.items():
        draws = [partial(draw, Seed(0, version), numbers) for version in VERSIONS]
        rounds = [[nanoseconds(each, numbers) for each in draws] for _ in range(ROUNDS + 1)][1:]  # the first warms up
        first, second = (median(times) for times in zip(*rounds, strict=True))
        ratio = median(second / first for first, second in rounds)
        sys.stdout.write(f"{name:<16}{first:>11.2f} ns{second:>11.2f} ns{ratio:>9.2f}\n")


if __name__ == "__main__":
    main()
