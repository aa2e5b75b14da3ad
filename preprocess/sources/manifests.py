"""Read rows of manifests: JSON lines and arrays, CSV, Parquet, and lists of files beside one of captions.

An unreadable row is a sentence in place of a mapping. Each reader takes the path and the columns to read. Undecodable bytes become lone
surrogates. Files may be hostile: no line or field larger than the limits below is read into memory.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import IO, Any, BinaryIO, NamedTuple

from mmspeed.config.roles import ROLES
from mmspeed.errors import UserError, first_names
from mmspeed.log import get_logger
from mmspeed.preprocess.sources.captions import decode, decode_part, encoding_of, is_wide, json_tree
from mmspeed.redaction import readable

log = get_logger("preprocess")
Row = tuple[int, "dict[str, Any] | str"]  # the line or row number, from 1, and the row or its problem


class Cell(NamedTuple):
    """A medium whose bytes stand in a row: the name that it had (perhaps none), the leaf that holds them, and the row from 0."""

    name: str
    leaf: str
    row: int


_MAX_LINE_BYTES = 4 << 20  # a row's object takes up to about 30 times its line
_MAX_JSON_BYTES = 256 << 20  # of a JSON array, which is read as a whole
_SHOWN_COLUMNS = 20
_SEPARATORS = (",", ";", "\t")  # the first of those that fit alike
MEDIA_LISTS = ("videos.txt", "images.txt")
CAPTION_LISTS = ("prompts.txt", "prompt.txt", "captions.txt")


@dataclass(frozen=True)
class Columns:
    """The columns to read from a manifest. `split` may be missing from it, the others, also those of `roles` and `scores`, must exist.

    `shown` is the manifest's address for messages; empty: its path. `encoding`: of a manifest without a byte-order mark; None: UTF-8.
    """

    media: str
    caption: str
    split: str | None
    shown: str = ""
    scores: tuple[str, ...] = ()
    encoding: str | None = None
    roles: Mapping[str, str] = field(default_factory=dict)  # column of each

    @property
    def names(self) -> list[str]:
        columns = (self.media, self.caption, self.split, *self.scores, *self.roles.values())
        return [name for name in dict.fromkeys(columns) if name]

    def check(self, path: str, names: Collection[str]) -> None:
        """Raise UserError if a required column is missing from `names`, the columns of the manifest at `path`, or any occurs twice."""
        path = self.shown or path
        for column in self.names:
            count = sum(name == column for name in names)
            if count > 1:
                raise UserError(f"data.sources: {path} has {count} columns '{column}'; rename or remove all but one")
        required = [("set media_column", self.media), ("set caption_column", self.caption)]
        required += [("correct data.min and data.max", column) for column in self.scores]
        required += [(f"correct `roles`, which takes the {role} from it", name) for role, name in self.roles.items()]
        for advice, column in required:
            if column not in names:
                first = first_names([repr(name[:100]) for name in names], _SHOWN_COLUMNS)
                raise UserError(f"data.sources: {path} has no column '{column}'; it has {first}: {advice}")
        usual = [name for name, role in ROLES.items() if role.needs or role.brings]
        if unread := [name for name in usual if name in names and name not in self.names]:
            log.warning(
                f"{path} has a column '{unread[0]}' that no role reads; `roles: {{{unread[0]}: {unread[0]}}}` does"
            )


def read_jsonl(path: str, columns: Columns) -> Iterator[Row]:
    """Yield one JSON object per line; empty lines are skipped. Raises UserError if the file cannot be read.

    Columns are checked at the end: each row may have different ones.
    """
    known_names: dict[str, None] = {}
    try:
        with open(path, "rb") as file:
            for number, line in _lines(file, columns.encoding):
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
                yield number, _fields(row, columns, known_names)
    except OSError as error:
        raise _cannot_be_read(path, error) from None
    if known_names:
        columns.check(path, known_names)


def read_json(path: str, columns: Columns) -> Iterator[Row]:
    """Yield the objects of a JSON array, or of JSON lines under this ending. Raises UserError for another file, and one too large."""
    known_names: dict[str, None] = {}
    try:
        with open(path, "rb") as file:
            data = file.read(_MAX_JSON_BYTES + 1)
    except OSError as error:
        raise _cannot_be_read(path, error) from None
    shown = columns.shown or path
    if len(data) > _MAX_JSON_BYTES:
        raise UserError(f"data.sources: {shown} is larger than {_MAX_JSON_BYTES >> 20} MB; write it as JSON lines")
    text = decode(data, columns.encoding)
    try:
        rows = json_tree(text)
    except ValueError as error:
        if text.lstrip("\ufeff \r\n\t").startswith("{"):
            yield from read_jsonl(path, columns)
            return
        raise UserError(f"data.sources: {shown} is {error}") from None
    if not isinstance(rows, list):
        raise UserError(f"data.sources: {shown} holds a JSON {type(rows).__name__}, not an array of objects")
    for number, row in enumerate(rows, 1):
        yield number, _fields(row, columns, known_names)
    if known_names:
        columns.check(path, known_names)


def _fields(row: Any, columns: Columns, known_names: dict[str, None]) -> dict[str, Any] | str:
    """The columns of a JSON row, or its problem; their names are added to `known_names`."""
    if not isinstance(row, dict):
        return f"a JSON {type(row).__name__}, not an object"
    if len(known_names) < 1000:  # names for a message; a hostile file may have new ones in each row
        known_names.update(dict.fromkeys(row))
    fields = {name: row[name] for name in columns.names if name in row}
    known_names.update(dict.fromkeys(fields))
    return fields


def read_lists(path: str, columns: Columns) -> Iterator[Row]:
    """Yield the lines of a list of files, each with the same line of the list of captions beside it (`captions_beside`).

    Raises UserError if there is none, or it has another number of lines.
    """
    captions = captions_beside(path)
    shown = columns.shown or path
    if captions is None:
        raise UserError(f"data.sources: {shown} has no list of captions beside it ({', '.join(CAPTION_LISTS)})")
    try:
        with open(path, "rb") as file, open(captions, "rb") as beside:
            pairs = itertools.zip_longest(_lines(file, columns.encoding), _lines(beside, columns.encoding))
            for media, caption in pairs:
                number, place = (media or caption)[0], None if media is None else media[1]
                if media is None or caption is None:
                    if media is None or (place or "").strip():
                        few = "captions" if caption is None else "files"
                        raise UserError(
                            f"data.sources: {shown} and {captions} differ in length: {few} end before line {number}"
                        )
                elif place is None or caption[1] is None:
                    yield number, f"a line longer than {_MAX_LINE_BYTES} bytes"
                elif place.strip():
                    yield number, {columns.media: place.strip(), columns.caption: caption[1].strip()}
    except OSError as error:
        raise _cannot_be_read(path, error) from None


def captions_beside(path: str) -> str | None:
    """The list of captions beside a list of files; None where there is none."""
    files = (os.path.join(os.path.dirname(path), name) for name in CAPTION_LISTS)
    return next((file for file in files if os.path.isfile(file)), None)


def _cannot_be_read(path: str, error: OSError) -> UserError:
    return UserError(f"data.sources: {path} cannot be read: {error.strerror or error}")


def _lines(file: BinaryIO, own: str | None) -> Iterator[tuple[int, str | None]]:
    """Yield lines with their numbers from 1; None for one that is too long, of which at most the limit is kept in memory.

    `own`: the encoding where no byte-order mark says it; None: UTF-8.
    """
    encoding = encoding_of(file.read(4), own)
    file.seek(0)
    lines: IO[Any] = file
    if is_wide(encoding):  # a byte of its own ends no line
        lines = io.TextIOWrapper(file, encoding, "replace", newline="\n")
    number = 0
    while line := lines.readline(_MAX_LINE_BYTES + 1):
        number += 1
        if len(line) <= _MAX_LINE_BYTES:
            plain = "utf-8" if number > 1 and encoding == "utf-8-sig" else encoding
            yield number, line if isinstance(line, str) else decode_part(line, plain)
            continue
        while line and line[-1:] not in (b"\n", "\n"):
            line = lines.readline(_MAX_LINE_BYTES)
        yield number, None


def read_csv(path: str, columns: Columns) -> Iterator[Row]:
    """Yield rows of values with a header line, separated by commas, semicolons or tabs, whichever gives the header its columns.

    A row with more or fewer fields than the header is a problem. Rows are numbered by the line they begin in. Raises UserError for a file or header that cannot be read.
    """
    try:
        with open(path, "rb") as file:
            header: list[str] | None = None
            for begin, fields in _csv_rows(file, columns):
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


def _csv_rows(file: BinaryIO, columns: Columns) -> Iterator[tuple[int, list[str] | str]]:
    """Yield the line that each row begins in, and its fields or its problem; without empty lines."""
    # An overlong line is passed on as an overlong field, which csv refuses by its own limit.
    too_long = "x" * (csv.field_size_limit() + 1)
    lines = iter(too_long if line is None else line for _, line in _lines(file, columns.encoding))
    first = []
    while (line := next(lines, None)) is not None:
        first.append(line)
        if line.strip():
            break
    separator = max(_SEPARATORS, key=lambda one: _fitting(first[-1:], one, columns))
    # without `strict` an unclosed quote makes one field of the rest
    reader = csv.reader(itertools.chain(first, lines), strict=True, delimiter=separator)
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


def _fitting(header: list[str], separator: str, columns: Columns) -> tuple[int, int]:
    """The number of wanted columns that a header has with a separator, and of all; none where it is no CSV."""
    try:
        names = [name.strip() for name in next(csv.reader(header, delimiter=separator), [])]
    except csv.Error:
        return 0, 0
    return sum(name in names for name in columns.names), len(names)


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
            cells: dict[str, str] = {}
            message: Any = {}
            for line in child.stdout:
                if not line.endswith(b"\n"):
                    break  # cut off when the reader died
                message = json.loads(line)
                if isinstance(message, list):
                    number += 1
                    row = dict(zip(read_columns, message, strict=True))
                    for name in cells:
                        row[name] = None if row[name] is None else Cell(row[name], cells[name], number - 1)
                    yield number, row
                elif "names" in message:
                    columns.check(path, message["names"])
                    read_columns = message["read"]
                    cells = {name: leaf for name, leaf in message.get("cells", {}).items() if leaf}
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


def column_names(path: str, kind: str, encoding: str | None = None) -> list[str]:
    """The names of all columns of a manifest (`kind` of `READERS`). Raises UserError if it cannot be read."""
    seen: dict[str, None] = {}

    class Every(Columns):
        def check(self, path: str, names: Collection[str]) -> None:
            seen.update(dict.fromkeys(names))

    columns = (
        Columns("video", "caption", None, encoding=encoding)
        if kind == "lists"
        else Every("", "", None, encoding=encoding)
    )
    for _, row in READERS[kind](path, columns):
        if kind == "lists" and isinstance(row, dict):
            seen.update(row)
        if seen:  # known from its head; JSON lines are read to the end, since each may have others
            break
    return list(seen)


def head_columns(path: str, kind: str, encoding: str | None) -> list[str]:
    """The names of the columns, of JSON lines those of the first. Raises UserError if the manifest cannot be read."""
    if kind != "jsonl":
        return column_names(path, kind, encoding)
    try:
        with open(path, "rb") as file:
            first = next((line for _, line in _lines(file, encoding) if line is None or line.strip()), None)
        row = json.loads(first or "null")
    except OSError as error:
        raise _cannot_be_read(path, error) from None
    except (ValueError, RecursionError):
        return []
    return list(row) if isinstance(row, dict) else []


READERS = {"jsonl": read_jsonl, "json": read_json, "csv": read_csv, "parquet": read_parquet, "lists": read_lists}
