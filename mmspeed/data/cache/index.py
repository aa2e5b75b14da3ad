"""Compile the index's Parquet files into two Arrow files that readers map.

The Parquet files remain the source of truth. `index/entries.arrow` holds the columns needed to read a payload, sorted by section and
key and of fixed width; `index/samples.arrow` holds the samples, sorted by key. Both record the Parquet files they were compiled from.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from mmspeed.errors import UserError
from mmspeed.log import get_logger

from .files import TempFile, disk_errors
from .keys import canonical_json
from .seals import BLANK, seal_file
from .tables import (
    NULL_KEY,
    SAMPLES_FILE,
    SECTIONS,
    SPLITS,
    entry_schema,
    index_files,
    read_columns,
    read_table,
    shard_of_index,
    with_roles,
)

VERSION = 2  # of the compiled files; those of other versions are compiled again
ENTRIES_NAME, SAMPLES_NAME = "entries.arrow", "samples.arrow"
FACTS = b"mmspeed.facts"
KEY_BYTES = 16
_LOCK = ".compile.lock"
_KEY = pa.binary(KEY_BYTES)
Array: TypeAlias = npt.NDArray[Any]

ENTRIES_SCHEMA = pa.schema(
    {
        "prefix": pa.uint64(),  # the key's first 8 bytes as a number, for the binary search
        "key": _KEY,
        "shard": pa.int32(),  # number in the list of shards
        "offset": pa.int64(),
        "bytes": pa.int64(),
        "checksum": _KEY,
        "bucket": pa.int32(),  # number in the list of buckets; -1: none
        "tokens": pa.int64(),
    }
)
SAMPLES_SCHEMA = pa.schema(
    {
        "key": pa.large_string(),
        "latent_keys": pa.large_list(_KEY),
        "text_keys": pa.large_list(_KEY),
        "split": pa.int8(),
        "bucket": pa.int32(),
        "dataset": pa.int32(),  # number in the list of data sets
        "tokens": pa.int64(),
        "lost": pa.uint8(),
        "content_id": pa.large_string(),
        "source": pa.large_string(),
    }
)


@dataclass(frozen=True)
class IndexFacts:
    """The metadata of a compiled file."""

    files: str  # digest of names and sizes of the Parquet files
    stamps: str  # digest of names, sizes and times of the Parquet files
    version: int = VERSION
    buckets: list[str] = field(default_factory=list)
    datasets: list[str] = field(default_factory=list)
    shards: list[str] = field(default_factory=list)
    sections: dict[str, list[int]] = field(default_factory=dict)  # rows [start, stop) of each section
    duplicates: int = 0
    null_key: str | None = None
    lacking: int = 0  # samples, lost ones excepted, with an entry that is missing
    lacking_source: str = ""


@dataclass(frozen=True)
class IndexFiles:
    """Digests of the Parquet files that an index consists of."""

    files: str
    stamps: str


def list_index(root: Path) -> IndexFiles:
    """Digests of the current Parquet files of a cache's index. Raises UserError if there are no samples yet."""
    if not (root / SAMPLES_FILE).exists():
        raise UserError(f"cache {root} lists no samples yet; run mmspeed preprocess to its end")
    rows = []
    for path in [*index_files(root), root / SAMPLES_FILE]:
        with suppress(FileNotFoundError):
            status = path.stat()
            rows.append([path.name, status.st_size, status.st_mtime_ns])
    return IndexFiles(digest_of_files([row[:2] for row in rows]), digest_of_files(rows))


def fits(schema: pa.Schema, expected: pa.Schema) -> bool | None:
    """True if a compiled file has the schema that this version reads; None if another version wrote it. Raises ValueError.

    A table of samples may have columns of further roles behind the others.
    """
    facts = json.loads((schema.metadata or {}).get(FACTS, b"{}"))
    if isinstance(facts, dict) and facts.get("version", VERSION) != VERSION:
        return None
    return bool(schema.equals(with_roles(expected, schema.names), check_metadata=False))


def digest_of_files(rows: list[list[Any]]) -> str:
    """A digest of rows that describe files, independent of their order."""
    return hashlib.sha256(canonical_json(sorted(rows)).encode()).hexdigest()


