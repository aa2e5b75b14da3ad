"""`mmspeed check --suggest-buckets N`: find the N buckets that lose least of the sources, and compare them with hand-made lists.

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
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mmspeed.config import Bucket, Config
from mmspeed.models.build import patch_of
from mmspeed.models.codecs.vae import codec_geometry
from mmspeed.preprocess.records.source_shapes import ShapeHistogram, commonest
from mmspeed.preprocess.report.bucket_search import on_a_line, search, worth_of

CANDIDATES = 2000  # approximate number to examine
WIDEST = 3.0  # aspect ratios are between 1 : 3 and 3 : 1
_ASPECTS = 65  # evenly spaced ratios of candidate shapes, 3.4 % from one to the next
_COMMON_ASPECTS = 32  # the most common ratios of the sources
_LINE = 400  # candidates of a kind for which the exact method is fast
_SAME_AREA = 0.8  # areas whose ratio is above this share count as equal
# Width to height; those of Open-Sora 2, taken in both orientations.
_OPEN_SORA_RATIOS = (2.39, 2.0, 16 / 9, 1.85, 9 / 16, 5 / 8, 3 / 2, 4 / 3, 1.0)


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


@dataclass(frozen=True)
class BucketOutcome:
    """The result of applying a list of buckets to the sources.

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
class BucketSuggestion:
    """The suggested list and those it is compared with, by name; `asked` is the requested number, `exact` true if it is optimal."""

    asked: int
    sources: int
    suggested: BucketOutcome
    others: dict[str, BucketOutcome]
    exact: bool
    binned: bool  # sources of slightly different shapes are counted as one


def grid_of(config: Config) -> BucketGrid:
    """The grid of buckets that fit the config's codec and model. Raises UserError like `codec_geometry`."""
    _, strides = codec_geometry(config.vae)
    patch = patch_of(config.model)
    return BucketGrid(strides.temporal, patch[0], strides.spatial * patch[1], strides.spatial * patch[2])


def suggest(
    cells: ShapeHistogram, present: Sequence[Bucket], grid: BucketGrid, number: int, allow_upscale: bool
) -> BucketSuggestion:
    """Suggest at most `number` buckets for the sources in `cells`, of which there is at least one.

    None is larger than the `present` buckets: some present bucket has at least as many frames and about as large an area.
    """
    judge = _Judge(cells, present, allow_upscale)
    candidates = _candidates(cells, present, grid)
    chosen, exact = _choose(judge, candidates, [b for b in dict.fromkeys(present) if b in candidates], number)
    suggested = judge.outcome(sorted(candidates[m] for m in chosen))
    used = [b for b, clips in zip(suggested.buckets, suggested.clips, strict=True) if clips]
    others = {"data.buckets": judge.outcome(list(dict.fromkeys(present)))}
    ratios = dict.fromkeys(round(r, 6) for ratio in _OPEN_SORA_RATIOS for r in (ratio, 1 / ratio))
    sizes = {(b.frames, area) for b in present for area in [_target(b, present)]}
    by_ratio = [Bucket(grid.frames(f), *hw) for f, area in sorted(sizes) for hw in _shapes(area, list(ratios), grid)]
    if by_ratio := [b for b in dict.fromkeys(by_ratio) if b.frames]:
        others["9 ratios, both orientations"] = judge.outcome(by_ratio)
    if (single := _single(judge, present, grid)) is not None:
        others[f"the most common shape, {single.buckets[0]}"] = single
    return BucketSuggestion(number, cells.clips, judge.outcome(used), others, exact, cells.binned)


