"""A folder of fetched files that many processes share, within a limit of bytes: the oldest files nobody uses are deleted first.

A file in use carries a shared `flock`, which the system drops with its process, however that ends. A file is written under a
hidden name and renamed, so that what has its name is whole.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from mmspeed.data.cache.files import TEMP_SUFFIX, TempFile, disk_errors, exclusive, held, same_file, try_lock

_LOCK = ".store.lock"
_SHARE = 256  # part of the limit that a process may add before the folder is measured again


class Pin(AbstractContextManager["Pin"]):
    """A file of the folder that is not deleted until `close`."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path, self._fd = path, fd

    def close(self) -> None:
        """Let the file be deleted."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def __exit__(self, *error: object) -> None:
        self.close()


class BoundedFolder:
    """Files of `folder` by name, at most `limit` bytes of them, apart from those in use.

    Threads and processes may share it. Raises UserError if the disk is full or the folder cannot be written.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit
        self._fresh = limit  # bytes added since the folder was measured

    def pin(self, name: str) -> Pin | None:
        """A file, in use until its pin is closed, and now the newest; None if it is not there. Raises OSError."""
        path = self._path(name)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_SH)
        if not same_file(path, fd):  # deleted before it was locked
            os.close(fd)
            return None
        with suppress(OSError):
            os.utime(path)
        return Pin(path, fd)

    def add(self, name: str, size: int | None, write: Callable[[TempFile], None]) -> Pin:
        """Make a file by `write` and return it, in use; room is made for `size` bytes if they are known. Raises what `write` raises."""
        path = self._path(name)
        with disk_errors(self.folder):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._make_room(size or 0)
            temp = TempFile(path.parent)
            try:
                write(temp)
                if size is None:
                    self._make_room(0)  # its bytes stand in the folder already
                with self._locked():  # nobody deletes meanwhile
                    if (pin := self.pin(name)) is None:  # no other process made it first
                        temp.rename(path)  # need not be durable: it can be fetched again
                        temp.share()
                        pin = self.pin(name)
                assert pin is not None
                return pin
            finally:
                temp.discard()

    def _path(self, name: str) -> Path:
        return self.folder / name[:2] / name

    def _make_room(self, size: int) -> None:
        """Delete the oldest files, and what killed processes left, until `size` bytes more are within the limit."""
        self._fresh += size
        if self._fresh <= self.limit // _SHARE and size:
            return
        with self._locked():
            files, used = [], 0
            for path in self.folder.glob("*/*"):
                with suppress(FileNotFoundError):
                    status = path.stat()
                    if path.name.endswith(TEMP_SUFFIX) and not held(path):
                        path.unlink()  # of a killed process
                        continue
                    used += status.st_size
                    if not path.name.endswith(TEMP_SUFFIX):
                        files.append((status.st_mtime_ns, status.st_size, path))
            self._fresh = size
            for _, length, path in sorted(files):
                if used + size <= self.limit:
                    return
                used -= length if _delete(path) else 0

    def _locked(self) -> AbstractContextManager[None]:
        """Hold the lock under which one process measures the folder and deletes."""
        return exclusive(self.folder / _LOCK)


def _delete(path: Path) -> bool:
    """Delete a file unless somebody uses it; True if it is gone."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        if not try_lock(fd):
            return False
        path.unlink(missing_ok=True)
        return True
    finally:
        os.close(fd)
