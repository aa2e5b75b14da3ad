"""Disks that are full, or can only be read, for the calling process and its children alone."""

from __future__ import annotations

import ctypes
import os
import resource
from pathlib import Path

_NEW_NAMESPACE, _NEW_USER = 0x00020000, 0x10000000  # CLONE_NEWNS, CLONE_NEWUSER
_READ_ONLY, _REMOUNT, _RECURSIVE, _PRIVATE = 1, 32, 16384, 1 << 18
_LIBC = ctypes.CDLL(None, use_errno=True)


def _check(result: int, words: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{words}: {os.strerror(code)}")


class SmallDisk:
    """A file system in memory of `size` kB at `folder`, which ends with this process. Raises OSError where it is not permitted."""

    def __init__(self, folder: Path, kilobytes: int) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        user, group = os.getuid(), os.getgid()
        if user == 0:
            _check(_LIBC.unshare(_NEW_NAMESPACE), "unshare")
        else:  # one thread only, as after a fork
            _check(_LIBC.unshare(_NEW_USER | _NEW_NAMESPACE), "unshare")
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"0 {user} 1")
            Path("/proc/self/gid_map").write_text(f"0 {group} 1")
        self._mount("none", "/", None, _RECURSIVE | _PRIVATE, "")
        self._mount("tmpfs", str(folder), "tmpfs", 0, f"size={kilobytes}k")

    def _mount(self, source: str, target: str, kind: str | None, flags: int, options: str) -> None:
        arguments = [None if text is None else text.encode() for text in (source, target, kind)]
        _check(_LIBC.mount(*arguments, ctypes.c_ulong(flags), options.encode()), f"mount of {target}")

    def resize(self, kilobytes: int) -> None:
        """Let the disk hold more, or less."""
        self._mount("tmpfs", str(self.folder), None, _REMOUNT, f"size={kilobytes}k")

    def read_only(self, only: bool = True) -> None:
        """Refuse all writes, or allow them again."""
        self._mount("tmpfs", str(self.folder), None, _REMOUNT | (_READ_ONLY if only else 0), "")


class FileLimit:
    """The stand-in where no small disk is permitted: writes of this process beyond so many kB of a file fail."""

    def __init__(self, kilobytes: int) -> None:
        self._before = resource.getrlimit(resource.RLIMIT_FSIZE)
        self.resize(kilobytes)

    def resize(self, kilobytes: int) -> None:
        """Let files be longer, or shorter."""
        resource.setrlimit(resource.RLIMIT_FSIZE, (kilobytes * 1024, self._before[1]))


def limited_disk(folder: Path, kilobytes: int, file_kilobytes: int) -> tuple[SmallDisk | FileLimit, str]:
    """A disk of so many kB, or files of `file_kilobytes` where none is permitted; and the words for it."""
    try:
        return SmallDisk(folder, kilobytes), f"a disk of {kilobytes} kB"
    except OSError:
        folder.mkdir(parents=True, exist_ok=True)
        return FileLimit(file_kilobytes), f"files of {file_kilobytes} kB (no small disk is permitted here)"
