"""How long captions are in tokens, and how much of a batch of them is padding: from histograms alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mmspeed.preprocess.records.statistics import DataStatistics

CHARS_A_TOKEN = 4.0  # of English, for tokenizers of English
_MARKS = 2  # tokens that stand for begin and end
_GRID = 2048


@dataclass(frozen=True)
class CaptionLengths:
    """The distribution of a caption's tokens, cut to what the encoder takes: even within a bin of its histogram."""

    tokens_K: npt.NDArray[Any]  # rising
    below_K: npt.NDArray[Any]  # share of the captions that are no longer
    most: int  # tokens that the encoder takes
    mean: float
    counted: bool  # in tokens; else guessed by characters

    @classmethod
    def of(cls, statistics: DataStatistics, most: int) -> CaptionLengths | None:
        """From the tokens that were counted, else from the characters; None when there are no captions."""
        known, chars = statistics.histograms["caption_tokens"], statistics.histograms["caption_chars"]
        histogram, counted = (known, True) if known.count else (chars, False)
        if histogram.least is None or histogram.greatest is None:
            return None
        inside = [edge for edge in histogram.edges if histogram.least < edge <= histogram.greatest]
        tokens_K = np.array([histogram.least, *inside, histogram.greatest], dtype=np.float64)
        first = next(number for number, count in enumerate(histogram.counts) if count)
        below = np.cumsum(histogram.counts[first : first + len(inside) + 1]) / histogram.count
        mean = histogram.mean
        if not counted:
            tokens_K, mean = tokens_K / CHARS_A_TOKEN + _MARKS, mean / CHARS_A_TOKEN + _MARKS
        return cls(tokens_K, np.array([0.0, *below]), most, min(mean, float(most)), counted)

    def longest(self, count: int) -> float:
        """The expected tokens of the longest of so many captions, which the others are padded to."""
        top = min(float(self.tokens_K[-1]), float(self.most))
        if self.tokens_K[0] >= top:
            return top
        grid = np.linspace(self.tokens_K[0], top, _GRID)
        below = np.interp(grid, self.tokens_K, self.below_K) ** count
        return top - float((below[1:] + below[:-1]).sum() / 2 * (grid[1] - grid[0]))

    def padding(self, batches: Iterable[tuple[int, int]]) -> float:
        """The share of padding among caption tokens where so many captions (first) are met so many at a time (second)."""
        pairs = [(captions, self.longest(together)) for captions, together in batches]
        whole = sum(captions * longest for captions, longest in pairs)
        return max(0.0, 1 - sum(captions for captions, _ in pairs) * self.longest(1) / whole) if whole else 0.0
