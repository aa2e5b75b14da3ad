"""Map the compiled index: entries are looked up by binary search, samples are built one at a time. Processes share its pages.

Opening reads only the description of the columns, so ten million rows open as fast as ten; a thread compares a large file with its seal
meanwhile, and its verdict is awaited before the first payload is read. Row numbers and offsets are checked when they are used.
"""

from __future__ import annotations

import functools
import itertools
import json
import mmap
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mmspeed.config.roles import ROLES
from mmspeed.errors import UserError
from mmspeed.log import get_logger
from mmspeed.protocols import ShapeClass
from mmspeed.shapes import Bucket

from .index import (
    ENTRIES_NAME,
    ENTRIES_SCHEMA,
    FACTS,
    KEY_BYTES,
    SAMPLES_NAME,
    SAMPLES_SCHEMA,
    Array,
    IndexFacts,
    IndexFiles,
    compile_index,
    compile_lock,
    fits,
    list_index,
)
from .keys import is_key
from .payloads import PayloadLocation
from .seals import LaterSeal, is_cut, map_file, sealed_map
from .tables import SECTIONS, SPLITS, Sample

_CHECKED_BYTES = 1 << 25  # the seal of a larger compiled file is compared by a thread
_STEP = 4096  # rows turned into Python objects at a time


class EntryTable:
    """The entries of a compiled index, looked up by key."""

    def __init__(self, path: Path, file: mmap.mmap, batch: pa.RecordBatch, facts: IndexFacts) -> None:
        self._path, self._file, self._batch, self._facts = path, file, batch, facts
        columns = {name: _numbers(batch, name) for name in ("prefix", "shard", "offset", "bytes")}
        self._shard, self._offset, self._bytes = columns["shard"], columns["offset"], columns["bytes"]
        self._key, self._checksum = (_content(batch.column(name).buffers()[1]) for name in ("key", "checksum"))
        self._sections = {
            name: (start, columns["prefix"][start:stop]) for name, (start, stop) in facts.sections.items()
        }
        self.duplicates = facts.duplicates
        self.hashes = np.zeros(len(self), np.uint32)  # by row, of payloads that a reader has verified since; 0: not yet

    def __len__(self) -> int:
        return self._batch.num_rows

    def row(self, section: str, key: str) -> int | None:
        """The row of an entry; None if there is none. Raises UserError if the file was cut."""
        if not is_key(key):
            return None
        if is_cut(self._file):
            raise damaged_index(self._path)
        key_bytes = bytes.fromhex(key)
        prefix = np.uint64(int.from_bytes(key_bytes[:8], "big"))
        start, prefixes = self._sections[section]
        index = int(np.searchsorted(prefixes, prefix))
        while index < len(prefixes) and prefixes[index] == prefix:
            row = start + index
            if self._key[row * KEY_BYTES : (row + 1) * KEY_BYTES] == key_bytes:
                return row
            index += 1
        return None

    def place(self, row: int) -> PayloadLocation:
        """The location of a row's payload. Raises UserError if the row is invalid."""
        shard, offset, size = int(self._shard[row]), int(self._offset[row]), int(self._bytes[row])
        if not 0 <= shard < len(self._facts.shards) or offset < 0 or size < 0:
            raise damaged_index(self._path)
        checksum = bytes(self._checksum[row * KEY_BYTES : (row + 1) * KEY_BYTES])
        return PayloadLocation(self._facts.shards[shard], offset, size, checksum)

    def keys(self, section: str) -> Iterator[str]:
        """Yield the keys of a section, in order."""
        start, prefixes = self._sections[section]
        for row in range(start, start + len(prefixes)):
            yield self._key[row * KEY_BYTES : (row + 1) * KEY_BYTES].hex()


