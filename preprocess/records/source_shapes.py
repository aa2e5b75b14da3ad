"""Count sources by width, height and length: exactly while shapes are few, in bins when they are many."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mmspeed.preprocess.decoding.probe import Probe
from mmspeed.preprocess.decoding.windows import frames_available

CELLS = 10_000  # at most
_ASPECTS, _AREAS = 128, 16  # finest bins per doubling: 0.5 % of an aspect ratio, 4 % of an area
_OCTAVES = 32  # log2 of aspect ratios is smaller in size, so bins are never negative and merge into one in the end


@dataclass(frozen=True)
class ShapeHistogram:
    """Sources by shape, one entry per cell: count, displayed size in pixels, available frames, and true for images.

    `frames` are at `data.fps`, at most those of the largest bucket. If a cell holds several shapes (`binned`),
    width, height and frames are the smallest of them.
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
    def clips(self) -> int:
        """The number of sources in all cells."""
        return int(self.counts.sum())

    def take(self, chosen: np.ndarray) -> ShapeHistogram:
        """The histogram of the chosen cells (a mask, or positions)."""
        parts = (self.counts, self.widths, self.heights, self.frames, self.images)
        counts, widths, heights, frames, images = (part[chosen] for part in parts)
        return ShapeHistogram(counts, widths, heights, frames, images, self.binned)


class SourceShapes:
    """Count sources by shape, in at most `limit` cells (at least 2), for any number of sources.

    When there are too many cells, their bins become coarser: each bin of a level consists of whole bins of the previous one, so that
    the result does not depend on the order of the sources.
    """

    def __init__(self, most_frames: int, limit: int = CELLS) -> None:
        self.most_frames, self.limit = most_frames, limit
        self.level = 0  # 0: exact
        self._cells: dict[tuple[int, ...], list[int]] = {}  # bin -> count, width, height, frames

    @property
    def clips(self) -> int:
        return sum(cell[0] for cell in self._cells.values())

    def add_probe(self, probe: Probe, fps: float | None) -> None:
        """Count a probed source."""
        image = len(probe.pts_seconds) == 1
        frames = 1 if image else frames_available(probe.pts_seconds, fps)
        self.add(probe.width, probe.height, frames, image)

    def add(self, width: int, height: int, frames: int, image: bool, count: int = 1) -> None:
        """Count sources of one shape; `frames` are those available of each."""
        self._put(count, width, height, min(frames, self.most_frames), image)
        while len(self._cells) > self.limit:
            self.level += 1
            old, self._cells = self._cells, {}
            for key, cell in old.items():
                self._put(cell[0], cell[1], cell[2], cell[3], bool(key[0]))

    def cells(self) -> ShapeHistogram:
        """The cells in a fixed order."""
        rows = [[*cell, key[0]] for key, cell in sorted(self._cells.items())]
        count, width, height, frames, image = np.array(rows, np.int64).reshape(-1, 5).T
        return ShapeHistogram(count, width, height, frames, image.astype(bool), self.level > 0)

    def _put(self, count: int, width: int, height: int, frames: int, image: bool) -> None:
        key = int(image), *self._bins(width, height, frames)
        cell = self._cells.setdefault(key, [0, width, height, frames])
        cell[0] += count
        cell[1:] = min(cell[1], width), min(cell[2], height), min(cell[3], frames)

    def _bins(self, width: int, height: int, frames: int) -> tuple[int, int, int]:
        """The bins of a shape. Each level doubles the bins of aspect ratios, of areas and of lengths in turn."""
        if self.level == 0:
            return width, height, frames
        aspect, area = math.log2(width / height) + _OCTAVES, math.log2(width * height)
        turns = self.level - 1
        return (
            int(aspect * _ASPECTS) >> turns // 3,
            int(area * _AREAS) >> (turns + 2) // 3,
            (frames - 1) >> (turns + 1) // 3,
        )


def commonest(values: np.ndarray, counts: np.ndarray, number: int) -> Sequence[float]:
    """The `number` values that are counted most, the most frequent first."""
    distinct, inverse = np.unique(values, return_inverse=True)
    totals = np.bincount(inverse, weights=counts)
    return [float(value) for value in distinct[np.argsort(-totals, kind="stable")[:number]]]
