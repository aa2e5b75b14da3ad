"""Walk the folders of a source: links are followed, each folder is entered once, and hidden ones are not entered."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Folder:
    """A folder: its path, the names of its files, and those of its hidden files and folders; all in order."""

    path: str
    files: list[str]
    hidden: list[str]


def walk(root: str, unreadable: Callable[[OSError], None], without: Iterable[str] = ()) -> Iterator[Folder]:
    """Yield a folder and those below it, such as those behind links: data sets are often spread over several disks.

    unreadable: is called with the error of a folder that cannot be read. without: folders that are not entered.
    """
    entered = {os.path.realpath(path) for path in (root, *without)}
    for path, folders, files in os.walk(root, onerror=unreadable, followlinks=True):
        hidden = sorted(name for name in (*folders, *files) if name.startswith("."))
        # Sorted before they are entered, so that of two links to a folder the same one is followed on every file system.
        folders[:] = [name for name in sorted(folders) if name not in hidden and _enter(path, name, entered)]
        yield Folder(path, sorted(set(files).difference(hidden)), hidden)


def _enter(folder: str, name: str, entered: set[str]) -> bool:
    """True at the first visit of a folder; links may form cycles."""
    real = os.path.realpath(os.path.join(folder, name))
    first = real not in entered
    entered.add(real)
    return first
