"""Store entries in the background: a thread serialises them and writes them to disk, a bounded number behind."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

from mmspeed.data import CacheWriter


class BackgroundWriter(AbstractContextManager["BackgroundWriter"]):
    """A `CacheWriter` whose `add` returns immediately, unless `depth` entries are waiting. A context manager.

    Args:
        writer: the writer that stores the entries.
        depth: number of entries that may wait.
        remember: keep the names of stored entries for `drain`.

    An error in the thread, such as a full disk, is raised by the next call here. Leaving the block waits until everything is
    written; the writer itself stays open, and its owner closes it.
    """

    def __init__(self, writer: CacheWriter, depth: int = 16, remember: bool = True) -> None:
        self.waited = 0.0  # seconds that callers of `add` were blocked
        self._writer = writer
        self._remember = remember
        self._stored: list[tuple[str, str]] = []
        self._queue: queue.Queue[dict[str, Any] | Callable[[], None] | None] = queue.Queue(maxsize=depth)
        self._pending: set[tuple[str, str]] = set()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="cache-writer", daemon=True)
        self._thread.start()

    def has(self, section: str, key: str) -> bool:
        """True if the entry is in the cache or waiting to be written. Thread-safe."""
        return (section, key) in self._pending or self._writer.has(section, key)

    def add(self, **entry: Any) -> None:
        """Store an entry with the arguments of `CacheWriter.add`. Its tensors must not be changed afterwards."""
        self._raise()
        self._pending.add((entry["section"], entry["key"]))
        started = time.monotonic()
        self._queue.put(entry)
        self.waited += time.monotonic() - started

    def call(self, function: Callable[[], None]) -> None:
        """Run `function` in the thread, after the entries that were added before."""
        self._raise()
        self._queue.put(function)

    def drain(self) -> list[tuple[str, str]]:
        """Wait until everything is written; return (section, key) of the entries since the last call. Raises the thread's error."""
        self._queue.join()
        self._raise()
        stored, self._stored = self._stored, []
        return stored

    def close(self) -> None:
        """Wait until everything is written, and end the thread. Raises the thread's error."""
        self._stop()
        self._raise()

    def _work(self) -> None:
        # After an error tasks are still removed, and dropped, so that no caller waits for room in the queue.
        for task in iter(self._queue.get, None):
            try:
                if self._error is None:
                    self._do(task)
            except BaseException as error:
                self._error = error
            self._queue.task_done()

    def _do(self, task: dict[str, Any] | Callable[[], None]) -> None:
        if callable(task):
            task()
            return
        name = task["section"], task["key"]
        if self._writer.add(**task) and self._remember:
            self._stored.append(name)
        self._pending.discard(name)

    def _stop(self) -> None:
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()
        if error is None:
            self._raise()
