"""Checkpoints: the whole state of a run, written while it goes on, loadable on any number of ranks and in any strategy.

    checkpoints/
      latest.json               the checkpoints in the order they were written, with validation losses
      step-00000123/
        meta.json               step and whatever else is no tensor
        index.json              which tensor lies where (storage.py)
        shard-*.safetensors     `model.*`, `ema.*` and `optimizer.*`, by parameter names

A checkpoint is written into `.tmp-step-00000123` and renamed when every rank has finished; all ranks share the folder.
"""

from __future__ import annotations

import json
import math
import shutil
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from mmspeed.comm import all_reduce_max, barrier
from mmspeed.errors import UserError
from mmspeed.log import get_logger

from .ema import EMA
from .storage import (
    FORMAT,
    META,
    RECORD,
    THRESHOLD,
    DamageError,
    SafetensorsReader,
    SafetensorsWriter,
    read_index,
    read_meta,
    read_record,
    step_name,
    step_of,
    steps_in,
    sync_folder,
    without_new_thresholds,
    write_json,
)

Which = Literal["ema", "model"]
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


@dataclass
class TrainingState:
    """What a checkpoint holds. `meta` is JSON: epoch position, config, data fingerprint, and so on."""

    model: nn.Module
    optimizer: Optimizer | None = None
    ema: EMA | None = None
    meta: dict[str, Any] = field(default_factory=dict)


# ---- which checkpoints there are ----


def recorded(folder: Path) -> list[dict[str, Any]]:
    """`{"step", "loss"}` of each checkpoint in `folder`, in the order they were written; `loss` may be None.

    Whole checkpoints that a kill kept from being recorded come last, by step; so do all, with a warning, when the
    record is damaged.
    """
    entries: list[dict[str, Any]] = []
    try:
        entries = read_record(folder)
    except DamageError as error:
        get_logger(__name__).warning(
            f"{folder} {error}; going by the names of the folders there, the recorded validation losses are lost"
        )
    known = {entry["step"] for entry in entries}
    found = steps_in(folder)
    entries += [{"step": step, "loss": None} for step in found if step not in known]
    return [entry for entry in entries if entry["step"] in found]


def latest(folder: Path) -> Path | None:
    """The checkpoint written last, or None. Warns of folders that are passed over because they are not whole."""
    for path in sorted(folder.glob("step-*")):
        if path.is_dir() and step_of(path) is not None and not (path / META).is_file():
            get_logger(__name__).warning(f"checkpoint {path} is left out: it is incomplete, it has no {META}")
    entries = recorded(folder)
    return folder / step_name(entries[-1]["step"]) if entries else None


def best(folder: Path) -> Path | None:
    """The checkpoint with the lowest validation loss, or None when none has a loss."""
    scored = [entry for entry in recorded(folder) if entry["loss"] is not None]
    return folder / step_name(min(scored, key=lambda entry: entry["loss"])["step"]) if scored else None


# ---- loading ----


def _prefixed(prefix: str, tensors: dict[str, Any]) -> dict[str, Tensor]:
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items() if isinstance(tensor, Tensor)}


def _check(folder: Path, index: dict[str, Any], wanted: dict[str, Tensor]) -> None:
    """Raise UserError at the first tensor that the checkpoint and `wanted` do not share in name and shape."""
    held = index["tensors"]
    advice = "the checkpoint is of another model; compare the `model` section of its run's config"
    for name, tensor in wanted.items():
        if name not in held:
            raise UserError(f"checkpoint {folder} has no tensor `{name}`: {advice}")
        if held[name]["shape"] != list(tensor.shape):
            shapes = f"{tuple(held[name]['shape'])} in the checkpoint, {tuple(tensor.shape)} here"
            raise UserError(f"checkpoint {folder}: `{name}` is {shapes}: {advice}")
    parts = {name.split(".", 1)[0] for name in wanted}
    # an average stands for its parameter when weights alone are loaded
    stems = {name.split(".", 1)[1] for name in wanted}
    unknown = (name for name in held if name.split(".", 1)[0] in parts and name.split(".", 1)[1] not in stems)
    extra = next((name for name in unknown if not name.endswith(THRESHOLD)), None)
    if extra is not None:
        raise UserError(f"checkpoint {folder} holds `{extra}`, which the model here does not have: {advice}")


