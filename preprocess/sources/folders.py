"""Read folders: walk them, and collect media beside captions of the same stem, on this machine or in a store."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from mmspeed.config.places import base_name
from mmspeed.config.schema import SourceConfig
from mmspeed.media.containers import is_pickle
from mmspeed.media.rejections import Reason, Rejected, in_words
from mmspeed.media.source import RemoteFile
from mmspeed.preprocess.sources.captions import MAX_CAPTION_BYTES
from mmspeed.preprocess.sources.listing import CAPTION_ENDINGS, SourceCollector, ending, is_media, unknown_ending


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


class FolderFiles(Protocol):
    """The files of a folder, by their names relative to it."""

    def check(self, name: str) -> None:
        """Raises Rejected for what is no file that can be read."""
        ...

    def caption(self, name: str) -> bytes:
        """The first `MAX_CAPTION_BYTES` + 1 bytes of a caption file. Raises Rejected where it cannot be read."""
        ...

    def medium(self, name: str) -> tuple[str, RemoteFile | None]:
        """The path or URL of a media file, and its facts where it is in a store."""
        ...


def collect_group(
    collector: SourceCollector, files: FolderFiles, names: Sequence[str], caption_column: str, place: str
) -> None:
    """Collect the files `names`, all of one stem, as sources of `place`, or as rejections."""
    media = [name for name in names if is_media(name)]
    captions, unreadable = collector.captions(), ""
    for name in names:
        if name in media:
            continue
        try:
            files.check(name)
        except Rejected as error:
            collector.reject(name, error.reason, error.detail)
            continue
        if is_pickle(name):
            collector.reject(name, Reason.PICKLE, Reason.PICKLE.explanation)
        elif ending(name) not in CAPTION_ENDINGS:
            collector.reject(name, Reason.NOT_MEDIA, unknown_ending(name))
        elif not media:
            collector.reject(name, Reason.ORPHAN_CAPTION, "a caption without a media file of its name")
        else:
            collector.caption_files += 1
            try:
                captions.add_file(name, files.caption(name), caption_column)
            except Rejected as error:
                unreadable = f"its caption {base_name(name)} cannot be read: {error.detail}"
    for name in media:
        try:
            files.check(name)
            if unreadable:
                raise Rejected(Reason.UNREADABLE, unreadable)
            path, facts = files.medium(name)
        except Rejected as error:
            collector.reject(name, error.reason, error.detail)
        else:
            collector.add(name, path, captions, "train", place, remote=facts)


def read_folder(collector: SourceCollector, config: SourceConfig, root: str) -> None:
    """Collect all files, recursively, except those in hidden folders."""
    files_of_root, place = LocalFiles(root), os.path.basename(root.rstrip(os.sep))

    def unreadable(error: OSError) -> None:
        collector.files += 1
        relative = os.path.relpath(error.filename or root, root).replace(os.sep, "/")
        collector.reject(f"{relative}/", Reason.UNREADABLE, f"the folder cannot be read: {in_words(error)}")

    for folder in walk(root, unreadable):
        collector.files += len(folder.files) + len(folder.hidden)
        collector.ignored += len(folder.hidden)
        groups: dict[str, list[str]] = {}
        for name in folder.files:
            groups.setdefault(os.path.splitext(name)[0], []).append(name)
        below = os.path.relpath(folder.path, root).replace(os.sep, "/")
        for names in groups.values():
            relative = [name if below == "." else f"{below}/{name}" for name in names]
            collect_group(collector, files_of_root, relative, config.caption_column, place)


class LocalFiles:
    """The files of a folder on this machine."""

    def __init__(self, root: str) -> None:
        self.root = root

    def check(self, name: str) -> None:
        path = os.path.join(self.root, name)
        if not os.path.isfile(path):
            raise Rejected(*no_file(path))

    def caption(self, name: str) -> bytes:
        try:
            with open(os.path.join(self.root, name), "rb") as file:
                return file.read(MAX_CAPTION_BYTES + 1)
        except OSError as error:
            raise Rejected(Reason.UNREADABLE, in_words(error)) from None

    def medium(self, name: str) -> tuple[str, None]:
        return os.path.join(self.root, name), None


def no_file(path: str) -> tuple[Reason, str]:
    """The reason that `path` is not a readable file, and its detail."""
    try:
        os.stat(path)
        return Reason.NOT_MEDIA, "not a regular file"
    except PermissionError as error:
        return Reason.UNREADABLE, in_words(error)
    except (OSError, ValueError):
        pass
    return Reason.MISSING_FILE, "the link leads nowhere" if os.path.islink(path) else "no such file"
