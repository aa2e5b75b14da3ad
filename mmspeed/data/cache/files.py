"""Files that are whole or absent (law 4): hidden, locked while their writer lives, published by one rename or link.

A temporary file whose lock can be taken has no writer any more: it is what a killed process left, and may be deleted.
Locks are `flock`s, which the system drops when a process ends, however it ends.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mmspeed.errors import UserError

TEMP_SUFFIX = ".tmp"
READERS_LOCK = ".readers.lock"  # shared by all that have a cache open, exclusive for what takes entries away
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS})


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn a full disk, an exhausted quota or a forbidden write inside the block into a UserError that names `path`."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            why = os.strerror(error.errno or 0)
            raise UserError(
                f"disk full while writing {path} ({why}); make room and run the same command again"
            ) from error
        if error.errno in (errno.EACCES, errno.EROFS):
            raise UserError(
                f"cannot write {path} ({os.strerror(error.errno or 0)}); choose a folder you may write to"
            ) from error
        raise


class TempFile:
    """A hidden file in the folder of its final name, locked by this process until it is released.

    Nothing buffers between `write` and the system, so that a full disk shows where it happens. Used by one thread.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        while True:
            self.path = folder / f".{os.getpid()}-{secrets.token_hex(6)}{TEMP_SUFFIX}"
            self._fd = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o644)
            if try_lock(self._fd) and _same_file(self.path, self._fd):
                break
            os.close(self._fd)  # a repair elsewhere saw the file before it was locked, and took it for a stale one
            self.path.unlink(missing_ok=True)
        self.size = 0

    def write(self, data: bytes) -> None:
        """Append all of `data`; on any error the file keeps exactly what it held before."""
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(self._fd, view) :]
            self.size += len(data)
        except BaseException:
            os.ftruncate(self._fd, self.size)
            os.lseek(self._fd, self.size, os.SEEK_SET)
            raise

    def replace(self, target: Path) -> None:
        """Make the contents durable and give them the name `target`, in place of what had it."""
        os.fsync(self._fd)
        os.replace(self.path, target)
        fsync_folder(target.parent)

    def link(self, target: Path) -> bool:
        """Make the contents durable and give them the name `target` unless that is taken; whether it was free.

        The temporary name stays beside it, for readers that know the file by it, until `drop_name`.
        Raises UserError when the file system has no hard links.
        """
        os.fsync(self._fd)
        try:
            os.link(self.path, target)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno in _NO_LINKS:
                raise UserError(
                    f"{target.parent} is on a file system without hard links; put the cache elsewhere"
                ) from error
            raise
        fsync_folder(target.parent)
        return True

    def sync(self) -> None:
        """Make what was written so far durable, and so visible to other machines that open the file."""
        os.fsync(self._fd)

    def drop_name(self) -> None:
        """Take the temporary name away; the contents live on under the name that `link` gave."""
        self.path.unlink(missing_ok=True)

    def release(self) -> None:
        """Drop the lock and close. What was published stays; what was not is left for `discard` or a repair."""
        # An explicit unlock, because a forked child shares this lock and would keep it beyond our close.
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        os.close(self._fd)

    def discard(self) -> None:
        """Delete the temporary file and release it."""
        self.path.unlink(missing_ok=True)
        self.release()


def try_lock(fd: int, shared: bool = False) -> bool:
    """Take the lock of an open file, exclusive or shared; False when another's is in the way. Raises UserError without locks."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
            raise UserError("the cache's file system has no file locks; put the cache on another one") from error
        raise
    return True


class BusyError(UserError):
    """Another command keeps this one from working now; nothing is wrong with the cache."""


class ReaderLock:
    """Held, with any number of others, while a cache is read or added to; until `close`, or the object or process is gone.

    Where the folder may not be written there is none, and nobody who could take anything away. Raises BusyError while a command
    that takes entries away is at work.
    """

    def __init__(self, root: Path) -> None:
        self._fd: int | None = None
        try:
            fd = os.open(root / READERS_LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
        except OSError:
            return
        try:
            free = try_lock(fd, shared=True)
        except (UserError, OSError):  # a file system without locks: writers will say so
            free = True
        if not free:
            os.close(fd)
            raise BusyError(f"a `mmspeed cache` command is at work on {root}; run this again when it is done")
        self._fd = fd

    def close(self) -> None:
        """Let go of it."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def __del__(self) -> None:
        self.close()


def _same_file(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except FileNotFoundError:
        return False


def held(path: Path) -> bool:
    """Whether a living process holds the lock of a file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return True  # gone in this moment, so its writer lives
    try:
        return not try_lock(fd)
    finally:
        os.close(fd)


@contextmanager
def abandoned(path: Path, shared: bool = False) -> Iterator[bool]:
    """Whether a file is there and has no living writer; when so, its lock is held during the block.

    Held `shared`, it does not look like a living writer's to those who only ask whether there is one.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        yield False
        return
    try:
        yield try_lock(fd, shared)
    finally:
        os.close(fd)


def write_whole(path: Path, data: bytes, replace: bool = True) -> bool:
    """Write a file at once, durably. With `replace` false an existing file stays; whether ours was written.

    Raises UserError when the disk is full; nothing is left behind then.
    """
    with disk_errors(path):
        temp = TempFile(path.parent)
        try:
            temp.write(data)
            if replace:
                temp.replace(path)
                return True
            return temp.link(path)
        finally:
            temp.discard()


def fsync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        # Some network file systems refuse to sync a folder; they need no such call.
        with suppress(OSError):
            os.fsync(fd)
    finally:
        os.close(fd)
