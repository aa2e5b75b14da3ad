"""The cost of saving: the stall of the training thread beside one copy of the state, and the share of hashes in a write.

Writes with and without hashes differ less than two writes of one kind do, so their difference says nothing. Both figures of hashes are
taken inside of the same write: the processor time of the thread that hashes, and how much later the write ends because it waits for that
thread when its own bytes are on the disk.

A copy is one into memory that is there already, as that of the host's buffers is: without the page faults of new memory.
"""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from mmspeed.loop.checkpoint.manager import CheckpointManager, TrainingState
from mmspeed.loop.checkpoint.storage import SafetensorsWriter

STALL_GOAL, HASH_GOAL = 1.2, 0.03  # of one copy of the state; of a write with fsync
WRITES = 3  # in a round


@dataclass(frozen=True)
class SavingCost:
    """Medians for a state of `megabytes`: seconds of a copy, of the stall of an asynchronous save and of a write with fsync.

    `hash_share`: the time by which a write ends later because of its hashes, of the rest of the same write. `hash_work`: the processor time
    of the thread that hashes, of the same write: what a machine without a free core pays.
    """

    megabytes: float
    copy: float
    stall: float
    write: float
    hash_share: float
    hash_work: float

    @property
    def stall_share(self) -> float:
        """The stall in copies of the state."""
        return self.stall / self.copy

    def passed(self) -> bool:
        """True where both goals are kept."""
        return self.stall_share <= STALL_GOAL and self.hash_share <= HASH_GOAL

    def lines(self) -> list[str]:
        """The figures for people."""
        return [
            f"saving {self.megabytes:.0f} MB: the training thread stalls for {self.stall:.3f} s, {self.stall_share:.2f} x one copy of the "
            f"state ({self.copy:.3f} s; goal: at most {STALL_GOAL})",
            f"a write with fsync takes {self.write:.3f} s, and ends {self.hash_share:.2%} later because of its hashes (goal: at most "
            f"{HASH_GOAL:.0%}); they take a thread of their own {self.hash_work:.1%} of that time",
        ]

    def to_json(self) -> str:
        """The figures for programs."""
        return json.dumps(asdict(self) | {"stall_share": self.stall_share}, indent=2)


def bench_saving(rounds: int = 5, megabytes: int = 256) -> SavingCost:
    """Measure on this machine's temporary folder, the first round warms up and is left out."""
    width = 1024
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(max(1, megabytes // 4))))
    state = TrainingState(model)
    tensors: dict[str, Any] = {f"model.{name}": value for name, value in model.state_dict().items()}
    times: dict[str, list[float]] = {"copy": [], "stall": [], "write": [], "hash_share": [], "hash_work": []}
    buffers = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        manager = CheckpointManager(folder / "run", keep_last=1)
        for step in range(1, rounds + 2):
            times["copy"].append(_seconds(lambda: _copy(tensors, buffers)))
            times["stall"].append(_seconds(partial(manager.save, step, state)))
            manager.wait()
            for _ in range(WRITES):
                path = folder / "alone"
                path.mkdir()
                writer = SafetensorsWriter(path, tensors, lambda _: None, tensors)
                seconds = _seconds(partial(dcp.save, tensors, storage_writer=writer, no_dist=True))
                times["write"].append(seconds)
                times["hash_share"].append(writer.late_seconds / (seconds - writer.late_seconds))
                times["hash_work"].append(writer.hash_seconds / seconds)
                shutil.rmtree(path)
    medians = {name: statistics.median(values[len(values) // (rounds + 1) :]) for name, values in times.items()}
    return SavingCost(sum(tensor.nbytes for tensor in tensors.values()) / 1e6, **medians)


def _copy(tensors: dict[str, Tensor], buffers: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        buffers[name].copy_(tensor.detach())


def _seconds(work: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun
