"""Read documents from files: JSON and JSON lines, CSV, Parquet, text, webdataset tars, each also compressed, and Megatron's bin and idx.

A file is read as a stream, and a document larger than the limit is never held: it is rejected, as is every other row that is none.
"""

from __future__ import annotations

import codecs
import csv
import glob
import gzip
import io
import json
import os
import tarfile
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa

from mmspeed.config.places import is_url
from mmspeed.config.texts import TextsConfig, TextSourceConfig
from mmspeed.errors import UserError
from mmspeed.media.rejections import in_words
from mmspeed.preprocess.sources.folders import no_file, walk
from mmspeed.preprocess.sources.listing import unknown_ending
from mmspeed.preprocess.texts.columns import ColumnChoice, Columns
from mmspeed.preprocess.texts.parquet_texts import ParquetDocuments

_PIECE, _BLOCK = 1 << 20, 1 << 16  # bytes of a read, and of one of zstd, which gives blocks of twice as many
_PACKED = (".gz", ".zst")
_CUTS = (OSError, EOFError, zlib.error)  # of compressed files that are cut or damaged
_RATIO, _FREE = 200, 1 << 26  # a file that decompresses to more than 200 times its size, and 64 MiB, is no text
_MAGIC = b"MMIDIDX\x00\x00"
_ID_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # of Megatron's index
_csv_limit = threading.Lock()  # the limit of a field belongs to the interpreter


@dataclass(frozen=True)
class TextRow:
    """A row of a source: its place for messages, and its text, chat or ids; or the reason why there is none."""

    place: str
    value: Any = None
    reason: str = ""
    detail: str = ""

    @property
    def size(self) -> int:
        """Bytes of the value, as text."""
        if isinstance(self.value, np.ndarray):
            return int(self.value.nbytes)
        return len(self.value) if isinstance(self.value, str) else len(str(self.value))


class TooLargeError(Exception):
    """A file decompresses to more than any text does."""


def files_of(source: TextSourceConfig) -> list[Path]:
    """The files of a source, in order. Raises UserError if there are none."""
    return found(source)[0]


def found(source: TextSourceConfig, cache: str = "") -> tuple[list[Path], list[TextRow]]:
    """The files of a source, in order, and what is left out in its folders, as rejected rows; the folder `cache` is not looked into.

    Raises UserError if there are no files.
    """
    if is_url(source.path):
        raise UserError(f"{source.path} is not on this machine's disks; copy the texts here and name their folder")
    path = Path(source.path).expanduser()
    files: list[Path] = []
    left_out: list[TextRow] = []
    for place in [path] if path.exists() else sorted(map(Path, glob.glob(str(path)))):
        if place.is_dir():
            _find(place, cache, files, left_out)
        elif place.is_file():
            files.append(place)
    if not files:
        raise UserError(
            f"{source.path}: no texts there; files end in {', '.join(sorted(_READERS))}, and may be behind .gz or .zst"
        )
    for file in files:
        if not _kind(file):
            raise UserError(
                f"{file}: files of texts end in {', '.join(sorted(_READERS))}, each also behind .gz or .zst"
            )
    return files, left_out


def _find(root: Path, cache: str, files: list[Path], left_out: list[TextRow]) -> None:
    """Add the files of a folder, and what is left out in it."""

    def unreadable(error: OSError) -> None:
        place = f"{error.filename or root}{os.sep}"
        left_out.append(TextRow(place, reason="unreadable", detail=f"the folder cannot be read: {in_words(error)}"))

    here: list[Path] = []
    for folder in walk(str(root), unreadable, [cache] if cache else ()):
        left_out += [TextRow(os.path.join(folder.path, name), reason="hidden") for name in folder.hidden]
        for path in (Path(folder.path, name) for name in folder.files):
            if not path.is_file():
                left_out.append(TextRow(str(path), reason="unreadable", detail=no_file(str(path))[1]))
            elif _kind(path):
                here.append(path)
            elif path.suffix.lower() != ".idx" or not _beside(path, ".bin").is_file():
                left_out.append(TextRow(str(path), reason="other_file", detail=unknown_ending(path.name)))
    files += sorted(here)


def rows_of(texts: TextsConfig, source: TextSourceConfig) -> Iterator[TextRow]:
    """Yield the rows of a source, in the order of its files. Raises UserError if a file cannot be opened."""
    limit = int(texts.max_document_mb * 1e6)
    (files, left_out), column = found(source, texts.cache), ColumnChoice(source)
    for path in files:
        try:
            yield from _READERS[_kind(path)](path, source, column, limit)
        except TooLargeError:
            yield TextRow(str(path), reason="too_large", detail=f"it decompresses to more than {_RATIO} times its size")
        except (*_CUTS, tarfile.TarError, pa.ArrowException, ValueError) as error:
            yield TextRow(str(path), reason="broken_line", detail=f"the file cannot be read further: {_line(error)}")
    yield from left_out


def _kind(path: Path) -> str:
    """The ending that says how a file is read, in lower case; empty for files that are no texts."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in _PACKED:
        suffixes = [suffix for suffix in suffixes if suffix not in _PACKED]
    ending = suffixes[-1] if suffixes else ""
    return ending if ending in _READERS else ""


class _Unpacked(io.RawIOBase):
    """A file's bytes, decompressed; those before a cut are read before it raises. Raises TooLargeError for more than any text would give."""

    def __init__(self, path: Path) -> None:
        self._most = max(_FREE, _RATIO * path.stat().st_size)
        self.count = 0
        if path.suffix.lower() == ".zst":
            self._file: Any = pa.CompressedInputStream(pa.OSFile(str(path)), "zstd")
            self._read: Callable[[int], bytes] = lambda size: self._file.read(min(size, _BLOCK))
        else:
            self._file = gzip.open(path, "rb") if path.suffix.lower() == ".gz" else open(path, "rb")
            self._read = self._file.read1  # `read` loses what it has when the file is cut

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._read(min(len(buffer), _PIECE))
        self.count += len(data)
        if self.count > self._most:
            raise TooLargeError
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()


def _open(path: Path) -> io.BufferedReader:
    return io.BufferedReader(_Unpacked(path), _PIECE)


def _lines(file: IO[bytes], limit: int) -> Iterator[bytes | None]:
    """Yield the lines of a file; None for one above the limit, which is skipped and never held."""
    while line := file.readline(limit + 1):
        if len(line) <= limit or line.endswith(b"\n"):
            yield line
            continue
        while (rest := file.readline(_PIECE)) and not rest.endswith(b"\n"):
            pass
        yield None


def _json_lines(path: Path, source: TextSourceConfig, column: ColumnChoice, limit: int) -> Iterator[TextRow]:
    with _open(path) as file:
        for number, line in enumerate(_lines(file, limit), 1):
            if line is None:
                yield TextRow(f"{path}:{number}", reason="too_large")
            elif line.strip():
                yield _of_json(f"{path}:{number}", line, source, column)


def _json(path: Path, source: TextSourceConfig, column: ColumnChoice, limit: int) -> Iterator[TextRow]:
    """The rows of an array, of a mapping that is the whole file, or of JSON lines."""
    with _open(path) as file:
        if file.peek(1).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
            yield from _array(path, file, source, column, limit)
            return
        try:
            data = file.read(limit + 1)
            tree = json.loads(data.decode("utf-8-sig")) if len(data) <= limit else None
        except (*_CUTS, ValueError, RecursionError):
            tree = None
    yield from _json_lines(path, source, column, limit) if tree is None else [_of_tree(str(path), tree, source, column)]


