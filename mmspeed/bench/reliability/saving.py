"""The cost of saving: the stall of the training thread beside one copy of the state, and the share of hashes in a write.

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
from torch.distributed.checkpoint import HuggingFaceStorageWriter

from mmspeed.loop.checkpoint.manager import CheckpointManager, TrainingState
from mmspeed.loop.checkpoint.storage import SafetensorsWriter

STALL_GOAL, HASH_GOAL = 1.2, 0.03  # of one copy of the state; of a write with fsync


@dataclass(frozen=True)
class SavingCost:
    """Medians in seconds for a state of `megabytes`: a copy, the stall of an asynchronous save, writes without and with hashes."""

    megabytes: float
    copy: float
    stall: float
    plain_write: float
    sealed_write: float

    @property
    def stall_share(self) -> float:
        """The stall in copies of the state."""
        return self.stall / self.copy

    @property
    def hash_share(self) -> float:
        """The share of a write that hashes, the check for finite values and the index add."""
        return self.sealed_write / self.plain_write - 1

    def passed(self) -> bool:
        """True where both goals are kept."""
        return self.stall_share <= STALL_GOAL and self.hash_share <= HASH_GOAL

    def lines(self) -> list[str]:
        """The figures for people."""
        return [
            f"saving {self.megabytes:.0f} MB: the training thread stalls for {self.stall:.3f} s, {self.stall_share:.2f} x one copy of the "
            f"state ({self.copy:.3f} s; goal: at most {STALL_GOAL})",
            f"a write with fsync takes {self.sealed_write:.3f} s with hashes, {self.plain_write:.3f} s without: {self.hash_share:+.1%} "
            f"(goal: at most {HASH_GOAL:+.0%})",
        ]

    def to_json(self) -> str:
        """The figures for programs."""
        return json.dumps(asdict(self) | {"stall_share": self.stall_share, "hash_share": self.hash_share}, indent=2)


def bench_saving(rounds: int = 5, megabytes: int = 256) -> SavingCost:
    """Measure on this machine's temporary folder, each way in turn in every round; the first round warms up and is left out."""
    width = 1024
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(max(1, megabytes // 4))))
    state = TrainingState(model)
    tensors: dict[str, Any] = {f"model.{name}": value for name, value in model.state_dict().items()}
    times: dict[str, list[float]] = {"copy": [], "stall": [], "plain_write": [], "sealed_write": []}
    buffers = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        manager = CheckpointManager(folder / "run", keep_last=1)
        for step in range(1, rounds + 2):
            times["copy"].append(_seconds(lambda: _copy(tensors, buffers)))
            times["stall"].append(_seconds(partial(manager.save, step, state)))
            manager.wait()
            ways: list[tuple[str, Callable[[Path], HuggingFaceStorageWriter]]] = [
                ("plain_write", _plain_writer(tensors)),
                ("sealed_write", lambda path: SafetensorsWriter(path, tensors, lambda _: None, tensors)),
            ]
            for name, writer in ways if step % 2 else reversed(ways):
                path = folder / "alone"
                path.mkdir()
                save = partial(dcp.save, tensors, storage_writer=writer(path), no_dist=True)
                times[name].append(_seconds(save))
                shutil.rmtree(path)
    medians = {name: statistics.median(values[1:]) for name, values in times.items()}
    return SavingCost(sum(tensor.nbytes for tensor in tensors.values()) / 1e6, **medians)


def _copy(tensors: dict[str, Tensor], buffers: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        buffers[name].copy_(tensor.detach())


def _plain_writer(tensors: dict[str, Any]) -> Callable[[Path], HuggingFaceStorageWriter]:
    files = dict.fromkeys(tensors, 1)
    return lambda path: HuggingFaceStorageWriter(str(path), fqn_to_index_mapping=files, save_distributed=True)


def _seconds(work: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun
