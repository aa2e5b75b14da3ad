"""Process that reads documents from a Parquet file: `python -m mmspeed.preprocess.texts.parquet_reader FILE CHOICES LIMIT`.

CHOICES is JSON: pairs of the columns that a table must have and all that are read, of which the first that it has are taken.
It writes to standard output a line of JSON (the names of all columns and of those that are read, and whether the documents are texts), an Arrow stream of the rows (the
value, and whether it is larger than the limit and left out), and a line of JSON with the problem that it ended by, if there was one.
Sizes are known before values are unfolded: a tiny file can repeat a long text very often.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import types

from mmspeed.guards import limit_memory
from mmspeed.preprocess.texts.sources import whole_file

_MAX_MEMORY = 4 << 30  # bytes of the process
_BATCH_ROWS, _BATCH_BYTES = 256, 256 << 20  # that are decoded at a time
_PIECE = 4 << 20  # bytes of rows that are sent together


def main() -> None:
    """Write the documents to standard output; ends when its reader is gone."""
    limit_memory(_MAX_MEMORY)
    out, (path, choices, limit) = sys.stdout.buffer, sys.argv[1:]
    problem = ""
    try:
        _write(out, Path(path), json.loads(choices), int(limit))
    except BrokenPipeError:
        os._exit(1)
    except Exception as error:  # any error means that this file cannot be read
        problem = str(error).partition("\n")[0][:200] or type(error).__name__
    _write_line(out, {"problem": problem})
    out.flush()


def _write_line(out: BinaryIO, value: dict[str, Any]) -> None:
    out.write(f"{json.dumps(value)}\n".encode())


def _write(out: BinaryIO, path: Path, choices: list[tuple[list[str], list[str]]], limit: int) -> None:
    stream = whole_file(path)
    with pq.ParquetFile(stream) as file:
        names = file.schema_arrow.names
        columns = next(
            ([one for one in every if one in names] for needed, every in choices if {*needed} <= {*names}), []
        )
        if not columns:
            _write_line(out, {"names": names})
            return
        fields = [file.schema_arrow.field(name) for name in columns]
        folds = fields[0].type if len(fields) == 1 else pa.struct(fields)
        plain = _unfolded(folds)
        text = types.is_string(plain) or types.is_large_string(plain)
        _write_line(out, {"names": names, "columns": columns, "text": text})
        schema = pa.schema([("value", pa.large_binary() if text else plain), ("large", pa.bool_())])
        leaves = [file.metadata.schema.column(i) for i in range(file.metadata.num_columns)]
        within = tuple(f"{name}." for name in columns)
        numbers = [i for i, leaf in enumerate(leaves) if leaf.path in columns or leaf.path.startswith(within)]
        folded = [leaves[i].path for i in numbers if leaves[i].physical_type == "BYTE_ARRAY"]
        with pq.ParquetFile(stream, read_dictionary=folded) as probe, pa.ipc.new_stream(out, schema) as writer:
            for group in range(file.metadata.num_row_groups):
                choice: Any = {"row_groups": [group], "columns": columns, "use_threads": False}
                first = next(probe.iter_batches(_BATCH_ROWS, **choice), None)
                longest = _longest(_documents(first, columns)) if first is not None else 0
                facts = file.metadata.row_group(group)
                chunks = [facts.column(i) for i in numbers]
                size = max(max(one.total_uncompressed_size, (8 + longest) * one.num_values) for one in chunks)
                rows = max(1, min(_BATCH_ROWS, _BATCH_BYTES * facts.num_rows // max(1, size)))
                for batch in file.iter_batches(rows, **choice):
                    for values, large in _pieces(_documents(batch, columns), limit):
                        values = values.cast(plain).cast(schema.field(0).type)
                        writer.write_batch(pa.record_batch([values, pa.array(large)], schema))


def _documents(batch: Any, columns: list[str]) -> Any:
    """The values of a column, or structs of those of several."""
    values = [batch.column(name) for name in columns]
    values = [each.cast(_unfolded(each.type, keep=True)) for each in values]  # Arrow takes no rows of views
    return values[0] if len(values) == 1 else pa.StructArray.from_arrays(values, names=columns)


def _longest(values: Any) -> int:
    """The bytes of the longest text of a dictionary."""
    kind = values.type
    if types.is_dictionary(kind):
        return int(_sizes(values.dictionary).max(initial=0))
    if types.is_list(kind) or types.is_large_list(kind):
        return _longest(values.flatten())
    return max(map(_longest, values.flatten()), default=0) if types.is_struct(kind) else 0


def _pieces(values: Any, limit: int) -> Iterator[tuple[Any, np.ndarray]]:
    """The values in parts of few bytes, of each which are larger than the limit: these are null."""
    sizes = _sizes(values)
    large = sizes > limit
    ends = np.cumsum(np.maximum(np.where(large, 0, sizes), _sizes(values, reserved=True)))
    starts = np.flatnonzero(np.diff(ends // _PIECE, prepend=-1))
    for start, stop in zip(starts, [*starts[1:], len(values)], strict=True):
        yield values.take(pa.array(np.arange(start, stop), mask=large[start:stop])), large[start:stop]


def _sizes(values: Any, reserved: bool = False) -> np.ndarray:
    """The bytes of each value when it is unfolded; `reserved`: that Arrow sets aside for it, by the mean of its dictionary."""
    kind = values.type
    if types.is_dictionary(kind):
        lengths, none = np.append(_sizes(values.dictionary), 0), len(values.dictionary)
        if reserved:
            lengths[:] = lengths.sum() // max(1, none)
        return lengths[_numbers(values.indices.fill_null(none))]
    if types.is_list(kind) or types.is_large_list(kind):
        lengths = _numbers(pc.list_value_length(values).fill_null(0))
        if types.is_primitive(kind.value_type):
            return lengths * -(-kind.value_type.bit_width // 8)
        sums = np.append(0, np.cumsum(_sizes(values.flatten(), reserved)))
        return np.diff(sums[np.cumsum(lengths)], prepend=0)
    if types.is_struct(kind):
        return np.stack([_sizes(field, reserved) for field in values.flatten()]).sum(axis=0)
    if types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind) or types.is_large_binary(kind):
        return _numbers(pc.binary_length(values).fill_null(0))
    return np.array([values.slice(row, 1).nbytes for row in range(len(values))], np.int64)


def _numbers(values: Any) -> np.ndarray:
    return values.to_numpy(zero_copy_only=False).astype(np.int64)


def _unfolded(kind: Any, keep: bool = False) -> Any:
    """A type without views, and without dictionaries unless they are to `keep`."""
    if types.is_dictionary(kind) and not keep:
        return _unfolded(kind.value_type)
    if types.is_string_view(kind) or types.is_binary_view(kind):
        return pa.large_string() if types.is_string_view(kind) else pa.large_binary()
    if types.is_list(kind) or types.is_large_list(kind):
        field = kind.value_field
        return (pa.list_ if types.is_list(kind) else pa.large_list)(field.with_type(_unfolded(field.type, keep)))
    if types.is_struct(kind):
        return pa.struct([field.with_type(_unfolded(field.type, keep)) for field in kind])
    return kind


if __name__ == "__main__":
    main()
