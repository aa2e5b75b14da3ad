"""List the sources in folders, manifests and webdataset tars, on disk and in remote stores; a path may have braces and `*`.

Only captions, manifests and tar headers are opened; archives are never unpacked. Each file, row or member
becomes a source, a caption, a rejection with a reason, or is counted as ignored.
"""

from __future__ import annotations

import glob
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any

from braceexpand import braceexpand

from mmspeed.config.places import absent_hint, base_name, is_url
from mmspeed.config.schema import DataConfig, SourceConfig
from mmspeed.data.cache.stores import attempt, open_store, protocol_of
from mmspeed.errors import UserError, first_names
from mmspeed.log import get_logger
from mmspeed.media.rejections import Reason, Rejected, Rejection
from mmspeed.media.source import Kind, Source, Split, content_id
from mmspeed.preprocess.sources.captions import CaptionAffixes, is_missing, strings
from mmspeed.preprocess.sources.fetched import MediaStore
from mmspeed.preprocess.sources.folders import no_file, read_folder, walk
from mmspeed.preprocess.sources.listing import (
    IMAGE_ENDINGS,
    VIDEO_ENDINGS,
    SourceCollector,
    SourceListing,
    ending,
    is_media,
    kind_of_media,
)
from mmspeed.preprocess.sources.manifest_search import (
    FORMAT_OF_ENDING,
    USUAL_COLUMNS,
    captioned,
    kind_of,
    like_manifests,
    manifest_in,
    usual_names,
)
from mmspeed.preprocess.sources.manifests import READERS, Cell, Columns, column_names
from mmspeed.preprocess.sources.remote import RemoteFile
from mmspeed.preprocess.sources.remote_listing import RemoteListing, reachable, row_place
from mmspeed.preprocess.sources.scores import SCORE_REASONS, ScoreLimits
from mmspeed.preprocess.sources.tar_samples import read_tar
from mmspeed.redaction import readable

__all__ = ["Kind", "Source", "SourceListing", "Split", "content_id", "list_sources"]

log = get_logger("preprocess")

_SPLITS: dict[Any, Split] = {
    None: "train",
    "": "train",
    "train": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
}


def list_sources(data: DataConfig, deadline: float = math.inf) -> SourceListing:
    """The media of all configured sources, in their order and then by name.

    Raises UserError for a missing path, an unknown format, a missing column, a source without any media, and a store that cannot be
    reached; LateError when it goes on after the `deadline` (of `time.monotonic`).
    """
    scores = ScoreLimits.of(data)
    collector = SourceCollector(
        data.max_caption_chars,
        data.missing_caption,
        data.default_caption or "",
        scores,
        deadline,
        data.caption_encoding,
    )
    with closing(MediaStore.of(data)) as media:
        remote = RemoteListing(collector, media)
        for config, name in zip(data.sources, data.dataset_names, strict=True):
            collector.dataset, collector.affixes = name, CaptionAffixes.of(data, config)
            before = len(collector.sources), len(collector.rejections)
            places = [(path, _format(data, config, path)) for path in expand(config.path)]
            if config.roles and (other := next((path for path, kind in places if not _has_columns(kind)), None)):
                raise UserError(
                    f"data.sources: {other} has no columns, and `roles` names some; name a manifest as path"
                )
            remote.prepare_tars([path for path, kind in places if kind == "webdataset" and is_url(path)])
            for path, kind in places:
                if is_url(path):
                    _read_remote(remote, config, path, kind)
                elif kind == "manifest_folder":
                    manifest = manifest_in(data, config, path) or path
                    log.info(f"{path} is read by {base_name(manifest)}")
                    _read_manifest(collector, config, manifest)
                else:
                    _READ[kind](collector, config, path)
            if len(collector.sources) == before[0]:
                _check_not_empty(
                    data, config, [path for path, kind in places if kind == "folder"], collector.rejections[before[1] :]
                )
    return collector.listing(data.limit)


def _has_columns(kind: str) -> bool:
    """True for a manifest; a list of files beside one of captions has two columns and no names."""
    return kind == "manifest_folder" or (kind in READERS and kind != "lists")


