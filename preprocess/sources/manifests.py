"""Read rows of manifests in JSON lines, CSV and Parquet. An unreadable row is a sentence in place of a mapping.

Each reader takes the path and the columns to read. Undecodable bytes become lone surrogates. Files may be hostile: no
line or field larger than the limits below is read into memory.
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

from mmspeed.errors import UserError, first_names
from mmspeed.redaction import readable

Row = tuple[int, "dict[str, Any] | str"]  # the line or row number, from 1, and the row or its problem

_MAX_LINE_BYTES = 4 << 20  # a row's object takes up to about 30 times its line
_SHOWN_COLUMNS = 20


@dataclass(frozen=True)
class Columns:
    """The columns to read from a manifest. `split` may be missing from it, the others, also those of `scores`, must exist.

    `shown` is the manifest's address for messages; empty: its path.
    """

    media: str
    caption: str
    split: str | None
    shown: str = ""
    scores: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        return [name for name in dict.fromkeys((self.media, self.caption, self.split, *self.scores)) if name]

    def check(self, path: str, names: Collection[str]) -> None:
        """Raise UserError if a required column is missing from `names`, the columns of the manifest at `path`, or any occurs twice."""
        path = self.shown or path
        for column in self.names:
            count = sum(name == column for name in names)
            if count > 1:
                raise UserError(f"data.sources: {path} has {count} columns '{column}'; rename or remove all but one")
        required = [("set media_column", self.media), ("set caption_column", self.caption)]
        required += [("correct data.min and data.max", column) for column in self.scores]
        for advice, column in required:
            if column not in names:
                first = first_names([repr(name[:100]) for name in names], _SHOWN_COLUMNS)
                raise UserError(f"data.sources: {path} has no column '{column}'; it has {first}: {advice}")


def read_jsonl(path: str, columns: Columns) -> Iterator[Row]:
    """Yield one JSON object per line; empty lines are skipped. Raises UserError if the file cannot be read.

    Columns are checked at the end: each row may have different ones.
    """
    known_names: dict[str, None] = {}
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
                if len(known_names) < 1000:  # names for a message; a hostile file may have new ones in each row
                    known_names.update(dict.fromkeys(row))
                fields = {name: row[name] for name in columns.names if name in row}
                known_names.update(dict.fromkeys(fields))
                yield number, fields
    except OSError as error:
        raise _cannot_be_read(path, error) from None
    if known_names:
        columns.check(path, known_names)


def _cannot_be_read(path: str, error: OSError) -> UserError:
    return UserError(f"data.sources: {path} cannot be read: {error.strerror or error}")


def _lines(file: BinaryIO) -> Iterator[tuple[int, str | None]]:
    """Yield lines with their numbers from 1; None for one that is too long, of which at most the limit is kept in memory."""
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
    """Yield rows of comma-separated values with a header line. A row with more or fewer fields than the header is a problem.

    Rows are numbered by the line they begin in. Raises UserError for a file or header that cannot be read.
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
    """Yield the line that each row begins in, and its fields or its problem; without empty lines."""
    # An overlong line is passed on as an overlong field, which csv refuses by its own limit.
    too_long = "x" * (csv.field_size_limit() + 1)
    reader = csv.reader(
        _csv_lines(file, too_long), strict=True
    )  # otherwise an unclosed quote makes one field of the rest
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
    """Yield rows of a Parquet file. Raises UserError if it is not one, or unpacks to too much.

    It is read in a separate process (parquet_rows.py): a damaged file can abort the library, a hostile one can fill the memory.
    """
    command = [sys.executable, "-m", "mmspeed.preprocess.sources.parquet_rows", path, *columns.names]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True) as child:
        try:
            assert child.stdout is not None
            number = 0
            read_columns: list[str] = []
            message: Any = {}
            for line in child.stdout:
                if not line.endswith(b"\n"):
                    break  # cut off when the reader died
                message = json.loads(line)
                if isinstance(message, list):
                    number += 1
                    yield number, dict(zip(read_columns, message, strict=True))
                elif "names" in message:
                    columns.check(path, message["names"])
                    read_columns = message["read"]
                else:
                    break
            if not isinstance(message, dict) or "end" not in message:
                problem = message.get("error") if isinstance(message, dict) else None
                code = child.wait()
                how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
                problem = problem or f"its reader died ({how}) after {number} rows; the file is damaged"
                raise UserError(f"data.sources: {path} cannot be read as Parquet: {readable(problem)}")
        finally:
            child.kill()


def column_names(path: str, kind: str) -> list[str]:
    """The names of all columns of a manifest (`kind` of `READERS`). Raises UserError if it cannot be read."""
    seen: dict[str, None] = {}

    class Every(Columns):
        def check(self, path: str, names: Collection[str]) -> None:
            seen.update(dict.fromkeys(names))

    for _ in READERS[kind](path, Every("", "", None)):
        if seen:  # known from its head; JSON lines are read to the end, since each may have others
            break
    return list(seen)


READERS = {"jsonl": read_jsonl, "csv": read_csv, "parquet": read_parquet}