def _array(
    path: Path, file: io.BufferedReader, source: TextSourceConfig, column: ColumnChoice, limit: int
) -> Iterator[TextRow]:
    """The rows of an array, of which little more than one is held."""
    decode, decoder = json.JSONDecoder().raw_decode, codecs.getincrementaldecoder("utf-8-sig")()
    signs, at, number = _more(file, decoder, 1).lstrip(), 1, 1
    while True:
        place = f"{path}:{number}"
        while at < len(signs) and signs[at] in " \t\r\n,":
            at += 1
        if signs.startswith("]", at):
            if (signs[at + 1 :] + _more(file, decoder, _PIECE)).strip():
                raise ValueError("something follows the array")
            return
        try:
            tree, end = decode(signs, at)
        except RecursionError:
            raise ValueError("it is nested too deep") from None
        except ValueError as error:
            if len(signs) - at > limit:
                yield TextRow(place, reason="too_large", detail="the rest of the array is not read")
                return
            more = _more(file, decoder, max(_PIECE, len(signs) - at))
            if not more:
                raise ValueError(f"element {number}: {_line(error)}") from None
            signs, at = signs[at:] + more, 0
            continue
        yield TextRow(place, reason="too_large") if end - at > limit else _of_tree(place, tree, source, column)
        at, number = end, number + 1


def _more(file: io.BufferedReader, decoder: codecs.IncrementalDecoder, size: int) -> str:
    """So many further characters of a file or more, fewer at its end or before a cut. Raises what cuts it where there are none."""
    signs = ""
    try:
        while len(signs) < size and (data := file.read1(_PIECE)):
            signs += decoder.decode(data)
    except _CUTS:
        if not signs:
            raise
    return signs


def _of_json(place: str, data: bytes, source: TextSourceConfig, column: ColumnChoice) -> TextRow:
    try:
        tree = json.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return TextRow(place, reason="not_utf8", detail=str(error.reason))
    except (ValueError, RecursionError) as error:
        return TextRow(place, reason="broken_line", detail=_line(error))
    return _of_tree(place, tree, source, column)


def _of_tree(place: str, tree: Any, source: TextSourceConfig, column: ColumnChoice) -> TextRow:
    if not isinstance(tree, dict):
        return TextRow(place, reason="broken_line", detail="it is not a mapping")
    own = column.of(tree)
    if own is None:
        return TextRow(place, reason="missing_column", detail=f"it has no {column}")
    return _of_row(place, tree, source, own)


def _of_row(place: str, row: Mapping[str, Any], source: TextSourceConfig, columns: Columns) -> TextRow:
    try:
        value = columns.value(row)
    except ValueError as error:
        return TextRow(place, reason="bad_chat", detail=str(error))
    return checked(place, value, source)


def checked(place: str, value: Any, source: TextSourceConfig) -> TextRow:
    """A row of a value, or its rejection if the value is not what the source's `content` says."""
    if source.content == "text":
        if not isinstance(value, str):
            return TextRow(place, reason="not_a_string", detail=f"it is of type {type(value).__name__}")
        try:
            value.encode()
        except UnicodeEncodeError:
            return TextRow(
                place, reason="not_utf8", detail="it holds half of a surrogate pair, or bytes that are no text"
            )
        return TextRow(place, value) if value.strip() else TextRow(place, reason="empty")
    if not isinstance(value, (list, np.ndarray)):
        what = "a list of messages" if source.content == "chat" else "a list of ids"
        return TextRow(
            place, reason="bad_chat" if source.content == "chat" else "unknown_ids", detail=f"it is not {what}"
        )
    if not len(value):
        return TextRow(place, reason="empty")
    if source.content == "chat":
        return TextRow(place, value)
    if isinstance(value, list) and not all(type(number) is int and abs(number) < 1 << 62 for number in value):
        return TextRow(place, reason="unknown_ids", detail="it holds something else than whole numbers")
    return TextRow(place, np.asarray(value, np.int64))


