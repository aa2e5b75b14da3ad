"""The bench of the copy before heads are exchanged: its time against that of its product, and the way without the copy.

Heads of one token lie together in what a fused product of queries, keys and values writes, so a rank's heads are gathered by a copy of
three tensors. Without it each rank's heads would be a product of their own, which writes them together. All ways are timed in
turns, and the least time of each is taken: other programs of the machine only add.

    MALLOC_MMAP_THRESHOLD_=4000000000 MALLOC_TRIM_THRESHOLD_=8000000000 python -m tests.claims.packing --tokens 1024 --width 3072

The settings keep freed memory, as an accelerator's allocator does: new pages of the system cost more than the copy.

Legend: N tokens of a rank, E width, A heads, D head width, n ranks.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from mmspeed.comm.packing import pack

RANKS = (2, 4, 8)
WIRE = (2, 0, 1, 3)  # tokens first


def ways(tokens: int, width: int, heads: int, device: str, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    """The fused product, the copy of its queries, keys and values for n ranks, and n products."""
    x_NE = torch.randn(tokens, width, device=device, dtype=dtype)
    weight = torch.randn(3 * width, width, device=device, dtype=dtype)
    qkv = (x_NE @ weight.T).unflatten(-1, (heads, 3, -1)).permute(2, 1, 0, 3)[:, None]  # 3 B A N D
    q_BAND, k_BAND, v_BAND = (qkv[0] * 1.5, qkv[1] * 0.5, qkv[2])

    def copy(ranks: int) -> None:
        pack([q_BAND, k_BAND, v_BAND], 1, [(heads // ranks,) * ranks] * 3, WIRE, rows=True)

    def products(ranks: int) -> list[Tensor]:
        return [x_NE @ part.T for part in weight.chunk(ranks)]

    found: dict[str, Callable[[], object]] = {"product": lambda: x_NE @ weight.T}
    for ranks in RANKS:
        found[f"copy for {ranks}"] = lambda ranks=ranks: copy(ranks)  # type: ignore[misc]
        found[f"{ranks} products"] = lambda ranks=ranks: products(ranks)  # type: ignore[misc]
    return found


def seconds(call: Callable[[], object], device: str) -> float:
    """Of one call."""
    if device != "cpu":
        torch.accelerator.synchronize()
    start = time.perf_counter()
    call()
    if device != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter() - start


def main() -> None:
    """Print the times."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("tokens", 4096), ("width", 1152), ("heads", 16), ("rounds", 15)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    given = parser.parse_args()
    made = ways(given.tokens, given.width, given.heads, given.device, getattr(torch, given.dtype))
    times: dict[str, list[float]] = {name: [] for name in made}
    for number in range(given.rounds + 2):
        for name, call in made.items():
            taken = seconds(call, given.device)
            if number >= 2:
                times[name].append(taken)
    base = min(times["product"])
    for name, each in times.items():
        print(f"{name:<12} {1e3 * min(each):9.3f} ms  {100 * min(each) / base:6.1f} % of the product")


if __name__ == "__main__":
    main()
