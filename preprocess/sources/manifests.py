"""Rows of manifests in JSON lines, CSV and Parquet. A row that cannot be read is a sentence in place of a mapping.

Each reader takes the path and the columns that will be read. Undecodable bytes become lone surrogates. Files may be hostile: no
line or field is taken into memory that is larger than the limits below.
"""

from __future__ import annotations

import csv
import json
import signal
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from mmspeed.errors import UserError
from mmspeed.preprocess.sources.rejections import readable

Row = tuple[int, "dict[str, Any] | str"]  # the line or row number counted from 1, and the row or what is wrong with it

_MAX_LINE_BYTES = 4 << 20  # a row's object takes up to some 30 times its line
_SHOWN_COLUMNS = 20


@dataclass(frozen=True)
class Columns:
    """The columns that are read of a manifest. `split` may be missing from it, the others not."""

    media: str
    caption: str
    split: str | None

    @property
    def names(self) -> list[str]:
        return [name for name in dict.fromkeys((self.media, self.caption, self.split)) if name]

    def check(self, path: str, names: Collection[str]) -> None:
        """Raises UserError when one of `names` that must be in the manifest at `path` is not there, or is there twice."""
        for column in self.names:
            count = sum(name == column for name in names)
            if count > 1:
                raise UserError(f"data.sources: {path} has {count} columns '{column}'; rename or remove all but one")
        for option, column in (("media_column", self.media), ("caption_column", self.caption)):
            if column not in names:
                first = ", ".join(repr(name[:100]) for name in list(names)[:_SHOWN_COLUMNS])
                more = f" and {len(names) - _SHOWN_COLUMNS} more" if len(names) > _SHOWN_COLUMNS else ""
                raise UserError(f"data.sources: {path} has no column '{column}'; it has {first}{more}: set {option}")


def read_jsonl(path: str, columns: Columns) -> Iterator[Row]:
    """One JSON object a line; empty lines are passed over. Raises UserError when the file cannot be read.

    Whether the columns are there shows at the end: each row may have its own.
    """
    seen: dict[str, None] = {}
    try:
        with open(path, "rb") as file:
            for number, line in _lines(file):
                if line is None:
                    yield number, f"a line longer than {_MAX_LINE_BYTES} bytes"
                    continue
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    yield number, f"not JSON: {error}"
                    continue
                if not isinstance(row, dict):
                    yield number, f"a JSON {type(row).__name__}, not an object"
                    continue
                if len(seen) < 1000:  # names for a message; a hostile file has new ones in each row
                    seen.update(dict.fromkeys(row))
                kept = {name: row[name] for name in columns.names if name in row}
                seen.update(dict.fromkeys(kept))
                yield number, kept
    except OSError as error:
        raise _cannot_be_read(path, error) from None
    if seen:
        columns.check(path, seen)


def _cannot_be_read(path: str, error: OSError) -> UserError:
    return UserError(f"data.sources: {path} cannot be read: {error.strerror or error}")


def _lines(file: BinaryIO) -> Iterator[tuple[int, str | None]]:
    """Lines with their numbers from 1; None for one that is too long, of which no more is kept than the limit."""
    number = 0
    while line := file.readline(_MAX_LINE_BYTES + 1):
        number += 1
        if len(line) <= _MAX_LINE_BYTES:
            yield number, line.decode("utf-8-sig" if number == 1 else "utf-8", "surrogateescape")
            continue
        while line and not line.endswith(b"\n"):
            line = file.readline(_MAX_LINE_BYTES)
        yield number, None


def read_csv(path: str, columns: Columns) -> Iterator[Row]:
    """Comma-separated values with a header line. A row with more or fewer fields than the header is not guessed at.

    Rows are named by the line they begin in. Raises UserError for a file or header that cannot be read.
    """
    try:
        with open(path, "rb") as file:
            header: list[str] | None = None
            for begin, fields in _csv_rows(file):
                if header is None:
                    if isinstance(fields, str):
                        raise UserError(f"data.sources: {path} has a broken header in line {begin}: {fields}")
                    header = [name.strip() for name in fields]
                    columns.check(path, header)
                elif isinstance(fields, str):
                    yield begin, fields
                elif len(fields) != len(header):
                    yield begin, f"{len(fields)} fields under {len(header)} columns; quote texts that hold commas"
                else:
                    yield begin, dict(zip(header, fields, strict=True))
    except OSError as error:
        raise _cannot_be_read(path, error) from None


def _csv_rows(file: BinaryIO) -> Iterator[tuple[int, list[str] | str]]:
    """The line each row begins in, and its fields or what is wrong with it; without empty lines."""
    # A line that is too long stands for a field that is: csv has a limit of its own for fields.
    too_long = "x" * (csv.field_size_limit() + 1)
    reader = csv.reader(_csv_lines(file, too_long), strict=True)  # else an unclosed quote makes one field of the rest
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


def _csv_lines(file: BinaryIO, too_long: str) -> Iterable[str]:
    return (too_long if line is None else line for _, line in _lines(file))


def read_parquet(path: str, columns: Columns) -> Iterator[Row]:
    """Rows of a Parquet file. Raises UserError when it is not one, or unpacks to too much.

    Read in a process of its own (parquet_rows.py): a damaged file can abort the library, a hostile one can fill the memory.
    """
    command = [sys.executable, "-m", "mmspeed.preprocess.sources.parquet_rows", path, *columns.names]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True) as child:
        try:
            assert child.stdout is not None
            number = 0
            read: list[str] = []
            said: Any = {}
            for line in child.stdout:
                if not line.endswith(b"\n"):
                    break  # cut off by the reader's death
                said = json.loads(line)
                if isinstance(said, list):
                    number += 1
                    yield number, dict(zip(read, said, strict=True))
                elif "names" in said:
                    columns.check(path, said["names"])
                    read = said["read"]
                else:
                    break
            if not isinstance(said, dict) or "end" not in said:
                why = said.get("error") if isinstance(said, dict) else None
                code = child.wait()
                how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
                why = why or f"its reader died ({how}) after {number} rows; the file is damaged"
                raise UserError(f"data.sources: {path} cannot be read as Parquet: {readable(why)}")
        finally:
            child.kill()


READERS = {"jsonl": read_jsonl, "csv": read_csv, "parquet": read_parquet}
