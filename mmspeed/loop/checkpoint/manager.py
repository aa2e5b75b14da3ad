"""Checkpoints: the whole state of a run, written while training continues, loadable on any number of ranks and in any strategy.

    checkpoints/
      latest.json               the checkpoints in the order they were written, with validation losses; the identity of the run
      step-00000123/
        meta.json               step and all other state that is no tensor; fingerprints of weights that do not train (frozen.py)
        index.json              the file, position and hash of each tensor (storage.py)
        seal.json               the hashes of the two, the step and the run (seals.py)
        shard-*.safetensors     `model.*`, `ema.*` and `optimizer.*`, by names of parameters and buffers (state.py)

A checkpoint is written into `.tmp-step-00000123` and renamed when every rank has finished; all ranks share the folder.
"""

from __future__ import annotations

import json
import math
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from mmspeed.comm import all_gather_objects, all_reduce_max, barrier, broadcast_object
from mmspeed.data.cache.files import fsync_folder
from mmspeed.errors import UserError
from mmspeed.loop.averages import EMA
from mmspeed.loop.frozen import frozen_fingerprint
from mmspeed.loop.optimizers.make_optimizer import AnyOptimizer
from mmspeed.parallel import unwrap

from .folder import clean, put_in_place, remove
from .load import (
    best,
    check_frozen_roles,
    latest,
    load,
    load_weights,
    of_role,
    open_checkpoint,
    prefixed,
    recorded,
)
from .local import LocalCopies
from .retention import KEPT, Retention
from .staging import SaveStall, StagedState, Staging
from .state import declared_state, states_to_save, weights_to_save
from .storage import (
    EMA_UPDATES,
    FORMAT,
    FROZEN,
    META,
    RECORD,
    ROLES,
    SEAL,
    STATE,
    DamagedCheckpointError,
    DamageError,
    SafetensorsWriter,
    causes_of,
    read_record,
    run_of,
    step_name,
    step_of,
    steps_in,
    write_sealed,
)

__all__ = [
    "CheckpointManager",
    "DamagedCheckpointError",
    "Retention",
    "TrainingState",
    "best",
    "latest",
    "load",
    "load_weights",
    "open_checkpoint",
    "recorded",
    "step_name",
    "steps_in",
]


@dataclass
class TrainingState:
    """The state that a checkpoint holds. `meta` is JSON: epoch position, config, data fingerprint, and so on.

    `others`: the states of further models that learn, by role; their own `meta` and `others` are not read. `frozen`: models that do not
    learn, by role, of which a fingerprint alone is held.
    """

    model: nn.Module
    optimizer: AnyOptimizer | None = None
    ema: EMA | None = None
    meta: dict[str, Any] = field(default_factory=dict)
    others: Mapping[str, TrainingState] = field(default_factory=dict)
    frozen: Mapping[str, nn.Module] = field(default_factory=dict)


# ---- saving ----


def state_tensors(state: TrainingState, staging: Staging, role: str | None = None) -> dict[str, Tensor]:
    """The tensors of a state by their names in a checkpoint: `model.*`, `ema.*`, `optimizer.*`; for a further role `role:model.*`."""
    of_model = of_role("model", role)
    weights = weights_to_save(
        state.model, state.optimizer, lambda name, values: staging.copy(f"{of_model}.{name}", values)
    )
    tensors = prefixed(of_model, weights)
    if state.ema is not None:
        tensors |= prefixed(of_role("ema", role), state.ema.state_dict())
    if state.optimizer is not None:
        tensors |= prefixed(of_role("optimizer", role), states_to_save(state.model, state.optimizer))
    return tensors


def _learned(state: TrainingState, tensors: Mapping[str, Tensor], role: str | None = None) -> list[str]:
    """Names in a checkpoint of the weights that train, their averages and moments, which must be finite; buffers need not be."""
    of_optimizer = f"{of_role('optimizer', role)}."
    names = [name for name, parameter in unwrap(state.model).named_parameters() if parameter.requires_grad]
    weights = (f"{of_role(part, role)}.{name}" for part in ("model", "ema") for name in names)
    return [*weights, *(name for name in tensors if name.startswith(of_optimizer))]


@dataclass
class _PendingSave:
    step: int
    temporary: Path
    future: Future[Any]


