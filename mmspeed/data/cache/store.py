"""Stores of payloads: mapped shards in a local folder (here), or a remote store (remote.py)."""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from .index_reader import PayloadLocation
from .payloads import pread

_MAPPINGS = 128


class ShortError(Exception):
    """A shard ends before the entry does."""


class Store(Protocol):
    """A store that a cache reads payloads from."""

    def view(self, section: str, key: str, place: PayloadLocation) -> memoryview:
        """The bytes of a payload. Raises FileNotFoundError if its shard is missing, ShortError if that is cut off."""
        ...

    def again(self, section: str, key: str, place: PayloadLocation) -> memoryview:
        """The bytes from their source, in memory of their own, after those of `view` were not as they should be. Raises as `view`."""
        ...


class LocalStore:
    """The shards of a folder, each mapped once per process and shared with others; a payload is a view of the mapping.

    Mappings are private: writing into a view changes a copy of that page, in this process only. A mapping that is dropped
    here lives as long as any view of it.

    Args:
        root: the folder that shards are named relative to.
        mappings: number to keep; beyond it the least recently used is dropped.
    """

    def __init__(self, root: Path, mappings: int = _MAPPINGS) -> None:
        self.root, self._limit = root, mappings
        self._maps: dict[str, mmap.mmap] = {}  # most recently used last; its single operations are thread-safe
        self.mapped = 0  # mappings made so far

    def view(self, section: str, key: str, place: PayloadLocation) -> memoryview:
        end = place.offset + place.size
        mapping = self._maps.pop(place.shard, None)
        if mapping is None or len(mapping) < end:  # a shard in progress grows
            mapping = self._map(self.root / place.shard)
        self._maps[place.shard] = mapping
        while len(self._maps) > self._limit:
            with suppress(KeyError, StopIteration, RuntimeError):
                self._maps.pop(next(iter(self._maps)))
        # Check the file's current size: touching a page that was cut off meanwhile would kill the process.
        if min(len(mapping), mapping.size()) < end:
            raise ShortError
        return memoryview(mapping)[place.offset : end]

    def again(self, section: str, key: str, place: PayloadLocation) -> memoryview:
        """The file's own bytes, copied: those of the mapping may have been written to in this process."""
        fd = os.open(self.root / place.shard, os.O_RDONLY | os.O_CLOEXEC)
        with open(fd, "rb", buffering=0) as file:
            payload = bytearray(pread(file, place.size, place.offset))
        if len(payload) < place.size:
            raise ShortError
        return memoryview(payload)

    def _map(self, path: Path) -> mmap.mmap:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.mapped += 1
            mapping = mmap.mmap(fd, 0, access=mmap.ACCESS_COPY)
            # Cold reads then come in large pages: half of the processor's work (tests.claims.loader, small latents).
            if hasattr(mmap, "MADV_HUGEPAGE"):
                with suppress(OSError):  # a kernel without them
                    mapping.madvise(mmap.MADV_HUGEPAGE)
            return mapping
        except ValueError:  # an empty file
            raise ShortError from None
        finally:
            os.close(fd)
