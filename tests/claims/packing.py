"""The bench of the copies that heads take on their way to other ranks: their time, and the way without them.

Heads of one token lie together in what a product writes and reads, so the linear layers of an attention over n ranks make four copies of
eight units in a step: a rank's heads are gathered before they go, and put beside those of others when they come. Without copies each
rank's heads are a product of their own ("apart"), which writes and reads them together. Both ways are timed, forward and backward:

    today    qkv = x W, copy; copy, out = y Wo; dy = g Wo, copy; copy, dx = dqkv W; both gradients of weights
    apart    the same sums as n products each, batched where they give, added up where they take; no copy
    copies   those of `today` alone

    MALLOC_MMAP_THRESHOLD_=4000000000 MALLOC_TRIM_THRESHOLD_=8000000000 python -m tests.claims.packing --tokens 1024 --width 3072

The settings keep freed memory, as an accelerator's allocator does: new pages of the system cost more than the copy. On a CPU seconds are
the processor's, with one thread, as other programs of the machine take its time too; on an accelerator they are the clock's.

Legend: N tokens of a rank, E width, A heads, D head width, P ranks.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from mmspeed.comm.packing import pack

WIRE = (2, 0, 1, 3)  # tokens first


@dataclass(frozen=True)
class Inputs:
    """The tensors of a step: tokens and their gradient, weights, and what comes from other ranks."""

    x_NE: Tensor
    grad_NE: Tensor
    qkv: Tensor  # (3 E, E), head by head
    out: Tensor  # (E, E)
    out_PND: Tensor  # attention's output for this rank's tokens, D = E / P of each rank
    grad_PND: Tensor  # and the gradients of queries, keys and values, D = 3 E / P
    heads: int

    @property
    def ranks(self) -> int:
        return len(self.out_PND)


def gathered(x_NE: Tensor, inputs: Inputs) -> Tensor:
    """The queries, keys and values that each rank is to get."""
    q, k, v = x_NE.unflatten(-1, (inputs.heads, 3, -1)).permute(2, 1, 0, 3)[:, None].unbind(0)
    return pack([q, k, v], 1, [(inputs.heads // inputs.ranks,) * inputs.ranks] * 3, WIRE, rows=True).flat


def beside(x_PND: Tensor) -> Tensor:
    """(N, P D), the channels of all ranks."""
    ranks, tokens, width = x_PND.shape
    x_NE = x_PND.new_empty(tokens, ranks * width)
    x_NE.unflatten(-1, (ranks, width)).copy_(x_PND.movedim(0, 1))
    return x_NE


def by_rank(x_NE: Tensor, ranks: int) -> Tensor:
    """(P, N, D), contiguous."""
    return x_NE.unflatten(-1, (ranks, -1)).movedim(1, 0).contiguous()


def today(inputs: Inputs) -> list[Tensor]:
    """The product of all heads, and copies: output, gradients of x and of both weights, what is sent."""
    sent = gathered(inputs.x_NE @ inputs.qkv.T, inputs)
    y_NE = beside(inputs.out_PND)
    out = y_NE @ inputs.out.T
    back_PND = by_rank(inputs.grad_NE @ inputs.out, inputs.ranks)
    grad = beside(inputs.grad_PND)
    return [out, grad @ inputs.qkv, grad.T @ inputs.x_NE, inputs.grad_NE.T @ y_NE, back_PND, sent]


def added(x_PND: Tensor, weight_PDE: Tensor) -> Tensor:
    """The sum of each rank's product, made in place."""
    total = x_PND[0] @ weight_PDE[0]
    for x_ND, weight_DE in zip(x_PND[1:], weight_PDE[1:], strict=True):
        total.addmm_(x_ND, weight_DE)
    return total


def apart(inputs: Inputs) -> list[Tensor]:
    """Products for each rank, no copies; the results of `today`."""
    ranks, width = inputs.ranks, inputs.x_NE.shape[-1]
    x_PNE, grad_PNE = (x.expand(ranks, *x.shape) for x in (inputs.x_NE, inputs.grad_NE))
    qkv, out = inputs.qkv.view(ranks, -1, width), inputs.out.view(width, ranks, -1).movedim(1, 0)
    sent = torch.bmm(x_PNE, qkv.mT)
    back_PND = torch.bmm(grad_PNE, out)
    weights = torch.empty_like(inputs.out)
    for place, y_ND in enumerate(inputs.out_PND):
        torch.mm(inputs.grad_NE.T, y_ND, out=weights.view(width, ranks, -1)[:, place])
    return [
        added(inputs.out_PND, out.mT),
        added(inputs.grad_PND, qkv),
        torch.bmm(inputs.grad_PND.mT, x_PNE).view_as(inputs.qkv),
        weights,
        back_PND,
        sent,
    ]


def copies(inputs: Inputs, qkv_NE: Tensor) -> None:
    """The copies of `today` alone."""
    gathered(qkv_NE, inputs)
    by_rank(beside(inputs.out_PND), inputs.ranks)
    beside(inputs.grad_PND)


def seconds(call: Callable[[], object], device: str) -> float:
    """Seconds of one call: the processor's on a CPU, else the clock's."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    if device != "cpu":
        torch.accelerator.synchronize()
    start = clock()
    call()
    if device != "cpu":
        torch.accelerator.synchronize()
    return clock() - start


def main() -> None:
    """Print the times."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("tokens", 1024), ("width", 1152), ("heads", 16), ("rounds", 9)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    asked = parser.parse_args()
    if asked.device == "cpu":
        torch.set_num_threads(1)
    random = partial(torch.randn, device=asked.device, dtype=getattr(torch, asked.dtype))
    tokens, width = asked.tokens, asked.width
    shared = (random(tokens, width), random(tokens, width), random(3 * width, width), random(width, width))
    calls: dict[tuple[str, int], Callable[[], object]] = {}
    for ranks in asked.ranks:
        inputs = Inputs(
            *shared, random(ranks, tokens, width // ranks), random(ranks, tokens, 3 * width // ranks), asked.heads
        )
        near = 0.05 * width**0.5 if asked.dtype != "float32" else 1e-3 * width**0.5
        for one, other in zip(today(inputs)[:5], apart(inputs)[:5], strict=True):
            torch.testing.assert_close(one, other, rtol=0.05, atol=near)
        calls["today", ranks], calls["apart", ranks] = partial(today, inputs), partial(apart, inputs)
        calls["copies", ranks] = partial(copies, inputs, random(tokens, 3 * width))
    times: dict[tuple[str, int], list[float]] = {way: [] for way in calls}
    for number in range(asked.rounds + 1):
        for way, call in list(calls.items())[:: -1 if number % 2 else 1]:
            taken = seconds(call, asked.device)
            if number:
                times[way].append(taken)
    for ranks in asked.ranks:
        today_s, apart_s, copies_s = (times[way, ranks] for way in ("today", "apart", "copies"))
        share = statistics.median(copies_s) / statistics.median(today_s)
        ratio = statistics.median(apart_s) / statistics.median(today_s)
        paired = sorted(two / one for one, two in zip(today_s, apart_s, strict=True))
        rounds = f"median of {len(paired)} rounds; {paired[0]:.3f} to {paired[-1]:.3f}"
        print(
            f"{ranks} ranks: today {1e3 * statistics.median(today_s):.1f} ms, copies {100 * share:.2f} % of it; apart / today "
            f"{ratio:.4f} (of medians), {statistics.median(paired):.4f} ({rounds})"
        )


if __name__ == "__main__":
    main()
