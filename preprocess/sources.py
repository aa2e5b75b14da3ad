"""What there is to encode: folders, manifests and webdataset tars become a list of `Source`.

Nothing is opened but captions, manifests and tar headers; archives are never unpacked. Each file, row or member that is
met becomes a source, a caption, a rejection with a reason, or is counted as ignored.
"""

from __future__ import annotations

import glob
import itertools
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, BinaryIO

from mmspeed.config.schema import DataConfig, SourceConfig
from mmspeed.errors import UserError
from mmspeed.preprocess.captions import captions_in, clean_caption, is_missing, strings
from mmspeed.preprocess.manifests import READERS
from mmspeed.preprocess.reasons import Reason, Rejection
from mmspeed.preprocess.source import Kind, Source, Split, content_id, readable
from mmspeed.preprocess.tars import Member, is_unsafe, read_headers

__all__ = ["Kind", "Listing", "Source", "Split", "content_id", "list_sources"]

VIDEO_ENDINGS = frozenset(
    ".mp4 .m4v .mov .mkv .webm .avi .gif .ts .mts .m2ts .mpg .mpeg .wmv .flv .ogv .3gp .apng".split()
)
IMAGE_ENDINGS = frozenset(".jpg .jpeg .png .webp .bmp .tif .tiff .avif".split())
CAPTION_ENDINGS = frozenset((".txt", ".json", ".cap"))
FORMAT_OF_ENDING = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".parquet": "parquet",
    ".tar": "webdataset",
}
_SPLITS: dict[Any, Split] = {
    None: "train",
    "": "train",
    "train": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
}
_MAX_CAPTION_BYTES = 1 << 20


@dataclass(frozen=True)
class Listing:
    """All that was met, each thing counted once.

    `files` = sources + `beyond_limit` + `caption_files` + rejections + `ignored`, where a file is a file of a folder,
    a row of a manifest or a member of a tar (a tar that breaks off and a folder that cannot be read count as one more).
    `ignored` counts hidden files, and tar members beside a media member that are neither media nor captions.
    `captions_cut` counts captions that were longer than the limit, `captions_repaired` those in which U+FFFD stands for
    bytes that could not be decoded.
    """

    sources: list[Source]
    rejections: list[Rejection]
    ignored: int = 0
    captions_cut: int = 0
    captions_repaired: int = 0
    files: int = 0
    caption_files: int = 0
    beyond_limit: int = 0


def list_sources(data: DataConfig) -> Listing:
    """Every source of the configured places, in their order and then by name.

    Raises UserError for a missing path, an unknown format, a missing column, or a place without any media.
    """
    found = _Found(data.max_caption_chars)
    for config in data.sources:
        before = len(found.sources), len(found.rejections)
        for path in _paths(config):
            _READ[_format(config, path)](found, config, path)
        if len(found.sources) == before[0]:
            _check_not_empty(config, found.rejections[before[1] :])
    limit = data.limit if data.limit is not None else len(found.sources)
    return Listing(
        sources=found.sources[:limit],
        rejections=found.rejections,
        ignored=found.ignored,
        captions_cut=found.captions_cut,
        captions_repaired=found.captions_repaired,
        files=found.files,
        caption_files=found.caption_files,
        beyond_limit=max(0, len(found.sources) - limit),
    )


class _Found:
    """What has been met so far."""

    def __init__(self, max_caption_chars: int) -> None:
        self.sources: list[Source] = []
        self.rejections: list[Rejection] = []
        self.ignored = self.files = self.caption_files = 0
        self.captions_cut = self.captions_repaired = 0
        self._max_chars = max_caption_chars
        self._names: set[str] = set()

    def add(
        self,
        name: str,
        path: str,
        captions: Iterable[str],
        split: Split,
        place: str,
        member: Member | None = None,
        where: str = "",
    ) -> None:
        """A media file with its raw captions; without any caption it is rejected, and `where` says where it was met."""
        kept: dict[str, None] = {}
        for caption in captions:
            text, cut, repaired = clean_caption(caption, self._max_chars)
            self.captions_cut += cut
            self.captions_repaired += repaired
            if text:
                kept[text] = None
        if not kept:
            self.reject(name, Reason.NO_CAPTION, where)
            return
        kind: Kind = "image" if _ending(name) in IMAGE_ENDINGS else "video"
        offset, size = (member.offset, member.size) if member else (None, None)
        unique = self._unique(readable(name), readable(place))
        self.sources.append(Source(unique, path, offset, size, kind, tuple(kept), split))

    def reject(self, name: str, reason: Reason, detail: str) -> None:
        self.rejections.append(Rejection(readable(name), reason, readable(detail)))

    def _unique(self, name: str, place: str) -> str:
        """`name`; with its place before it, and then a number behind it, when it is taken."""
        options = itertools.chain((name, f"{place}/{name}"), (f"{name}#{number}" for number in itertools.count(2)))
        unique = next(option for option in options if option not in self._names)
        self._names.add(unique)
        return unique