def usual_columns(data: DataConfig) -> dict[str, str]:
    """The column keys that the first source needs if it is a manifest without the default names: those of usual names that it has.

    Empty if it needs none, or if no usual name is there (then `list_sources` says which there are). Raises UserError like it.
    """
    config = data.sources[0]
    path = expand(config.path)[0]
    kind = _format(data, config, path)
    if kind == "manifest_folder":
        path = manifest_in(data, config, path) or path
        kind = kind_of(path)
    if kind not in READERS:
        return {}
    if is_url(path):
        with closing(MediaStore.of(data)) as media:
            with RemoteListing(SourceCollector(data.max_caption_chars), media).manifest(path) as copy:
                names = column_names(copy, kind, data.caption_encoding)
    else:
        names = column_names(path, kind, data.caption_encoding)
    guessed = {}
    for key, usual in USUAL_COLUMNS.items():
        if getattr(config, key) not in names and (column := next((name for name in usual if name in names), None)):
            guessed[key] = column
    return guessed


def _read_remote(remote: RemoteListing, config: SourceConfig, url: str, kind: str) -> None:
    """Collect one tar, manifest or folder of a remote store."""
    if kind == "webdataset":
        remote.read_tar(config, url)
        return
    if kind == "folder":
        files = remote.find(url)
        manifest = next((name for name in usual_names(config) if name in files), None)
        if manifest is None and config.format == "auto" and not captioned(files):
            like = like_manifests([name for name in files if "/" not in name and kind_of(name) != "lists"])
            manifest = like[0] if len(like) == 1 else None
        if manifest is None or config.format == "folder":
            if config.format not in ("auto", "folder"):
                raise UserError(
                    f"data.sources: {url} is a folder, and format {config.format} reads a file; name the file"
                )
            remote.read_folder(config, url, files)
            return
        url = f"{url.rstrip('/')}/{manifest}"
    with remote.manifest(url) as path:
        _read_manifest(remote.collector, config, path, url, remote.file(url))


def _format(data: DataConfig, config: SourceConfig, path: str) -> str:
    """The format of `path`. Raises UserError if it cannot be determined."""
    if is_url(path):
        path = base_name(path)
        if config.format == "webdataset" or re.search(r"\.(tgz|tar\.\w+)$", path.lower()):
            pass  # below
        elif config.format in ("auto", *READERS) and ending(path) not in FORMAT_OF_ENDING:
            return "folder"
        elif config.format == "folder":
            return "folder"
    elif config.format == "folder" and not os.path.isdir(path):
        raise UserError(f"data.sources: {path} is a file, not a folder; set format to match it, or to auto")
    if os.path.isdir(path):
        if config.format != "folder" and manifest_in(data, config, path) is not None:
            return "manifest_folder"
        if config.format not in ("auto", "folder"):
            raise UserError(f"data.sources: {path} is a folder, and format {config.format} reads a file; name the file")
        return "folder"
    if config.format != "auto":
        return config.format
    if re.search(r"\.(tgz|tar\.\w+)$", path.lower()):
        raise UserError(f"data.sources: {path} is a compressed tar, which cannot be read in place; decompress it first")
    if not kind_of(path):
        raise UserError(
            f"data.sources: {path}: cannot tell what it is by its ending; "
            f"name a folder or a file in {', '.join(FORMAT_OF_ENDING)}, or set format"
        )
    return kind_of(path)


