"""Find the few buckets that keep most of the sources, for `mmspeed init --videos` and `mmspeed check --suggest-buckets N`.

The share that a bucket keeps of a source is the product of three shares:

    frames   F / frames that the source has, or that the largest bucket has, whichever is fewer
    view     of the picture's pixels, those inside the centre crop to the bucket's shape
    size     the root of (H x W / pixels of the picture, or of the largest present bucket, whichever is fewer); at most 1

The size counts by its side and not by its area: otherwise a tall picture would be cropped to a wide bucket for a little more
resolution, which loses most of its content.

The loss is 1 minus that; a source that no bucket takes loses 1. A source goes to the bucket that `rank_buckets` puts first, which
is the one that keeps most: for one source the product is proportional to F x view x root of H x W.

Legend: F frames, H W height and width in pixels, M candidates, C cells of sources.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mmspeed.config import Bucket, Config
from mmspeed.models.codecs.vae import codec_geometry
from mmspeed.models.sections import patch_of
from mmspeed.preprocess.decoding.probe import Probe
from mmspeed.preprocess.decoding.transform import kept_fraction, rank_by_picture
from mmspeed.preprocess.decoding.windows import frames_available

CELLS = 10_000  # shapes of sources that are told apart, at most
CANDIDATES = 2000  # approximate number to examine
WIDEST = 3.0  # aspect ratios are between 1 : 3 and 3 : 1
_ASPECTS = 65  # evenly spaced ratios of candidate shapes, 3.4 % from one to the next
_COMMON_ASPECTS = 32  # the most common ratios of the sources
_SAME_AREA = 0.8  # areas whose ratio is above this share count as equal
_GAIN = 1e-6  # of the kept share: an exchange for less is not worth its time
_ROUNDING = 1e-9  # of the kept share: smaller differences are rounding
_SIDES_A_FRAME = 16  # pixels of a side that count as a frame, where bins get wide


@dataclass(frozen=True)
class BucketGrid:
    """The multiples that frames, heights and widths of a bucket need, for the codec and the model's patch."""

    temporal: int  # frames per latent frame, from the second
    patch_frames: int  # latent frames per token
    height: int
    width: int

    def frames(self, most: int) -> int:
        """The largest F that fits and is at most `most`; 0 if there is none."""
        latents = (1 + (most - 1) // self.temporal) // self.patch_frames * self.patch_frames if most >= 1 else 0
        return 1 + (latents - 1) * self.temporal if latents else 0

    def holds(self, bucket: Bucket) -> bool:
        """True if the bucket fits the grid."""
        divides = bucket.height % self.height == 0 and bucket.width % self.width == 0
        return divides and self.frames(bucket.frames) == bucket.frames


def grid_of(config: Config) -> BucketGrid:
    """The grid of buckets that fit the config's codec and model. Raises UserError like `codec_geometry`."""
    _, strides = codec_geometry(config.vae)
    patch = patch_of(config.model)
    return BucketGrid(strides.temporal, patch[0], strides.spatial * patch[1], strides.spatial * patch[2])


@dataclass(frozen=True)
class SourceCells:
    """Sources by shape, one entry per cell: count, displayed size in pixels, available frames at `data.fps`, and true for images.

    If a cell holds several shapes (`binned`), width, height and frames are the smallest of them.
    """

    counts: np.ndarray
    widths: np.ndarray
    heights: np.ndarray
    frames: np.ndarray
    images: np.ndarray
    binned: bool = False

    def __len__(self) -> int:
        return len(self.counts)

    @property
    def sources(self) -> int:
        return int(self.counts.sum())


class SourceShapes:
    """Counts of sources by width, height, frames at `data.fps` (up to `most_frames`), and whether they are images."""

    def __init__(self, most_frames: int) -> None:
        self.most_frames = most_frames
        self.counts = Counter[tuple[int, int, int, bool]]()

    def add(self, probe: Probe, fps: float | None) -> None:
        """Count a probed source."""
        image = len(probe.pts_seconds) == 1
        frames = 1 if image else min(frames_available(probe.pts_seconds, fps), self.most_frames)
        self.counts[probe.width, probe.height, frames, image] += 1

    def cells(self, most: int = CELLS) -> SourceCells:
        """The counts in at most so many cells (at least 2), of bins as narrow as that allows."""
        for step in (2**power for power in range(64)):
            bins: dict[tuple[int, int, int, bool], list[int]] = {}
            for (width, height, frames, image), count in self.counts.items():
                place = width // step, height // step, frames // max(1, step // _SIDES_A_FRAME), image
                cell = bins.setdefault(place, [0, width, height, frames])
                cell[0] += count
                cell[1:] = min(cell[1], width), min(cell[2], height), min(cell[3], frames)
            if len(bins) <= most:
                break
        rows = np.array([[*cell, place[3]] for place, cell in sorted(bins.items())], np.int64).reshape(-1, 5)
        counts, widths, heights, frames_C, images = rows.T
        return SourceCells(counts, widths, heights, frames_C, images.astype(bool), step > 1)


@dataclass(frozen=True)
class BucketFit:
    """A list of buckets, and what it does with the sources.

    `clips` are the numbers in each bucket. `cropped`, `trimmed` and `scaled` are the mean shares that these clips lose: pixels
    outside the crop, frames beyond F, length of the sides. `kept` is the mean kept share over all sources.
    """

    buckets: tuple[Bucket, ...]
    clips: tuple[int, ...]
    cropped: float
    trimmed: float
    scaled: float
    rejected: int
    kept: float


@dataclass(frozen=True)
class BucketFitter:
    """Fits buckets to the sources in `cells`, of which there is at least one, and judges lists of buckets.

    No bucket is larger than the `present` ones: some present bucket has at least as many frames and about as large an area. Frames and
    pixels beyond the largest present bucket do not count as lost.
    """

    cells: SourceCells
    present: Sequence[Bucket]
    allow_upscale: bool = False

    def fit(self, grid: BucketGrid, number: int) -> BucketFit:
        """The best list of at most `number` buckets that is found, no worse than the present one if that has no more and fits."""
        candidates = _candidates(self.cells, self.present, grid)
        values_MC = np.array([self._values(bucket) for bucket in candidates])
        own = [candidates.index(bucket) for bucket in dict.fromkeys(self.present) if bucket in candidates]
        starts = [[], own] if 0 < len(own) <= number else [[]]
        weights_C = self.cells.counts / self.cells.sources
        lists = [*(search(values_MC, weights_C, number, start) for start in starts), *starts]
        fits = [self.judge(sorted(candidates[m] for m in chosen)) for chosen in lists]
        best = max(fits, key=lambda fit: fit.kept)
        return self.judge([bucket for bucket, clips in zip(best.buckets, best.clips, strict=True) if clips])

    def judge(self, buckets: Sequence[Bucket]) -> BucketFit:
        """The outcome of these buckets: each source goes where `rank_buckets` puts it."""
        cells, clips = self.cells, dict.fromkeys(buckets, 0)
        view_C, frames_C, size_C = np.zeros((3, len(cells)))
        columns = (cells.counts, cells.widths, cells.heights, cells.frames, cells.images)
        for at, (count, width, height, frames, image) in enumerate(
            zip(*(one.tolist() for one in columns), strict=True)
        ):
            fitting = [bucket for bucket in clips if bucket.is_image == image and bucket.frames <= frames]
            for bucket in rank_by_picture(width, height, fitting, self.allow_upscale)[:1]:
                clips[bucket] += count
                view_C[at] = kept_fraction(width, height, bucket)
                frames_C[at] = bucket.frames / min(frames, self._most_frames)
                size_C[at] = math.sqrt(min(1.0, bucket.height * bucket.width / min(width * height, self._most_area)))
        total = sum(clips.values())
        cropped, trimmed, scaled = (
            1 - float(part_C @ cells.counts) / total if total else 0.0 for part_C in (view_C, frames_C, size_C)
        )
        kept = float((view_C * frames_C * size_C) @ cells.counts) / cells.sources
        rejected = cells.sources - total
        return BucketFit(tuple(clips), tuple(clips.values()), cropped, trimmed, scaled, rejected, kept)

    def _values(self, bucket: Bucket) -> np.ndarray:
        """The share that a bucket keeps of each cell; 0: it does not take it."""
        cells, area_C = self.cells, np.minimum(self.cells.widths * self.cells.heights, self._most_area)
        covered_C = (bucket.height <= cells.heights) & (bucket.width <= cells.widths) | self.allow_upscale
        taken_C = covered_C & (cells.images == bucket.is_image) & (cells.frames >= bucket.frames)
        one_C, other_C = bucket.width * cells.heights, bucket.height * cells.widths
        view_C = np.minimum(one_C, other_C) / np.maximum(one_C, other_C)
        size_C = np.sqrt(np.minimum(1.0, bucket.height * bucket.width / area_C))
        return taken_C * view_C * size_C * bucket.frames / np.minimum(cells.frames, self._most_frames)

    @property
    def _most_frames(self) -> int:
        return max(bucket.frames for bucket in self.present)

    @property
    def _most_area(self) -> int:
        return max(bucket.height * bucket.width for bucket in self.present)


def search(values_MC: np.ndarray, weights_C: np.ndarray, most: int, start: Sequence[int] = ()) -> list[int]:
    """At most `most` candidates that together keep much of the cells (weights sum to 1): fewer where more would keep no more.

    `values_MC` are the shares that candidates keep of cells; a cell goes to the chosen one that keeps most of it. From `start` on,
    candidates are added greedily, then exchanged for others while that keeps more (Teitz and Bart's interchange).
    """

    def held(chosen: Sequence[int]) -> np.ndarray:
        return values_MC[list(chosen)].max(axis=0) if chosen else np.zeros(len(weights_C))

    def best_beside(chosen: Sequence[int]) -> tuple[int, float]:
        held_C = held(chosen)
        kept_M = np.array([np.maximum(row_C, held_C) @ weights_C for row_C in values_MC])
        return int(kept_M.argmax()), float(kept_M.max())

    chosen, kept, before = list(start), float(held(start) @ weights_C), -1.0
    while len(values_MC) and kept > before:
        before = kept
        while len(chosen) < most and (best := best_beside(chosen))[1] > kept + _ROUNDING:
            chosen, kept = [*chosen, best[0]], best[1]
        for old in tuple(chosen):
            others = [one for one in chosen if one != old]
            best = best_beside(others)
            if float(held(others) @ weights_C) >= kept - _ROUNDING:
                chosen = others
            elif best[1] > kept + _GAIN:
                chosen, kept = [*others, best[0]], best[1]
    return chosen


def _candidates(cells: SourceCells, present: Sequence[Bucket], grid: BucketGrid) -> list[Bucket]:
    """Candidate buckets: shapes at the areas of present ones, with lengths that sources have; and the present ones that fit."""
    aspects_C = cells.widths / cells.heights
    spread = np.geomspace(1 / WIDEST, WIDEST, _ASPECTS)
    spread = spread[(spread > 0.96 * aspects_C.min()) & (spread < 1.04 * aspects_C.max())]
    common = np.clip(_commonest(aspects_C, cells.counts, _COMMON_ASPECTS), 1 / WIDEST, WIDEST)
    aspects = [float(aspect) for aspect in (*spread, *common)]
    buckets: dict[Bucket, None] = {}
    if cells.images.any() and grid.frames(1):
        areas = {_target(b, present) for b in present}
        buckets |= dict.fromkeys(Bucket(1, *hw) for area in sorted(areas) for hw in _shapes(area, aspects, grid))
    lengths = sorted({grid.frames(int(f)) for f in np.unique(cells.frames[~cells.images])} - {0, 1})
    videos = [b for b in present if not b.is_image]
    sizes = {_target(b, videos): 0 for b in videos}
    shapes = {area: _shapes(area, aspects, grid) for area in sizes}
    room = max(2, CANDIDATES // max(1, sum(map(len, shapes.values()))))  # lengths for each shape
    for area in sizes:
        most = max(b.frames for b in videos if _target(b, videos) >= area)
        fitting = sorted({min(length, grid.frames(most)) for length in lengths} - {0, 1})
        if len(fitting) > room:
            fitting = [fitting[round(at)] for at in np.linspace(0, len(fitting) - 1, room)]
        buckets |= dict.fromkeys(Bucket(f, *hw) for f in fitting for hw in shapes[area])
    return sorted(buckets | dict.fromkeys(b for b in present if grid.holds(b)))


def _target(bucket: Bucket, present: Sequence[Bucket]) -> int:
    """The target area of a bucket: the largest that is about its own, of a bucket with at least as many frames."""
    area = bucket.height * bucket.width
    others = (b.height * b.width for b in present if b.frames >= bucket.frames)
    return max(other for other in others if other * _SAME_AREA <= area)


def _shapes(area: int, aspects: Sequence[float], grid: BucketGrid) -> list[tuple[int, int]]:
    """The (H, W) of at most `area` that keeps most of a picture, for each aspect ratio (width to height)."""
    pairs = []
    for height in range(grid.height, area // grid.width + 1, grid.height):
        full = area // height // grid.width
        pairs += [(height, width * grid.width) for width in range(max(1, full * 3 // 4), full + 1)]
    if not pairs:
        return []
    pairs_P2 = np.array(pairs)
    places_P = np.log(pairs_P2[:, 1] / pairs_P2[:, 0])
    logs_P = np.log(pairs_P2[:, 0] * pairs_P2[:, 1]) / 2
    best = (int(np.argmax(logs_P - np.abs(places_P - math.log(aspect)))) for aspect in aspects)
    return list(dict.fromkeys(pairs[at] for at in best))


def _commonest(values: np.ndarray, counts: np.ndarray, number: int) -> Sequence[float]:
    """The `number` values that are counted most, the most frequent first."""
    distinct, inverse = np.unique(values, return_inverse=True)
    totals = np.bincount(inverse, weights=counts)
    return [float(value) for value in distinct[np.argsort(-totals, kind="stable")[:number]]]


def suggest_lines(config: Config, cells: SourceCells, number: int) -> list[str]:
    """The lines of `mmspeed check --suggest-buckets`: a list to paste into the config, compared with the present one."""
    if not len(cells):
        return ["suggested buckets: none, since no source could be probed"]
    fitter = BucketFitter(cells, config.buckets, config.data.allow_upscale)
    fit = fitter.fit(grid_of(config), number)
    count = len(fit.buckets)
    lines = [f"suggested buckets for {cells.sources:,} sources:"]
    if not count:
        lines = ["suggested buckets: none, since no bucket up to the size of data.buckets takes any of the sources"]
    elif count < number:
        lines[0] += f" {count} bucket{'s' if count > 1 else ''}, and not {number}, since more would keep no more"
    rows = [f"- {{frames: {b.frames}, height: {b.height}, width: {b.width}}}" for b in fit.buckets]
    lines += ["  buckets:"] if rows else []
    lines += [
        f"    {row:<{max(map(len, rows))}}  # {clips:,} clip{'s' if clips != 1 else ''}"
        for row, clips in zip(rows, fit.clips, strict=True)
    ]
    lines.append(
        "  lost are pixels by cropping, frames by trimming, and length of the sides by scaling down, of what the largest"
        " of data.buckets could hold; kept is the remaining share over all sources:"
    )
    table = [("", "buckets", "cropped", "trimmed", "scaled", "rejected", "kept")]
    for name, one in (("suggested", fit), ("data.buckets", fitter.judge(list(dict.fromkeys(config.buckets))))):
        lost = (f"{share:.1%}" for share in (one.cropped, one.trimmed, one.scaled))
        shares = lost if any(one.clips) else "---"
        table.append((name, str(len(one.buckets)), *shares, f"{one.rejected:,}", f"{one.kept:.1%}"))
    lines += [f"  {row[0]:<12}" + "".join(f"{cell:>10}" for cell in row[1:]) for row in table]
    if any(bucket.keep < 1 for bucket in config.data.buckets):
        lines.append("  (as if data.buckets[].keep were 1 throughout)")
    if cells.binned:
        lines.append(
            "  (sources of nearly one shape are counted as the smallest of them, so a little more may be kept)"
        )
    videos = int(cells.counts[~cells.images].sum())
    if videos and all(bucket.is_image for bucket in config.buckets):
        lines.append(f"  {videos:,} videos are left out: data.buckets has images only (frames: 1)")
    elif fit.rejected:
        small = "" if config.data.allow_upscale else ", too small (data.allow_upscale)"
        lines.append(f"  {fit.rejected:,} of the sources go to none of these: too short{small}, or of another kind")
    return lines
