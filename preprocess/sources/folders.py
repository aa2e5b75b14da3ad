"""Folders: media beside captions of the same stem."""

from __future__ import annotations

import os

from mmspeed.config.schema import SourceConfig
from mmspeed.preprocess.sources.captions import MAX_CAPTION_BYTES
from mmspeed.preprocess.sources.containers import is_pickle
from mmspeed.preprocess.sources.listing import CAPTION_ENDINGS, SourceCollector, ending, is_media
from mmspeed.preprocess.sources.rejections import Reason


def read_folder(found: SourceCollector, config: SourceConfig, root: str) -> None:
    """All files, recursively. Hidden folders are not entered.

    Links are followed wherever they lead, since data sets often lie on several disks; each folder is entered once.
    """
    entered = {os.path.realpath(root)}

    def unreadable(error: OSError) -> None:
        found.files += 1
        shown = os.path.relpath(error.filename or root, root).replace(os.sep, "/")
        found.reject(f"{shown}/", Reason.UNREADABLE, f"the folder cannot be read: {error.strerror or error}")

    for folder, folders, files in os.walk(root, onerror=unreadable, followlinks=True):
        # Sorted before they are entered, so that of two links to one folder the same is followed on every file system.
        folders[:] = [name for name in sorted(folders) if not name.startswith(".") and _enter(folder, name, entered)]
        hidden = [name for name in files if name.startswith(".")]
        found.files += len(files)
        found.ignored += len(hidden)
        groups: dict[str, list[str]] = {}
        for name in sorted(set(files) - set(hidden)):
            groups.setdefault(os.path.splitext(name)[0], []).append(name)
        for names in groups.values():
            _read_group(found, config, root, folder, names)


def _enter(folder: str, name: str, entered: set[str]) -> bool:
    """Whether a folder is met for the first time; links may lead in circles."""
    real = os.path.realpath(os.path.join(folder, name))
    first = real not in entered
    entered.add(real)
    return first


def _read_group(found: SourceCollector, config: SourceConfig, root: str, folder: str, names: list[str]) -> None:
    """The files of one stem."""
    media = [name for name in names if is_media(name)]
    captions = found.captions()
    unreadable = ""
    for name in names:
        path = os.path.join(folder, name)
        shown = os.path.relpath(path, root).replace(os.sep, "/")
        if name in media:
            continue
        if not os.path.isfile(path):
            found.reject(shown, *no_file(path))
        elif is_pickle(name):
            found.reject(shown, Reason.PICKLE, "")
        elif ending(name) not in CAPTION_ENDINGS:
            found.reject(shown, Reason.NOT_MEDIA, f"ending {ending(name) or '(none)'}")
        elif not media:
            found.reject(shown, Reason.ORPHAN_CAPTION, "")
        else:
            found.caption_files += 1
            try:
                with open(path, "rb") as file:
                    captions.add_file(name, file.read(MAX_CAPTION_BYTES + 1), config.caption_column)
            except OSError as error:
                unreadable = f"its caption {name} cannot be read: {error.strerror or error}"
    for name in media:
        path = os.path.join(folder, name)
        shown = os.path.relpath(path, root).replace(os.sep, "/")
        if not os.path.isfile(path):
            found.reject(shown, *no_file(path))
        elif unreadable:
            found.reject(shown, Reason.UNREADABLE, unreadable)
        else:
            found.add(shown, path, captions, "train", os.path.basename(root.rstrip(os.sep)))


def no_file(path: str) -> tuple[Reason, str]:
    """Why `path` is no file that can be read: a reason and its detail."""
    try:
        os.stat(path)
        return Reason.NOT_MEDIA, "not a regular file"
    except PermissionError as error:
        return Reason.UNREADABLE, error.strerror or str(error)
    except (OSError, ValueError):
        pass
    return Reason.MISSING_FILE, "the link leads nowhere" if os.path.islink(path) else "no such file"