def _csv(path: Path, source: TextSourceConfig, column: ColumnChoice, limit: int) -> Iterator[TextRow]:
    with _open(path) as file, io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline="") as text:
        rows, number, header, own = csv.reader(text, strict=False), 0, list[str](), None
        while True:
            try:
                with _csv_limit:
                    before = csv.field_size_limit(limit)
                    try:
                        row = next(rows, None)
                    finally:
                        csv.field_size_limit(before)
            except csv.Error as error:
                number += 1
                large = "field limit" in str(error)
                yield TextRow(
                    f"{path}:{rows.line_num}", reason="too_large" if large else "broken_line", detail=str(error)
                )
                continue
            if row is None:
                return
            if own is None:
                header, own = row, column.of(row)
                if own is None:
                    yield TextRow(
                        str(path), reason="missing_column", detail=f"its columns are {', '.join(header)[:200]}"
                    )
                    return
            elif row:
                cells = dict(zip(reversed(header[: len(row)]), reversed(row[: len(header)]), strict=True))
                yield _of_cells(f"{path}:{rows.line_num}", cells, source, own)


def _of_cells(place: str, cells: dict[str, Any], source: TextSourceConfig, columns: Columns) -> TextRow:
    if not all(name in cells for name in columns.needed):
        return TextRow(place, reason="broken_line", detail="it has too few fields")
    try:
        if columns.whole and source.content != "text":
            cells = {name: json.loads(cells[name]) for name in columns.needed}
    except (ValueError, RecursionError) as error:
        return TextRow(place, reason="broken_line", detail=_line(error))
    return _of_row(place, cells, source, columns)


def _parquet(path: Path, source: TextSourceConfig, column: ColumnChoice, limit: int) -> Iterator[TextRow]:
    with ParquetDocuments(path, [(one.needed, one.names) for one in column.choices], limit) as file:
        own = column.of(file.names)
        if own is not None:
            for number, (value, large) in enumerate(file.rows(), 1):
                place = f"{path}:{number}"
                yield TextRow(place, reason="too_large") if large else _of_scalar(place, value, file, source, own)
        elif not file.problem:
            names = ", ".join(file.names)[:200]
            yield TextRow(str(path), reason="missing_column", detail=f"its columns are {names}")
        if file.problem:
            raise TooLargeError if file.problem == TooLargeError.__name__ else ValueError(file.problem)


def _of_scalar(place: str, value: Any, file: ParquetDocuments, source: TextSourceConfig, columns: Columns) -> TextRow:
    """A row of a scalar of Arrow; of a text its bytes, of several columns a struct."""
    try:
        plain = value.as_py()
        plain = plain.decode() if file.text and plain is not None else plain
    except UnicodeDecodeError as error:
        return TextRow(place, reason="not_utf8", detail=str(error.reason))
    except (ArithmeticError, LookupError, ValueError) as error:  # a time that Python has no value for
        return TextRow(place, reason="broken_line", detail=_line(error))
    row = plain if len(file.columns) > 1 else {file.columns[0]: plain}
    return _of_row(place, row, source, columns)


def whole_file(path: Path) -> Any:
    """A file that can be read at any place; a compressed one in memory. Raises TooLargeError."""
    if path.suffix.lower() not in _PACKED:
        return pa.memory_map(str(path))
    with _open(path) as file:
        return pa.BufferReader(file.read())


def _text(path: Path, source: TextSourceConfig, column: ColumnChoice, limit: int) -> Iterator[TextRow]:
    with _open(path) as file:
        if source.split == "file":
            data = file.read(limit + 1)
            yield TextRow(str(path), reason="too_large") if len(data) > limit else _of_bytes(str(path), data, source)
            return
        part: list[bytes] = []
        first, size, large = 1, 0, False
        for number, line in enumerate(_lines(file, limit), 1):
            if line is None or line.strip():
                first = first if part or large else number
                size += len(line or b"")
                large |= line is None or size > limit
                if large:
                    part.clear()
                else:
                    part.append(line or b"")
                continue
            if part or large:
                yield _of_part(f"{path}:{first}", part, large, source)
            part, size, large = [], 0, False
        if part or large:
            yield _of_part(f"{path}:{first}", part, large, source)


def _of_part(place: str, part: list[bytes], large: bool, source: TextSourceConfig) -> TextRow:
    return TextRow(place, reason="too_large") if large else _of_bytes(place, b"".join(part), source)


