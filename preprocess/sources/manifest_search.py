"""Find the manifest of a folder whose media have no captions beside them."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress

from mmspeed.config.places import base_name
from mmspeed.config.schema import DataConfig, SourceConfig
from mmspeed.errors import UserError
from mmspeed.preprocess.sources.folders import walk
from mmspeed.preprocess.sources.listing import CAPTION_ENDINGS, ending, is_media
from mmspeed.preprocess.sources.manifests import CAPTION_LISTS, MEDIA_LISTS, READERS, head_columns

FORMAT_OF_ENDING = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".tar": "webdataset",
}
# Keys of a source, and the names under which manifests usually have what they name, the likeliest first.
USUAL_COLUMNS = {
    "media_column": ("video", "video_path", "path", "file_name", "filename", "file", "media", "image", "url"),
    "caption_column": ("caption", "text", "prompt", "captions", "cap", "description"),
}


def kind_of(path: str) -> str:
    """The format of a file by its name; empty if that does not say it."""
    return "lists" if base_name(path) in MEDIA_LISTS else FORMAT_OF_ENDING.get(ending(path), "")


def manifest_in(data: DataConfig, config: SourceConfig, folder: str) -> str | None:
    """The manifest by which a local folder is read: `metadata.*`, else the only file that lists media with captions.

    None where captions stand beside the media, and where there is no such file or there are several.
    """
    named = (os.path.join(folder, name) for name in usual_names(config))
    if (usual := next((file for file in named if os.path.isfile(file)), None)) is not None or config.format != "auto":
        return usual
    names: list[str] = []
    with suppress(OSError):  # told where the folder is read
        names = os.listdir(folder)
    places = [os.path.join(folder, name) for name in like_manifests(names)]
    found = [place for place in places if os.path.isfile(place) and _lists_media(data, config, place)]
    captions_beside = len(found) == 1 and any(captioned(below.files) for below in walk(folder, lambda error: None))
    return found[0] if len(found) == 1 and not captions_beside else None


def usual_names(config: SourceConfig) -> list[str]:
    """The names of manifests that are read before anything else in a folder."""
    kinds = ("jsonl", "csv", "parquet") if config.format == "auto" else (config.format,)
    return [f"metadata.{kind}" for kind in kinds]


def like_manifests(names: Sequence[str]) -> list[str]:
    """The files of a folder, in order, that may be manifests by their names; captions of a medium are none."""
    stems = {os.path.splitext(name)[0] for name in names if is_media(name)}
    lists = any(name in names for name in CAPTION_LISTS)
    return [
        name
        for name in sorted(names)
        if kind_of(name) in READERS
        and not name.startswith(".")
        and (lists if kind_of(name) == "lists" else os.path.splitext(name)[0] not in stems)
    ]


def captioned(names: Iterable[str]) -> bool:
    """True if a medium among names has a caption file of its stem beside it."""
    stems: dict[bool, set[str]] = {True: set(), False: set()}
    for name in names:
        if is_media(name) or ending(name) in CAPTION_ENDINGS:
            stems[is_media(name)].add(os.path.splitext(name)[0])
    return not stems[True].isdisjoint(stems[False])


def _lists_media(data: DataConfig, config: SourceConfig, path: str) -> bool:
    """True if a file has a column of media and one of captions, under the names of the config or usual ones."""
    names: Collection[str] = ()
    with suppress(UserError):
        names = head_columns(path, kind_of(path), data.caption_encoding)
    return all(any(name in names for name in (getattr(config, key), *usual)) for key, usual in USUAL_COLUMNS.items())