class _Judge:
    """Computes the shares of the sources that buckets keep. `present` buckets limit the frames and pixels that count."""

    def __init__(self, cells: ShapeHistogram, present: Sequence[Bucket], allow_upscale: bool) -> None:
        self.cells, self.allow_upscale = cells, allow_upscale
        self.weights_C = cells.counts / cells.clips
        self.area_C = cells.widths * cells.heights
        self.most_area = max(b.height * b.width for b in present)
        self.frames_C = np.minimum(cells.frames, max(b.frames for b in present))

    def values(self, buckets: Sequence[Bucket]) -> np.ndarray:
        """(M, C): the share that each bucket keeps of each cell; 0: it does not take it. With `allow_upscale` coded as in bucket_search."""
        values_MC = np.zeros((len(buckets), len(self.cells)))
        for row_C, bucket in zip(values_MC, buckets, strict=True):
            taken_C, covered_C, view_C = self._fit(bucket)
            kept_C = bucket.frames / self.frames_C * view_C * self._size(bucket)
            np.copyto(row_C, kept_C + covered_C if self.allow_upscale else kept_C, where=taken_C)
        return values_MC

    def outcome(self, buckets: Sequence[Bucket]) -> BucketOutcome:
        """The result of these buckets for the sources, by the order of `rank_buckets`."""
        if not buckets:
            return BucketOutcome((), (), 0.0, 0.0, 0.0, self.cells.clips, 0.0)
        keys = np.array([self._keys(bucket) for bucket in buckets])  # (M, keys, C)
        best_MC = keys[:, 0] >= 0
        for key_MC in keys.transpose(1, 0, 2):
            key_MC = np.where(best_MC, key_MC, -np.inf)
            best_MC &= key_MC == key_MC.max(axis=0)
        taken_C, owner_C, count_C = best_MC.any(axis=0), best_MC.argmax(axis=0), self.cells.counts
        clips = np.bincount(owner_C[taken_C], weights=count_C[taken_C], minlength=len(buckets))
        view_C, size_C, frames_C = (np.zeros(len(self.cells)) for _ in range(3))
        for number, bucket in enumerate(buckets):
            own_C = taken_C & (owner_C == number)
            view_C[own_C] = self._fit(bucket)[2][own_C]
            size_C[own_C] = self._size(bucket)[own_C]
            frames_C[own_C] = bucket.frames / self.frames_C[own_C]
        total = int(count_C[taken_C].sum())
        lost = [1 - float(part @ count_C) / total if total else 0.0 for part in (view_C, frames_C, size_C)]
        kept = float((view_C * size_C * frames_C) @ self.weights_C)
        return BucketOutcome(
            tuple(buckets), tuple(int(c) for c in clips), lost[0], lost[1], lost[2], self.cells.clips - total, kept
        )

    def _fit(self, bucket: Bucket) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Arrays (C,): true where the bucket takes the cell, true where without enlarging it, and the kept share of the view."""
        cells = self.cells
        covered_C = (bucket.height <= cells.heights) & (bucket.width <= cells.widths)
        taken_C = (cells.images == bucket.is_image) & (cells.frames >= bucket.frames)
        one_C, other_C = bucket.width * cells.heights, bucket.height * cells.widths
        view_C = np.minimum(one_C, other_C) / np.maximum(one_C, other_C)
        return taken_C & (covered_C | self.allow_upscale), covered_C, view_C

    def _size(self, bucket: Bucket) -> np.ndarray:
        return np.sqrt(np.minimum(1.0, bucket.height * bucket.width / np.minimum(self.area_C, self.most_area)))

    def _keys(self, bucket: Bucket) -> np.ndarray:
        """(keys, C): the sort keys of `rank_buckets`, the first key first; that is -1 where the bucket does not take the cell."""
        taken_C, covered_C, view_C = self._fit(bucket)
        area = bucket.height * bucket.width
        enlarged_C = np.maximum(1.0, np.maximum(bucket.height / self.cells.heights, bucket.width / self.cells.widths))
        worth_C = bucket.frames * view_C * np.sqrt(np.minimum(area, self.area_C))
        rest = [worth_C, view_C, -enlarged_C, np.full(len(view_C), area), np.full(len(view_C), bucket.width)]
        return np.array([np.where(taken_C, covered_C, -1), *rest], float)


def _choose(
    judge: _Judge, candidates: Sequence[Bucket], present: Sequence[Bucket], number: int
) -> tuple[list[int], bool]:
    """Positions of the best combination of candidates, and True if it is certainly optimal."""
    if not candidates:
        return [], True
    values_MC, coded = judge.values(candidates), judge.allow_upscale
    starts: list[list[int]] = [[]]
    kinds = [np.array([m for m, b in enumerate(candidates) if b.is_image == image], int) for image in (False, True)]
    kinds = [members for members in kinds if len(members)]
    if all(len({candidates[m].frames for m in kind}) == 1 and len(kind) <= _LINE for kind in kinds):
        chosen = _on_lines(judge, candidates, kinds, worth_of(coded)(values_MC), number)
        # The exact method's premise: a cell is taken by all candidates of its kind, without enlarging it, or by none.
        takes = [(values_MC[kind] > (1 if coded else 0)).sum(axis=0) for kind in kinds]
        if all(((n == 0) | (n == len(kind))).all() for n, kind in zip(takes, kinds, strict=True)) and not (
            coded and any(((values_MC[kind] > 0) & (values_MC[kind] <= 1)).any() for kind in kinds)
        ):
            return chosen, True
        starts.append(chosen)
    if len(present) <= number:
        starts.append([candidates.index(b) for b in present])
    return search(values_MC, judge.weights_C, number, starts, coded), False


def _on_lines(
    judge: _Judge, candidates: Sequence[Bucket], kinds: Sequence[np.ndarray], values_MC: np.ndarray, number: int
) -> list[int]:
    """The best candidates if each kind (images, videos) is a line of aspect ratios; as few as keep the same."""
    places_M = np.log([b.width / b.height for b in candidates])
    places_C = np.log(judge.cells.widths / judge.cells.heights)
    best: list[tuple[float, list[int]]] = [(0.0, [])]
    for kind in kinds:
        line = on_a_line(values_MC[kind], judge.weights_C, places_M[kind], places_C, number)
        pairs = [(a, b) for a in best for b in line if len(a[1]) + len(b[1]) <= number]
        together: dict[int, tuple[float, list[int]]] = {}
        for (kept, chosen), (more, added) in pairs:
            joined = kept + more, [*chosen, *(int(kind[m]) for m in added)]
            size = len(joined[1])
            together[size] = max(together.get(size, joined), joined, key=lambda pair: pair[0])
        best = [together[size] for size in sorted(together)]
    most = max(kept for kept, _ in best)
    return next(chosen for kept, chosen in best if kept >= most - 1e-9)


def _candidates(cells: ShapeHistogram, present: Sequence[Bucket], grid: BucketGrid) -> list[Bucket]:
    """Candidate buckets: shapes at the areas of present ones, with lengths that sources have; and the present ones that fit."""
    aspects_C = cells.widths / cells.heights
    spread = np.geomspace(1 / WIDEST, WIDEST, _ASPECTS)
    spread = spread[(spread > 0.96 * aspects_C.min()) & (spread < 1.04 * aspects_C.max())]
    common = np.clip(commonest(aspects_C, cells.counts, _COMMON_ASPECTS), 1 / WIDEST, WIDEST)
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


def _single(judge: _Judge, present: Sequence[Bucket], grid: BucketGrid) -> BucketOutcome | None:
    """A single bucket of the most common shape of sources, with the present length and area that keep most."""
    cells = judge.cells
    aspects_C = cells.widths / cells.heights
    near_C = np.round(np.log(aspects_C) * 50) + 1000 * cells.images  # 2 % apart; images separate
    own_C = near_C == commonest(near_C, cells.counts, 1)[0]
    aspect = commonest(aspects_C[own_C], cells.counts[own_C], 1)
    alike = [b for b in present if b.is_image == bool(cells.images[own_C][0])]
    shapes_tried = {(grid.frames(b.frames), *hw) for b in alike for hw in _shapes(_target(b, alike), aspect, grid)}
    outcomes = [judge.outcome([Bucket(*shape)]) for shape in sorted(shapes_tried) if shape[0]]
    return max(outcomes, key=lambda outcome: outcome.kept, default=None)
