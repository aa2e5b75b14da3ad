"""The files of checkpoints: torch.distributed.checkpoint over safetensors and a JSON index, no pickles (law 4).

torch's safetensors writer puts every rank's shards into files of their own but leaves no index, so that its reader
opens every file on every rank and guesses a tensor's size from the pieces it finds. Here the coordinator writes `index.json`:

    {"tensors": {name: {"shape", "dtype", "chunks": [{"file", "offsets", "shape", "hash"}]}},
     "files": {file: bytes}, "headers": {file: hash}}

From it each rank plans its own reads, whatever the number of ranks that wrote, and a lost or truncated file is noticed
before any data is read. A rank checks the hash of each chunk that it reads any part of (seals.py).
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future as Task
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from mmspeed.data.cache.tensor_files import rows_of, write_safetensors
from mmspeed.errors import UserError

from .seals import chunk_digest, digest, header_digest, sealed_text, unsealed

FORMAT = 1
INDEX, META, SEAL, RECORD = "index.json", "meta.json", "seal.json", "latest.json"
FROZEN, STATE = "frozen", "state"  # in META, if present: the base's fingerprint, the rules of declared state
EMA_UPDATES = "ema_updates"  # in META, of each model that learns: number of updates of its average; None without one
ROLES = "roles"  # in META, if present: the same of further models, by role; of one that does not learn its fingerprint alone


class DamageError(Exception):
    """A problem of a file in a checkpoint folder; the text continues after the folder's name."""


def causes_of(error: BaseException) -> list[BaseException]:
    """The errors of all ranks that torch's exception of a save or a load holds; of another error itself."""
    return [wrapped[0] for wrapped in error.failures.values()] if isinstance(error, CheckpointException) else [error]


class DamagedCheckpointError(UserError):
    """A checkpoint that cannot be loaded because its files are damaged or lack something; an older one may be sound."""


class NotFiniteError(UserError):
    """A weight, average or moment that is not finite and so is not saved."""


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


def write_json(path: Path, value: Any) -> str:
    """Write `value` to `path`, whole or not at all. Returns the hash of the file."""
    text = json.dumps(value, indent=1)
    _write_text(path, text)
    return digest(text.encode())


def write_sealed(path: Path, value: dict[str, Any]) -> None:
    """Write `value` to `path` with a hash of itself, whole or not at all."""
    _write_text(path, sealed_text(value))


