"""Copies of the newest checkpoints on each node's own disk, written before those in the run's folder.

    LOCAL/RUN/HOST/step-00000123/   a checkpoint of what the ranks of this host hold, sealed as any other; RUN: the identity of the run

A node's copy has all that its ranks need to go on in the same layout, and no more: it takes no exchange with other nodes to write or to
read. A restart goes on from copies where all ranks have theirs of one step; otherwise, and in another layout, from the run's folder.
"""

from __future__ import annotations

import math
import shutil
import socket
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from mmspeed.comm import all_gather_objects, barrier
from mmspeed.log import get_logger
from mmspeed.parallel.tensor import local

from .folder import clean, put_in_place, remove
from .storage import SEAL, SafetensorsReader, SafetensorsWriter, causes_of, run_of, step_name, steps_in

log = get_logger(__name__)


class LocalCopies:
    """The copies of one run on this host's disk, of which the newest `keep` stay. Made by all ranks together.

    `group` is the run's group of checkpoints, `run` the run's identity: copies of another run are never looked at.
    """

    def __init__(self, place: Path, run: str, keep: int, group: dist.ProcessGroup | None) -> None:
        host = socket.gethostname()
        self.folder, self.failures = place / run / host, 0
        self._place, self._run, self._keep, self._all = place, run, keep, group
        self.group, self._lead = _group_of(host, group)
        if self._lead:
            clean(self.folder)
        barrier(group)

    def write(self, step: int, tensors: dict[str, Tensor], meta: dict[str, Any], finite: Collection[str]) -> None:
        """Write this host's part of a staged state. A failure is a line and a count, since the run's folder follows."""
        temporary = self.folder / f".tmp-{step_name(step)}"
        writer = SafetensorsWriter(temporary, tensors, partial(self._commit, step, temporary, meta), finite)
        try:
            dcp.save(
                cast(dict[str, Any], tensors), storage_writer=writer, planner=_HostPlanner(), process_group=self.group
            )
        except (Exception, CheckpointException) as error:
            self.failures += 1
            if self._lead:
                shutil.rmtree(temporary, ignore_errors=True)
                log.warning(
                    f"step {step}: no copy on the local disk, {self._place}: {_cause(error)}; the checkpoint goes to the run's folder "
                    f"alone (copies that failed so far: {self.failures})"
                )

    def newest(self, least: int | None) -> Path | None:
        """The copy of the newest step that every rank of the run has on its host, `least` or later; None without one. A collective call."""
        steps = [step for step in steps_in(self.folder) if run_of(self.folder / step_name(step), SEAL) == self._run]
        common = set[int].intersection(*map(set, all_gather_objects(steps, self._all)))
        step = max(common, default=None)
        return None if step is None or (least is not None and step < least) else self.folder / step_name(step)

    def remove_after(self, step: int) -> None:
        """Remove the copies of steps after `step`, to which the run has returned."""
        for later in steps_in(self.folder) if self._lead else ():
            if later > step:
                remove(self.folder / step_name(later))

    def remove_all(self) -> None:
        """Remove the copies of a run that is finished, so that they do not stay on every node's disk."""
        if self._lead:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _commit(self, step: int, temporary: Path, meta: dict[str, Any], index_hash: str) -> None:
        put_in_place(self.folder, step, temporary, meta, index_hash, self._run)
        for older in steps_in(self.folder)[: -self._keep]:
            remove(self.folder / step_name(older))


def _group_of(host: str, group: dist.ProcessGroup | None) -> tuple[dist.ProcessGroup | None, bool]:
    """The ranks of this host as a group, and True on the first of them. A collective call."""
    if not dist.is_initialized():
        return None, True
    rank, hosts = dist.get_rank(group), all_gather_objects(host, group)
    ranks = {name: [other for other, its in enumerate(hosts) if its == name] for name in dict.fromkeys(hosts)}
    if len(ranks) == 1:
        return group, rank == 0
    groups = {
        name: dist.new_group(members, backend="gloo") for name, members in ranks.items()
    }  # by all ranks, in one order
    return groups[host], rank == ranks[host][0]


def _cause(error: BaseException) -> str:
    causes = causes_of(error)
    cause = next((one for one in causes if isinstance(one, OSError)), causes[0])
    return str(cause.strerror or cause) if isinstance(cause, OSError) else str(cause) or type(cause).__name__


class _HostPlanner(DefaultSavePlanner):
    """A planner that takes the tensors of one host's ranks, of which torch's would demand that they are whole."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        self.global_plan, self.metadata = create_default_global_save_plan(_each_once(all_plans))
        return self.global_plan, self.metadata


def _each_once(plans: list[SavePlan]) -> list[SavePlan]:
    """The plans with each chunk in one of them alone: that of the rank, among those that hold it, with the fewest values so far."""
    holders: dict[MetadataIndex, list[int]] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            holders.setdefault(item.index, []).append(rank)
    values = [0] * len(plans)
    kept: list[list[WriteItem]] = [[] for _ in plans]
    for plan in plans:
        for item in plan.items:
            ranks = holders.pop(item.index, None)
            if ranks is None or item.tensor_data is None:  # save() passes tensors only
                continue
            rank = min(ranks, key=lambda one: values[one])
            values[rank] += math.prod(item.tensor_data.chunk.sizes)
            kept[rank].append(item)
    return [replace(plan, items=own) for plan, own in zip(plans, kept, strict=True)]


def first_lacking(folder: Path, index: Mapping[str, Any], wanted: Mapping[str, Tensor]) -> str | None:
    """The first of the wanted tensors of which a checkpoint lacks a part that lies on this process; None without one."""
    stored = index["tensors"]
    for name, tensor in wanted.items():
        if name not in stored or stored[name]["shape"] != list(tensor.shape):
            return name
    planner = DefaultLoadPlanner()
    planner.set_up_planner(dict(wanted), SafetensorsReader(folder, dict(index)).read_metadata(), is_coordinator=False)
    held: Counter[str] = Counter()
    for item in planner.create_local_plan().items:
        held[item.dest_index.fqn] += math.prod(item.lengths)
    return next((name for name, tensor in wanted.items() if held[name] != local(tensor).numel()), None)
