"""List the sources in folders, manifests and webdataset tars.

Only captions, manifests and tar headers are opened; archives are never unpacked. Each file, row or member
becomes a source, a caption, a rejection with a reason, or is counted as ignored.
"""

from __future__ import annotations

import glob
import os
import re
from typing import Any, BinaryIO

from mmspeed.config.places import absent_hint
from mmspeed.config.schema import DataConfig, SourceConfig
from mmspeed.errors import UserError
from mmspeed.preprocess.sources.captions import MAX_CAPTION_BYTES, is_missing, strings
from mmspeed.preprocess.sources.containers import HEAD_BYTES, holds_pickle, is_pickle
from mmspeed.preprocess.sources.folders import no_file, read_folder
from mmspeed.preprocess.sources.listing import (
    CAPTION_ENDINGS,
    IMAGE_ENDINGS,
    VIDEO_ENDINGS,
    SourceCollector,
    SourceListing,
    ending,
    is_media,
)
from mmspeed.preprocess.sources.manifests import READERS, Columns
from mmspeed.preprocess.sources.rejections import Reason, Rejection, readable
from mmspeed.preprocess.sources.source import Kind, Source, Split, content_id
from mmspeed.preprocess.sources.tars import TarMember, is_unsafe, read_headers

__all__ = ["Kind", "Source", "SourceListing", "Split", "content_id", "list_sources"]

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


def list_sources(data: DataConfig) -> SourceListing:
    """All sources of the configured data sets, in their order and then by name.

    Raises UserError for a missing path, an unknown format, a missing column, or a data set without any media.
    """
    collector = SourceCollector(data.max_caption_chars)
    for config, name in zip(data.sources, data.dataset_names, strict=True):
        collector.dataset = name
        before = len(collector.sources), len(collector.rejections)
        for path in _paths(config):
            _READ[_format(config, path)](collector, config, path)
        if len(collector.sources) == before[0]:
            _check_not_empty(config, collector.rejections[before[1] :])
    return collector.listing(data.limit)


def _paths(config: SourceConfig) -> list[str]:
    """The files or the folder that a source names; `*` is the only wildcard. Raises UserError if there are none."""
    if os.path.exists(config.path):
        return [config.path]
    pattern = "*".join(glob.escape(part) for part in config.path.split("*"))
    paths = sorted(glob.glob(pattern)) if "*" in config.path else []
    if not paths:
        raise UserError(f"data.sources: {config.path} {absent_hint(config.path)}")
    return paths


def _format(config: SourceConfig, path: str) -> str:
    """The format of `path`. Raises UserError if it cannot be determined."""
    if config.format == "folder" and not os.path.isdir(path):
        raise UserError(f"data.sources: {path} is a file, not a folder; set format to match it, or to auto")
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
    if ending(path) not in FORMAT_OF_ENDING:
        raise UserError(
            f"data.sources: {path}: cannot tell what it is by its ending; "
            f"name a folder or a file in {', '.join(FORMAT_OF_ENDING)}, or set format"
        )
    return FORMAT_OF_ENDING[ending(path)]


def _manifest_in(config: SourceConfig, folder: str) -> str | None:
    kinds = ("jsonl", "csv", "parquet") if config.format == "auto" else (config.format,)
    files = (os.path.join(folder, f"metadata.{kind}") for kind in kinds)
    return next((file for file in files if os.path.isfile(file)), None)


def _check_not_empty(config: SourceConfig, rejections: list[Rejection]) -> None:
    """Raise UserError if a data set holds nothing that could have been a source."""
    candidate_reasons = {Reason.NO_CAPTION, Reason.MISSING_FILE, Reason.BAD_ROW}
    if any(rejection.reason in candidate_reasons for rejection in rejections):
        return
    example = f" ({rejections[0].source}: {rejections[0].detail or rejections[0].reason})" if rejections else ""
    hint = "; to read tars, name them: folder/*.tar" if any(ending(r.source) == ".tar" for r in rejections) else ""
    endings = " ".join(sorted(VIDEO_ENDINGS | IMAGE_ENDINGS))
    raise UserError(f"data.sources: {config.path} holds no media{example}; looked for {endings}{hint}")


def _read_manifest(collector: SourceCollector, config: SourceConfig, path: str) -> None:
    """Read rows that name media relative to the manifest's folder. Raises UserError for a missing column or no rows.

    A row may name any file, with `..` or an absolute path: the manifest belongs to the user, who may read these files.
    """
    kind = config.format if config.format in READERS else FORMAT_OF_ENDING[ending(path)]
    name = os.path.basename(path)
    rows = good = 0
    first_problem = ""
    unit = "row" if kind == "parquet" else "line"
    columns = Columns(config.media_column, config.caption_column, config.split_column)
    for line, row in READERS[kind](path, columns):
        rows += 1
        where = f"{name} {unit} {line}"
        if isinstance(row, str):
            first_problem = first_problem or f"{unit} {line}: {row}"
            collector.reject(f"{name}:{line}", Reason.BAD_ROW, f"{where}: {row}")
            continue
        good += 1
        _read_row(collector, config, path, f"{name}:{line}", where, row)
    collector.files += rows
    if not rows:
        raise UserError(f"data.sources: {path} holds no rows")
    if not good:
        raise UserError(f"data.sources: {path} is not {kind}: {readable(first_problem[:500])}")


