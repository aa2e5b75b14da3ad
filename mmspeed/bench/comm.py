"""The bench of the exchanges: bytes by the ledger and by the formula, copies, and time, for each method.

Legend: B batch, S sequence length of a rank, H hidden size, n ranks. A rank's part is (B, S, H), of `part` bytes; the whole is n parts.
BSH and SBH are the orders of the dims in memory.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mmspeed.comm import (
    Axis,
    ExchangeMethod,
    all_gather,
    all_gather_objects,
    all_to_all,
    barrier,
    even_sizes,
    finish_all,
    ledger,
    nbytes,
    pass_on,
    reduce_scatter,
    start_all_to_all_many,
)
from mmspeed.device import Device, pick
from mmspeed.errors import UserError
from mmspeed.log import format_bytes
from mmspeed.mesh import process_group

BATCH, HIDDEN = 2, 3072
BSH, SBH = (0, 1, 2), (1, 0, 2)
WARM = 2
WAYS: tuple[ExchangeMethod, ...] = ("collective", "point_to_point")


@dataclass(frozen=True)
class Primitive:
    """An exchange, ready to be called. `sent`: bytes that this rank sends, by the formula. `copies`: the most that it may make."""

    name: str
    way: ExchangeMethod
    call: Callable[[], Any]
    sent: int
    copies: int


@dataclass(frozen=True)
class ExchangeRow:
    """The results of a primitive. Bytes and copies are the maxima over ranks, seconds those of the slowest rank."""

    name: str
    way: str
    ledger_bytes: int
    formula_bytes: int
    equal: bool  # on every rank
    packs: int
    unpacks: int
    most_copies: int
    seconds: float
    bytes_per_s: float
    to_collective: float | None  # time of this way divided by that of the collective

    def passed(self) -> bool:
        """True where the bytes are those of the formula, and no copies are made beyond those that the layouts need."""
        return self.equal and self.packs + self.unpacks <= self.most_copies


@dataclass(frozen=True)
class CommResult:
    """The results of the bench. `part_bytes`: bytes of a rank's part."""

    ranks: int
    device: str
    part_bytes: int
    rounds: int
    rows: list[ExchangeRow]

    def passed(self) -> bool:
        """True where every row passed."""
        return all(row.passed() for row in self.rows)

    def lines(self) -> list[str]:
        """The table."""
        width = max(len(row.name) for row in self.rows)
        lines = [
            f"{self.ranks} ranks, {self.device}, parts of {format_bytes(self.part_bytes)}, medians of {self.rounds} rounds;"
            " bytes are what a rank sends to others",
            f"  {'':<{width}}  {'made by':<14}  {'ledger':>13}  {'formula':>13}"
            f"  {'copies':>8}  {'ms':>9}  {'GB/s':>6}  {'to collective':>13}",
        ]
        for row in self.rows:
            ratio = f"{row.to_collective:.2f} x" if row.to_collective is not None else ""
            bad = (
                ""
                if row.passed()
                else "  FAILED: bytes"
                if not row.equal
                else f"  FAILED: over {row.most_copies} copies"
            )
            lines.append(
                f"  {row.name:<{width}}  {row.way.replace('_', ' '):<14}  {row.ledger_bytes:>13,}  {row.formula_bytes:>13,}"
                f"  {row.packs:>3} + {row.unpacks:<2}  {1e3 * row.seconds:>9.3f}  {row.bytes_per_s / 1e9:>6.2f}  {ratio:>13}{bad}"
            )
        return lines

    def to_json(self) -> str:
        """All figures as JSON."""
        rows = [asdict(row) | {"passed": row.passed()} for row in self.rows]
        return json.dumps(asdict(self) | {"rows": rows, "passed": self.passed()}, indent=2)


def bench_comm(megabytes: float, rounds: int) -> CommResult:
    """Measure in the launcher's processes, with parts of `megabytes` MB; all get the same result.

    Raises UserError for one process, which has no exchanges.
    """
    device = pick()
    device.activate()
    with process_group(device):
        if dist.get_world_size() < 2:
            raise UserError("bench comm needs two processes at least: give --ranks 2, or start it with torchrun")
        return measure(device, dist.group.WORLD, megabytes, rounds)


def measure(device: Device, group: Any, megabytes: float, rounds: int) -> CommResult:
    """Measure every primitive, in turns, `rounds` times. All ranks of the group call it, and get the same result."""
    axes = [Axis("sequence", group, dist.get_world_size(group), dist.get_rank(group), exchange=way) for way in WAYS]
    sequence = max(1, round(megabytes * 1e6 / (BATCH * HIDDEN * 4)))
    x = torch.randn(BATCH, sequence, HIDDEN, device=device.torch_device)
    primitives = [primitive for axis in axes for primitive in primitives_of(axis, x)]
    order = list(dict.fromkeys(primitive.name for primitive in primitives))
    primitives.sort(key=lambda primitive: (order.index(primitive.name), WAYS.index(primitive.way)))
    counts, seconds = [], [list[float]() for _ in primitives]
    for primitive in primitives:
        with ledger(*axes) as counted:
            primitive.call()
        sides = [sum(n for (*_, of), n in counted.copies.items() if of == side) for side in ("pack", "unpack")]
        counts.append((counted.total(), *sides))
    for number in range(WARM + rounds):
        for place, primitive in enumerate(primitives):
            device.synchronize()
            barrier(group)
            started = time.perf_counter()
            primitive.call()
            device.synchronize()
            if number >= WARM:
                seconds[place].append(time.perf_counter() - started)
    results = [
        {"sent": sent, "wanted": primitive.sent, "packs": packs, "unpacks": unpacks, "seconds": times}
        for primitive, (sent, packs, unpacks), times in zip(primitives, counts, seconds, strict=True)
    ]
    all_results = all_gather_objects(results, group)
    rows: list[ExchangeRow] = []
    for place, primitive in enumerate(primitives):
        rows.append(_row(primitive, [rank[place] for rank in all_results], rows))
    return CommResult(axes[0].size, device.name, nbytes(x), rounds, rows)