def compile_index(root: Path | str, target: Path | None = None) -> None:
    """Compile the index of a cache into its `index` folder or into `target`, replacing an existing one.

    Raises UserError if a Parquet file is damaged, if there are no samples yet, or if the disk is full.
    """
    root, began = Path(root), time.perf_counter()
    target = target or root / "index"
    listing = list_index(root)
    entries = _Entries.read(root)
    counts = entries.write(target / ENTRIES_NAME, listing), _write_samples(root, target, listing, entries.bare())
    seconds = time.perf_counter() - began
    get_logger("data").info("compiled the index of %s: %d entries, %d samples, %.1f s", root, *counts, seconds)


@contextmanager
def compile_lock(root: Path) -> Iterator[bool]:
    """Hold the lock under which one process compiles this cache's index; yields False if the folder cannot be written to."""
    try:
        fd = os.open(root / "index" / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o666)
    except OSError:
        yield False
        return
    try:
        with suppress(OSError):  # without locks several processes may do the same work, each to the same end
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield os.access(root / "index", os.W_OK)
    finally:
        os.close(fd)


# -- entries --------------------------------------------------------------------------------------------------------


@functools.cache
def _nibbles() -> Array:
    table = np.full(256, 255, np.uint8)
    table[np.frombuffer(b"0123456789abcdef", np.uint8)] = np.arange(16)
    return table


def unhex(column: pa.Array, what: str) -> Array:
    """A column of 32 hexadecimal digits as bytes (n, 16). Raises UserError for any other value."""
    column = column.cast(pa.large_string())
    _, offsets, data = column.buffers()
    ends = np.frombuffer(offsets, np.int64)[column.offset : column.offset + len(column) + 1] if len(column) else None
    if ends is None:
        return np.empty((0, KEY_BYTES), np.uint8)
    if column.null_count or (np.diff(ends) != 2 * KEY_BYTES).any():
        raise UserError(f"{what}: not all keys have {2 * KEY_BYTES} digits; delete it and run mmspeed preprocess again")
    digits = _nibbles()[np.frombuffer(data, np.uint8)[ends[0] : ends[-1]]].reshape(-1, 2 * KEY_BYTES)
    if (digits == 255).any():
        raise UserError(f"{what}: not all keys are hexadecimal; delete it and run mmspeed preprocess again")
    return (digits[:, 0::2] << 4) | digits[:, 1::2]


def halves(keys: Array) -> tuple[Array, Array]:
    """Keys (n, 16) as two columns of 64-bit numbers that sort like the keys."""
    numbers = np.ascontiguousarray(keys).view(">u8").astype(np.uint64)
    return np.ascontiguousarray(numbers[:, 0]), np.ascontiguousarray(numbers[:, 1])


