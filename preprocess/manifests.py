"""Rows of manifests in JSON lines, CSV and Parquet. A row that cannot be read is a sentence in place of a mapping.

Each reader takes the path and the columns that will be read. Undecodable bytes become lone surrogates.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Collection, Iterator
from typing import Any, TextIO

from mmspeed.errors import UserError

Row = tuple[int, "dict[str, Any] | str"]  # the line or row number counted from 1, and the row or what is wrong with it


def read_jsonl(path: str, columns: Collection[str]) -> Iterator[Row]:
    """One JSON object a line; empty lines are passed over. Raises UserError when the file cannot be read."""
    try:
        with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="\n") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    yield number, f"not JSON: {error}"
                    continue
                yield number, row if isinstance(row, dict) else f"a JSON {type(row).__name__}, not an object"
    except OSError as error:
        raise UserError(f"data.sources: {path} cannot be read: {error.strerror or error}") from None


def read_csv(path: str, columns: Collection[str]) -> Iterator[Row]:
    """Comma-separated values with a header line. A row with more or fewer fields than the header is not guessed at.

    Rows are named by the line they begin in. Raises UserError for a file or header that cannot be read.
    """
    try:
        with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
            header: list[str] | None = None
            for begin, fields in _csv_rows(file):
                if header is None:
                    if isinstance(fields, str):
                        raise UserError(f"data.sources: {path} has a broken header in line {begin}: {fields}")
                    header = [name.strip() for name in fields]
                    _check_header(path, header, columns)
                elif isinstance(fields, str):
                    yield begin, fields
                elif len(fields) != len(header):
                    yield begin, f"{len(fields)} fields under {len(header)} columns; quote texts that hold commas"
                else:
                    yield begin, dict(zip(header, fields, strict=True))
    except OSError as error:
        raise UserError(f"data.sources: {path} cannot be read: {error.strerror or error}") from None


def _csv_rows(file: TextIO) -> Iterator[tuple[int, list[str] | str]]:
    """The line each row begins in, and its fields or what is wrong with it; without empty lines."""
    reader = csv.reader(file, strict=True)  # else an unclosed quote makes one field of all that follows
    while True:
        begin = reader.line_num + 1
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            lost = f"; lines {begin} to {reader.line_num} are lost by an unclosed quote" * (reader.line_num > begin)
            yield begin, f"not CSV: {error}{lost}"
            continue
        if fields:
            yield begin, fields


def _check_header(path: str, header: list[str], columns: Collection[str]) -> None:
    """Raises UserError when a column that will be read is there more than once."""
    for column in columns:
        if header.count(column) > 1:
            raise UserError(
                f"data.sources: {path} has {header.count(column)} columns '{column}'; rename or remove all but one"
            )


def read_parquet(path: str, columns: Collection[str]) -> Iterator[Row]:
    """Rows of a Parquet file, read batch by batch. Raises UserError when it is not one."""
    import pyarrow
    import pyarrow.parquet as parquet

    try:
        number = 0
        with parquet.ParquetFile(path) as file:
            _check_header(path, file.schema_arrow.names, columns)
            for batch in file.iter_batches():
                values = [_values(column) for column in batch.columns]
                for row in zip(*values, strict=True):
                    number += 1
                    yield number, dict(zip(batch.schema.names, row, strict=True))
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"data.sources: {path} cannot be read as Parquet: {str(error).splitlines()[0]}") from None


def _values(column: Any) -> list[Any]:
    """A column as Python values; strings that are no UTF-8 keep their bytes as lone surrogates."""
    import pyarrow

    try:
        return list(column.to_pylist())
    except UnicodeDecodeError:
        pass
    kind = column.type
    if pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind):
        raw = column.cast(pyarrow.large_binary()).to_pylist()
        return [None if text is None else text.decode("utf-8", "surrogateescape") for text in raw]
    if pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind):
        return [_values(item.values) if item.is_valid else None for item in column]
    return [b""] * len(column)  # structs and maps: never read as a caption, a path or a split


READERS = {"jsonl": read_jsonl, "csv": read_csv, "parquet": read_parquet}