def primitives_of(axis: Axis, x_BSH: Tensor) -> list[Primitive]:
    """The exchanges of a part (B, S, H), by the axis's method, with the bytes that they must send and the copies that they may make."""
    n, rank, size = axis.size, axis.rank, x_BSH.element_size()
    part, others = nbytes(x_BSH), axis.size - 1
    x_SBH = x_BSH.transpose(0, 1).contiguous().transpose(0, 1)  # the same shape, in another order in memory
    whole = torch.randn(BATCH, n * x_BSH.shape[1], x_BSH.shape[2] // n, device=x_BSH.device)
    gathered_SBH = torch.randn(n * x_BSH.shape[1], *x_BSH.shape[::2], device=x_BSH.device)
    odd = x_BSH[:, :, : x_BSH.shape[2] - 1].contiguous()
    odd_H = even_sizes(odd.shape[2], n)
    exchanged = part - nbytes(x_BSH[:, :, : even_sizes(x_BSH.shape[2], n)[rank]])
    back = nbytes(whole) - nbytes(whole[:, : x_BSH.shape[1]])
    threes = [x_BSH, x_BSH + 1, x_BSH + 2]

    def primitive(name: str, call: Callable[[], Any], sent: int, copies: int) -> Primitive:
        return Primitive(name, axis.exchange, call, sent, copies)

    primitives = [
        primitive("all-to-all S to H, BSH to BSH", lambda: all_to_all(x_BSH, axis, 2, 1, order=BSH), exchanged, 2),
        primitive("all-to-all S to H, BSH to SBH", lambda: all_to_all(x_BSH, axis, 2, 1, order=SBH), exchanged, 1),
        primitive("all-to-all S to H, SBH to SBH", lambda: all_to_all(x_SBH, axis, 2, 1, order=SBH), exchanged, 1),
        primitive("all-to-all S to H, SBH to BSH", lambda: all_to_all(x_SBH, axis, 2, 1, order=BSH), exchanged, 2),
        primitive("all-to-all H to S, BSH to BSH", lambda: all_to_all(whole, axis, 1, 2, order=BSH), back, 2),
        primitive(
            "all-to-all S to H, uneven",
            lambda: all_to_all(odd, axis, 2, 1, odd_H),
            BATCH * x_BSH.shape[1] * (odd.shape[2] - odd_H[rank]) * size,
            2,
        ),
        primitive(
            "all-to-all of three in one message",
            lambda: finish_all(start_all_to_all_many(threes, axis, 2, 1)),
            3 * exchanged,
            2,
        ),
        primitive(
            "reduce-scatter, BSH", lambda: reduce_scatter(gathered_SBH.transpose(0, 1), axis, 1), others * part, 1
        ),
        primitive("reduce-scatter, SBH", lambda: reduce_scatter(gathered_SBH, axis, 0), others * part, 0),
        primitive("all-gather, BSH", lambda: all_gather(x_BSH, axis, 1), others * part, 1),
        primitive("all-gather, SBH", lambda: all_gather(x_SBH.transpose(0, 1), axis, 0), others * part, 0),
    ]
    if axis.exchange == "point_to_point":
        primitives.append(primitive("ring hop", lambda: pass_on([x_BSH], axis, rank + 1, rank - 1).wait(), part, 0))
    return primitives


def _row(primitive: Primitive, ranks: list[dict[str, Any]], before: list[ExchangeRow]) -> ExchangeRow:
    """The row of a primitive from the results of all ranks."""
    slowest = statistics.median(map(max, zip(*(rank["seconds"] for rank in ranks), strict=True)))
    sent = max(rank["sent"] for rank in ranks)
    collective = [row.seconds for row in before if row.name == primitive.name and row.way == WAYS[0]]
    return ExchangeRow(
        name=primitive.name,
        way=primitive.way,
        ledger_bytes=sent,
        formula_bytes=max(rank["wanted"] for rank in ranks),
        equal=all(rank["sent"] == rank["wanted"] for rank in ranks),
        packs=max(rank["packs"] for rank in ranks),
        unpacks=max(rank["unpacks"] for rank in ranks),
        most_copies=primitive.copies,
        seconds=slowest,
        bytes_per_s=sent / slowest,
        to_collective=slowest / collective[0] if collective else None,
    )
