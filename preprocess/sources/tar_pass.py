"""Stream tars of stores that answer no ranges: wanted members are kept as they pass, in one pass if asked for in order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import BinaryIO

from mmspeed.data.cache.bounded import Pin
from mmspeed.data.cache.stores import attempt
from mmspeed.log import get_logger
from mmspeed.media.source import RemoteFile, Source

_STEP = 1 << 20  # bytes that are read at a time where none are wanted
Keep = Callable[[Source, RemoteFile, BinaryIO], Pin]


class TarPasses:
    """One pass for each streamed tar. Threads may share it."""

    def __init__(self, keep: Keep) -> None:
        self._keep = keep
        self._expected: dict[str, dict[int, Source]] = {}
        self._passes: dict[str, _TarPass] = {}
        self._lock = threading.Lock()

    def expect(self, sources: Sequence[Source]) -> None:
        """Say which members will be asked for."""
        for source in sources:
            self._expected.setdefault(source.path, {})[source.offset or 0] = source

    def fetch(self, source: Source, file: RemoteFile) -> Pin:
        """A member, kept until its pin is closed. Raises what the store raises."""
        with self._lock:
            one = self._passes.get(file.url)
            if one is None:
                for other in list(self._passes.values()):
                    if other.ended:  # all that were expected of it have passed
                        self._passes.pop(other.file.url).close()
                one = _TarPass(file, self._keep, self._expected.get(file.url, {}))
                self._passes[file.url] = one
        return attempt(lambda: one.fetch(source))

    def close(self) -> None:
        """End all streams."""
        with self._lock:
            for one in self._passes.values():
                one.close()
            self._passes.clear()


class _TarPass:
    """The stream of one tar, its position, and the members that have passed but were not asked for yet."""

    def __init__(self, file: RemoteFile, keep: Keep, expected: dict[int, Source]) -> None:
        self.file = file
        self._keep, self._expected = keep, expected
        self._order = sorted(expected)
        self._stream: BinaryIO | None = None
        self._at = 0
        self._ready: dict[int, Pin] = {}
        self._served: set[int] = set()
        self._lock = threading.Lock()
        self._warned = False

    @property
    def ended(self) -> bool:
        """True when nothing that was expected is left to be read or asked for."""
        return not self._ready and bool(self._order) and self._at > self._order[-1]

    def fetch(self, source: Source) -> Pin:
        """Read on until the member is kept; from the first byte again if it has passed already. Raises what the store raises."""
        offset = source.offset or 0
        with self._lock:
            self._served.add(offset)
            if (pin := self._ready.pop(offset, None)) is not None:
                return pin
            if self._stream is not None and self._at > offset:
                self._restart(source)
            try:
                if self._stream is None:
                    self._stream, self._at = self.file.open(), 0
                for other in self._order:
                    if self._at <= other < offset and other not in self._ready and other not in self._served:
                        self._ready[other] = self._take(self._expected[other])
                return self._take(source)
            except BaseException:
                self._end()  # another try begins at the first byte
                raise

    def close(self) -> None:
        """End the stream, and let go of members that nobody asked for."""
        with self._lock:
            self._end()
            for pin in self._ready.values():
                pin.close()
            self._ready.clear()

    def _take(self, source: Source) -> Pin:
        """Keep the member of a source, which the stream has not passed."""
        assert self._stream is not None and source.offset is not None
        while self._at < source.offset:
            data = self._stream.read(min(_STEP, source.offset - self._at))
            if not data:
                raise OSError(f"the tar ends at byte {self._at}")
            self._at += len(data)
        pin = self._keep(source, self.file, self._stream)
        self._at += source.size or 0
        return pin

    def _restart(self, source: Source) -> None:
        self._end()
        if not self._warned:
            get_logger("preprocess").warning(
                "%s answers no ranges, and %s is behind what was read: the tar is read from its beginning again",
                self.file.url,
                source.name,
            )
        self._warned = True

    def _end(self) -> None:
        if self._stream is not None:
            self._stream.close()
        self._stream, self._at = None, 0