class SampleTable(Sequence[Sample]):
    """The samples, or some of them, in the order of their keys; a `Sample` is built on access."""

    def __init__(
        self, path: Path, file: mmap.mmap, batch: pa.RecordBatch, facts: IndexFacts, rows: Array | None = None
    ) -> None:
        self._path, self._file, self._batch, self._facts, self._rows = path, file, batch, facts, rows
        self._number = {name: _numbers(batch, name) for name in ("split", "bucket", "dataset", "tokens", "lost")}
        self._roles = [role for role in ROLES if f"{role}_keys" in batch.schema.names]
        self.null_key, self.lacking, self.lacking_source = facts.null_key, facts.lacking, facts.lacking_source
        self._buckets = [Bucket.parse(name) for name in facts.buckets]
        self._datasets = facts.datasets

    def __len__(self) -> int:
        return self._batch.num_rows if self._rows is None else len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> SampleTable: ...
    def __getitem__(self, index: int | slice) -> Sample | SampleTable:
        if isinstance(index, slice):
            return self._part(self._all()[index])
        if not -len(self) <= index < len(self):
            raise IndexError(f"there are {len(self)} samples, not {index}")
        index += len(self) if index < 0 else 0
        return self._samples(np.array([index if self._rows is None else self._rows[index]]))[0]

    def __iter__(self) -> Iterator[Sample]:
        for start in range(0, len(self), _STEP):
            yield from self._samples(self._all(start, start + _STEP))

    def split(self, name: str) -> SampleTable:
        """The samples of one split."""
        rows = np.flatnonzero(self._number["split"] == SPLITS.index(name)).astype(_row_type(self._batch.num_rows))
        if self._rows is not None:
            rows = self._rows[np.isin(self._rows, rows)]
        return self if len(rows) == len(self) else self._part(rows)

    def copies_of_held_out(self) -> int:
        """The number of training samples, among all of the table, whose content is held out too."""
        content, held = self._batch["content_id"], pa.array(self._number["split"] == SPLITS.index("val"))
        found = pc.is_in(content, value_set=pc.unique(content.filter(held)))
        return int(
            pc.sum(pc.and_(pc.and_(found, pc.invert(held)), pc.greater(pc.binary_length(content), 0))).as_py() or 0
        )

    def lost(self) -> Array:
        """The indices in this sequence of the samples whose source failed after the order of training was fixed."""
        return np.flatnonzero(self._number["lost"] if self._rows is None else self._number["lost"][self._rows])

    def buckets(self) -> list[Bucket]:
        """The buckets that the samples are in, in order."""
        return list(self.by_bucket())

    def by_bucket(self) -> dict[Bucket, Array]:
        """The indices in this sequence of each bucket's samples, sorted by the samples' keys; buckets are in order."""
        codes = self._number["bucket"] if self._rows is None else self._number["bucket"][self._rows]
        if len(codes) and not 0 <= int(codes.min()) <= int(codes.max()) < len(self._buckets):
            raise damaged_index(self._path)
        kind = _row_type(len(self))
        indices = {
            self._buckets[code]: np.flatnonzero(codes == code).astype(kind) for code in np.unique(codes).tolist()
        }
        if self._rows is not None and (np.diff(self._rows.astype(np.int64)) < 0).any():  # such as samples[::-1]
            indices = {bucket: places[np.argsort(self._rows[places])] for bucket, places in indices.items()}
        return {bucket: indices[bucket] for bucket in sorted(indices)}

    def by_group(self) -> dict[tuple[ShapeClass, str], Array]:
        """The indices of the samples of each bucket and data set, like `by_bucket`, in the order of the buckets and then of the names."""
        indices: dict[tuple[ShapeClass, str], Array] = {}
        for bucket, places in self.by_bucket().items():
            codes = self._number["dataset"][places if self._rows is None else self._rows[places]]
            if not 0 <= int(codes.min()) <= int(codes.max()) < len(self._datasets):
                raise damaged_index(self._path)
            present = np.flatnonzero(np.bincount(codes)).tolist()
            for code in sorted(present, key=lambda code: self._datasets[code]):
                indices[bucket, self._datasets[code]] = places[codes == code]
        return indices

    def sorted_keys(self) -> Iterator[list[str]]:
        """Yield the keys in order, in batches."""
        rows = None if self._rows is None else np.sort(self._rows)
        for start in range(0, len(self), 16 * _STEP):
            part = slice(start, min(start + 16 * _STEP, len(self)))
            batch_rows = np.arange(part.start, part.stop) if rows is None else rows[part]
            yield self._texts("key", batch_rows)

    def _part(self, rows: Array) -> SampleTable:
        return SampleTable(self._path, self._file, self._batch, self._facts, rows)

    def _all(self, start: int = 0, stop: int | None = None) -> Array:
        """The rows of the samples with indices [start, stop)."""
        stop = len(self) if stop is None else min(stop, len(self))
        if self._rows is not None:
            return self._rows[start:stop]
        return np.arange(start, stop, dtype=_row_type(len(self)))

    def _samples(self, rows: Array) -> list[Sample]:
        if is_cut(self._file):
            raise damaged_index(self._path)
        columns: list[list[Any]] = [self._texts(name, rows) for name in ("key", "source", "content_id")]
        columns += [self._keys(name, rows) for name in ("latent_keys", "text_keys")]
        of_roles = {role: self._keys(f"{role}_keys", rows) for role in self._roles}
        columns += [self._number[name][rows].tolist() for name in ("split", "bucket", "dataset", "tokens", "lost")]
        samples: list[Sample] = []
        splits, buckets, datasets = len(SPLITS), len(self._buckets), len(self._datasets)
        for row in zip(*columns, strict=True):
            key, source, content_id, latents, texts, split, bucket, dataset, tokens, lost = row
            if not (0 <= split < splits and 0 <= bucket < buckets and 0 <= dataset < datasets):
                raise damaged_index(self._path)
            group = SPLITS[split], self._buckets[bucket], source
            roles = {role: keys[len(samples)] for role, keys in of_roles.items() if keys[len(samples)]}
            samples.append(
                Sample(key, latents, texts, *group, tokens, content_id, bool(lost), self._datasets[dataset], roles)
            )
        return samples

    def _texts(self, name: str, rows: Array) -> list[str]:
        _, offsets, data = self._batch.column(name).buffers()
        try:
            return [bytes(part).decode() for part in self._parts(offsets, data, 1, rows)]
        except UnicodeDecodeError:
            raise damaged_index(self._path) from None

    def _keys(self, name: str, rows: Array) -> list[tuple[str, ...]]:
        _, offsets, _, data = self._batch.column(name).buffers()
        hex_keys = (bytes(part).hex() for part in self._parts(offsets, data, KEY_BYTES, rows))
        width = 2 * KEY_BYTES
        return [tuple(text[at : at + width] for at in range(0, len(text), width)) for text in hex_keys]

    def _parts(self, offsets: pa.Buffer, data: pa.Buffer | None, width: int, rows: Array) -> Iterator[memoryview]:
        """Yield, for each row, the items [offsets[row], offsets[row + 1]) of `width` bytes."""
        ends, content = np.frombuffer(offsets, np.int64, self._batch.num_rows + 1), _content(data)
        index = rows.astype(np.int64)
        for start, stop in zip(ends[index].tolist(), ends[index + 1].tolist(), strict=True):
            if not 0 <= start <= stop <= len(content) // width:
                raise damaged_index(self._path)
            yield content[start * width : stop * width]


