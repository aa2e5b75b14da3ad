"""Safetensors written one tensor after another, in files of at most so many bytes, and read again to be compared."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mmspeed.data.cache.files import disk_errors, fsync_folder
from mmspeed.data.cache.tensor_files import Row, write_safetensors
from mmspeed.errors import UserError

DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


@dataclass(frozen=True)
class TensorEntry:
    """A tensor to write."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """The bytes of its numbers."""
        return math.prod(self.shape) * self.dtype.itemsize


E = TypeVar("E", bound=TensorEntry)


def require_new(out: Path, option: str = "") -> None:
    """Raise UserError, which `option` begins, for a folder that exists and is not empty."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{option}{out} exists already; name a new folder")


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield a folder beside `out` to write into, which becomes `out` at the end of the block, and is removed where that fails.

    Raises UserError for an `out` that exists, and for a full disk.
    """
    require_new(out)
    work = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(work, ignore_errors=True)
    try:
        with disk_errors(out):
            work.mkdir(parents=True)
            yield work
            if out.exists():
                out.rmdir()
            os.rename(work, out)
            fsync_folder(out.parent)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def write_tensors(
    folder: Path,
    stem: str,
    entries: Sequence[E],
    value_of: Callable[[E], Tensor],
    shard_bytes: int,
    advance: Callable[[], object] = lambda: None,
) -> int:
    """Write `<stem>.safetensors`, or several files and their index, and return the bytes of all tensors.

    value_of: the value of a tensor, of its shape and number type, contiguous on the CPU; one is in memory at a time. advance: called after
    each. Raises UserError where a file does not give back what was written.
    """
    shards, placed = _sharded(entries, shard_bytes), dict[str, str]()
    for number, shard in enumerate(shards, 1):
        one = f"{stem}.safetensors"
        name = one if len(shards) == 1 else f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors"
        digests: dict[str, str] = {}
        rows = (Row(entry.name, DTYPES[entry.dtype], entry.shape, entry.nbytes) for entry in shard)
        write_safetensors(folder / name, {"format": "pt"}, rows, _noted(shard, value_of, digests, advance))
        _compare(folder / name, digests)
        placed |= {entry.name: name for entry in shard}
    total = sum(entry.nbytes for entry in entries)
    if len(shards) > 1:
        contents = {"metadata": {"total_size": total}, "weight_map": placed}
        (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(contents, indent=2) + "\n", encoding="utf-8")
    return total


def _sharded(entries: Sequence[E], shard_bytes: int) -> list[list[E]]:
    """The tensors in files of at most so many bytes, in their order; a larger tensor has a file of its own."""
    shards: list[list[E]] = [[]]
    size = 0
    for entry in entries:
        if shards[-1] and size + entry.nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += entry.nbytes
    return shards


def _digest(tensor: Tensor) -> str:
    """The hash of a tensor's bytes."""
    return xxhash.xxh3_128_hexdigest(tensor.reshape(-1).view(torch.uint8).numpy().data)


def _noted(
    shard: Sequence[E], value_of: Callable[[E], Tensor], digests: dict[str, str], advance: Callable[[], object]
) -> Iterator[Tensor]:
    """The values of a file's tensors, whose hashes are noted."""
    for entry in shard:
        value = value_of(entry)
        digests[entry.name] = _digest(value)
        yield value
        advance()


def _compare(path: Path, digests: Mapping[str, str]) -> None:
    """Raises UserError where a file does not give back the tensors that were written."""
    try:
        with safe_open(path, framework="pt") as file:
            sound = set(file.keys()) == set(digests)
            other = [name for name, digest in digests.items() if not sound or _digest(file.get_tensor(name)) != digest]
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} was written and cannot be read: {error}") from None
    if other:
        raise UserError(f"{path}: `{other[0]}` is not what was written: look at the disk, and export again")