def _check_not_empty(data: DataConfig, config: SourceConfig, paths: Sequence[str], rejections: list[Rejection]) -> None:
    """Raise UserError if a data set holds nothing that could have been a source, or may have its captions in files that are not read.

    `paths`: the folders of it that were read file by file.
    """
    reasons = Counter(rejection.reason for rejection in rejections)
    folders = [path for path in paths if config.format == "auto" and not is_url(path) and os.path.isdir(path)]
    found = ((path, below) for path in folders for below in walk(path, lambda error: None, [data.cache]))
    like = [
        os.path.relpath(os.path.join(below.path, name), path)
        for path, below in found
        for name in like_manifests(below.files)
    ]
    if like and not {*reasons} & {Reason.CAPTION_ENCODING, *SCORE_REASONS}:
        raise UserError(
            f"data.sources: {config.path} has {reasons[Reason.NO_CAPTION]} media without a caption beside them, and files that may list "
            f"media and captions ({first_names(like)}): name one of them as path (of parts of one set all: *.parquet), with its "
            "media_column and caption_column; or set data.missing_caption"
        )
    candidate_reasons = {
        Reason.NO_CAPTION,
        Reason.CAPTION_ENCODING,
        Reason.MISSING_FILE,
        Reason.BAD_ROW,
        *SCORE_REASONS,
    }
    if any(rejection.reason in candidate_reasons for rejection in rejections):
        return
    example = f" ({rejections[0].source}: {rejections[0].detail or rejections[0].reason})" if rejections else ""
    hint = "; to read tars, name them: folder/*.tar" if any(ending(r.source) == ".tar" for r in rejections) else ""
    endings = " ".join(sorted(VIDEO_ENDINGS | IMAGE_ENDINGS))
    raise UserError(f"data.sources: {config.path} holds no media{example}; looked for {endings}{hint}")


def _read_manifest(
    collector: SourceCollector, config: SourceConfig, path: str, url: str = "", file: RemoteFile | None = None
) -> None:
    """Read rows that name media relative to the manifest's folder, or by URLs. Raises UserError for a missing column or no rows.

    A row may name any file, with `..` or an absolute path: the manifest belongs to the user, who may read these files. A remote
    manifest, of which `path` is the local copy and `url` its address (`file`: its facts), may name remote files alone.
    """
    place = url or path
    name = base_name(place)
    kind = config.format if config.format in READERS else kind_of(name)
    rows = good = 0
    first_problem = ""
    unit = "row" if kind == "parquet" else "line"
    named = config.media_column, config.caption_column, config.split_column
    columns = Columns(*named, place, collector.scores.columns, collector.encoding, config.roles)
    for line, row in READERS[kind](path, columns):
        rows += 1
        where = f"{name} {unit} {line}"
        if isinstance(row, str):
            first_problem = first_problem or f"{unit} {line}: {row}"
            collector.reject(f"{name}:{line}", Reason.BAD_ROW, f"{where}: {row}")
            continue
        good += 1
        _read_row(collector, config, place, f"{name}:{line}", where, row, file)
    collector.files += rows
    if not rows:
        raise UserError(f"data.sources: {place} holds no rows")
    if not good:
        raise UserError(f"data.sources: {place} is not {kind}: {readable(first_problem[:500])}")


def _read_row(
    collector: SourceCollector,
    config: SourceConfig,
    manifest: str,
    name: str,
    where: str,
    row: dict[str, Any],
    file: RemoteFile | None = None,
) -> None:
    """Read one row; `name` identifies it until its media is known, and `where` is its manifest and line, for messages."""
    media, split = row.get(config.media_column), row.get(config.split_column) if config.split_column else None
    split = None if is_missing(split) else split
    try:
        captions = strings(row.get(config.caption_column))
        if not isinstance(media, str | Cell):
            found = "is missing" if is_missing(media) else f"is of type {type(media).__name__}"
            raise ValueError(f"'{config.media_column}' names no file: it {found}")
        if isinstance(media, str) and (not media.strip() or "\0" in media):
            raise ValueError(
                f"'{config.media_column}' names no file: it {'holds a zero byte' if media.strip() else 'is empty'}"
            )
        if not isinstance(split, str | None) or split not in _SPLITS:
            raise ValueError(f"'{config.split_column}' is {split!r}, neither train nor val")
        roles = [(role, _role_source(collector, role, column, manifest, row)) for role, column in config.roles.items()]
        cell, remote = None, None
        if isinstance(media, Cell):
            shown, path = base_name(media.name) if is_media(media.name) else name, manifest
            cell, remote = (media.leaf, media.row), file
        else:
            shown, path = _place_of(manifest, media)
    except (ValueError, TypeError) as error:
        collector.reject(name, Reason.BAD_ROW, f"{where}: {error}")
        return
    except Rejected as error:
        shown = name if isinstance(media, Cell) else f"{name} {media}"
        collector.reject(shown, error.reason, f"{where}: {error.detail}")
        return
    words = collector.captions(captions, row)
    place = base_name(manifest)
    collector.add(shown, path, words, _SPLITS[split], place, where=where, remote=remote, cell=cell, roles=roles)


