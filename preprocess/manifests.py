"""Rows of manifests in JSON lines, CSV and Parquet. A row that cannot be read is a sentence in place of a mapping."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from typing import Any

from mmspeed.errors import UserError

Row = tuple[int, "dict[str, Any] | str"]  # the line or row number counted from 1, and the row or what is wrong with it


def read_jsonl(path: str) -> Iterator[Row]:
    """One JSON object a line; empty lines are passed over."""
    with open(path, encoding="utf-8-sig", errors="replace", newline="\n") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                yield number, f"not JSON: {error}"
                continue
            yield number, row if isinstance(row, dict) else f"a JSON {type(row).__name__}, not an object"


def read_csv(path: str) -> Iterator[Row]:
    """Comma-separated values with a header line. A row with more or fewer fields than the header is not guessed at."""
    with open(path, encoding="utf-8-sig", errors="replace", newline="") as file:
        reader = csv.reader(file)
        header: list[str] | None = None
        while True:
            try:
                fields = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                yield reader.line_num, f"not CSV: {error}"
                continue
            if not fields:
                continue
            if header is None:
                header = [name.strip() for name in fields]
            elif len(fields) != len(header):
                yield reader.line_num, f"{len(fields)} fields under {len(header)} columns; quote texts that hold commas"
            else:
                yield reader.line_num, dict(zip(header, fields, strict=True))


def read_parquet(path: str) -> Iterator[Row]:
    """Rows of a Parquet file, read batch by batch. Raises UserError when it is not one."""
    import pyarrow
    import pyarrow.parquet as parquet

    try:
        number = 0
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"data.sources: {path} cannot be read as Parquet: {str(error).splitlines()[0]}") from None


READERS = {"jsonl": read_jsonl, "csv": read_csv, "parquet": read_parquet}
