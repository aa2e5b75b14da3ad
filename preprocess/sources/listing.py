"""The result of listing sources: sources, rejections and counts; and the endings of media and captions."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mmspeed.errors import UserError
from mmspeed.media.rejections import Reason, Rejection
from mmspeed.media.source import Kind, RemoteFile, Source, Split
from mmspeed.preprocess.sources.captions import CaptionAffixes, CaptionCounts, Captions
from mmspeed.preprocess.sources.scores import ScoreLimits
from mmspeed.preprocess.sources.tars import TarMember
from mmspeed.redaction import readable

VIDEO_ENDINGS = frozenset(
    ".mp4 .m4v .mov .mkv .webm .avi .gif .ts .mts .m2ts .mpg .mpeg .wmv .flv .ogv .3gp .apng .h264 .hevc".split()
)
IMAGE_ENDINGS = frozenset(".jpg .jpeg .png .webp .bmp .tif .tiff .avif".split())
CAPTION_ENDINGS = frozenset((".txt", ".json", ".cap", ".caption"))


class LateError(UserError):
    """A listing goes on after its deadline."""


@dataclass(frozen=True)
class SourceListing:
    """All listed files, each counted once.

    `files` = sources + `beyond_limit` + `caption_files` + rejections + `ignored`, where a file is a file of a folder,
    a row of a manifest or a member of a tar (a broken tar and an unreadable folder count as one more).
    `ignored` counts hidden files and folders, and tar members beside a media member that are neither media nor captions.
    `missing_captions` counts sources without a caption that are not rejected for it (`data.missing_caption`).
    Counts of captions, not of files: `captions_cut` counts those longer than the limit, `captions_stripped` those from which control or invisible characters
    were removed, and `captions_dropped` those beyond the first `captions.MAX_CAPTIONS` of a clip.
    """

    sources: list[Source]
    rejections: list[Rejection]
    ignored: int = 0
    missing_captions: int = 0
    captions_cut: int = 0
    captions_stripped: int = 0
    captions_dropped: int = 0
    files: int = 0
    caption_files: int = 0
    beyond_limit: int = 0
    scores: ScoreLimits | None = None  # with those of all media with captions


class SourceCollector:
    """Collector of sources, rejections and counts during a listing."""

    def __init__(
        self,
        max_caption_chars: int,
        missing: Literal["reject", "empty", "default"] = "reject",
        default: str = "",
        scores: ScoreLimits | None = None,
        deadline: float = math.inf,
        encoding: str | None = None,
    ) -> None:
        self.dataset = ""  # name of the configured source that is being read
        self.affixes = CaptionAffixes()  # of that source
        self.missing_captions = 0
        self._missing, self._default = missing, default
        self._deadline, self.encoding = deadline, encoding
        self.scores = scores or ScoreLimits({}, {})
        self.sources: list[Source] = []
        self.rejections: list[Rejection] = []
        self.ignored = self.files = self.caption_files = 0
        self.counts = CaptionCounts()
        self._max_chars = max_caption_chars
        self._taken: dict[str, int] = {}  # names, and the last number appended to each

    def captions(self, texts: Iterable[str] = (), fields: Mapping[str, Any] | None = None) -> Captions:
        """The captions of a new clip, starting with `texts`, and the scores among `fields`. Raises LateError after the deadline."""
        captions = Captions(self._max_chars, self.counts, self.scores.columns, self.encoding)
        if time.monotonic() > self._deadline:
            raise LateError("listing the sources takes too long")
        captions.add_scores(fields or {})
        for text in texts:
            captions.add(text)
        return captions

    def add(
        self,
        name: str,
        path: str,
        captions: Captions,
        split: Split,
        place: str,
        member: TarMember | None = None,
        where: str = "",
        remote: RemoteFile | None = None,
        cell: tuple[str, int] | None = None,
        roles: Sequence[tuple[str, Source]] = (),
    ) -> None:
        """Add a media file with its captions; `where` is its location for messages, `cell` its leaf and row in a Parquet file.

        `roles` are the files of its further roles.

        Without captions it is rejected, or taken with none or the default one, and counted (`data.missing_caption`). Captions, the
        default one included, get the words before and behind them that `affixes` has. A source that a score's threshold refuses is
        rejected. A caption file that cannot be read as one is no missing caption: its media are rejected, as are those with a caption that
        is no text.
        """
        texts = captions.texts
        if captions.broken:
            self.reject(name, Reason.CAPTION_ENCODING, f"{where}: {captions.broken}" if where else captions.broken)
            return
        if not texts and (self._missing == "reject" or captions.problem):
            self.reject(name, Reason.NO_CAPTION, where or captions.problem or "no caption, or an empty one")
            return
        refusal = self.scores.refusal(captions.scores)
        if refusal is not None:
            self.reject(name, refusal[0], f"{where}: {refusal[1]}" if where else refusal[1])
            return
        if not texts:
            self.missing_captions += 1
            texts = (self._default,) if self._missing == "default" else ()
        texts = tuple(self.affixes.around(text) for text in texts)
        kind = kind_of_media(name)
        offset, size = (member.offset, member.size) if member else (None, None)
        column, offset = cell or ("", offset)
        unique = self._unique(readable(name), readable(place))
        files = tuple(roles)
        source = Source(
            unique, path, offset, size, kind, texts, split, self.dataset, remote, column=column, roles=files
        )
        self.sources.append(source)

    def reject(self, name: str, reason: Reason, detail: str) -> None:
        self.rejections.append(Rejection(name, reason, detail))

    def listing(self, limit: int | None) -> SourceListing:
        """The listing, with the first `limit` sources."""
        limited = self.sources[:limit]
        return SourceListing(
            sources=limited,
            rejections=self.rejections,
            ignored=self.ignored,
            missing_captions=self.missing_captions,
            captions_cut=self.counts.cut,
            captions_stripped=self.counts.stripped,
            captions_dropped=self.counts.dropped,
            files=self.files,
            caption_files=self.caption_files,
            beyond_limit=len(self.sources) - len(limited),
            scores=self.scores,
        )

    def _unique(self, name: str, place: str) -> str:
        """A unique form of `name`: if it is taken, with `place` before it, and then with a number after it."""
        unique = next((option for option in (name, f"{place}/{name}") if option not in self._taken), "")
        while not unique or unique in self._taken:
            self._taken[name] += 1  # continued, so that n equal names do not take n squared steps
            unique = f"{name}#{self._taken[name]}"
        self._taken[unique] = 1
        return unique


def ending(name: str) -> str:
    """The ending of a name, in lower case with its dot."""
    return os.path.splitext(name)[1].lower()


def kind_of_media(name: str) -> Kind:
    """The kind of a file by its name."""
    return "image" if ending(name) in IMAGE_ENDINGS else "video"


def unknown_ending(name: str) -> str:
    """The detail of a file whose ending is of no media that are read."""
    known = ending(name)
    return f"its ending {known} is of no media that are read" if known else "its name has no ending"


def is_media(name: str) -> bool:
    """True if a name has the ending of a video or a picture."""
    return ending(name) in VIDEO_ENDINGS or ending(name) in IMAGE_ENDINGS
