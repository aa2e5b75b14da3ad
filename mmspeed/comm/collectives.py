"""Small host-side collectives of the loop and of preprocessing.

Objects are sent as JSON, not as pickles (law 4 forbids pickles on disk; here too JSON keeps the contents plain).
They are a few bytes each and not counted: the ledger counts exchanges of tensors (`exchange.py`). The gradient traffic of DDP and
FSDP2 is torch's own and is counted by `torch.distributed`'s debug tools.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from mmspeed.errors import UserError

Group = dist.ProcessGroup | None


def alone(group: Group = None) -> bool:
    """True where this process has no peers in the group, so that there is nothing to agree on."""
    return not dist.is_initialized() or dist.get_world_size(group) == 1


def _all_reduce(values: list[float], op: Any, group: Group) -> list[float]:
    if alone(group):
        return values
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, op=op, group=group)
    return tensor.tolist()


def all_reduce_sum(values: list[float], group: Group = None) -> list[float]:
    """Element-wise sum of a few numbers over the group, in float64 on the CPU."""
    return _all_reduce(values, dist.ReduceOp.SUM, group)


def all_reduce_max(values: list[float], group: Group = None) -> list[float]:
    """Element-wise maximum of a few numbers over the group."""
    return _all_reduce(values, dist.ReduceOp.MAX, group)


def sum_counts(counts: torch.Tensor, group: Group = None) -> torch.Tensor:
    """Element-wise sum of whole numbers over the group, int64 on their device; never waits for the device."""
    total = counts.to(torch.int64)
    if not alone(group):
        dist.all_reduce(total, group=group)
    return total


def barrier(group: Group = None) -> None:
    """Wait until every rank of the group has called this."""
    if not alone(group):
        # an all-reduce on the CPU backend: `dist.barrier` would pick the accelerator and may synchronise it
        dist.all_reduce(torch.zeros(1), group=group)


def all_gather_objects(value: Any, group: Group = None) -> list[Any]:
    """The JSON-serialisable values of all ranks, in rank order."""
    if alone(group):
        return [value]
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([data.numel()]), group=group)
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: data.numel()] = data
    parts = [torch.zeros(longest, dtype=torch.uint8) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    return [json.loads(part[: int(size)].numpy().tobytes()) for part, size in zip(parts, sizes, strict=True)]


def first_does(check: Callable[[], None], rank: int, group: Group = None) -> None:
    """Run `check()` on rank 0; a UserError that it raises there is raised on every rank."""
    problem = None
    if rank == 0:
        try:
            check()
        except UserError as error:
            problem = str(error)
    problem = broadcast_object(problem, group=group)
    if problem is not None:
        raise UserError(problem)


def broadcast_object(value: Any, source: int = 0, group: Group = None) -> Any:
    """The JSON-serialisable value of rank `source`, on every rank."""
    return all_gather_objects(value, group)[source]