def _read_row(
    collector: SourceCollector, config: SourceConfig, manifest: str, name: str, where: str, row: dict[str, Any]
) -> None:
    """Read one row; `name` identifies it until its media is known, and `where` is its manifest and line, for messages."""
    media, split = row.get(config.media_column), row.get(config.split_column) if config.split_column else None
    split = None if is_missing(split) else split
    try:
        captions = strings(row.get(config.caption_column))
        if not isinstance(media, str) or not media.strip() or "\0" in media:
            raise ValueError(f"'{config.media_column}' names no file")
        if split not in _SPLITS:
            raise ValueError(f"'{config.split_column}' is {split!r}, neither train nor val")
    except (ValueError, TypeError) as error:
        collector.reject(name, Reason.BAD_ROW, f"{where}: {error}")
        return
    path = os.path.join(os.path.dirname(manifest), media)
    try:
        is_file = os.path.isfile(path)
    except UnicodeEncodeError:  # a surrogate that does not encode a byte
        is_file = False
    if is_file:
        place = os.path.basename(manifest)
        collector.add(media, path, collector.captions(captions), _SPLITS[split], place, where=where)
    else:
        reason, why = no_file(path)
        collector.reject(f"{name} {media}", reason, f"{where}: {why}")


def _read_tar(collector: SourceCollector, config: SourceConfig, path: str) -> None:
    """Read samples of a webdataset tar: members that share their name up to the first dot of the base name.

    A repeated name begins another sample, so that concatenated tars keep their pairs.
    """
    tar = os.path.basename(path)
    headers = read_headers(path)
    collector.files += len(headers.members)
    if headers.problem is not None:
        collector.files += 1
        collector.reject(tar, *headers.problem)
    samples: list[dict[str, TarMember]] = []
    latest: dict[str, dict[str, TarMember]] = {}
    for member in headers.members:
        folder, _, base = member.name.rpartition("/")
        if unsafe := is_unsafe(member):
            collector.reject(f"{tar}!{member.name}", Reason.UNSAFE_NAME, unsafe)
        elif base.startswith("."):
            collector.ignored += 1
        elif member.offset + member.size > headers.bytes:
            collector.reject(f"{tar}!{member.name}", Reason.TRUNCATED, "the tar ends inside this member")
        else:
            stem = f"{folder}/{base.partition('.')[0]}"
            if stem not in latest or member.name in latest[stem]:
                latest[stem] = {}
                samples.append(latest[stem])
            latest[stem][member.name] = member
    if not samples:
        return
    with open(path, "rb") as file:
        for sample in samples:
            _read_sample(collector, config, path, file, list(sample.values()))


def _read_sample(
    collector: SourceCollector, config: SourceConfig, path: str, file: BinaryIO, members: list[TarMember]
) -> None:
    tar = os.path.basename(path)
    has_media = any(is_media(member.name) for member in members)
    captions = collector.captions()
    media: list[TarMember] = []
    for member in members:
        is_caption = ending(member.name) in CAPTION_ENDINGS
        file.seek(member.offset)
        data = file.read(min(member.size, MAX_CAPTION_BYTES + 1 if is_caption else HEAD_BYTES))
        if is_media(member.name):
            if holds_pickle(data):
                collector.reject(f"{tar}!{member.name}", Reason.NOT_MEDIA, "a pickle")
            else:
                media.append(member)
        elif is_pickle(member.name, data):
            collector.reject(f"{tar}!{member.name}", Reason.PICKLE, "")
        elif not has_media:
            reason = Reason.ORPHAN_CAPTION if is_caption else Reason.NOT_MEDIA
            collector.reject(f"{tar}!{member.name}", reason, "a sample without media")
        elif is_caption:
            collector.caption_files += 1
            captions.add_file(member.name, data, config.caption_column)
        else:
            collector.ignored += 1
    for member in media:
        collector.add(f"{tar}!{member.name}", path, captions, "train", os.path.basename(os.path.dirname(path)), member)


def _read_manifest_folder(collector: SourceCollector, config: SourceConfig, path: str) -> None:
    manifest = _manifest_in(config, path)
    assert manifest is not None
    _read_manifest(collector, config, manifest)


_READ = {
    "folder": read_folder,
    "manifest_folder": _read_manifest_folder,
    "jsonl": _read_manifest,
    "csv": _read_manifest,
    "parquet": _read_manifest,
    "webdataset": _read_tar,
}
