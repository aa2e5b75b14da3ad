"""Estimate captions' lengths in tokens, and the padding of their batches, from histograms."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mmspeed.preprocess.records.statistics import DataStatistics

CHARS_A_TOKEN = 4.0  # for English text and tokenizers
_MARKS = 2  # tokens for begin and end
_GRID = 2048


@dataclass(frozen=True)
class CaptionLengths:
    """The distribution of a caption's tokens, cut to the encoder's limit; uniform within a bin of its histogram."""

    tokens_K: npt.NDArray[Any]  # rising
    below_K: npt.NDArray[Any]  # share of the captions that are at most this long
    most: int  # token limit of the encoder
    mean: float
    counted: bool  # in tokens; else estimated from characters

    @classmethod
    def of(cls, statistics: DataStatistics, most: int) -> CaptionLengths | None:
        """Make the distribution from counted tokens, else from characters; None if there are no captions."""
        tokens, chars = statistics.histograms["caption_tokens"], statistics.histograms["caption_chars"]
        histogram, counted = (tokens, True) if tokens.count else (chars, False)
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
        """The expected tokens of the longest of `count` captions, to which the others are padded."""
        top = min(float(self.tokens_K[-1]), float(self.most))
        if self.tokens_K[0] >= top:
            return top
        grid = np.linspace(self.tokens_K[0], top, _GRID)
        below = np.interp(grid, self.tokens_K, self.below_K) ** count
        return top - float((below[1:] + below[:-1]).sum() / 2 * (grid[1] - grid[0]))

    def padding(self, batches: Iterable[tuple[int, int]]) -> float:
        """The share of padding among caption tokens, for batches given as (number of captions, captions in a batch)."""
        pairs = [(captions, self.longest(together)) for captions, together in batches]
        total_tokens = sum(captions * longest for captions, longest in pairs)
        return (
            max(0.0, 1 - sum(captions for captions, _ in pairs) * self.longest(1) / total_tokens)
            if total_tokens
            else 0.0
        )
