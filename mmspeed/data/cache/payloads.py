"""Give the payloads of entries: bytes from the mapped shards of a folder (here) or from a remote store (remote.py), and the tensors in
them as views, without a copy and with every bound checked."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import mmap
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol, TypeAlias, cast

import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

_MAPPINGS = 128
_LENGTH = 8  # bytes of the header's length
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
Bytes: TypeAlias = memoryview | npt.NDArray[Any]
xxh3_64 = cast(Callable[[Bytes], int], xxhash.xxh3_64_intdigest)  # the stubs of arrays name no buffer


class PayloadLocation(NamedTuple):
    """The location of an entry's payload, and its checksum."""

    shard: str
    offset: int
    size: int
    checksum: bytes

    def fits(self, payload: memoryview | bytes) -> bool:
        """True if these bytes have the checksum."""
        return hashlib.sha256(payload).digest()[: len(self.checksum)] == self.checksum


def hash_of(data: Bytes) -> int:
    """32 bits of the XXH3 (Collet, 2019) of some bytes, not 0: by which later reads notice that they have changed."""
    return xxh3_64(data) & 0xFFFFFFFF or 1


class ShortError(Exception):
    """A shard ends before the entry does."""


class Store(Protocol):
    """A store that a cache reads payloads from."""

    def view(self, section: str, key: str, place: PayloadLocation) -> memoryview:
        """The bytes of a payload. Raises FileNotFoundError if its shard is missing, ShortError if that is cut off."""
        ...

    def again(self, section: str, key: str, place: PayloadLocation) -> memoryview:
        """The bytes from their source, in memory of their own, after those of `view` were not as they should be. Raises as `view`."""
        ...


class LocalStore:
    """The shards of a folder, each mapped once per process and shared with others; a payload is a view of the mapping.

    Mappings are private: writing into a view changes a copy of that page, in this process only. A mapping that is dropped
    here lives as long as any view of it.

    Args:
        root: the folder that shards are named relative to.
        mappings: number to keep; beyond it the least recently used is dropped.
    """

    def __init__(self, root: Path, mappings: int = _MAPPINGS) -> None:
        self.root, self._limit = root, mappings
        self._maps: dict[str, mmap.mmap] = {}  # most recently used last; its single operations are thread-safe
        self.mapped = 0  # mappings made so far

    def view(self, section: str, key: str, place: PayloadLocation) -> memoryview:
        end = place.offset + place.size
        mapping = self._maps.pop(place.shard, None)
        if mapping is None or len(mapping) < end:  # a shard in progress grows
            mapping = map_copy(self.root / place.shard)
            self.mapped += 1
        self._maps[place.shard] = mapping
        while len(self._maps) > self._limit:
            with suppress(KeyError, StopIteration, RuntimeError):
                self._maps.pop(next(iter(self._maps)))
        # Check the file's current size: touching a page that was cut off meanwhile would kill the process.
        if min(len(mapping), mapping.size()) < end:
            raise ShortError
        return memoryview(mapping)[place.offset : end]

    def again(self, section: str, key: str, place: PayloadLocation) -> memoryview:
        """The file's own bytes, copied: those of the mapping may have been written to in this process."""
        with open(self.root / place.shard, "rb", buffering=0) as file:
            payload = bytearray(pread(file, place.size, place.offset))
        if len(payload) < place.size:
            raise ShortError
        return memoryview(payload)


def map_copy(path: Path) -> mmap.mmap:
    """The bytes of a file, mapped privately. Raises OSError, ShortError for an empty file."""
    with open(path, "rb") as file:
        try:
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except ValueError:  # an empty file
            raise ShortError from None
    # Cold reads then come in large pages: half of the processor's work (tests.claims.loader, small latents).
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


def pread(file: BinaryIO, count: int, at: int) -> bytes:
    """Read `count` bytes of a file from offset `at`; fewer at its end."""
    parts: list[bytes] = []
    while count > 0 and (part := os.pread(file.fileno(), count, at)):
        parts.append(part)
        count, at = count - len(part), at + len(part)
    return b"".join(parts)


@dataclass(frozen=True)
class _Field:
    """One tensor of a payload: type, shape, and range of its bytes after the header."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


def tensors_of(payload: memoryview) -> dict[str, Tensor]:
    """The tensors of a safetensors payload, by name; they share its memory and keep it alive.

    Raises ValueError if the payload is not valid, for any content of its header.
    """
    if len(payload) < _LENGTH:
        raise ValueError("shorter than a header")
    start = _LENGTH + int.from_bytes(payload[:_LENGTH], "little")
    if start > len(payload):
        raise ValueError("shorter than its header")
    return {field.name: _tensor(payload, start, field) for field in _fields(bytes(payload[_LENGTH:start]))}


@functools.lru_cache(maxsize=1024)  # the entries of a bucket, and captions of a length, have one header
def _fields(text: bytes) -> tuple[_Field, ...]:
    """Parse a header and check its consistency. Raises ValueError."""
    try:
        header = json.loads(text)
    except RecursionError:
        raise ValueError("a header with too many nested levels") from None
    if not isinstance(header, dict):
        raise ValueError("a header that is not a mapping")
    return tuple(_field(name, row) for name, row in header.items() if name != "__metadata__")


def _field(name: str, row: object) -> _Field:
    if not isinstance(row, dict):
        raise ValueError("a tensor without description")
    dtype, shape, span = _DTYPES.get(str(row.get("dtype"))), _sizes(row.get("shape")), _sizes(row.get("data_offsets"))
    if dtype is None or len(span) != 2 or len(shape) > 16:
        raise ValueError("a tensor of unknown form")
    begin, end = span
    if begin > end or end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError("a tensor whose size is not that of its bytes")
    return _Field(name, dtype, tuple(shape), begin, end)


def _tensor(payload: memoryview, start: int, field: _Field) -> Tensor:
    if field.end > len(payload) - start:
        raise ValueError("a tensor beyond the payload's end")
    if field.begin == field.end:
        return torch.empty([min(size, 1 << 31) for size in field.shape], dtype=field.dtype)
    part = payload[start + field.begin : start + field.end]
    flat = torch.frombuffer(part, dtype=field.dtype)
    if flat.data_ptr() % field.dtype.itemsize:  # other writers may not align their data as mmspeed does
        flat = torch.frombuffer(bytearray(part), dtype=field.dtype)
    return flat.view(field.shape)


def _sizes(value: object) -> list[int]:
    if not isinstance(value, list) or any(type(size) is not int or size < 0 for size in value):
        raise ValueError("a size that is not a number")
    return value


def not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """The name of the first tensor that holds a number that is not finite; None where all are."""
    return next((name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())), None)