def _ending(name: str) -> str:
    return os.path.splitext(name)[1].lower()


def _is_media(name: str) -> bool:
    return _ending(name) in VIDEO_ENDINGS or _ending(name) in IMAGE_ENDINGS


def _paths(config: SourceConfig) -> list[str]:
    """The files or the folder that a source names; `*` is the only wildcard. Raises UserError when there are none."""
    if os.path.exists(config.path):
        return [config.path]
    pattern = "*".join(glob.escape(part) for part in config.path.split("*"))
    paths = sorted(glob.glob(pattern)) if "*" in config.path else []
    if not paths:
        raise UserError(f"data.sources: {config.path} does not exist; correct the path")
    return paths


def _format(config: SourceConfig, path: str) -> str:
    """How `path` is read. Raises UserError when that cannot be told."""
    if config.format == "folder" and not os.path.isdir(path):
        raise UserError(f"data.sources: {path} is a file, not a folder; set format to what it is, or to auto")
    if os.path.isdir(path):
        if config.format != "folder" and _manifest_in(config, path) is not None:
            return "manifest_folder"
        if config.format not in ("auto", "folder"):
            raise UserError(f"data.sources: {path} is a folder, and format {config.format} reads a file; name the file")
        return "folder"
    if config.format != "auto":
        return config.format
    if re.search(r"\.(tgz|tar\.\w+)$", path.lower()):
        raise UserError(f"data.sources: {path} is a compressed tar, which cannot be read in place; decompress it first")
    if _ending(path) not in FORMAT_OF_ENDING:
        raise UserError(
            f"data.sources: {path}: cannot tell what it is by its ending; "
            f"name a folder or a file in {', '.join(FORMAT_OF_ENDING)}, or set format"
        )
    return FORMAT_OF_ENDING[_ending(path)]


def _manifest_in(config: SourceConfig, folder: str) -> str | None:
    kinds = ("jsonl", "csv", "parquet") if config.format == "auto" else (config.format,)
    files = (os.path.join(folder, f"metadata.{kind}") for kind in kinds)
    return next((file for file in files if os.path.isfile(file)), None)


def _check_not_empty(config: SourceConfig, rejections: list[Rejection]) -> None:
    """Raises UserError when a place held nothing that could have been a source."""
    tried = {Reason.NO_CAPTION, Reason.MISSING_FILE, Reason.BAD_ROW}
    if any(rejection.reason in tried for rejection in rejections):
        return
    why = f" ({rejections[0].source}: {rejections[0].detail or rejections[0].reason})" if rejections else ""
    hint = "; to read tars, name them: folder/*.tar" if any(_ending(r.source) == ".tar" for r in rejections) else ""
    endings = " ".join(sorted(VIDEO_ENDINGS | IMAGE_ENDINGS))
    raise UserError(f"data.sources: {config.path} holds no media{why}; looked for {endings}{hint}")


def _read_folder(found: _Found, config: SourceConfig, root: str) -> None:
    """Media beside captions of the same stem, recursively. Hidden folders are not entered."""
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


def _read_group(found: _Found, config: SourceConfig, root: str, folder: str, names: list[str]) -> None:
    """The files of one stem."""
    media = [name for name in names if _is_media(name)]
    captions: list[str] = []
    unreadable = ""
    for name in names:
        path = os.path.join(folder, name)
        shown = os.path.relpath(path, root).replace(os.sep, "/")
        if name in media:
            continue
        if not os.path.isfile(path):
            found.reject(shown, *_no_file(path))
        elif _ending(name) not in CAPTION_ENDINGS:
            found.reject(shown, Reason.NOT_MEDIA, f"ending {_ending(name) or '(none)'}")
        elif not media:
            found.reject(shown, Reason.ORPHAN_CAPTION, "")
        else:
            found.caption_files += 1
            try:
                with open(path, "rb") as file:
                    captions += captions_in(name, file.read(_MAX_CAPTION_BYTES), config.caption_column)
            except OSError as error:
                unreadable = f"its caption {name} cannot be read: {error.strerror or error}"
    for name in media:
        path = os.path.join(folder, name)
        shown = os.path.relpath(path, root).replace(os.sep, "/")
        if not os.path.isfile(path):
            found.reject(shown, *_no_file(path))
        elif unreadable:
            found.reject(shown, Reason.UNREADABLE, unreadable)
        else:
            found.add(shown, path, captions, "train", os.path.basename(root.rstrip(os.sep)))


def _no_file(path: str) -> tuple[Reason, str]:
    try:
        os.stat(path)
        return Reason.NOT_MEDIA, "not a regular file"
    except PermissionError as error:
        return Reason.UNREADABLE, error.strerror or str(error)
    except (OSError, ValueError):
        pass
    return Reason.MISSING_FILE, "the link leads nowhere" if os.path.islink(path) else "no such file"


