"""Read documents from a Parquet file in a process of its own (parquet_reader.py): a damaged file can end it, a hostile one fill it up to a limit."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pyarrow as pa

from mmspeed.media.rejections import death_in_words


class ParquetDocuments(AbstractContextManager["ParquetDocuments"]):
    """The documents of a column, or of several. Use as a context manager: leaving it ends the process.

    `choices`: columns that a table must have and all that are read, of which the first that it has are taken. `names`: of all columns;
    `columns`: those that are read, of several as a struct; `text`: the documents are texts, given as bytes; `problem`: why the file cannot be read further; empty: it was
    read to its end.
    """

    def __init__(self, path: Path, choices: Sequence[tuple[list[str], list[str]]], limit: int) -> None:
        words = [str(path), json.dumps(choices), str(limit)]
        command = [sys.executable, "-m", "mmspeed.preprocess.texts.parquet_reader", *words]
        self._child = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )
        assert self._child.stdout is not None
        self._out = self._child.stdout
        head = self._line()
        self.names: list[str] = head.get("names", [])
        self.columns: list[str] = head.get("columns", [])
        self.text: bool = head.get("text", False)
        self.problem: str = head.get("problem", "")

    def __exit__(self, *error: object) -> None:
        self._child.kill()
        self._child.wait()
        self._out.close()

    def rows(self) -> Iterator[tuple[Any, bool]]:
        """The rows: a scalar of Arrow, and whether the document is larger than the limit; sets `problem` at the end."""
        try:
            for batch in pa.ipc.open_stream(self._out):
                yield from zip(batch.column(0), batch.column(1).to_pylist(), strict=True)
        except (pa.ArrowException, OSError):  # its stream ends in the middle
            self.problem = self._death()
        else:
            self.problem = self._line().get("problem", "")

    def _line(self) -> dict[str, Any]:
        line = self._out.readline()
        return json.loads(line) if line.endswith(b"\n") else {"problem": self._death()}

    def _death(self) -> str:
        return f"its reader {death_in_words(self._child.wait())}"
