"""Process that reads a Parquet manifest: `python -m mmspeed.preprocess.sources.parquet_rows FILE COLUMN...`, rows on standard output.

Each line is JSON: first `{"names": every column's, "read": those that follow, "cells": of media in the rows
their leaf}`, then a list for each row, at the end
`{"end": true}`; or `{"error": why}` at any time. Without one of these two the process died, which damaged files can cause.
It imports no torch, to start fast.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import pyarrow
import pyarrow.parquet as parquet
from pyarrow import types

from mmspeed.guards import limit_memory
from mmspeed.media.rejections import in_words

_MAX_MEMORY = 4 << 30  # bytes: for sizes that a file does not declare
_MAX_CHUNK_BYTES = 1 << 30  # of one column in one row group, unpacked; writers make 1 to 512 MB
_MAX_CHUNK_VALUES = 1 << 26  # of one column in one row group, counted in all lists
_MAX_TEXT_CHARS = 4 << 20
_BATCH_ROWS = 4096


def main() -> None:
    """Write the rows to standard output; ends when its reader is gone."""
    limit_memory(_MAX_MEMORY)
    path, *names = sys.argv[1:]
    try:
        _write_rows(path, names)
    except BrokenPipeError:
        os._exit(1)
    except Exception as error:  # any error means that this file cannot be read
        _write({"error": (str(error) or in_words(error)).partition("\n")[0][:500]})
    sys.stdout.flush()


def _write(value: Any) -> None:
    sys.stdout.write(json.dumps(value) + "\n")


def _write_rows(path: str, names: list[str]) -> None:
    """Write all rows. Strings stay dictionary-encoded until they are Python objects: a tiny file can repeat a long string very often."""
    with parquet.ParquetFile(path) as file:
        all_names = file.schema_arrow.names
        read_names = [name for name in names if name in all_names]
        single = [name for name in read_names[:1] if name == names[0] and all_names.count(name) == 1]
        cells = {name: leaf for name in single if (leaf := _leaf_of_bytes(file, name))}
        leaves = [
            f"{name}.path" if name in cells else name
            for name in read_names
            if name not in cells or _has_path(file, name)
        ]
        cells = {name: leaf if _has_bytes(file, leaf) else "" for name, leaf in cells.items()}
        _write({"names": all_names, "read": read_names, "cells": cells})
        texts = _check_size(path, file, leaves)
        rows = file.metadata.num_rows
    with parquet.ParquetFile(path, read_dictionary=texts) as file:
        for start in range(0, rows, _BATCH_ROWS) if not leaves else ():
            _write_batch(read_names, {}, min(_BATCH_ROWS, rows - start), cells)
        for batch in file.iter_batches(_BATCH_ROWS, columns=leaves) if leaves else ():
            columns = dict(zip(batch.schema.names, batch.columns, strict=True))
            _write_batch(read_names, columns, batch.num_rows, cells)
    _write({"end": True})


def _write_batch(names: list[str], columns: dict[str, Any], rows: int, cells: dict[str, str]) -> None:
    """Write rows; of media whose bytes stand in them the names that they had, which may be empty."""
    values = []
    for name in names:
        if name not in cells:
            values.append(_values(columns[name]))
            continue
        paths = _values(columns[name].field("path")) if name in columns else [""] * rows
        valid = columns[name].is_valid().to_pylist() if name in columns else [True] * rows
        values.append([path or "" if there else None for path, there in zip(paths, valid, strict=True)])
    for row in zip(*values, strict=True):
        _write(row)


def _leaf_of_bytes(file: Any, name: str) -> str:
    """The path of a column's bytes, where media stand in the rows themselves; empty for another column."""
    kind = file.schema_arrow.field(name).type
    if _is_bytes(kind):
        return name
    if not types.is_struct(kind) or kind.get_field_index("bytes") < 0 or not _is_bytes(kind.field("bytes").type):
        return ""
    return f"{name}.bytes"


def _has_bytes(file: Any, leaf: str) -> bool:
    """False where a leaf says that all of its values are missing: then the media are files of the names beside it."""
    groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
    chunks = [group.column(i) for group in groups for i in range(group.num_columns)]
    known = [chunk.statistics for chunk in chunks if chunk.path_in_schema == leaf]
    return any(one is None or not one.has_null_count or one.num_values for one in known)


def _is_bytes(kind: Any) -> bool:
    return bool(types.is_binary(kind) or types.is_large_binary(kind))


def _has_path(file: Any, name: str) -> bool:
    kind = file.schema_arrow.field(name).type
    if not types.is_struct(kind) or kind.get_field_index("path") < 0:
        return False
    return bool(types.is_string(kind.field("path").type) or types.is_large_string(kind.field("path").type))


def _check_size(path: str, file: Any, names: list[str]) -> list[str]:
    """Paths of the text columns among `names`, columns or fields of them. Raises ValueError for a file made to fill the memory."""
    data = file.metadata
    if data.num_rows > os.path.getsize(path):
        raise ValueError("it states more rows than it has bytes, so its rows cannot name different files")
    paths = [data.schema.column(i).path for i in range(data.num_columns)]
    column_numbers = [i for i, leaf in enumerate(paths) if leaf in names or leaf.split(".")[0] in names]
    for group in range(data.num_row_groups):
        for index in column_numbers:
            chunk = data.row_group(group).column(index)
            if chunk.total_uncompressed_size > _MAX_CHUNK_BYTES or chunk.num_values > _MAX_CHUNK_VALUES:
                raise ValueError(
                    f"column '{chunk.path_in_schema[:100]}' of row group {group} unpacks to "
                    f"{chunk.total_uncompressed_size / 1e6:.0f} MB in {chunk.num_values} values, more than is read "
                    f"({_MAX_CHUNK_BYTES / 1e6:.0f} MB, {_MAX_CHUNK_VALUES}); write the file with smaller row groups"
                )
    leaves = (data.schema.column(index) for index in column_numbers)
    return [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY" and leaf.path.split(".")[0] in names]


def _values(column: Any) -> list[Any]:
    """A column as Python values; strings that are not UTF-8 keep their bytes as lone surrogates.

    Types that cannot be a text, path or split (a struct, a map, a time, bytes) become an empty mapping, which readers refuse.
    """
    kind = column.type
    if isinstance(column, pyarrow.ExtensionArray):
        return _values(column.storage)
    if types.is_dictionary(kind):
        values = _values(column.dictionary)
        return [None if index is None else values[index] for index in column.indices.to_pylist()]
    if types.is_string(kind) or types.is_large_string(kind):
        try:
            texts = column.to_pylist()
        except UnicodeDecodeError:
            raw = column.cast(pyarrow.large_binary()).to_pylist()
            texts = [None if text is None else text.decode("utf-8", "surrogateescape") for text in raw]
        return [text if text is None else text[:_MAX_TEXT_CHARS] for text in texts]
    if types.is_list(kind) or types.is_large_list(kind):
        values, ends = _values(column.flatten()), 0
        rows: list[Any] = []
        for length in column.value_lengths().to_pylist():
            rows.append(None if length is None else values[ends : ends + length])
            ends += length or 0
        return rows
    plain = types.is_null(kind) or types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind)
    if plain:
        return list(column.to_pylist())
    return [{} if valid else None for valid in column.is_valid().to_pylist()]


if __name__ == "__main__":
    main()
