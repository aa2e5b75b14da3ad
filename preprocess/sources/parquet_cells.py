"""Read media whose bytes stand in the rows of a Parquet file, as `datasets` writes them: a row group at a time, in a process of its own.

The process, `python -m mmspeed.preprocess.sources.parquet_cells FILE LEAF ROW`, writes the group of the row to standard output: the number
of its first row, then for each row a length (-1: it holds no bytes) and so many bytes; a length of -2 is followed by an error's text.
A damaged file can end it, or fill its memory up to a limit, and nothing else.
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, BinaryIO

from mmspeed.guards import limit_memory
from mmspeed.media.rejections import Reason, Rejected, death_in_words, in_words

_MAX_MEMORY = 8 << 30  # bytes: a page of at most 2 GiB, packed and unpacked
_NUMBER = struct.Struct("<q")
_STEP = 1 << 20
NOTHING, _ERROR = -1, -2


@contextmanager
def group_rows(path: str, leaf: str, row: int) -> Iterator[Iterator[tuple[int, int, BinaryIO]]]:
    """The rows of the row group that a row is in: (number, length or `NOTHING`, stream that stands at the first byte).

    What is not read of a row is passed over. Raises Rejected if the file cannot be read.
    """
    command = [sys.executable, "-m", "mmspeed.preprocess.sources.parquet_cells", path, leaf, str(row)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True) as child:
        try:
            assert child.stdout is not None
            yield _rows(child, Counted(child.stdout))
        finally:
            child.kill()


class Counted:
    """A stream that knows how much was read of it."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self.at = stream, 0

    def read(self, size: int) -> bytes:
        """At most `size` bytes, fewer only at the end."""
        data = self._stream.read(size)
        self.at += len(data)
        return data


def _rows(child: subprocess.Popen[bytes], stream: Counted) -> Iterator[tuple[int, int, BinaryIO]]:
    number = _number(child, stream)
    while data := stream.read(_NUMBER.size):
        (length,) = _NUMBER.unpack(data) if len(data) == _NUMBER.size else (_ERROR,)
        if length == _ERROR:
            raise Rejected(Reason.UNREADABLE, f"its Parquet file: {stream.read(_STEP).decode(errors='replace')}")
        end = stream.at + max(0, length)
        yield number, length, stream  # type: ignore[misc]
        while stream.at < end:
            if not stream.read(min(_STEP, end - stream.at)):
                raise _died(child)
        number += 1
    if child.wait():
        raise _died(child)


def _number(child: subprocess.Popen[bytes], stream: Counted) -> int:
    data = stream.read(_NUMBER.size)
    if len(data) < _NUMBER.size:
        raise _died(child)
    return int(_NUMBER.unpack(data)[0])


def _died(child: subprocess.Popen[bytes]) -> Rejected:
    return Rejected(
        Reason.UNREADABLE, f"its Parquet file: its reader {death_in_words(child.wait())}; the file is damaged"
    )


def main() -> None:
    """Write the rows to standard output; ends when its reader is gone."""
    limit_memory(_MAX_MEMORY)
    path, leaf, row = sys.argv[1:]
    out = sys.stdout.buffer
    try:
        _write_group(out, path, leaf, int(row))
        out.flush()
    except BrokenPipeError:
        os._exit(1)
    except Exception as error:  # any error means that this file cannot be read
        out.write(_NUMBER.pack(_ERROR) + in_words(error)[:500].encode())
        out.flush()


def _write_group(out: BinaryIO, path: str, leaf: str, row: int) -> None:
    import pyarrow.parquet as parquet

    with parquet.ParquetFile(path, buffer_size=_STEP, pre_buffer=False) as file:
        first, group = 0, 0
        while row >= first + file.metadata.row_group(group).num_rows:
            first += file.metadata.row_group(group).num_rows
            group += 1
        out.write(_NUMBER.pack(first))
        column, *fields = leaf.split(".")
        for batch in file.iter_batches(1, row_groups=[group], columns=[leaf], use_threads=False):
            values = batch.column(column)
            for field in fields:
                values = values.field(field)
            data = values[0].as_py()
            out.write(_NUMBER.pack(NOTHING if data is None else len(data)))
            out.write(data or b"")


if __name__ == "__main__":
    main()