@dataclass(frozen=True)
class Tables:
    """An open compiled index, and the seals of its large files."""

    entries: EntryTable
    samples: SampleTable
    seals: Sequence[LaterSeal] = ()


def open_tables(root: Path) -> Tables:
    """Open the compiled index of a cache's folder; it is compiled first if it is absent, damaged, or older than the Parquet files.

    Of several processes that open a cache at the same time, one compiles and the others wait. If the folder cannot be written to,
    each process compiles a temporary one. Raises UserError if the Parquet files are damaged.
    """
    folder = root / "index"
    if (tables := try_open(folder, list_index(root))) is not None:
        return tables
    with compile_lock(root) as writable:
        if writable:
            if (tables := try_open(folder, list_index(root))) is None:
                compile_index(root)
                tables = try_open(folder, None)
        else:
            with tempfile.TemporaryDirectory(prefix="mmspeed-") as name:
                compile_index(root, Path(name))
                tables = try_open(Path(name), None)
    if tables is None:
        raise damaged_index(folder / ENTRIES_NAME)
    return tables


def try_open(folder: Path, listing: IndexFiles | None) -> Tables | None:
    """Open the compiled index in `folder`; None if it is absent, damaged, or not compiled from the Parquet files in `listing`.

    With empty `listing.stamps` the times of the Parquet files are ignored.
    """
    path = folder / ENTRIES_NAME
    try:
        if (mapped := _map(path, ENTRIES_SCHEMA, listing)) is None:
            return None
        entries, path = EntryTable(path, *mapped), folder / SAMPLES_NAME
        if (mapped := _map(path, SAMPLES_SCHEMA, listing)) is None:
            return None
        samples = SampleTable(path, *mapped)
        seals = [_later_seal(folder / name) for name in (ENTRIES_NAME, SAMPLES_NAME)]
        return Tables(entries, samples, [seal for seal in seals if seal is not None])
    except (pa.ArrowException, OSError, ValueError, TypeError, KeyError) as error:
        get_logger("data").warning("the compiled index %s is damaged (%s): it is compiled again", path, error)
        return None


