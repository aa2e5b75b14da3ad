"""Read entries from shards and compare them with the rows of an index, or recover them from the shard alone.

Nothing in a file is trusted before its seal or digest is verified, so damaged bytes reach no parser that might crash on them.
"""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import safetensors.torch

from mmspeed.data.cache.keys import canonical_json, digest, is_key
from mmspeed.data.cache.payloads import not_finite, pread
from mmspeed.data.cache.seals import is_sealed
from mmspeed.data.cache.tables import Entry, entry_schema, index_path, read_table, with_roles
from mmspeed.errors import UserError

_BLOCK = tarfile.BLOCKSIZE
# exceptions of readers of damaged files
BROKEN: tuple[type[Exception], ...] = (
    *(OSError, UserError, ValueError, KeyError, TypeError, tarfile.TarError),
    *(pa.ArrowException, safetensors.SafetensorError),
)


@dataclass(frozen=True)
class StoredPayload:
    """The bytes of one entry in a shard, and the offset of their end."""

    payload: bytes
    sidecar: bytes
    end: int


class DamagedError(ValueError):
    """An entry's bytes differ from the index."""


def read_block(file: BinaryIO, entry: Entry) -> StoredPayload:
    """An entry's payload and sidecar, compared with its row. Raises DamagedError, OSError."""
    size = os.fstat(file.fileno()).st_size
    if entry.offset + entry.bytes > size:
        raise DamagedError(f"the shard ends after {max(0, size - entry.offset)} of {entry.bytes} bytes")
    if _header(file, entry.offset - _BLOCK) != (f"{entry.key}.safetensors", entry.bytes):
        raise DamagedError("its header in the tar differs")
    payload = pread(file, entry.bytes, entry.offset)
    if digest(payload) != entry.checksum:
        raise DamagedError("its checksum differs")
    start = entry.offset + padded(entry.bytes)
    name, length = _header(file, start)
    if name != f"{entry.key}.json":
        raise DamagedError("its sidecar is missing")
    sidecar = pread(file, length, start + _BLOCK)
    if (what := _differs(sidecar, entry)) is not None:
        raise DamagedError(what)
    return StoredPayload(payload, sidecar, start + _BLOCK + padded(length))


def read_sound(file: BinaryIO, entry: Entry) -> StoredPayload:
    """`read_block` of an entry whose numbers are all finite. Raises DamagedError, OSError."""
    block = read_block(file, entry)
    if (name := not_finite(safetensors.torch.load(block.payload))) is not None:
        raise DamagedError(f"its `{name}` holds numbers that are not finite")
    return block


def _differs(sidecar: bytes, entry: Entry) -> str | None:
    try:
        sidecar_row = json.loads(sidecar)
        sidecar_row |= {"frames": tuple(sidecar_row["frames"]), "meta": canonical_json(sidecar_row["meta"])}
    except (ValueError, KeyError, TypeError):
        return "its sidecar cannot be read"
    row = asdict(entry)
    names = [n for n in row if n not in ("shard", "offset", "bytes", "source") and sidecar_row.get(n) != row[n]]
    return f"its sidecar differs from the index in {', '.join(names)}" if names else None


def _header(file: BinaryIO, at: int) -> tuple[str, int]:
    """Name and length of the tar member whose header is at offset `at`; ("", 0) if there is none."""
    try:
        info = tarfile.TarInfo.frombuf(pread(file, _BLOCK, at), "utf-8", "strict") if at >= 0 else None
    except (tarfile.TarError, ValueError):
        return "", 0
    return (info.name, info.size) if info is not None and info.isreg() else ("", 0)


def padded(count: int) -> int:
    """Bytes that a tar member of `count` bytes occupies, without its header."""
    return count + -count % _BLOCK


def trusted_rows(root: Path, shard: str) -> list[Entry]:
    """The rows of a shard's index, sorted by offset. Raises one of BROKEN unless the index is exactly as it was written."""
    path = index_path(root, shard)
    entries = [Entry.of_row(row) for row in sealed_table(path, entry_schema()).to_pylist()]
    if any(entry.shard != shard or entry.section != shard.split("/")[0] for entry in entries):
        raise ValueError("it lists the entries of another shard")
    return sorted(entries, key=lambda entry: entry.offset)


def salvage(root: Path, shard: str) -> Iterator[tuple[Entry, StoredPayload]]:
    """Yield the intact entries of a shard, from their sidecars and without an index. Raises OSError."""
    with open(root / shard, "rb") as file:
        at, size = 0, os.fstat(file.fileno()).st_size
        while at < size:
            recovered = _own_word(file, shard, at, size)
            if recovered is not None:
                yield recovered
            at = recovered[1].end if recovered is not None else at + _BLOCK


def _own_word(file: BinaryIO, shard: str, at: int, size: int) -> tuple[Entry, StoredPayload] | None:
    """The entry whose header is at offset `at`, from its sidecar; None if there is no intact one."""
    name, length = _header(file, at)
    key = name.removesuffix(".safetensors")
    if key == name or not is_key(key) or at + _BLOCK + length > size:
        return None
    start = at + _BLOCK + padded(length)
    try:
        sidecar = json.loads(pread(file, _header(file, start)[1], start + _BLOCK))
        sidecar |= {"frames": tuple(sidecar["frames"]), "meta": canonical_json(sidecar["meta"])}
        entry = Entry(**sidecar, shard=shard, offset=at + _BLOCK, bytes=length, source=None)
        if entry.section != shard.split("/")[0]:
            return None
        return entry, read_block(file, entry)
    except BROKEN:
        return None


def sealed_table(path: Path, schema: pa.Schema) -> pa.Table:
    """A table whose seal matches and whose columns are those of `schema`, and of further roles. Raises one of BROKEN otherwise."""
    if not is_sealed(path.read_bytes()):
        raise ValueError("is not as it was written")
    table = read_table(path)
    schema = with_roles(schema, table.schema.names)
    if table.schema.names != schema.names or table.schema.types != schema.types:
        raise ValueError("is another table")
    return table
