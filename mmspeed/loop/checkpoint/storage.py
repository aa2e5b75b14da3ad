"""The files of checkpoints: torch.distributed.checkpoint over safetensors and a JSON index, no pickles (law 4).

torch's safetensors writer puts every rank's shards into files of their own but leaves no index, so that its reader
opens every file on every rank and guesses a tensor's size from the pieces it finds. Here the coordinator writes `index.json`:

    {"tensors": {name: {"shape", "dtype", "chunks": [{"file", "offsets", "shape"}]}}, "files": {file: bytes}}

From it each rank plans its own reads, whatever the number of ranks that wrote, and a lost or truncated file is noticed
before any data is read.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

FORMAT = 1
THRESHOLD = ".attend.tau"  # ends the names of the only state that checkpoints without a STATE hold: thresholds of sparse attention
INDEX, META, RECORD = "index.json", "meta.json", "latest.json"
FROZEN, STATE = "frozen", "state"  # in META, if present: the base's fingerprint, the rules of declared state
EMA_UPDATES = "ema_updates"  # in META, of each model that learns: number of updates of its average; None without one
ROLES = "roles"  # in META, if present: the same of further models, by role; of one that does not learn its fingerprint alone


class DamageError(Exception):
    """A problem of a file in a checkpoint folder; the text continues after the folder's name."""


# ---- names ----


def step_name(step: int) -> str:
    """Folder name of a step's checkpoint, such as `step-00000123`."""
    return f"step-{step:08d}"


def step_of(folder: Path) -> int | None:
    """The step that `folder` is named for; None for names that `step_name` does not make, such as `step-old`."""
    match = re.fullmatch(r"step-([0-9]+)", folder.name)
    step = int(match[1]) if match else None
    return step if step is not None and step_name(step) == folder.name else None


def steps_in(folder: Path) -> list[int]:
    """The steps of the whole checkpoints in `folder`, rising; other folders and files there are left out."""
    steps = ((step_of(path), path) for path in folder.glob("step-*"))
    return sorted(step for step, path in steps if step is not None and (path / META).is_file())


# ---- files ----


def write_json(path: Path, value: Any) -> None:
    """Write `value` to `path`, whole or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems refuse to sync a folder, and need no such call
            os.fsync(handle)
    finally:
        os.close(handle)


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DamageError(f"is incomplete: it has no {path.name}") from None
    except ValueError as error:  # no JSON, or no UTF-8
        raise DamageError(f"is damaged: {path.name} is no JSON ({error})") from None


def read_index(folder: Path) -> dict[str, Any]:
    """The index of a checkpoint. Raises DamageError when the index or a file that it names is missing or damaged."""
    index = _read_json(folder / INDEX)
    match index:
        case {"tensors": dict(tensors), "files": dict(files)} if all(
            isinstance(entry, dict) and entry.keys() >= {"shape", "dtype", "chunks"} for entry in tensors.values()
        ):
            pass
        case _:
            raise DamageError(f"is damaged: {INDEX} is not a list of tensors and files")
    for name, size in files.items():
        actual = (folder / name).stat().st_size if (folder / name).exists() else None
        if actual != size:
            state = "is missing" if actual is None else f"has {actual} of its {size} bytes"
            raise DamageError(f"is incomplete: {name} {state}")
    return dict(index)


def read_meta(folder: Path) -> dict[str, Any]:
    """The contents of `meta.json`, as `CheckpointManager` wrote them. Raises DamageError; a newer format is not checked further."""
    meta = _read_json(folder / META)
    match meta:
        case {"format": int(version)} if version > FORMAT:
            return dict(meta)
        case {"format": int(), "step": int(), "ema_updates": int() | None, "meta": dict()} if isinstance(
            meta.get(FROZEN, ""), str
        ) and isinstance(meta.get(STATE, {}), dict):
            return dict(meta)
    raise DamageError(f"is damaged: {META} lacks an entry that every checkpoint has (format, step, ema_updates, meta)")


def read_record(folder: Path) -> list[dict[str, Any]]:
    """The entries `{"step", "loss"}` of `latest.json`; none when there is no such file. Raises DamageError."""
    if not (folder / RECORD).exists():
        return []
    match _read_json(folder / RECORD):
        case {"checkpoints": list(entries)} if all(map(_is_entry, entries)):
            return entries
    raise DamageError(f"is damaged: {RECORD} is not a list of checkpoints")


def _is_entry(entry: Any) -> bool:
    match entry:
        case {"step": int(), "loss": int() | float() | None}:
            return True
    return False


@dataclass(frozen=True)
class _TensorPlace:
    """The file of a chunk, in the attribute that torch's reader needs."""

    relative_path: str


class SafetensorsWriter(HuggingFaceStorageWriter):
    """A writer of each rank's shards, one file for each first word of the names (`model`, `ema`, `optimizer`).

    When all ranks are done the coordinator writes the index and calls `commit`.
    """

    def __init__(self, folder: Path, names: Iterable[str], commit: Callable[[], None]) -> None:
        self._names = list(names)
        super().__init__(str(folder), fqn_to_index_mapping=_file_numbers(self._names), save_distributed=True)
        self._folder, self._commit = folder, commit

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Number the files of all ranks' tensors, on the coordinator, since each pipeline stage has names of its own."""
        names = (item.index.fqn for plan in plans for item in plan.items)
        self.fqn_to_index_mapping = _file_numbers([*self._names, *names])
        return super().prepare_global_plan(plans)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        files = {(r.index.fqn, r.index.offset): r.storage_data.relative_path for rank in results for r in rank}
        tensors = {}
        for name, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata)  # save() passes tensors only
            chunks = [
                {"file": files[name, chunk.offsets], "offsets": list(chunk.offsets), "shape": list(chunk.sizes)}
                for chunk in tensor.chunks
                if chunk.sizes.numel()  # ranks beyond the end of a short tensor hold nothing
            ]
            dtype = str(tensor.properties.dtype).removeprefix("torch.")
            tensors[name] = {"shape": list(tensor.size), "dtype": dtype, "chunks": chunks}
        sizes = {file: (self._folder / file).stat().st_size for file in sorted(set(files.values()))}
        write_json(self._folder / INDEX, {"tensors": tensors, "files": sizes})
        self._commit()


def _file_numbers(names: Iterable[str]) -> dict[str, int]:
    """The number of each tensor's file: one for each first word, in order of first use."""
    parts: dict[str, int] = {}
    return {name: parts.setdefault(name.split(".", 1)[0], len(parts) + 1) for name in names}


class SafetensorsReader(HuggingFaceStorageReader):
    """A reader of the files of `SafetensorsWriter`, planned from the index alone."""

    def __init__(self, folder: Path, index: dict[str, Any]) -> None:
        super().__init__(str(folder))
        self._folder, self._index = folder, index

    def read_metadata(self) -> Metadata:
        tensors: dict[str, TensorStorageMetadata] = {}
        locations: dict[MetadataIndex, _TensorPlace] = {}
        for name, entry in self._index["tensors"].items():
            chunks = []
            for chunk in entry["chunks"]:
                offsets = torch.Size(chunk["offsets"])
                chunks.append(ChunkStorageMetadata(offsets, torch.Size(chunk["shape"])))
                locations[MetadataIndex(name, offsets)] = _TensorPlace(str(self._folder / chunk["file"]))
            properties = TensorProperties(dtype=getattr(torch, entry["dtype"]))
            tensors[name] = TensorStorageMetadata(properties, torch.Size(entry["shape"]), chunks)
        return Metadata(state_dict_metadata=dict(tensors), storage_data=locations)
