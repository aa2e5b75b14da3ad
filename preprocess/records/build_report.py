"""Report of `mmspeed preprocess`: the outcome of every source, in numbers and in lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmspeed.data import Sample
from mmspeed.errors import UserError, first_names
from mmspeed.log import format_seconds
from mmspeed.media.rejections import TOLD, Reason, Rejection, reasons_in_words, told
from mmspeed.preprocess.sources.listing import SourceListing

if TYPE_CHECKING:
    from mmspeed.models.text.encoders import TransformersEncoder
    from mmspeed.models.text.family import FamilyTextEncoder

EXAMPLES = 3  # rejected sources shown for each reason; rejects/ lists all
_CLEANED = ("cut", "stripped", "dropped")


@dataclass
class BuildReport:
    """Counts of one run of preprocess, over all its processes once they are merged.

    `sources` = `encoded` + `reused` + `rejected`: every source ends as one of them. A source is encoded if
    at least one of its clips was encoded in this run, reused if its clips were in the cache before, and rejected if none of its
    clips could be encoded. Clips that failed beside others of their source count as `clips_failed` and are listed in
    `rejections` under separate names, such as `a.mp4 [9x64x112, window 3]`; a caption that failed beside others as
    `a.mp4 [caption 2]`. A source without any caption left is rejected.
    """

    root: Path
    files: int = 0  # files examined
    sources: int = 0  # media with captions
    ignored: int = 0  # hidden files
    missing_captions: int = 0  # media taken without a caption, or with the default one
    captions_cut: int = 0  # cut to data.max_caption_chars
    captions_stripped: int = 0  # had control or invisible characters, which were removed
    captions_dropped: int = 0  # beyond the number of captions that a clip may have
    seconds: float = 0.0
    encoded: int = 0
    reused: int = 0
    rejected: int = 0
    partial: int = 0  # sources with some clips in the cache and some not
    clips_encoded: int = 0
    clips_reused: int = 0
    clips_failed: int = 0
    unmirrored: int = 0  # sources that are not mirrored for their captions
    scene_cuts: int = 0  # in all videos (data.scenes)
    cut_videos: int = 0  # videos with a cut
    texts: int = 0
    texts_reused: int = 0
    texts_failed: int = 0  # captions that could not be encoded
    captions_truncated: int = 0  # cut to text.max_tokens by the encoder
    captions_cut_by: Counter[str] = field(default_factory=Counter)  # further encoders, with their limits
    caption_padding_rows: int = 0  # stored because the model takes them as it takes tokens
    caption_padding_bytes: int = 0
    seconds_of_video: float = 0.0
    latent_seconds: float = 0.0  # from the first request for a clip to the last one encoded, summed over processes
    start_seconds: float = 0.0  # of these until the first clip was decoded
    busy_seconds: float = 0.0  # of these the codec encoded
    decode_wait_seconds: float = 0.0  # of these it waited for decoders
    write_wait_seconds: float = 0.0  # of these it waited for the disk
    decoders: Counter[str] = field(default_factory=Counter)
    decoder_refusals: Counter[str] = field(default_factory=Counter)  # sources left to PyAV, by reason
    latent_batches: Counter[str] = field(default_factory=Counter)  # see TrustedBatches.counts
    text_batches: Counter[str] = field(default_factory=Counter)
    rejections: list[Rejection] = field(default_factory=list)
    buckets: Counter[str] = field(default_factory=Counter)
    splits: Counter[str] = field(default_factory=Counter)
    # sources held out for a mark of another with their content
    held_out_copies: list[str] = field(default_factory=list)
    part: tuple[int, int] | None = None  # (number, count) of the part reported on; None: the whole build
    parts_missing: int = 0  # parts of the build that were missing when this one ended

    _SUMS = (
        *("encoded", "reused", "rejected", "partial", "clips_encoded", "clips_reused", "clips_failed"),
        *("unmirrored", "scene_cuts", "cut_videos"),
        *("texts", "texts_reused", "texts_failed", "captions_truncated", "seconds_of_video"),
        *("caption_padding_rows", "caption_padding_bytes"),
        *("latent_seconds", "start_seconds", "busy_seconds", "decode_wait_seconds", "write_wait_seconds"),
    )
    _COUNTERS = ("decoders", "decoder_refusals", "latent_batches", "text_batches", "captions_cut_by")

    @classmethod
    def of(cls, root: Path, listing: SourceListing) -> BuildReport:
        """The report of a build that has only listed its sources."""
        captions = {f"captions_{what}": getattr(listing, f"captions_{what}") for what in _CLEANED}
        captions["missing_captions"] = listing.missing_captions
        return cls(root=root, files=listing.files, sources=len(listing.sources), ignored=listing.ignored, **captions)

    def to_json(self) -> dict[str, Any]:
        """The fields that are summed over processes, in JSON's types."""
        counts: dict[str, Any] = {name: getattr(self, name) for name in self._SUMS}
        counters = {name: dict(getattr(self, name)) for name in self._COUNTERS}
        return counts | counters | {"rejections": [[r.source, r.reason.value, r.detail] for r in self.rejections]}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> BuildReport:
        """The inverse of `to_json`."""
        report = cls(root=Path(), **{name: data[name] for name in cls._SUMS})
        for name in cls._COUNTERS:
            setattr(report, name, Counter(data[name]))
        report.rejections = [Rejection(s, Reason(r), d) for s, r, d in data["rejections"]]
        return report

    def merge(self, parts: Sequence[BuildReport]) -> None:
        """Replace the counts by the sums over all processes' parts (including this process's)."""
        for name in self._SUMS:
            setattr(self, name, sum(getattr(part, name) for part in parts))
        for name in self._COUNTERS:
            setattr(self, name, sum((getattr(part, name) for part in parts), Counter()))
        self.rejections = [rejection for part in parts for rejection in part.rejections]

    def found_again(self, last: dict[str, Any], rejections: Sequence[Rejection], held_out: Sequence[str]) -> None:
        """Take the counts of an earlier build (`to_json`), all of whose entries are still there."""
        past = BuildReport.from_json({**last, "rejections": []})
        self.reused, self.clips_reused = past.encoded + past.reused, past.clips_encoded + past.clips_reused
        self.texts_reused = past.texts + past.texts_reused
        for name in (
            "rejected",
            "partial",
            "clips_failed",
            "unmirrored",
            "scene_cuts",
            "cut_videos",
            "decoder_refusals",
        ):
            setattr(self, name, getattr(past, name))
        self.rejections, self.held_out_copies = list(rejections), list(held_out)

    @contextmanager
    def counting_captions(self, encoder: TransformersEncoder | FamilyTextEncoder, itemsize: int) -> Iterator[None]:
        """Add what an encoder cuts and pads of the captions in the block. itemsize: bytes of a stored number."""
        truncated, cut_by, padding = encoder.truncated, encoder.truncated_by.copy(), encoder.padding_rows
        yield
        rows = encoder.padding_rows - padding
        self.captions_truncated += encoder.truncated - truncated
        self.captions_cut_by += encoder.truncated_by - cut_by
        self.caption_padding_rows += rows
        self.caption_padding_bytes += rows * encoder.width * itemsize

    @property
    def busy(self) -> float:
        """The share of the latents' time that the codec spent encoding."""
        return self.busy_seconds / self.latent_seconds if self.latent_seconds else 0.0

    def count_samples(self, samples: Sequence[Sample]) -> None:
        self.buckets = Counter(str(sample.bucket) for sample in samples)
        self.splits = Counter(sample.split for sample in samples)

    @property
    def reasons(self) -> Counter[str]:
        """Rejections by the name of their reason."""
        return Counter(rejection.reason.value for rejection in self.rejections)

    def require_some(self) -> None:
        """Raise UserError if no source is in the cache."""
        if self.encoded + self.reused == 0:
            examples = ", ".join(f"{count} {reason}" for reason, count in self.reasons.most_common(4))
            said = [one for one in self.rejections if one.reason in (Reason.NO_CAPTION, *TOLD)]
            examples += f". {reasons_in_words(said)}" if said else ""
            raise UserError(
                f"none of the {self.files} files could be encoded ({examples or 'no media found'}); "
                f"every one is listed with its reason in {self.root / 'rejects'}"
            )

    def lines(self) -> list[str]:
        """The summary as lines."""
        where = f"cache {self.root}"
        if self.part is not None:
            where += f", part {self.part[0] + 1} of {self.part[1]}"
        lines = [
            f"{where}: {self.encoded + self.reused} of {self._shared()} sources in it"
            f" ({self.encoded} encoded now, {self.reused} already there)"
        ]
        if self.clips_encoded + self.clips_reused != self.encoded + self.reused or self.clips_failed:
            failed = f", {self.clips_failed} failed" if self.clips_failed else ""
            lines.append(f"  clips: {self.clips_encoded} encoded now, {self.clips_reused} already there{failed}")
        failed = f", {self.texts_failed} failed" if self.texts_failed else ""
        lines.append(f"  captions: {self.texts} encoded now, {self.texts_reused} already there{failed}")
        if self.part is None:
            lines.append(
                f"  samples: {_counts(self.splits)}; buckets (frames x height x width): {_counts(self.buckets)}"
            )
        if self.held_out_copies:
            lines.append(held_out_line(self.held_out_copies))
        if self.scene_cuts:
            lines.append(scene_line(self.scene_cuts, self.cut_videos))
        lines += [*self._speed_lines(), *self._caption_lines()]
        if self.ignored:
            lines.append(f"  hidden files ignored: {self.ignored}")
        if self.rejections:
            lines.append(f"  rejected: {len(self.rejections)}, listed in {self.root / 'rejects'}")
            for reason, count in self.reasons.most_common():
                shown = [(r.source, r.detail) for r in self.rejections if r.reason.value == reason][:EXAMPLES]
                more = ", ..." if count > EXAMPLES else ""
                lines.append(f"    {reason:<16} {count:>5}  {', '.join(name for name, _ in shown)}{more}")
                lines += [f"  {line}" for line in told(reason, shown)]
        if self.part is not None:
            lines.append(self._part_line())
        return lines

    def _shared(self) -> str:
        """The number of sources that these counts cover, in words."""
        if self.part is None:
            return str(self.sources)
        return f"its {len(range(self.part[0], self.sources, self.part[1]))}"

    def _part_line(self) -> str:
        assert self.part is not None
        done = f"part {self.part[0] + 1} of {self.part[1]} is done"
        if self.parts_missing == 0:
            return f"{done}; the cache was complete before, and lists all samples"
        parts = "part is" if self.parts_missing == 1 else "parts are"
        return f"{done}; {self.parts_missing} {parts} missing, and the last to end will complete the cache"

    def _speed_lines(self) -> list[str]:
        lines = []
        if self.clips_encoded:
            rate = self.clips_encoded / self.seconds if self.seconds else 0.0
            lines.append(
                f"  time: {format_seconds(self.seconds)}, {rate:.1f} clips/s,"
                f" {self.seconds_of_video:.0f} s of video; decoded by {_counts(self.decoders)}"
            )
            waits = {"decoders": self.decode_wait_seconds, "the disk": self.write_wait_seconds}
            shares = ", ".join(
                f"{share:.0%} waiting for {what}"
                for what, seconds in waits.items()
                if (share := seconds / self.latent_seconds if self.latent_seconds else 0.0) >= 0.005
            )
            lines.append(f"  encoder busy {self.busy:.0%} of the time{', ' + shares if shares else ''}")
        if self.decoder_refusals:
            lines.append(refusal_line(self.decoder_refusals))
        for what, counts in (("clips", self.latent_batches), ("captions", self.text_batches)):
            if counts["batched"] or counts["distrusted"] or counts["halved"]:
                lines.append(f"  {what}: {_batches(counts)}")
        return lines

    def _caption_lines(self) -> list[str]:
        lines = []
        if self.missing_captions:
            lines.append(f"  sources without a caption, taken by data.missing_caption: {self.missing_captions}")
        if self.captions_cut or self.captions_truncated:
            lines.append(
                f"  captions cut: {self.captions_cut} to data.max_caption_chars, {self.captions_truncated} to text.max_tokens"
            )
        if self.unmirrored:
            lines.append(unmirrored_line(self.unmirrored))
        if self.captions_cut_by:
            lines.append(f"  captions cut by further encoders: {_counts(self.captions_cut_by)}")
        if self.caption_padding_rows:
            size = self.caption_padding_bytes / 1e6
            lines.append(
                f"  rows of padding, which the model takes, in captions: {self.caption_padding_rows}, {size:.1f} MB"
            )
        if self.captions_stripped:
            lines.append(f"  captions with control or invisible characters, removed: {self.captions_stripped}")
        if self.captions_dropped:
            lines.append(f"  captions beyond the limit for a clip, left out: {self.captions_dropped}")
        return lines