class CheckpointManager:
    """A manager that writes, keeps and removes the checkpoints of one run. Made and called by all ranks together.

    At most one write is under way. It fails as a whole: the error is raised on every rank by the next `save`, `poll` or
    `wait`, and earlier checkpoints are untouched. `group` must be a CPU group that nothing else uses, because the writing
    thread communicates over it while training continues; None makes one. `local`: a folder on each node's own disk, where the newest
    `keep_local` checkpoints are written first (local.py).
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep_last: int = 2,
        keep_best: bool = True,
        keep_every: int | None = None,
        keep_hours: float | None = None,
        local: Path | None = None,
        keep_local: int = 1,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.folder, self.retention = folder, Retention(keep_last, keep_best, keep_every, keep_hours)
        if group is None and dist.is_initialized():
            group = dist.new_group(backend="gloo")
        self.group = group
        self._lead = not dist.is_initialized() or dist.get_rank() == 0
        self._pending: _PendingSave | None = None
        self._staging = Staging()
        # called on every rank when a checkpoint is whole on disk, with its step and folder
        self.on_written: Callable[[int, Path], None] | None = None
        self.saved_step: int | None = None  # of the newest checkpoint that this process knows to be whole on disk
        # of checkpoints up to this step, which are known to be from before a spike, the newest is kept; None: no rule is watching
        self.sound: int | None = None
        self._losses: dict[int, float] = {}
        self._in_use: int | None = None
        self._bases: dict[
            str | None, tuple[nn.Module, str | None]
        ] = {}  # by role: a model, the fingerprint of its frozen weights
        self._lock = threading.Lock()  # the record is changed by the training thread and by the writing one
        if self._lead:
            folder.mkdir(parents=True, exist_ok=True)
            clean(folder)
            self._run = _identity(folder)
            _mend_record(folder, self._run)
            if local is not None and run_of(folder) is None:  # a copy can be found before the first checkpoint is here
                _write_record(folder, recorded(folder), self._run)
        barrier(group)
        self.local: LocalCopies | None = None
        if local is not None:
            run = broadcast_object(self._run if self._lead else None, group=group)
            self.local = LocalCopies(local, run, keep_local, group)

    def save(self, step: int, state: TrainingState, *, blocking: bool = False) -> SaveStall:
        """Copy the state aside and write it in the background; `blocking` waits until it is on disk. Returns how long it kept this thread.

        Waits first for the write before this one. Raises UserError when that one (or, blocking, this one) failed, as it does where a
        weight that trains, its average or its moments are not finite.
        """
        begun = time.perf_counter()
        self.wait()
        free = time.perf_counter()
        tensors = state_tensors(state, self._staging)
        finite = _learned(state, tensors)
        meta: dict[str, Any] = {"format": FORMAT, "step": step, **self._facts(state), "meta": state.meta}
        for role, other in state.others.items():
            tensors |= state_tensors(other, self._staging, role)
            finite += _learned(other, tensors, role)
            meta.setdefault(ROLES, {})[role] = self._facts(other, role)
        for role, model in state.frozen.items():
            if (base := self.frozen(model, role)) is not None:
                meta.setdefault(ROLES, {})[role] = {FROZEN: base}
        meta = json.loads(json.dumps(meta))
        temporary = self.folder / f".tmp-{step_name(step)}"
        writer = SafetensorsWriter(temporary, tensors, partial(self._commit, step, temporary, meta), finite)
        staged = self._staging.stage(tensors)
        thread = ThreadPoolExecutor(1, "checkpoint-write")
        self._pending = _PendingSave(step, temporary, thread.submit(self._write, step, staged, writer, meta, finite))
        thread.shutdown(wait=False)
        stall = SaveStall(free - begun, time.perf_counter() - free)
        if blocking:
            self.wait()
        return stall

    def _write(
        self, step: int, staged: StagedState, writer: SafetensorsWriter, meta: dict[str, Any], finite: list[str]
    ) -> None:
        """Write a staged state; the writing thread's part of a save."""
        staged.wait()
        if self.local is not None:
            self.local.write(step, staged.tensors, meta, finite)
        dcp.save(cast(dict[str, Any], staged.tensors), storage_writer=writer, process_group=self.group)

    def wait(self) -> int | None:
        """Wait for the write under way; returns its step, or None without one. Raises UserError when it failed."""
        if self._pending is None:
            return None
        pending, self._pending = self._pending, None
        try:
            pending.future.result()
        except (Exception, CheckpointException) as error:
            if self._lead:
                shutil.rmtree(pending.temporary, ignore_errors=True)
            raise _explain(self.folder, pending.step, error) from error
        self.saved_step = pending.step
        if self.on_written is not None:
            self.on_written(pending.step, self.folder / step_name(pending.step))
        return pending.step

    def poll(self, group: dist.ProcessGroup | None = None) -> int | None:
        """Call `wait` if the write is finished on every rank; else return None at once.

        `group` is a CPU group of the training thread; it is used only while a write is under way.
        """
        if self._pending is None or all_reduce_max([float(not self._pending.future.done())], group)[0]:
            return None
        return self.wait()

    def mark_best(self, step: int, loss: float) -> bool:
        """Record a step's validation loss, before or after its checkpoint is written. True where it is the lowest so far.

        A loss that is not finite is never the best, and is not recorded.
        """
        if not math.isfinite(loss):
            return False
        before = [
            entry["loss"] for entry in recorded(self.folder) if entry["loss"] is not None and entry["step"] != step
        ]
        lowest = min([*before, *(other for at, other in self._losses.items() if at != step)], default=math.inf)
        self._losses[step] = loss
        if self._lead:
            self._update_record(None)
        return loss < lowest

    def latest(self) -> Path | None:
        """The checkpoint written last, or None."""
        return latest(self.folder)

    def newest_copy(self, name: str | None) -> Path | None:
        """The newest copy on the local disks that all ranks have, at least as new as the checkpoint `name`. A collective call."""
        if self.local is None:
            return None
        return self.local.newest(step_of(self.folder / name) if name is not None else None)

    def load(
        self,
        folder: Path,
        model: nn.Module,
        optimizer: AnyOptimizer | None = None,
        ema: EMA | None = None,
        role: str | None = None,
    ) -> dict[str, Any]:
        """Call `load` after the write under way, with `folder` protected from removal."""
        self.wait()
        if folder.parent == self.folder and step_of(folder) is not None:
            self._in_use = step_of(folder)  # kept until another is loaded: a rollback returns to it
        self._bases.pop(role, None)  # a checkpoint may hold weights that are frozen here, and brings its own
        copies = self.local
        of_host = copies is not None and folder.parent == copies.folder
        meta = load(
            folder, model, optimizer, ema, self.group, role, copies.group if copies and of_host else None, of_host
        )
        if copies is not None:
            copies.remove_after(meta["step"])
        self.saved_step = meta["step"]
        return meta

    def check(self, folder: Path) -> None:
        """Raise DamagedCheckpointError on all ranks where one of them finds the files of a checkpoint damaged or lacking.

        Tensors are checked when they are read. A collective call.
        """
        self.wait()
        problem = None
        try:
            open_checkpoint(folder)
        except DamagedCheckpointError as error:
            problem = str(error)
        for message in all_gather_objects(problem, self.group):
            if message is not None:
                raise DamagedCheckpointError(message)

    def set_aside(self, name: str) -> tuple[str, str] | None:
        """Rename a damaged checkpoint to `NAME.damaged`, where there is another one. A collective call.

        Returns the new name and that of the checkpoint before it; None, and nothing is renamed, where it is the only one.
        """
        names: tuple[str, str] | None = None
        if self._lead:
            others = [step_name(entry["step"]) for entry in recorded(self.folder)]
            others = [other for other in others if other != name]
            if others:
                names = _set_aside(self.folder / name), others[-1]
        names = broadcast_object(names, group=self.group)
        return (names[0], names[1]) if names is not None else None

    def newest_until(self, step: int) -> Path | None:
        """The newest checkpoint of at most `step` steps, as rank 0 sees it; None without one. A collective call."""
        self.wait()
        steps = [entry["step"] for entry in recorded(self.folder) if entry["step"] <= step] if self._lead else []
        newest = broadcast_object(max(steps, default=None), group=self.group)
        return None if newest is None else self.folder / step_name(newest)

    def keep(self, checkpoint: Path) -> None:
        """Mark a checkpoint in the record as one that no later one replaces: that from before a spike. A collective call."""
        self.wait()
        if self._lead:
            with self._lock:
                entries = recorded(self.folder)
                marked = [
                    entry | ({KEPT: True} if checkpoint.name == step_name(entry["step"]) else {}) for entry in entries
                ]
                _write_record(self.folder, marked, self._run)

    def remove_after(self, step: int) -> None:
        """Remove the checkpoints after `step` steps, to which the run has returned. A collective call."""
        self.wait()
        self._losses = {at: loss for at, loss in self._losses.items() if at <= step}
        if self._lead:
            with self._lock:
                entries, gone = _split(recorded(self.folder), lambda entry: entry["step"] <= step)
                _write_record(self.folder, entries, self._run)
                for entry in gone:
                    remove(self.folder / step_name(entry["step"]))
        barrier(self.group)

    def check_frozen_roles(self, folder: Path, models: Mapping[str, nn.Module]) -> None:
        """Compare models that do not learn with those that a checkpoint was trained beside, by `load.check_frozen_roles`.

        A collective call.
        """
        self.wait()
        fingerprints = {role: self.frozen(model, role) for role, model in models.items()}
        check_frozen_roles(folder, {role: base for role, base in fingerprints.items() if base is not None})

    def _facts(self, state: TrainingState, role: str | None = None) -> dict[str, Any]:
        """The entries of meta.json for a state, beside its tensors."""
        facts: dict[str, Any] = {EMA_UPDATES: state.ema.updates if state.ema is not None else None}
        frozen, rules = self.frozen(state.model, role), declared_state(state.model)
        facts |= {FROZEN: frozen} if frozen is not None else {}
        return facts | ({STATE: rules} if rules else {})

    def frozen(self, model: nn.Module, role: str | None = None) -> str | None:
        """The fingerprint of a model's frozen weights, computed once, since they do not change. `role`: as for `load`.

        A collective call, while no write is under way.
        """
        if role not in self._bases or self._bases[role][0] is not model:
            self._bases[role] = (model, frozen_fingerprint(model, self.group))
        return self._bases[role][1]

    def _commit(self, step: int, temporary: Path, meta: dict[str, Any], index_hash: str) -> None:
        """Put the checkpoint in place; the writer calls this on rank 0 when all ranks' files are on disk."""
        put_in_place(self.folder, step, temporary, meta, index_hash, self._run)
        self.saved_step = step
        self._update_record(step)

    def _update_record(self, written: int | None) -> None:
        """Record losses and the step just written, then remove the checkpoints that need not be kept."""
        with self._lock:
            entries = [entry for entry in recorded(self.folder) if entry["step"] != written]
            if written is not None:
                entries.append({"step": written, "loss": None})
            for entry in entries:
                entry["loss"] = self._losses.get(entry["step"], entry["loss"])
            times = {entry["step"]: _written_at(self.folder / step_name(entry["step"])) for entry in entries}
            kept = self.retention.kept(entries, times, self.sound) | {self._in_use}
            entries, gone = _split(entries, lambda entry: entry["step"] in kept)
            _write_record(self.folder, entries, self._run)
            for entry in gone:
                remove(self.folder / step_name(entry["step"]))