@dataclass
class _Entries:
    """All entries, each once, sorted by section and key."""

    columns: dict[str, Array]  # prefix, rest, section, and those of the schema
    shards: list[str]
    buckets: list[str]
    duplicates: int

    @classmethod
    def read(cls, root: Path) -> _Entries:
        """Read the entries of all Parquet files. For an entry that is in two shards, the first counts."""
        paths = index_files(root)
        buckets: dict[str, int] = {}
        with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as threads:
            parts = list(threads.map(_read_part, paths))
        for number, (part, names) in enumerate(parts):
            codes = np.array([*(buckets.setdefault(name, len(buckets)) for name in names), -1], np.int32)
            part["bucket"] = codes[part["bucket"]]
            part["shard"] = np.full(len(part["key"]), number, np.int32)
        columns: dict[str, Array] = {}
        for name, empty in _EMPTY.items():
            columns[name] = np.concatenate([empty, *(part.pop(name) for part, _ in parts)])
        columns["prefix"], columns["rest"] = halves(columns["key"])
        order = np.lexsort((columns["rest"], columns["prefix"], columns["section"]))  # stable: the first shard leads
        ordered = [columns[name][order] for name in ("section", "prefix", "rest")]
        repeated = np.zeros(len(order), bool)
        if len(order):
            repeated[1:] = np.logical_and.reduce([column[1:] == column[:-1] for column in ordered])
        order = order[~repeated]
        for name in columns:
            columns[name] = columns[name][order]
        return cls(columns, [shard_of_index(path) for path in paths], list(buckets), int(repeated.sum()))

    def sections(self) -> dict[str, list[int]]:
        ends = np.searchsorted(self.columns["section"], np.arange(len(SECTIONS) + 1)).tolist()
        return {section: ends[number : number + 2] for number, section in enumerate(SECTIONS)}

    def bare(self) -> _Entries:
        """Drop all columns but those that `has` needs."""
        for name in self.columns.keys() - {"prefix", "rest", "section"}:
            del self.columns[name]
        return self

    def has(self, section: str, keys: Array) -> Array:
        """A mask (n,), true where an entry of the key (n, 16) exists."""
        rows = slice(*self.sections()[section])
        prefix, rest = self.columns["prefix"][rows], self.columns["rest"][rows]
        present = np.zeros(len(keys), bool)
        prefixes, rests = halves(keys)
        pending = np.argsort(prefixes)  # in order, the search stays in the processor's cache
        positions = np.searchsorted(prefix, prefixes[pending])
        while len(pending):
            inside = positions < len(prefix)
            pending, positions = pending[inside], positions[inside]
            same = prefix[positions] == prefixes[pending]
            pending, positions = pending[same], positions[same]
            present[pending[rest[positions] == rests[pending]]] = True
            positions = positions + 1
        return present

    def write(self, path: Path, listing: IndexFiles) -> int:
        facts = IndexFacts(
            **asdict(listing),
            buckets=self.buckets,
            shards=self.shards,
            sections=self.sections(),
            duplicates=self.duplicates,
        )
        columns = self.columns
        arrays = [
            _binary(columns[f.name]) if f.type == _KEY else pa.array(columns[f.name], f.type) for f in ENTRIES_SCHEMA
        ]
        write_batch(path, arrays, ENTRIES_SCHEMA, asdict(facts))
        return len(columns["key"])


_EMPTY: dict[str, Array] = {
    "key": np.empty((0, KEY_BYTES), np.uint8),
    "checksum": np.empty((0, KEY_BYTES), np.uint8),
    "section": np.empty(0, np.int8),
    "shard": np.empty(0, np.int32),
    "offset": np.empty(0, np.int64),
    "bytes": np.empty(0, np.int64),
    "bucket": np.empty(0, np.int32),
    "tokens": np.empty(0, np.int64),
}


def _read_part(path: Path) -> tuple[dict[str, Array], list[str]]:
    """The columns of one shard's index, and the names of its buckets. Raises UserError if it is damaged."""
    names = ("key", "section", "shard", "offset", "bytes", "checksum", "bucket", "tokens")
    table = read_table(path, pa.schema([entry_schema().field(name) for name in names])).combine_chunks()
    column = {name: _flat(table[name]) for name in names}
    sections = pc.index_in(column["section"], value_set=pa.array(SECTIONS))
    shard = pa.scalar(shard_of_index(path))
    valid = not any(column[name].null_count for name in names if name != "bucket") and not sections.null_count
    if not valid or pc.all(pc.equal(column["shard"], shard)).as_py() is False:
        raise UserError(
            f"cache table {path} lists entries that are not of {shard}; delete it and run mmspeed preprocess again"
        )
    bucket = column["bucket"].dictionary_encode()
    part = {name: column[name].to_numpy() for name in ("offset", "bytes", "tokens")}
    part["key"], part["checksum"] = (unhex(column[name], f"cache table {path}") for name in ("key", "checksum"))
    part["section"] = sections.to_numpy().astype(np.int8)
    part["bucket"] = pc.fill_null(bucket.indices, -1).to_numpy().astype(np.int32)
    return part, bucket.dictionary.to_pylist()


# -- samples --------------------------------------------------------------------------------------------------------