def open_checkpoint(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(meta, index) of a checkpoint; UserError when it is missing, incomplete, damaged or from a newer mmspeed."""
    if not folder.is_dir():
        raise UserError(f"there is no checkpoint {folder}")
    try:
        meta = read_meta(folder)
        index = read_index(folder) if meta["format"] <= FORMAT else {}
    except DamageError as error:
        others = [entry["step"] for entry in recorded(folder.parent) if step_name(entry["step"]) != folder.name]
        onward = f"go on from step {others[-1]}" if others else "start anew"
        raise UserError(f"checkpoint {folder} {error}; copy it again, or delete that folder to {onward}") from None
    if meta["format"] > FORMAT:
        raise UserError(
            f"checkpoint {folder} has format {meta['format']}; this mmspeed reads up to {FORMAT}: update mmspeed"
        )
    return meta, index


def load(
    folder: Path,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    ema: EMA | None = None,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Load a checkpoint into what is given, in place, whatever the ranks and strategy that wrote it.

    All ranks call it. Returns the saved `meta` with `step`. Raises UserError when the checkpoint is missing, incomplete
    or of another model.
    """
    meta, index = open_checkpoint(folder)
    wanted = without_new_thresholds(_prefixed("model", get_model_state_dict(model)), index)
    if ema is not None:
        if meta["ema_updates"] is None:
            raise UserError(f"checkpoint {folder} has no EMA weights: set train.ema_decay to null, or start anew")
        wanted |= _prefixed("ema", ema.state_dict())
    moments: dict[str, Any] = {}
    if optimizer is not None and any(name.startswith("optimizer.") for name in index["tensors"]):
        moments = dict(get_optimizer_state_dict(model, optimizer, options=_FLAT))
        wanted |= _prefixed("optimizer", moments)
    _check(folder, index, wanted)
    dcp.load(
        cast(dict[str, Any], wanted),
        storage_reader=SafetensorsReader(folder, index),
        process_group=group,
        no_dist=not dist.is_initialized(),
    )
    if optimizer is not None and moments:
        moments |= {name: wanted[f"optimizer.{name}"] for name, value in moments.items() if isinstance(value, Tensor)}
        set_optimizer_state_dict(model, optimizer, moments, options=_FLAT)
    if ema is not None:
        ema.updates = meta["ema_updates"]
    return {**meta["meta"], "step": meta["step"]}


def load_weights(folder: Path, model: nn.Module, which: Which = "ema", alone: bool = True) -> dict[str, Any]:
    """Load weights alone, in the number type that `model` has, by one process `alone` or by all. Returns and raises as `load`."""
    meta, index = open_checkpoint(folder)
    if which == "ema" and meta["ema_updates"] is None:
        raise UserError(f"checkpoint {folder} has no EMA weights: ask for the model's own")
    averaged = {name for name, _ in model.named_parameters()} if which == "ema" else set()
    state = cast(dict[str, Tensor], get_model_state_dict(model))
    named = {f"{'ema' if name in averaged else 'model'}.{name}": tensor for name, tensor in state.items()}
    wanted = without_new_thresholds(named, index)
    _check(folder, index, wanted)
    with warnings.catch_warnings():  # torch warns that one process loads; here that is what is wanted
        warnings.simplefilter("ignore")
        dcp.load(cast(dict[str, Any], wanted), storage_reader=SafetensorsReader(folder, index), no_dist=alone)
    return {**meta["meta"], "step": meta["step"]}


# ---- saving ----


@dataclass
class _Pending:
    step: int
    temporary: Path
    future: Future[Any]


class CheckpointManager:
    """Writes and keeps the checkpoints of one run. Made and called by all ranks together.

    At most one write is under way. It fails as a whole: the error is raised on every rank by the next `save`, `poll` or
    `wait`, and what was there before is untouched. `group` must be a CPU group that nothing else uses, because the writing
    thread talks over it while training goes on; None makes one.
    """

    def __init__(
        self, folder: Path, *, keep_last: int = 2, keep_best: bool = True, group: dist.ProcessGroup | None = None
    ) -> None:
        self.folder, self.keep_last, self.keep_best = folder, keep_last, keep_best
        if group is None and dist.is_initialized():
            group = dist.new_group(backend="gloo")
        self.group = group
        self._lead = not dist.is_initialized() or dist.get_rank() == 0
        self._pending: _Pending | None = None
        self._losses: dict[int, float] = {}
        self._in_use: int | None = None
        self._lock = threading.Lock()  # the record is changed by the training thread and by the writing one
        if self._lead:
            folder.mkdir(parents=True, exist_ok=True)
            _clean(folder)
            _mend_record(folder)
        barrier(group)

    def save(self, step: int, state: TrainingState, *, blocking: bool = False) -> None:
        """Copy the state aside and write it in the background; `blocking` waits until it is on disk.

        Waits first for the write before this one. Raises UserError when that one (or, blocking, this one) failed.
        """
        self.wait()
        tensors = _prefixed("model", get_model_state_dict(state.model))
        if state.ema is not None:
            tensors |= _prefixed("ema", state.ema.state_dict())
        # asking for an empty state would make torch take a step
        if state.optimizer is not None and state.optimizer.state:
            tensors |= _prefixed("optimizer", get_optimizer_state_dict(state.model, state.optimizer, options=_FLAT))
        updates = state.ema.updates if state.ema is not None else None
        meta = json.loads(json.dumps({"format": FORMAT, "step": step, "ema_updates": updates, "meta": state.meta}))
        temporary = self.folder / f".tmp-{step_name(step)}"
        writer = SafetensorsWriter(temporary, tensors, partial(self._commit, step, temporary, meta))
        future = dcp.async_save(cast(dict[str, Any], tensors), storage_writer=writer, process_group=self.group)
        self._pending = _Pending(step, temporary, cast("Future[Any]", future))
        if blocking:
            self.wait()

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
        return pending.step

    def poll(self, group: dist.ProcessGroup | None = None) -> int | None:
        """As `wait`, but returns None at once when the write is not finished on every rank.

        `group` is a CPU group of the training thread; it is used only while a write is under way.
        """
        if self._pending is None or all_reduce_max([float(not self._pending.future.done())], group)[0]:
            return None
        return self.wait()

    def mark_best(self, step: int, loss: float) -> bool:
        """Tell a step's validation loss, before or after its checkpoint is written; whether it is the lowest so far.

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

    def best(self) -> Path | None:
        """The checkpoint with the lowest validation loss, or None."""
        return best(self.folder)

    def load(
        self, folder: Path, model: nn.Module, optimizer: Optimizer | None = None, ema: EMA | None = None
    ) -> dict[str, Any]:
        """`load`, after the write under way, and with `folder` safe from removal."""
        self.wait()
        if folder.parent == self.folder and step_of(folder) is not None:
            self._in_use = step_of(folder)  # kept until another is loaded: a rollback returns to it
        return load(folder, model, optimizer, ema, self.group)

    def _commit(self, step: int, temporary: Path, meta: dict[str, Any]) -> None:
        """Called on rank 0 by the writer, when all ranks' files are on disk."""
        write_json(temporary / META, meta)
        sync_folder(temporary)
        target = self.folder / step_name(step)
        former = self.folder / f".old-{target.name}"
        if target.exists():
            target.rename(former)
        temporary.rename(target)
        sync_folder(self.folder)
        shutil.rmtree(former, ignore_errors=True)
        self._update_record(step)

    def _update_record(self, written: int | None) -> None:
        """Record losses and the step just written, then remove what need not be kept."""
        with self._lock:
            entries = [entry for entry in recorded(self.folder) if entry["step"] != written]
            if written is not None:
                entries.append({"step": written, "loss": None})
            for entry in entries:
                entry["loss"] = self._losses.get(entry["step"], entry["loss"])
            kept = {entry["step"] for entry in entries[-self.keep_last :]} | {self._in_use}
            scored = [entry for entry in entries if entry["loss"] is not None]
            if self.keep_best and scored:
                kept.add(min(scored, key=lambda entry: entry["loss"])["step"])
            entries, gone = _split(entries, lambda entry: entry["step"] in kept)
            _write_record(self.folder, entries)
            for entry in gone:
                _remove(self.folder / step_name(entry["step"]))


def _write_record(folder: Path, entries: list[dict[str, Any]]) -> None:
    newest = step_name(entries[-1]["step"]) if entries else None
    write_json(folder / RECORD, {"latest": newest, "checkpoints": entries})
    sync_folder(folder)


def _mend_record(folder: Path) -> None:
    """Write a damaged record anew, so that the warning comes once."""
    try:
        read_record(folder)
    except DamageError:
        _write_record(folder, recorded(folder))


def _split(items: list[Any], keep: Callable[[Any], bool]) -> tuple[list[Any], list[Any]]:
    return [item for item in items if keep(item)], [item for item in items if not keep(item)]


def _remove(checkpoint: Path) -> None:
    """Remove a checkpoint so that a kill half-way leaves no part of it under its name."""
    doomed = checkpoint.with_name(f".tmp-{checkpoint.name}.gone")
    checkpoint.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _clean(folder: Path) -> None:
    """Remove what a killed run left half-written; put back a checkpoint whose replacement was not finished."""
    for left in folder.glob(".tmp-*"):
        shutil.rmtree(left, ignore_errors=True)
    for former in folder.glob(".old-*"):
        target = folder / former.name.removeprefix(".old-")
        if target.exists():
            shutil.rmtree(former, ignore_errors=True)
        else:
            former.rename(target)


def _explain(folder: Path, step: int, error: BaseException) -> Exception:
    """The error of a failed write as a UserError where the file system is to blame, else as it is."""
    causes = [wrapped[0] for wrapped in error.failures.values()] if isinstance(error, CheckpointException) else [error]
    blamed = next((cause for cause in causes if isinstance(cause, OSError)), None)
    if blamed is None:
        return RuntimeError(f"checkpoint of step {step} could not be written to {folder}: {causes[0]!r}")
    return UserError(
        f"checkpoint of step {step} could not be written to {folder}: {blamed.strerror or blamed}; "
        "earlier checkpoints are untouched. Free space or mend the folder, then start the run again"
    )
