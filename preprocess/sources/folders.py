"""Read folders of media beside captions of the same stem."""

from __future__ import annotations

import os

from mmspeed.config.schema import SourceConfig
from mmspeed.preprocess.sources.captions import MAX_CAPTION_BYTES
from mmspeed.preprocess.sources.containers import is_pickle
from mmspeed.preprocess.sources.listing import CAPTION_ENDINGS, SourceCollector, ending, is_media, unknown_ending
from mmspeed.preprocess.sources.rejections import Reason, in_words


def read_folder(collector: SourceCollector, config: SourceConfig, root: str) -> None:
    """Collect all files, recursively, except those in hidden folders.

    Links are followed everywhere, since data sets are often spread over several disks; each folder is entered once.
    """
    entered = {os.path.realpath(root)}

    def unreadable(error: OSError) -> None:
        collector.files += 1
        relative = os.path.relpath(error.filename or root, root).replace(os.sep, "/")
        collector.reject(f"{relative}/", Reason.UNREADABLE, f"the folder cannot be read: {in_words(error)}")

    for folder, folders, files in os.walk(root, onerror=unreadable, followlinks=True):
        # Sorted before they are entered, so that of two links to a folder the same one is followed on every file system.
        folders[:] = [name for name in sorted(folders) if not name.startswith(".") and _enter(folder, name, entered)]
        hidden = [name for name in files if name.startswith(".")]
        collector.files += len(files)
        collector.ignored += len(hidden)
        groups: dict[str, list[str]] = {}
        for name in sorted(set(files) - set(hidden)):
            groups.setdefault(os.path.splitext(name)[0], []).append(name)
        for names in groups.values():
            _read_group(collector, config, root, folder, names)


def _enter(folder: str, name: str, entered: set[str]) -> bool:
    """True at the first visit of a folder; links may form cycles."""
    real = os.path.realpath(os.path.join(folder, name))
    first = real not in entered
    entered.add(real)
    return first


def _read_group(collector: SourceCollector, config: SourceConfig, root: str, folder: str, names: list[str]) -> None:
    """Collect the files of one stem."""
    media = [name for name in names if is_media(name)]
    captions = collector.captions()
    unreadable = ""
    for name in names:
        path = os.path.join(folder, name)
        relative = os.path.relpath(path, root).replace(os.sep, "/")
        if name in media:
            continue
        if not os.path.isfile(path):
            collector.reject(relative, *no_file(path))
        elif is_pickle(name):
            collector.reject(relative, Reason.PICKLE, Reason.PICKLE.explanation)
        elif ending(name) not in CAPTION_ENDINGS:
            collector.reject(relative, Reason.NOT_MEDIA, unknown_ending(name))
        elif not media:
            collector.reject(relative, Reason.ORPHAN_CAPTION, "a caption without a media file of its name")
        else:
            collector.caption_files += 1
            try:
                with open(path, "rb") as file:
                    captions.add_file(name, file.read(MAX_CAPTION_BYTES + 1), config.caption_column)
            except OSError as error:
                unreadable = f"its caption {name} cannot be read: {in_words(error)}"
    for name in media:
        path = os.path.join(folder, name)
        relative = os.path.relpath(path, root).replace(os.sep, "/")
        if not os.path.isfile(path):
            collector.reject(relative, *no_file(path))
        elif unreadable:
            collector.reject(relative, Reason.UNREADABLE, unreadable)
        else:
            collector.add(relative, path, captions, "train", os.path.basename(root.rstrip(os.sep)))


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