def _write_text(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DamageError(f"is incomplete: it has no {path.name}") from None
    except PermissionError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except OSError as error:
        raise DamageError(f"is damaged: {path.name} cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise DamageError(f"is damaged: {path.name} is no JSON ({error})") from None


def _parsed(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamageError(f"is damaged: {name} is no JSON ({error})") from None


def _read_json(path: Path) -> Any:
    return _parsed(path.name, _read_text(path))


def read_index(folder: Path) -> dict[str, Any]:
    """The index of a checkpoint. Raises DamageError when the index or a file that it names is missing or damaged."""
    index = _read_json(folder / INDEX)
    match index:
        case {"tensors": dict(tensors), "files": dict(files)} if all(
            _is_tensor(entry, files) for entry in tensors.values()
        ) and all(Path(name).name == name for name in files):
            pass
        case _:
            raise DamageError(f"is damaged: {INDEX} is not a list of tensors and files")
    for name, size in files.items():
        actual = (folder / name).stat().st_size if (folder / name).is_file() else None
        if actual != size:
            state = "is missing" if actual is None else f"has {actual} of its {size} bytes"
            raise DamageError(f"is incomplete: {name} {state}")
    return dict(index)


def _is_tensor(entry: Any, files: dict[str, Any]) -> bool:
    match entry:
        case {"shape": list(shape), "dtype": str(dtype), "chunks": list(chunks)}:
            kind = isinstance(getattr(torch, dtype, None), torch.dtype)
            return kind and _are_sizes(shape) and all(_is_chunk(chunk, files, len(shape)) for chunk in chunks)
    return False


def _is_chunk(chunk: Any, files: dict[str, Any], dimensions: int) -> bool:
    match chunk:
        case {"file": str(file), "offsets": list(offsets), "shape": list(shape)}:
            sizes = _are_sizes(offsets) and _are_sizes(shape) and len(offsets) == len(shape) == dimensions
            return sizes and file in files
    return False


def _are_sizes(values: list[Any]) -> bool:
    return all(type(value) is int and value >= 0 for value in values)


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


def check_seal(folder: Path, index: dict[str, Any]) -> bool:
    """Compare a checkpoint's index, meta, name and run with its seal. False for a checkpoint without seal and hashes.

    The run is compared where the checkpoint lies beside the record of one. Raises DamageError.
    """
    if not (folder / SEAL).exists() and "headers" not in index:
        return False
    _compare_with_seal(folder, INDEX, META)
    return True


def sealed_meta(folder: Path) -> dict[str, Any]:
    """The contents of `meta.json`, compared with the seal, of a checkpoint whose other files are not looked at. Raises DamageError."""
    meta = read_meta(folder)
    _compare_with_seal(folder, META)
    return meta


def _compare_with_seal(folder: Path, *names: str) -> None:
    seal = _read_sealed(folder / SEAL)
    for name in names:
        if digest(_read_text(folder / name).encode()) != seal.get(Path(name).stem):
            raise DamageError(f"is damaged: {name} is not the file that {SEAL} records")
    if step_of(folder) not in (None, seal.get("step")):
        raise DamageError(f"is damaged: it is the checkpoint of step {seal.get('step')} under another name")
    run = run_of(folder.parent)
    if run is not None and seal.get("run") != run:
        raise DamageError("is damaged: it belongs to another run than its folder")


def _read_sealed(path: Path) -> dict[str, Any]:
    text = _read_text(path)
    value = _parsed(path.name, text)
    try:
        return unsealed(text, dict(value))
    except (TypeError, ValueError):
        raise DamageError(f"is damaged: {path.name} is not as it was written") from None


def read_record(folder: Path) -> list[dict[str, Any]]:
    """The entries `{"step", "loss"}` of `latest.json`; none when there is no such file. Raises DamageError."""
    if not (folder / RECORD).exists():
        return []
    record = _read_json(folder / RECORD)
    match record:
        case {"checkpoints": list(entries)} if all(map(_is_entry, entries)):
            _read_sealed(folder / RECORD)
            return entries
    raise DamageError(f"is damaged: {RECORD} is not a list of checkpoints")


def run_of(folder: Path, name: str = RECORD) -> str | None:
    """The identity of the run whose checkpoints `folder` holds, or of a checkpoint by its `SEAL`.

    None where that file is lost, damaged, or names none.
    """
    try:
        run = _read_sealed(folder / name).get("run")
    except (DamageError, UserError):
        return None
    return run if isinstance(run, str) else None


def _is_entry(entry: Any) -> bool:
    match entry:
        case {"step": int(), "loss": int() | float() | None}:
            return True
    return False


# ---- writing ----


@dataclass(frozen=True)
class _Written:
    """A chunk that is on the disk: its file, its hash, and that of the file's header."""

    index: MetadataIndex
    file: str
    chunk_hash: str
    header_hash: str


def _in_host_memory(data: Any) -> Tensor:
    """The values of a tensor in row-major order in the host's memory, where those of a save are already. `save()` passes tensors only."""
    return cast(Tensor, data).detach().cpu().contiguous()


def _examined(name: str, tensor: Tensor, finite: bool) -> tuple[str, float]:
    """The hash of a chunk, and the processor seconds of this thread. Raises NotFiniteError where it must be `finite` and is not."""
    began = time.thread_time()
    if finite and tensor.is_floating_point() and tensor.numel():
        least, greatest = torch.aminmax(tensor.detach())  # a NaN is in both; no copy is made
        if not (torch.isfinite(least) and torch.isfinite(greatest)):
            raise NotFiniteError(f"`{name}` holds values that are not finite")
    return chunk_digest(tensor), time.thread_time() - began


class SafetensorsWriter(HuggingFaceStorageWriter):
    """A writer of each rank's shards, one file for each first word of the names (`model`, `ema`, `optimizer`).

    When all ranks are done the coordinator writes the index and calls `commit` with its hash. The write fails where a tensor named in
    `finite` holds a value that is not.

    After the write `hash_seconds` has the processor seconds of the thread that hashes, and `late_seconds` the time that this rank's write
    waited for it when its own bytes were on the disk.
    """

    hash_seconds = late_seconds = 0.0

    def __init__(
        self, folder: Path, names: Iterable[str], commit: Callable[[str], None], finite: Iterable[str] = ()
    ) -> None:
        self._names = list(names)
        super().__init__(str(folder), fqn_to_index_mapping=_file_numbers(self._names), save_distributed=True)
        self._folder, self._commit, self._finite = folder, commit, frozenset(finite)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Number the files of all ranks' tensors, on the coordinator, since each pipeline stage has names of its own."""
        names = (item.index.fqn for plan in plans for item in plan.items)
        self.fqn_to_index_mapping = _file_numbers([*self._names, *names])
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's tensors from where they are; torch's own writer first makes the bytes of a whole file in memory."""
        files: dict[str, list[WriteItem]] = {}
        for item in plan.items:
            numbers, shard = plan.storage_data["fqn_to_index_mapping"], plan.storage_data["shard_index"]
            place = f"model-{numbers[item.index.fqn]:05d}-of-{max(numbers.values()):05d}"
            files.setdefault(f"shard-{shard:05d}-{place}.safetensors", []).append(item)
        examined: dict[MetadataIndex, Task[tuple[str, float]]] = {}  # on a thread, while the file is written
        with ThreadPoolExecutor(1, "checkpoint-hash") as pool:
            for file, items in files.items():
                tensors = {i.index.fqn: _in_host_memory(planner.resolve_data(i)) for i in items}
                for item in items:
                    name = item.index.fqn
                    examined[item.index] = pool.submit(_examined, name, tensors[name], name in self._finite)
                rows, offsets = rows_of(tensors), {i.index.fqn: {"saved_offsets": i.index.offset} for i in items}
                metadata = {"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"}
                write_safetensors(self._folder / file, metadata, rows, (tensors[row.name] for row in rows))
            written = time.perf_counter()
            self.hash_seconds = sum(task.result()[1] for task in examined.values())
        self.late_seconds = time.perf_counter() - written
        results: list[_Written] = []
        for file, items in files.items():
            header = header_digest(self._folder / file)
            results += [_Written(i.index, file, examined[i.index].result()[0], header) for i in items]
        done: Future[list[WriteResult]] = Future()
        done.set_result(cast(list[WriteResult], results))  # `finish` alone reads them
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        written = {(r.index.fqn, r.index.offset): r for rank in cast(list[list[_Written]], results) for r in rank}
        tensors = {}
        for name, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata)  # save() passes tensors only
            chunks = [
                {
                    "file": written[name, chunk.offsets].file,
                    "offsets": list(chunk.offsets),
                    "shape": list(chunk.sizes),
                    "hash": written[name, chunk.offsets].chunk_hash,
                }
                for chunk in tensor.chunks
                if chunk.sizes.numel()  # ranks beyond the end of a short tensor hold nothing
            ]
            dtype = str(tensor.properties.dtype).removeprefix("torch.")
            tensors[name] = {"shape": list(tensor.size), "dtype": dtype, "chunks": chunks}
        headers = {r.file: r.header_hash for r in written.values()}
        headers = dict(sorted(headers.items()))
        sizes = {file: (self._folder / file).stat().st_size for file in headers}
        self._commit(write_json(self._folder / INDEX, {"tensors": tensors, "files": sizes, "headers": headers}))


def _file_numbers(names: Iterable[str]) -> dict[str, int]:
    """The number of each tensor's file: one for each first word, in order of first use."""
    parts: dict[str, int] = {}
    return {name: parts.setdefault(name.split(".", 1)[0], len(parts) + 1) for name in names}


# ---- reading ----


@dataclass(frozen=True)
class _TensorPlace:
    """The file, shape and hash of a chunk."""

    relative_path: str
    shape: tuple[int, ...]
    hash: str


def read_chunk(file: Any, name: str, shape: tuple[int, ...], expected: str) -> Tensor:
    """A whole chunk of an open safetensors file, on the CPU. Raises DamageError where its hash is not the `expected` one."""
    tensor: Tensor = file.get_tensor(name)
    if tuple(tensor.shape) != shape or chunk_digest(tensor) != expected:
        raise DamageError(f"is damaged: the bytes of `{name}` are not those that were written")
    return tensor


def check_header(path: Path, expected: str) -> None:
    """Raise DamageError where a shard's header is not the one that was written; `expected` is its hash."""
    try:
        sound = header_digest(path) == expected
    except OSError as error:
        raise DamageError(f"is damaged: {path.name} cannot be read ({error.strerror})") from None
    if not sound:
        raise DamageError(f"is damaged: the header of {path.name} is not the one that was written")


class SafetensorsReader(HuggingFaceStorageReader):
    """A reader of the files of `SafetensorsWriter`, planned from the index alone.

    It reads whole chunks, one at a time, and compares their hashes, however little of one a rank needs. Raises DamageError.
    """

    def __init__(self, folder: Path, index: dict[str, Any]) -> None:
        super().__init__(str(folder))
        self._folder, self._index = folder, index

    def read_metadata(self) -> Metadata:
        tensors: dict[str, TensorStorageMetadata] = {}
        locations: dict[MetadataIndex, _TensorPlace] = {}
        for name, entry in self._index["tensors"].items():
            chunks = []
            for chunk in entry["chunks"]:
                offsets, shape = torch.Size(chunk["offsets"]), torch.Size(chunk["shape"])
                chunks.append(ChunkStorageMetadata(offsets, shape))
                locations[MetadataIndex(name, offsets)] = _TensorPlace(chunk["file"], tuple(shape), chunk["hash"])
            properties = TensorProperties(dtype=getattr(torch, entry["dtype"]))
            tensors[name] = TensorStorageMetadata(properties, torch.Size(entry["shape"]), chunks)
        return Metadata(state_dict_metadata=dict(tensors), storage_data=locations)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        files: dict[str, dict[MetadataIndex, list[ReadItem]]] = {}
        for item in plan.items:
            chunks = files.setdefault(self.storage_data[item.storage_index].relative_path, {})
            chunks.setdefault(item.storage_index, []).append(item)
        for name, chunks in files.items():
            check_header(self._folder / name, self._index["headers"][name])
            try:
                self._read_file(name, chunks, planner)
            except (SafetensorError, OSError) as error:
                raise DamageError(f"is damaged: {name} cannot be read ({error})") from None
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_file(self, name: str, chunks: dict[MetadataIndex, list[ReadItem]], planner: LoadPlanner) -> None:
        with safe_open(self._folder / name, framework="pt") as file:
            for index, items in chunks.items():
                place = self.storage_data[index]
                chunk = read_chunk(file, index.fqn, place.shape, place.hash)
                for item in items:
                    part = tuple(
                        slice(begin, begin + length)
                        for begin, length in zip(item.storage_offsets, item.lengths, strict=True)
                    )
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(chunk[part])
                    planner.commit_tensor(item, target)