def _write_samples(root: Path, target: Path, listing: IndexFiles, entries: _Entries) -> int:
    """Write `samples.arrow` from the table of samples; return the number of samples."""
    path = root / SAMPLES_FILE
    columns: dict[str, pa.Array] = {}
    try:
        for name, column in read_columns(path, SAMPLES_SCHEMA):
            columns[name] = _sample_column(name, _flat(column), path)
            del column
        null_key = (pq.read_schema(path).metadata or {}).get(NULL_KEY)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise UserError(f"cache table {path} is damaged ({error}); run mmspeed preprocess again") from error
    lacking = _lacking(entries, columns)
    names = {name: columns[name].dictionary.to_pylist() for name in ("bucket", "dataset")}
    columns |= {name: columns[name].indices.cast(pa.int32()) for name in names}
    facts = IndexFacts(
        **asdict(listing),
        buckets=names["bucket"],
        datasets=names["dataset"],
        null_key=null_key.decode() if null_key else None,
        lacking=len(lacking),
        lacking_source=columns["source"][int(lacking[0])].as_py() if len(lacking) else "",
    )
    schema = with_roles(SAMPLES_SCHEMA, columns)
    write_batch(target / SAMPLES_NAME, [columns[name] for name in schema.names], schema, asdict(facts))
    return len(columns["key"])


def _sample_column(name: str, column: pa.Array, path: Path) -> pa.Array:
    """A column of the table of samples in its compiled form. Raises ValueError if it is malformed."""
    if column.null_count:
        raise ValueError(f"{name} has empty values")
    if name.endswith("_keys"):
        return _key_lists(column, path)
    if name == "key" and len(column) > 1 and not pc.all(pc.less(column[:-1], column[1:])).as_py():
        raise ValueError("it is not sorted by key")
    if name in ("bucket", "dataset"):
        return column.dictionary_encode()
    if name == "split":
        codes = pc.index_in(column, value_set=pa.array(SPLITS, pa.large_string()))
        if codes.null_count:
            raise ValueError("it names an unknown split")
        return codes.cast(pa.int8())
    return column.cast(SAMPLES_SCHEMA.field(name).type)


def _key_lists(column: pa.Array, path: Path) -> pa.Array:
    """Lists of keys in hexadecimal digits as lists of keys in bytes."""
    starts = column.offsets.to_numpy().astype(np.int64)
    keys = _binary(unhex(column.flatten(), f"cache table {path}"))
    return pa.LargeListArray.from_arrays(pa.array(starts - starts[0]), keys)


def _lacking(entries: _Entries, lists: dict[str, pa.Array]) -> Array:
    """The rows of the samples, lost ones excepted, that refer to a missing entry."""
    lost = lists["lost"].to_numpy()
    rows: list[Array] = [np.empty(0, np.int64)]
    for name in (name for name in lists if name.endswith("_keys")):
        section = "texts" if name == "text_keys" else "latents"
        keys = np.frombuffer(lists[name].values.buffers()[1], np.uint8).reshape(-1, KEY_BYTES)
        keys = keys[: len(lists[name].values)]
        absent = np.flatnonzero(~entries.has(section, keys))
        rows.append(np.searchsorted(lists[name].offsets.to_numpy(), absent, side="right") - 1)
    every = np.unique(np.concatenate(rows))
    return every[lost[every] == 0]


# -- files ----------------------------------------------------------------------------------------------------------


def _flat(column: pa.ChunkedArray) -> pa.Array:
    """A column as one array; strings and lists get 64-bit offsets, since they may exceed 2 GB in total."""
    if pa.types.is_string(column.type):
        column = column.cast(pa.large_string())
    elif pa.types.is_list(column.type):
        column = column.cast(pa.large_list(pa.large_string()))
    flat = column.combine_chunks()
    return flat.combine_chunks() if isinstance(flat, pa.ChunkedArray) else flat


def _binary(keys: Array) -> pa.Array:
    return pa.FixedSizeBinaryArray.from_buffers(_KEY, len(keys), [None, pa.py_buffer(np.ascontiguousarray(keys))])


def write_batch(path: Path, arrays: list[pa.Array], schema: pa.Schema, facts: Mapping[str, Any]) -> None:
    """Write one record batch as a sealed Arrow file with `facts` in its metadata, atomically. Raises UserError if the disk is full."""
    schema = schema.with_metadata({FACTS: json.dumps(facts), "mmspeed.seal": BLANK})
    with disk_errors(path):
        temp = TempFile(path.parent)
        try:
            with pa.OSFile(str(temp.path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
                writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=schema))
            seal_file(temp.path)
            temp.replace(path)
        finally:
            temp.discard()