def _place_of(manifest: str, media: str) -> tuple[str, str]:
    """The name of a file that a row of a manifest names, and its path or URL. Raises ValueError, and Rejected where it is no file."""
    url = row_place(manifest, media) if is_url(manifest) else media if is_url(media) else ""
    if url:
        return (base_name(url) if is_url(media) else media), url
    path = os.path.join(os.path.dirname(manifest), media)
    try:
        is_file = os.path.isfile(path)
    except UnicodeEncodeError:  # a surrogate that does not encode a byte
        is_file = False
    if not is_file:
        raise Rejected(*no_file(path))
    return media, path


def _role_source(collector: SourceCollector, role: str, column: str, manifest: str, row: Mapping[str, Any]) -> Source:
    """The file that a row names for a further role. Raises ValueError for a cell that names none, Rejected where it is no file."""
    media = row.get(column)
    if not isinstance(media, str) or not media.strip() or "\0" in media:
        found = "is empty" if is_missing(media) or media == "" else f"is {type(media).__name__} {str(media)[:40]!r}"
        raise ValueError(f"'{column}' names no file, its {role}: it {found}")
    try:
        name, path = _place_of(manifest, media)
    except Rejected as error:
        raise Rejected(error.reason, f"its {role} {media}: {error.detail}") from None
    return Source(readable(name), path, None, None, kind_of_media(name), (), "train", collector.dataset)


_READ: Mapping[str, Callable[[SourceCollector, SourceConfig, str], None]] = {
    "folder": read_folder,
    "webdataset": read_tar,
    **dict.fromkeys(READERS, _read_manifest),
}


MOST_NAMES = 1_000_000  # that braces may stand for


def expand(place: str) -> list[str]:
    """The files or the folder that a source names, in order. Raises UserError if one does not exist, or there are none."""
    if not is_url(place) and os.path.exists(place):
        return [place]
    return [path for part in place.split("::") for name in _braces(part) for path in _wildcard(name)]


def _braces(place: str) -> Sequence[str]:
    """The names that braces stand for, as in a shell and in webdataset: `{000000..000099}`, `{a,b}`."""
    if "{" not in place or (not is_url(place) and os.path.exists(place)):
        return [place]
    ranges = re.findall(r"\{(-?\d{1,18})\.\.(-?\d{1,18})", place)
    if math.prod(abs(int(last) - int(first)) + 1 for first, last in ranges) > MOST_NAMES:  # the package makes them all
        raise UserError(f"data.sources: {place} stands for more than {MOST_NAMES} names")
    try:
        names = list(braceexpand(place))
    except ValueError:
        raise UserError(f"data.sources: {place} has a brace without its partner") from None
    absent = [name for name in names if not is_url(name) and "*" not in name and not os.path.exists(name)]
    if absent:
        raise UserError(
            f"data.sources: {absent[0]} does not exist ({len(absent)} of the {len(names)} files of {place})"
        )
    return names


def _wildcard(place: str) -> list[str]:
    """The names that match; `*` is the only wildcard. Remote addresses without one are taken as they are."""
    if not is_url(place):
        if os.path.exists(place):
            return [place]
        pattern = "*".join(glob.escape(part) for part in place.split("*"))
        paths = sorted(glob.glob(pattern)) if "*" in place else []
        if not paths:
            raise UserError(f"data.sources: {place} {absent_hint(place)}")
        return paths
    if "*" not in place:
        return [place]
    if protocol_of(place) in ("http", "https"):
        raise UserError(
            f"data.sources: {place}: folders cannot be listed over http, so * finds nothing; write {{0000..0099}}"
        )
    filesystem, path = open_store(place)
    with reachable(place):
        filesystem.invalidate_cache()
        escaped = "".join(f"[{letter}]" if letter in "[?" else letter for letter in path)
        matches = sorted(attempt(lambda: filesystem.glob(escaped)))
    if not matches:
        raise UserError(f"data.sources: {place} matches no file")
    return [filesystem.unstrip_protocol(name) for name in matches]