def _of_bytes(place: str, data: bytes, source: TextSourceConfig) -> TextRow:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return TextRow(place, reason="not_utf8", detail=f"at byte {error.start}: {error.reason}")
    if source.content == "text":
        return checked(place, text, source)
    return TextRow(place, reason="not_a_string", detail=f"a text file holds no {source.content}")


def _tar(path: Path, source: TextSourceConfig, column: ColumnChoice, limit: int) -> Iterator[TextRow]:
    with _Unpacked(path) as file, tarfile.open(fileobj=file, mode="r|") as tar:
        for member in tar:
            ending = member.name.rpartition(".")[2].lower()
            if not member.isfile() or ending not in ("txt", "json"):
                continue
            place = f"{path}:{member.name}"
            if member.size > limit or member.issparse():
                yield TextRow(place, reason="too_large", detail="a sparse file" if member.issparse() else "")
                continue
            content = tar.extractfile(member)
            data = b"" if content is None else content.read()
            if ending == "json":
                if (
                    source.content != "text" or str(column).encode() in data
                ):  # others stand beside a text, as its description
                    yield _of_json(place, data, source, column)
            else:
                yield _of_bytes(place, data, source)
        if tar.offset != file.count < tar.offset + tarfile.BLOCKSIZE:  # tarfile takes such for the end
            raise tarfile.TarError("it ends within a member")


def _beside(path: Path, ending: str) -> Path:
    """The file of the same name that ends otherwise, in capitals as this one does."""
    return path.with_suffix(ending.upper() if path.suffix.isupper() else ending)


def _megatron(path: Path, source: TextSourceConfig, column: ColumnChoice, limit: int) -> Iterator[TextRow]:
    index = _beside(path, ".idx")
    if source.content != "ids":
        yield TextRow(str(path), reason="not_a_string", detail="it holds token ids; write content: ids")
        return
    if not index.is_file():
        yield TextRow(str(path), reason="broken_line", detail=f"there is no {index.name} beside it")
        return
    data = index.read_bytes()
    if data[:9] != _MAGIC or len(data) < 34 or int.from_bytes(data[9:17], "little") != 1:
        yield TextRow(str(index), reason="broken_line", detail="it is no index of Megatron, version 1")
        return
    kind = _ID_TYPES.get(data[17])
    sequences, documents = (int.from_bytes(data[at : at + 8], "little") for at in (18, 26))
    if kind is None or len(data) < 34 + 12 * sequences + 8 * documents:
        yield TextRow(str(index), reason="broken_line", detail="it is cut short, or of a type that is no id")
        return
    lengths = np.frombuffer(data, "<i4", sequences, 34).astype(np.int64)
    begins = np.frombuffer(data, "<i8", sequences, 34 + 4 * sequences)
    bounds = np.frombuffer(data, "<i8", documents, 34 + 12 * sequences)
    size = path.stat().st_size
    ids = np.memmap(path, kind, mode="r") if size else np.empty(0, kind)
    for number, (start, stop) in enumerate(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)):
        place = f"{path}:{number}"
        if not 0 <= start <= stop <= sequences:
            yield TextRow(place, reason="broken_line", detail="its index points outside of its sequences")
            continue
        first, many = (int(begins[start]), int(lengths[start:stop].sum())) if stop > start else (0, 0)
        if first < 0 or many < 0 or first + many * ids.itemsize > size or first % ids.itemsize:
            yield TextRow(place, reason="broken_line", detail="its index points outside of the file")
            continue
        at = first // ids.itemsize
        yield checked(place, np.asarray(ids[at : at + many], np.int64), source)


def _line(error: BaseException) -> str:
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__


_READERS: dict[str, Callable[[Path, TextSourceConfig, ColumnChoice, int], Iterator[TextRow]]] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json,
    ".csv": _csv,
    ".parquet": _parquet,
    ".txt": _text,
    ".tar": _tar,
    ".bin": _megatron,
}
