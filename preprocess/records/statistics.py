"""Statistics of a data set, gathered source by source in bounded memory, and merged over processes.

Sums are integers (milliseconds, pixels), so that parts added in any order give the exact total.
"""

from __future__ import annotations

import bisect
import heapq
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from mmspeed.config import Bucket
from mmspeed.media.probe import Probe
from mmspeed.media.rejections import Reason, Rejected, Rejection
from mmspeed.media.source import Kind, Source
from mmspeed.media.windows import furthest, windows_that_fit
from mmspeed.preprocess.decoding.clips import Clip
from mmspeed.preprocess.records.bucket_use import BucketUse, use_of
from mmspeed.preprocess.sources.listing import SourceListing
from mmspeed.protocols import ShapeClass
from mmspeed.shapes import as_bucket

EXAMPLES = 5  # rejected sources kept for each reason
SHOWN_SOURCES = 24  # sources kept for thumbnails
DISTINCT = 4096  # distinct names in a `NameCounts`
_TEXT = 300  # characters of a name, detail or caption that are kept
_MILLI = 1000
_UNEVEN = 2e-3  # seconds: times are stated in milliseconds by some containers

# Edges of the histograms' bins. Common frame rates and shapes are in the middle of a separate bin.
EDGES: dict[str, tuple[float, ...]] = {
    "seconds": (0.5, 1, 2, 3, 4, 5, 7, 10, 15, 20, 30, 45, 60, 120, 300, 600, 1800, 3600),
    "fps": (5, 9, 11, 14, 16, 19, 22, 23.5, 24.5, 26, 29, 31, 49, 51, 59, 61, 119, 121),
    "megapixels": (0.02, 0.05, 0.1, 0.15, 0.25, 0.35, 0.5, 0.7, 1, 1.5, 2.2, 4, 9, 16, 34),
    "aspect": (0.4, 0.54, 0.6, 0.7, 0.78, 0.9, 1.1, 1.28, 1.4, 1.6, 1.7, 1.85, 2.1, 2.5),
    "caption_chars": (20, 40, 60, 80, 120, 160, 240, 320, 480, 640, 960, 1280, 1920, 2560, 4096),
    "caption_tokens": (8, 16, 24, 32, 48, 64, 77, 96, 128, 192, 256, 384, 512),
    "captions": (1, 2, 3, 4, 5, 6, 8, 11, 21),
}
_COUNTED = ("sizes", "endings", "codecs", "decoders", "refusals", "stated")
_LISTED = (
    *("files", "caption_files", "ignored", "beyond_limit"),
    *("captions_cut", "captions_stripped", "captions_dropped", "missing_captions"),
)  # counts of a `SourceListing`
_SUMS = (
    *(*_LISTED, "listed", "selected", "images", "videos"),
    *("rejected_files", "rejected_sources", "rejected_clips", "rejected_captions", "bytes"),
    *("frames", "frames_taken", "milliseconds", "milliseconds_taken", "milliseconds_possible"),
    *("pixels", "pixels_kept"),
    *("mirrored", "unmirrored", "scene_cuts", "cut_videos"),
)


class Histogram:
    """Counts of numbers between fixed edges, with their least, greatest and mean. `edges[i]` belongs to bin i + 1.

    With `whole`, bins are labelled by their first and last integer.
    """

    def __init__(self, edges: Sequence[float], whole: bool = False) -> None:
        self.edges, self.whole = tuple(edges), whole
        self.counts = [0] * (len(self.edges) + 1)
        self.least: float | None = None
        self.greatest: float | None = None
        self._thousandths = 0

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def mean(self) -> float:
        return self._thousandths / _MILLI / self.count if self.count else 0.0

    def add(self, value: float) -> None:
        """Count one number."""
        self.counts[bisect.bisect_right(self.edges, value)] += 1
        self._thousandths += round(value * _MILLI)
        self.least = value if self.least is None else min(self.least, value)
        self.greatest = value if self.greatest is None else max(self.greatest, value)

    def merge(self, other: Histogram) -> None:
        """Add the numbers of a histogram of the same edges. Raises ValueError for other edges."""
        if self.edges != other.edges:
            raise ValueError("histograms of different edges cannot be added")
        self.counts = [a + b for a, b in zip(self.counts, other.counts, strict=True)]
        self._thousandths += other._thousandths
        known = [value for value in (self.least, self.greatest, other.least, other.greatest) if value is not None]
        self.least, self.greatest = (min(known), max(known)) if known else (None, None)

    def bins(self) -> list[tuple[str, int]]:
        """(label, count) of the bins from the first to the last non-empty one."""
        used = [index for index, count in enumerate(self.counts) if count]
        if not used:
            return []
        labels = [f"under {self.edges[0]:g}"]
        for a, b in pairwise(self.edges):
            last = b - 1 if self.whole else b
            labels.append(f"{a:g} to {last:g}" if last > a else f"{a:g}")
        labels.append(f"{self.edges[-1]:g} and more")
        return [(labels[index], self.counts[index]) for index in range(used[0], used[-1] + 1)]

    def to_json(self) -> list[Any]:
        """The histogram in JSON's types; the edges are those of this version."""
        return [self.counts, self._thousandths, self.least, self.greatest]

    def load(self, tree: Sequence[Any]) -> None:
        """Load the numbers of `to_json`. Raises ValueError if they have other edges."""
        if len(tree[0]) != len(self.counts):
            raise ValueError("a histogram of another version")
        self.counts, self._thousandths, self.least, self.greatest = list(tree[0]), *tree[1:]


