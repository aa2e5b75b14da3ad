"""Collect the files of one stem: media, and the captions beside them, of a folder on this machine or in a store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from mmspeed.config.places import base_name
from mmspeed.media.containers import is_pickle
from mmspeed.media.rejections import Reason, Rejected
from mmspeed.media.source import RemoteFile
from mmspeed.preprocess.sources.listing import CAPTION_ENDINGS, SourceCollector, ending, is_media, unknown_ending


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