def _later_seal(path: Path) -> LaterSeal | None:
    """The comparison of a large file with its seal, one for all who open it in this process; None for a small one."""
    status = path.stat()
    return _begun(path, status.st_ino, status.st_mtime_ns) if status.st_size > _CHECKED_BYTES else None


@functools.lru_cache(maxsize=4)
def _begun(path: Path, inode: int, changed: int) -> LaterSeal:
    return LaterSeal(path)


def damaged_index(path: Path) -> UserError:
    """The error of an invalid compiled index, with the remedy."""
    return UserError(
        f"the compiled index {path} is damaged; delete {path.parent}/*.arrow: it is compiled again from the Parquet files beside it"
    )


def _map(
    path: Path, schema: pa.Schema, listing: IndexFiles | None
) -> tuple[mmap.mmap, pa.RecordBatch, IndexFacts] | None:
    """The mapping of a compiled file, and its single batch as views of that; None if it is absent, of another version or of other files.

    Raises ValueError and Arrow's errors for any other mismatch.
    """
    if not path.exists():
        return None
    file = map_file(path)
    if len(file) <= _CHECKED_BYTES and not sealed_map(file):
        raise ValueError("not as it was written")
    with pa.ipc.open_file(pa.py_buffer(file)) as reader:
        fitting = fits(reader.schema, schema)
        if fitting is None:
            return None
        if reader.num_record_batches != 1 or not fitting:
            raise ValueError("another table")
        batch, metadata = reader.get_batch(0), reader.schema.metadata or {}
    batch.validate()
    facts = IndexFacts(**json.loads(metadata[FACTS]))
    for name in batch.schema.names:
        column = batch.column(name)
        if column.null_count or column.offset or len(column) != batch.num_rows:
            raise ValueError(f"a column {name} of another form")
        needed = (column.type.bit_width // 8) * len(column) if _fixed(column.type) else 8 * (len(column) + 1)
        if len(column) and (column.buffers()[1] is None or column.buffers()[1].size < needed):
            raise ValueError(f"a column {name} that is cut off")
    if "prefix" in schema.names:
        bounds = list(itertools.chain.from_iterable(facts.sections[section] for section in SECTIONS))
        if (
            len(bounds) != 2 * len(SECTIONS)
            or bounds != sorted(bounds)
            or (bounds[0], bounds[-1]) != (0, batch.num_rows)
        ):
            raise ValueError("sections that do not add up")
    if listing is not None and (facts.files != listing.files or listing.stamps not in ("", facts.stamps)):
        return None
    return file, batch, facts


def _numbers(batch: pa.RecordBatch, name: str) -> Array:
    """A column of numbers as a view."""
    column = batch.column(name)
    if not len(column):
        return np.empty(0, np.dtype(str(column.type)))
    return np.frombuffer(column.buffers()[1], np.dtype(str(column.type)), len(column))


def _fixed(kind: pa.DataType) -> bool:
    """True if a column has one buffer of values; columns of strings and lists begin with 64-bit offsets."""
    return not (pa.types.is_large_string(kind) or pa.types.is_large_list(kind))


def _content(buffer: pa.Buffer | None) -> memoryview:
    """A buffer's bytes."""
    return memoryview(buffer if buffer is not None else b"").cast("B")


def _row_type(rows: int) -> type[np.signedinteger[Any]]:
    """The narrowest type that can number this many rows: ten million of them take 40 MB per process."""
    return np.int32 if rows < 1 << 31 else np.int64
