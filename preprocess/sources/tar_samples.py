"""Collect the samples of webdataset tars, local and remote: members that share their name up to the first dot of the base name."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from mmspeed.config.places import base_name
from mmspeed.config.schema import SourceConfig
from mmspeed.media.containers import HEAD_BYTES, holds_pickle, is_pickle
from mmspeed.media.rejections import Reason
from mmspeed.media.source import RemoteFile
from mmspeed.preprocess.sources.captions import MAX_CAPTION_BYTES
from mmspeed.preprocess.sources.listing import CAPTION_ENDINGS, SourceCollector, ending, is_media
from mmspeed.preprocess.sources.tars import Headers, TarMember, is_unsafe, read_headers

HeadOf = Callable[[TarMember], bytes]


def head_bytes(member: TarMember) -> int:
    """The number of a member's first bytes that the listing reads: a caption, or what identifies a file."""
    if is_unsafe(member):
        return 0
    return min(member.size, MAX_CAPTION_BYTES + 1 if ending(member.name) in CAPTION_ENDINGS else HEAD_BYTES)


def read_tar(collector: SourceCollector, config: SourceConfig, path: str) -> None:
    """Collect the samples of a tar on disk."""
    headers = read_headers(path)
    if not headers.members:
        collect_tar(collector, config, path, headers, lambda member: b"")
        return
    with open(path, "rb") as file:

        def head_of(member: TarMember) -> bytes:
            file.seek(member.offset)
            return file.read(head_bytes(member))

        collect_tar(collector, config, path, headers, head_of)


def collect_tar(
    collector: SourceCollector,
    config: SourceConfig,
    path: str,
    headers: Headers,
    head_of: HeadOf,
    remote: RemoteFile | None = None,
) -> None:
    """Collect the samples of a tar by its headers and each member's first bytes.

    A repeated name begins another sample, so that concatenated tars keep their pairs.
    """
    tar = base_name(path)
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
    for sample in samples:
        _collect_sample(collector, config, path, list(sample.values()), head_of, remote)


def _collect_sample(
    collector: SourceCollector,
    config: SourceConfig,
    path: str,
    members: Sequence[TarMember],
    head_of: HeadOf,
    remote: RemoteFile | None,
) -> None:
    tar = base_name(path)
    has_media = any(is_media(member.name) for member in members)
    captions = collector.captions()
    media: list[TarMember] = []
    for member in members:
        is_caption = ending(member.name) in CAPTION_ENDINGS
        data = head_of(member)
        if is_media(member.name):
            if holds_pickle(data):
                collector.reject(
                    f"{tar}!{member.name}", Reason.NOT_MEDIA, "a pickle under the name of media, which is never opened"
                )
            else:
                media.append(member)
        elif is_pickle(member.name, data):
            collector.reject(f"{tar}!{member.name}", Reason.PICKLE, Reason.PICKLE.explanation)
        elif not has_media:
            reason = Reason.ORPHAN_CAPTION if is_caption else Reason.NOT_MEDIA
            collector.reject(f"{tar}!{member.name}", reason, "a sample without media")
        elif is_caption:
            collector.caption_files += 1
            captions.add_file(member.name, data, config.caption_column)
        else:
            collector.ignored += 1
    place = base_name(os.path.dirname(path))
    for member in media:
        collector.add(f"{tar}!{member.name}", path, captions, "train", place, member, remote=remote)
