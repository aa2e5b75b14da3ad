"""How many sources there are of each width, height and length: counted exactly while they are few, in bins when they are many."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mmspeed.preprocess.decoding.probe import Probe
from mmspeed.preprocess.decoding.windows import frames_available

CELLS = 10_000  # kept apart at most
_ASPECTS, _AREAS = 128, 16  # finest bins in a doubling: 0.5 % of an aspect ratio, 4 % of an area
_OCTAVES = 32  # sides differ by less; with it bins are never negative, and are one in the end


@dataclass(frozen=True)
class ShapeHistogram:
    """Sources by shape, one entry a cell: how many, pixels shown, frames that each can give, and whether it is an image.

    `frames` are at `data.fps`, and no more than the largest bucket asks for. Where a cell holds several shapes (`binned`),
    width, height and frames are the least of them.
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
        """Sources in all cells."""
        return int(self.counts.sum())

    def take(self, chosen: np.ndarray) -> ShapeHistogram:
        """The chosen cells (a mask, or positions)."""
        parts = (self.counts, self.widths, self.heights, self.frames, self.images)
        counts, widths, heights, frames, images = (part[chosen] for part in parts)
        return ShapeHistogram(counts, widths, heights, frames, images, self.binned)


class SourceShapes:
    """Counts sources by shape, in no more than `limit` cells (at least 2), however many sources there are.

    When the cells are too many, their bins become coarser: each bin of a level is made of whole bins of the one before, so that the
    outcome does not depend on the order of the sources.
    """

    def __init__(self, most_frames: int, limit: int = CELLS) -> None:
        self.most_frames, self.limit = most_frames, limit
        self.level = 0  # 0: exact
        self._cells: dict[tuple[int, ...], list[int]] = {}  # bin -> count, width, height, frames

    @property
    def clips(self) -> int:
        return sum(cell[0] for cell in self._cells.values())

    def add_probe(self, probe: Probe, fps: float | None) -> None:
        """Count a source as it was probed."""
        image = len(probe.pts_seconds) == 1
        frames = 1 if image else frames_available(probe.pts_seconds, fps)
        self.add(probe.width, probe.height, frames, image)

    def add(self, width: int, height: int, frames: int, image: bool, count: int = 1) -> None:
        """Count sources of one shape; `frames` are those that each can give."""
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
        """Each level doubles the bins of aspect ratios, of areas and of lengths in turn."""
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
