"""Cost of draws: nanoseconds of one core a number, of each version of the generator.

python -m tests.claims.draws
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial

import torch

from mmspeed import rng
from mmspeed.rng import VERSIONS, Seed

REPEATS = 9
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
    """The least time of a core a number, over repeats of enough draws to be timed."""
    draw()
    times, draws = [], max(1, 10_000 // numbers)
    for _ in range(REPEATS):
        began = time.process_time()  # not the time of others on this machine
        for _ in range(draws):
            draw()
        times.append(time.process_time() - began)
    return min(times) / draws / numbers * 1e9


def main() -> None:
    """Print a row for each kind of draw."""
    torch.set_num_threads(1)
    sys.stdout.write(f"{'draw':<16}" + "".join(f"{f'version {version}':>14}" for version in VERSIONS) + "    ratio\n")
    for name, (numbers, draw) in CASES.items():
        first, second = (nanoseconds(partial(draw, Seed(0, version), numbers), numbers) for version in VERSIONS)
        sys.stdout.write(f"{name:<16}{first:>11.2f} ns{second:>11.2f} ns{second / first:>9.2f}\n")


if __name__ == "__main__":
    main()