def held_out_line(sources: Sequence[str]) -> str:
    """A line on sources that are held out because another one of their content is marked so."""
    return (
        f"  held out because another source of the same content is: {len(sources)} ({first_names(sources, EXAMPLES)})"
    )


def scene_line(cuts: int, videos: int) -> str:
    """A line on the scene cuts of all videos."""
    return f"  scene cuts (data.scenes): {cuts}, in {videos} videos"


def unmirrored_line(sources: int) -> str:
    """A line on sources that `data.mirror` leaves out."""
    return f"  sources not mirrored for their captions (data.mirror_words): {sources}"


def refusal_line(refusals: Mapping[str, int]) -> str:
    """A line on the sources that another decoder left to PyAV, by the reasons."""
    return f"  left to PyAV by preprocess.decoder: {sum(refusals.values())} sources ({_counts(refusals)})"


_STATED = {
    "cover": "an animated PNG's first picture, which is no part of it, left out",
    "depth": "pictures of floating-point or 32-bit numbers",
    "fields": "interlaced video, made whole by bwdif",
    "gaps": "frames more than half a step from their times, in gaps between frames",
    "geometry": "mirrored by their display matrix, or cut by a clean aperture",
    "hdr": "PQ, HLG, linear light or wide primaries, mapped to BT.709",
    "order": "frames numbered by their order, which their times contradict",
    "profile": "pictures brought to sRGB by their ICC profile",
}


def stated_lines(counts: Mapping[str, int]) -> list[str]:
    """A line for each kind of statement about times, geometry and colours, with the number of sources that make it."""
    return [f"  {name:<16} {count:>5}  {_STATED[name]}" for name, count in sorted(counts.items())]


def _batches(counts: Counter[str]) -> str:
    text = f"{counts['batched']} encoded in batches, {counts['single']} one by one"
    if counts["distrusted"]:
        pairs = "shape and size gives" if counts["distrusted"] == 1 else "shapes and sizes give"
        text += f" ({counts['distrusted']} {pairs} other bits in a batch)"
    if counts["halved"]:
        text += f"; batches halved {counts['halved']} times to fit in memory"
    return text


def _counts(counter: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counter.items())) or "none"