def _read_manifest(found: _Found, config: SourceConfig, path: str) -> None:
    """Rows that name media relative to the manifest's folder. Raises UserError for a missing column or no rows."""
    ending = _ending(path)
    kind = config.format if config.format in READERS else FORMAT_OF_ENDING[ending]
    name = os.path.basename(path)
    columns: dict[str, None] = {}
    rows = 0
    first_problem = ""
    unit = "row" if kind == "parquet" else "line"
    read = [column for column in (config.media_column, config.caption_column, config.split_column) if column]
    for line, row in READERS[kind](path, read):
        rows += 1
        where = f"{name} {unit} {line}"
        if isinstance(row, str):
            first_problem = first_problem or f"{unit} {line}: {row}"
            found.reject(f"{name}:{line}", Reason.BAD_ROW, f"{where}: {row}")
            continue
        columns.update(dict.fromkeys(row))
        _read_row(found, config, path, f"{name}:{line}", where, row)
    found.files += rows
    if not rows:
        raise UserError(f"data.sources: {path} holds no rows")
    if not columns:
        raise UserError(f"data.sources: {path} is not {kind}: {first_problem}")
    for option, column in (("media_column", config.media_column), ("caption_column", config.caption_column)):
        if column not in columns:
            raise UserError(
                f"data.sources: {path} has no column '{column}'; it has {', '.join(map(repr, columns))}: set {option}"
            )


def _read_row(found: _Found, config: SourceConfig, manifest: str, name: str, where: str, row: dict[str, Any]) -> None:
    """One row; `name` stands for it until its media is known, and `where` tells people its manifest and line."""
    media, split = row.get(config.media_column), row.get(config.split_column) if config.split_column else None
    split = None if is_missing(split) else split
    try:
        captions = strings(row.get(config.caption_column))
        if not isinstance(media, str) or not media.strip() or "\0" in media:
            raise ValueError(f"'{config.media_column}' names no file")
        if split not in _SPLITS:
            raise ValueError(f"'{config.split_column}' is {split!r}, neither train nor val")
    except (ValueError, TypeError) as error:
        found.reject(name, Reason.BAD_ROW, f"{where}: {error}")
        return
    path = os.path.join(os.path.dirname(manifest), media)
    if os.path.isfile(path):
        found.add(media, path, captions, _SPLITS[split], os.path.basename(manifest), where=where)
    else:
        reason, why = _no_file(path)
        found.reject(f"{name} {media}", reason, f"{where}: {why}")


def _read_tar(found: _Found, config: SourceConfig, path: str) -> None:
    """Samples of a webdataset tar: members that share their name up to the first dot of the base name."""
    tar = os.path.basename(path)
    headers = read_headers(path)
    found.files += len(headers.members)
    if headers.problem is not None:
        found.files += 1
        found.reject(tar, *headers.problem)
    groups: dict[str, list[Member]] = {}
    for member in headers.members:
        folder, _, base = member.name.rpartition("/")
        if unsafe := is_unsafe(member):
            found.reject(f"{tar}!{member.name}", Reason.UNSAFE_NAME, unsafe)
        elif base.startswith("."):
            found.ignored += 1
        elif member.offset + member.size > headers.bytes:
            found.reject(f"{tar}!{member.name}", Reason.TRUNCATED, "the tar ends inside this member")
        else:
            groups.setdefault(f"{folder}/{base.partition('.')[0]}", []).append(member)
    if not groups:
        return
    with open(path, "rb") as file:
        for members in groups.values():
            _read_sample(found, config, path, file, members)


def _read_sample(found: _Found, config: SourceConfig, path: str, file: BinaryIO, members: list[Member]) -> None:
    tar = os.path.basename(path)
    media = [member for member in members if _is_media(member.name)]
    captions: list[str] = []
    for member in members:
        is_caption = _ending(member.name) in CAPTION_ENDINGS
        if _is_media(member.name):
            continue
        if not media:
            reason = Reason.ORPHAN_CAPTION if is_caption else Reason.NOT_MEDIA
            found.reject(f"{tar}!{member.name}", reason, "a sample without media")
        elif is_caption:
            found.caption_files += 1
            file.seek(member.offset)
            data = file.read(min(member.size, _MAX_CAPTION_BYTES))
            captions += captions_in(member.name, data, config.caption_column)
        else:
            found.ignored += 1
    for member in media:
        found.add(f"{tar}!{member.name}", path, captions, "train", os.path.basename(os.path.dirname(path)), member)


def _read_manifest_folder(found: _Found, config: SourceConfig, path: str) -> None:
    manifest = _manifest_in(config, path)
    assert manifest is not None
    _read_manifest(found, config, manifest)


_READ = {
    "folder": _read_folder,
    "manifest_folder": _read_manifest_folder,
    "jsonl": _read_manifest,
    "csv": _read_manifest,
    "parquet": _read_manifest,
    "webdataset": _read_tar,
}
