"""Read folders of media beside captions of the same stem."""

from __future__ import annotations

import os

from mmspeed.config.schema import SourceConfig
from mmspeed.media.rejections import Reason, Rejected, in_words
from mmspeed.preprocess.sources.captions import MAX_CAPTION_BYTES
from mmspeed.preprocess.sources.groups import collect_group
from mmspeed.preprocess.sources.listing import SourceCollector
from mmspeed.preprocess.sources.walk import walk


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
