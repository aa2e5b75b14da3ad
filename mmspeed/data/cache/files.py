"""Atomic files (law 4): hidden and locked while they are written, published complete by one rename or link.

A temporary file whose lock can be taken has no writer any more: a killed process left it, and it may be deleted.
Locks are `flock`s, which the system drops when a process ends, however it ends.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mmspeed.errors import UserError

TEMP_SUFFIX = ".tmp"
READERS_LOCK = ".readers.lock"  # shared by all who have a cache open, exclusive for commands that remove entries
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

    Its owner alone may read it until it has its final name; then it has the permissions `mode`, less those of the process's umask.
    Writes are not buffered, so that a full disk raises at the write that fails. For use by one thread.
    """

    def __init__(self, folder: Path, mode: int = 0o644) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        while True:
            self.path, self._fd, self._mode = _new_private(folder, mode)
            if try_lock(self._fd) and same_file(self.path, self._fd):
                break
            os.close(self._fd)  # a repair elsewhere found the file before it was locked, and treated it as abandoned
            self.path.unlink(missing_ok=True)
        self.size = 0

    def write(self, data: bytes) -> None:
        """Append all of `data`; on any error the file is truncated to its previous contents."""
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(self._fd, view) :]
            self.size += len(data)
        except BaseException:
            os.ftruncate(self._fd, self.size)
            os.lseek(self._fd, self.size, os.SEEK_SET)
            raise

    def truncate(self) -> None:
        """Begin again with no contents."""
        os.ftruncate(self._fd, 0)
        os.lseek(self._fd, 0, os.SEEK_SET)
        self.size = 0

    def replace(self, target: Path) -> None:
        """Make the contents durable and rename the file to `target`, replacing any file of that name."""
        os.fsync(self._fd)
        self.rename(target)
        fsync_folder(target.parent)

    def rename(self, target: Path) -> None:
        """Rename the file to `target`, replacing any file of that name, for contents that need not be durable."""
        os.fchmod(self._fd, self._mode)
        os.replace(self.path, target)

    def link(self, target: Path) -> bool:
        """Make the contents durable and link them as `target` unless that exists; return True if it was free.

        The temporary name remains beside it, for readers that use it, until its owner removes that.
        Raises UserError if the file system has no hard links.
        """
        os.fsync(self._fd)
        os.fchmod(self._fd, self._mode)
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
        """Make everything written so far durable, and so visible to other machines that open the file."""
        os.fsync(self._fd)

    def share(self) -> None:
        """Turn the lock into a shared one."""
        fcntl.flock(self._fd, fcntl.LOCK_SH)

    def release(self) -> None:
        """Drop the lock and close. A published file stays; an unpublished one is left for `discard` or a repair."""
        # Unlock explicitly: a forked child shares this lock and would hold it after this process closes the file.
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        os.close(self._fd)

    def discard(self) -> None:
        """Delete the temporary file and release it."""
        self.path.unlink(missing_ok=True)
        self.release()


@contextmanager
def private_file(target: Path) -> Iterator[Path]:
    """A hidden file beside `target` that its owner alone may read, for writers that open a name; it becomes `target` after the block.

    It then has a new file's permissions. It is not locked, and not made durable. After an exception it is removed.
    """
    path, fd, mode = _new_private(target.parent, 0o644)
    os.close(fd)
    try:
        yield path
        os.chmod(path, mode)
        os.replace(path, target)
    finally:
        path.unlink(missing_ok=True)


def _new_private(folder: Path, mode: int) -> tuple[Path, int, int]:
    """A new hidden file that its owner alone may read, open, and the permissions that it is to have under its final name."""
    path = folder / f".{os.getpid()}-{secrets.token_hex(6)}{TEMP_SUFFIX}"
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, mode)
    masked = stat.S_IMODE(os.fstat(fd).st_mode)
    os.fchmod(fd, masked & 0o700)
    return path, fd, masked


def try_lock(fd: int, shared: bool = False) -> bool:
    """Take an open file's lock, exclusive or shared; False if another process holds it. Raises UserError if the system has no locks."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
            raise UserError("the cache's file system has no file locks; put the cache on another one") from error
        raise
    return True


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold the lock of a file, which is made with its folder, and wait for it; on a file system without locks nothing is held.

    Raises UserError if the disk is full or the folder cannot be written.
    """
    with disk_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
    try:
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


class BusyError(UserError):
    """Another command is using the cache, which is not damaged."""


class ReaderLock:
    """A shared lock, held while a cache is read or added to; until `close`, or the end of the object or process.

    A folder that cannot be written to gets no lock, since nothing can be removed from it. Raises BusyError while a command that
    removes entries is running.
    """

    def __init__(self, root: Path) -> None:
        self._fd: int | None = None
        try:
            fd = os.open(root / READERS_LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
        except OSError:
            return
        try:
            free = try_lock(fd, shared=True)
        except (UserError, OSError):  # a file system without locks: writers report it
            free = True
        if not free:
            os.close(fd)
            raise BusyError(f"a `mmspeed cache` command is running on {root}; run this again when it has ended")
        self._fd = fd

    def close(self) -> None:
        """Release the lock."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def __del__(self) -> None:
        self.close()


def same_file(path: Path, fd: int) -> bool:
    """True if a name is that of an open file."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except FileNotFoundError:
        return False


def held(path: Path) -> bool:
    """True if a living process holds the lock of a file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return True  # it vanished just now, so its writer is alive
    try:
        return not try_lock(fd)
    finally:
        os.close(fd)


def remove_abandoned(root: Path) -> tuple[list[str], int]:
    """Delete the temporary files of writers that are gone; returns their names, and the number of those that writers hold."""
    removed, live = list[str](), 0
    for path in sorted(root.rglob(f".*{TEMP_SUFFIX}")):
        with abandoned(path) as free:
            if free:
                path.unlink(missing_ok=True)
                removed.append(path.relative_to(root).as_posix())
            else:
                live += path.exists()
    return removed, live


@contextmanager
def abandoned(path: Path, shared: bool = False) -> Iterator[bool]:
    """Yield True if a file exists and has no living writer; its lock is then held during the block.

    With `shared`, others that also take a shared lock do not mistake this process for a living writer.
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


def write_whole(path: Path, data: bytes, replace: bool = True, mode: int = 0o644) -> bool:
    """Write a whole file durably; return True if it was written, False if `replace` is false and the file existed.

    `mode`: its permissions, less those of the process's umask. Raises UserError if the disk is full, and then leaves nothing behind.
    """
    with disk_errors(path):
        temp = TempFile(path.parent, mode)
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
        # Some network file systems refuse to sync a folder; they do not need it.
        with suppress(OSError):
            os.fsync(fd)
    finally:
        os.close(fd)