class NameCounts:
    """Counts of names. Beyond `limit` distinct names the rarer half is counted together as `other`."""

    def __init__(self, limit: int = DISTINCT) -> None:
        self.limit = limit
        self.named: Counter[str] = Counter()
        self.other = 0

    @property
    def count(self) -> int:
        return self.named.total() + self.other

    def add(self, name: str, count: int = 1) -> None:
        """Count a name."""
        self.named[name] += count
        if len(self.named) > self.limit:
            ranked = sorted(self.named.items(), key=lambda item: (-item[1], item[0]))
            frequent = dict(ranked[: self.limit // 2])
            self.other += self.named.total() - sum(frequent.values())
            self.named = Counter(frequent)

    def merge(self, other: NameCounts) -> None:
        """Add another's names."""
        self.other += other.other
        for name in sorted(other.named):
            self.add(name, other.named[name])

    def top(self, number: int) -> list[tuple[str, int]]:
        """The most frequent names with their counts; the rest is one more row, `others`."""
        ranked = sorted(self.named.items(), key=lambda item: (-item[1], item[0]))
        rest = self.count - sum(count for _, count in ranked[:number])
        return [*ranked[:number], *([("others", rest)] if rest else [])]


@dataclass(frozen=True, order=True)
class ThumbnailSource:
    """A source of a thumbnail: the fields to open it, and those of its description."""

    content_id: str
    name: str
    path: str
    offset: int | None
    size: int | None
    kind: Kind
    caption: str
    buckets: tuple[str, ...]
    clips: int
    width: int
    height: int
    seconds: float
    column: str = ""

    def source(self) -> Source:
        """The source, for opening."""
        return Source(self.name, self.path, self.offset, self.size, self.kind, (), "train", column=self.column)


@dataclass
class DataStatistics:
    """Statistics of a data set, or of a process's part of it.

    `files` = `listed` + `beyond_limit` + `caption_files` + `ignored` + `rejected_files`, where `listed` counts sources;
    `listed` = `usable` + `rejected_sources` once every source was added. `rejected_clips` and
    `rejected_captions` are those of usable sources.
    Times are of videos only: their whole length, the part inside clips, and the part that `data.windows: all` would cover.
    `pixels` are those of all frames in clips, `pixels_kept` those inside the crops. `use` has such counts for each bucket.
    `mirrored` counts mirror images among the clips, `unmirrored` sources that are not mirrored for their captions, `scene_cuts` cuts in
    `cut_videos` sources.
    """

    sums: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(_SUMS, 0)))
    histograms: dict[str, Histogram] = field(
        default_factory=lambda: {name: Histogram(edges, name.startswith("caption")) for name, edges in EDGES.items()}
    )
    counts: dict[str, NameCounts] = field(default_factory=lambda: {name: NameCounts() for name in _COUNTED})
    use: dict[str, BucketUse] = field(default_factory=dict)  # by the bucket's name
    groups: Counter[tuple[str, str, str]] = field(default_factory=Counter)  # samples of (bucket, split, data set)
    reasons: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[tuple[str, str]]] = field(default_factory=dict)  # reason -> (source, detail)
    shown: list[ThumbnailSource] = field(default_factory=list)

    @property
    def usable(self) -> int:
        """Sources that were selected and not rejected later."""
        return self.sums["listed"] - self.sums["rejected_sources"]

    @property
    def rejected(self) -> int:
        return self.reasons.total()

    def add_listing(self, listing: SourceListing) -> None:
        """Add the counts and rejections of a listing. Once for a data set, by one process."""
        self.sums["listed"] += len(listing.sources)
        for name in _LISTED:
            self.sums[name] += getattr(listing, name)
        self.sums["rejected_files"] += len(listing.rejections)
        for rejection in listing.rejections:
            self._add_reason(rejection)

    def add_rejection(self, rejection: Rejection, whole: bool = True) -> None:
        """Add a listed source that is not used; with `whole` false, a clip of a source whose other clips may be used."""
        self.sums["rejected_sources" if whole else "rejected_clips"] += 1
        self._add_reason(rejection)

    def add_rejected_caption(self, rejection: Rejection) -> None:
        """Add a caption that a source lost, which has others."""
        self.sums["rejected_captions"] += 1
        self._add_reason(rejection)

    def add_source(self, source: Source, probe: Probe, clips: Sequence[Clip], unmirrored: bool = False) -> None:
        """Add a source with its clips, at least one; `unmirrored`: see `clips.left_unmirrored`."""
        self.sums["mirrored"] += sum(clip.mirrored for clip in clips)
        self.sums["unmirrored"] += unmirrored
        is_image = len(probe.pts_seconds) == 1
        self.sums["selected"] += 1
        self.sums["images" if is_image else "videos"] += 1
        self.sums["bytes"] += _size(source)
        self.counts["endings"].add(os.path.splitext(source.name)[1].lower()[:12] or "(none)")
        self.counts["codecs"].add(probe.codec or "unknown")
        self.counts["decoders"].add(probe.reader or probe.decoder)
        if probe.refusal:  # by another decoder than PyAV
            self.counts["refusals"].add(probe.refusal)
        gaps = ["gaps"] if any(_has_gap(probe, clip) for clip in clips) else []
        for name in (*probe.applied, *gaps):
            self.counts["stated"].add(name)
        self.counts["sizes"].add(f"{probe.width} x {probe.height}")
        self.histograms["megapixels"].add(probe.width * probe.height / 1e6)
        self.histograms["aspect"].add(probe.width / probe.height)
        self.histograms["captions"].add(len(source.captions))
        for caption in source.captions:
            self.histograms["caption_chars"].add(len(caption))
        seconds = 0.0 if is_image else _length(probe)
        if not is_image:
            self.histograms["seconds"].add(seconds)
            self.histograms["fps"].add(probe.fps)
            self._add_times(probe, clips, seconds)
        for bucket in dict.fromkeys(clip.bucket for clip in clips):
            used = use_of(probe, [clip for clip in clips if clip.bucket == bucket])
            self.use.setdefault(bucket.name, BucketUse()).add(used)
            self.sums["pixels"] += used.pixels
            self.sums["pixels_kept"] += used.pixels_kept
        self._show(source, probe, clips, seconds)

    def add_cuts(self, cuts: int) -> None:
        """Add the scene cuts of a source."""
        self.sums["scene_cuts"] += cuts
        self.sums["cut_videos"] += cuts > 0

    def add_sample(self, bucket: Bucket, split: str, dataset: str) -> None:
        """Add a sample of the named data set."""
        self.groups[bucket.name, split, dataset] += 1

    def add_caption_tokens(self, tokens: int) -> None:
        """Add the length of a distinct caption in tokens."""
        self.histograms["caption_tokens"].add(tokens)

    def samples(self, split: str) -> dict[Bucket, int]:
        """Samples of a split by bucket, in the order of the buckets."""
        samples_by_bucket: Counter[Bucket] = Counter()
        for (bucket, _), count in self.samples_by_group(split).items():
            samples_by_bucket[as_bucket(bucket)] += count
        return dict(samples_by_bucket)

    def samples_by_group(self, split: str) -> dict[tuple[ShapeClass, str], int]:
        """Samples of a split by (bucket, data set), in order."""
        samples_in_split: dict[tuple[ShapeClass, str], int] = {
            (Bucket.parse(name), of): n for (name, part, of), n in self.groups.items() if part == split
        }
        return dict(sorted(samples_in_split.items()))

    def buckets(self) -> dict[Bucket, BucketUse]:
        """The counts of frames and pixels of each bucket, in the order of the buckets."""
        return {bucket: self.use[bucket.name] for bucket in sorted(map(Bucket.parse, self.use))}

    def clips(self) -> dict[Bucket, int]:
        """Clips by bucket, in the order of the buckets."""
        return {bucket: used.clips for bucket, used in self.buckets().items()}

    def merge(self, other: DataStatistics) -> None:
        """Add the numbers of another part of the data set."""
        self.sums.update(other.sums)
        self.reasons.update(other.reasons)
        self.groups.update(other.groups)
        for name, histogram in self.histograms.items():
            histogram.merge(other.histograms[name])
        for name, counts in self.counts.items():
            counts.merge(other.counts[name])
        for name, used in other.use.items():
            self.use.setdefault(name, BucketUse()).add(used)
        for reason, examples in other.examples.items():
            self.examples[reason] = sorted([*self.examples.get(reason, []), *examples])[:EXAMPLES]
        self._keep_shown([*self.shown, *other.shown])

    def to_json(self) -> dict[str, Any]:
        """The numbers in JSON's types."""
        return {
            "sums": dict(self.sums),
            "histograms": {name: histogram.to_json() for name, histogram in self.histograms.items()},
            "counts": {name: [dict(counts.named), counts.other] for name, counts in self.counts.items()},
            "use": {name: asdict(used) for name, used in self.use.items()},
            "groups": sorted([*group, count] for group, count in self.groups.items()),
            "reasons": dict(self.reasons),
            "examples": {reason: [list(pair) for pair in pairs] for reason, pairs in self.examples.items()},
            "shown": [asdict(shown) | {"buckets": list(shown.buckets)} for shown in self.shown],
        }

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> DataStatistics:
        """The inverse of `to_json`. Raises KeyError or ValueError for data of another version."""
        statistics = cls()
        statistics.sums.update(tree["sums"])
        statistics.reasons.update(tree["reasons"])
        statistics.groups.update({(bucket, split, dataset): count for bucket, split, dataset, count in tree["groups"]})
        for name, histogram in statistics.histograms.items():
            histogram.load(tree["histograms"][name])
        for name, counts in statistics.counts.items():
            named, counts.other = tree["counts"].get(name, ({}, 0))  # a part that was built before it was counted
            counts.named = Counter(named)
        statistics.use = {name: BucketUse(**used) for name, used in tree["use"].items()}
        statistics.examples = {
            reason: [(name, why) for name, why in pairs] for reason, pairs in tree["examples"].items()
        }
        statistics.shown = [ThumbnailSource(**{**shown, "buckets": tuple(shown["buckets"])}) for shown in tree["shown"]]
        return statistics

    def _add_reason(self, rejection: Rejection) -> None:
        reason = Reason(rejection.reason).value
        self.reasons[reason] += 1
        pair = rejection.source[:_TEXT], rejection.detail[:_TEXT]
        self.examples[reason] = sorted([*self.examples.get(reason, []), pair])[:EXAMPLES]

    def _add_times(self, probe: Probe, clips: Sequence[Clip], seconds: float) -> None:
        """Add seconds of a video, those inside clips, and those that adjacent windows in its first bucket would cover."""
        start, end = probe.pts_seconds[0], probe.pts_seconds[0] + seconds
        spans = {(probe.pts_seconds[clip.indices[0]], clip.seconds) for clip in clips}
        covered_seconds = covered([(first, min(first + length, end)) for first, length in spans])
        best = clips[0]
        possible = windows_that_fit(probe.pts_seconds, best.bucket.frames, best.fps) * best.seconds if best.fps else 0.0
        self.sums["frames"] += len(probe.pts_seconds)
        self.sums["frames_taken"] += len({index for clip in clips for index in clip.indices})
        self.sums["milliseconds"] += round((end - start) * _MILLI)
        self.sums["milliseconds_taken"] += round(covered_seconds * _MILLI)
        self.sums["milliseconds_possible"] += round(max(covered_seconds, min(possible, seconds)) * _MILLI)

    def _show(self, source: Source, probe: Probe, clips: Sequence[Clip], seconds: float) -> None:
        content = clips[0].content_id
        if len(self.shown) == SHOWN_SOURCES and content > self.shown[-1].content_id:
            return
        buckets = tuple(dict.fromkeys(clip.bucket.name for clip in clips))
        one = ThumbnailSource(
            *(content, source.name[:_TEXT], source.path, source.offset, source.size, source.kind),
            *(source.captions[0][:_TEXT] if source.captions else "", buckets, len(clips)),
            *(probe.width, probe.height, round(seconds, 3)),
            column=source.column,
        )
        self._keep_shown([*self.shown, one])

    def _keep_shown(self, candidates: Sequence[ThumbnailSource]) -> None:
        """Keep for each content the first source by name, and of these the ones with the smallest content ids: a draw by content."""
        first: dict[str, ThumbnailSource] = {}
        for one in candidates:
            first[one.content_id] = min(first.get(one.content_id, one), one, key=lambda s: (s.name, s.path))
        self.shown = heapq.nsmallest(SHOWN_SOURCES, first.values(), key=lambda s: s.content_id)


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """The length of the union of intervals (start, end)."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _has_gap(probe: Probe, clip: Clip) -> bool:
    """True if a frame of a clip is more than half a usual step from its time."""
    return clip.fps > 0 and furthest(probe.pts_seconds, clip.indices, clip.fps) > probe.step / 2 + _UNEVEN


def _length(probe: Probe) -> float:
    """Seconds from the first frame to the end of the last, which is displayed for a usual step."""
    return probe.pts_seconds[-1] - probe.pts_seconds[0] + probe.step


def _size(source: Source) -> int:
    try:
        return source.bytes()
    except Rejected:  # removed after it was probed: decoding will report it
        return 0