def _identity(folder: Path) -> str:
    """The identity of the run whose checkpoints `folder` holds, from its record or its newest sealed checkpoint; else a new one."""
    run = run_of(folder)
    for step in reversed(steps_in(folder)) if run is None else ():
        run = run or run_of(folder / step_name(step), SEAL)
    return run or uuid.uuid4().hex


def _write_record(folder: Path, entries: list[dict[str, Any]], run: str) -> None:
    newest = step_name(entries[-1]["step"]) if entries else None
    write_sealed(folder / RECORD, {"latest": newest, "checkpoints": entries, "run": run})
    fsync_folder(folder)


def _mend_record(folder: Path, run: str) -> None:
    """Rewrite a damaged record, so that the warning comes once."""
    try:
        read_record(folder)
    except DamageError:
        _write_record(folder, recorded(folder), run)


def _written_at(checkpoint: Path) -> float:
    """Seconds since 1970 at which a checkpoint was written."""
    return (checkpoint / META).stat().st_mtime


def _set_aside(checkpoint: Path) -> str:
    """Rename a checkpoint to a name that none has; returns it."""
    names = (f"{checkpoint.name}.damaged{number}" for number in ("", *(f"-{count}" for count in range(2, 10_000))))
    free = next(name for name in names if not checkpoint.with_name(name).exists())
    checkpoint.rename(checkpoint.with_name(free))
    fsync_folder(checkpoint.parent)
    return free


def _split(items: list[Any], keep: Callable[[Any], bool]) -> tuple[list[Any], list[Any]]:
    return [item for item in items if keep(item)], [item for item in items if not keep(item)]


def _explain(folder: Path, step: int, error: BaseException) -> Exception:
    """A UserError for a write that failed in the file system, else a RuntimeError with the cause."""
    causes = causes_of(error)
    refused = next((cause for cause in causes if isinstance(cause, UserError)), None)
    if refused is not None:
        return UserError(f"checkpoint of step {step} was not written: {refused}; earlier checkpoints are untouched")
    blamed = next((cause for cause in causes if isinstance(cause, OSError)), None)
    if blamed is None:
        return RuntimeError(f"checkpoint of step {step} could not be written to {folder}: {causes[0]!r}")
    return UserError(
        f"checkpoint of step {step} could not be written to {folder}: {blamed.strerror or blamed}; "
        "earlier checkpoints are untouched. Free space or repair the folder, then start the run again"
    )
