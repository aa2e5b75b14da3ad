"""Scores of sources in columns of manifests and JSON sidecars: thresholds (`data.min`, `data.max`), and quantiles to choose them by."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mmspeed.config.schema import DataConfig
from mmspeed.media.rejections import Reason
from mmspeed.preprocess.sources.captions import is_missing

_SHOWN = (0, 5, 25, 50, 75, 95, 100)  # quantiles in percent
SCORE_REASONS = (Reason.BELOW_MINIMUM, Reason.ABOVE_MAXIMUM, Reason.NO_SCORE)
_OTHER_SHARES = (90, 75, 50, 25, 10)  # percent of the sources that other thresholds keep


@dataclass
class ScoreColumn:
    """The scores of one column, of all media with captions, before any threshold. `missing` counts those without a number."""

    values: array[float] = field(default_factory=lambda: array("d"))
    missing: int = 0


@dataclass(frozen=True)
class Threshold:
    """A threshold of a column and what it keeps: `key` is `min` or `max`, `others` are (threshold, what it keeps)."""

    key: str
    limit: float
    kept: str
    others: tuple[tuple[float, str], ...]


@dataclass(frozen=True)
class ScoreSummary:
    """A column of scores: of how many sources, how many have none, (percent, value) of quantiles, and its thresholds."""

    column: str
    count: int
    missing: int
    quantiles: tuple[tuple[int, float], ...] = ()
    thresholds: tuple[Threshold, ...] = ()

    def lines(self) -> list[str]:
        """The summary in lines."""
        without = f", {self.missing} without a number" if self.missing else ""
        lines = [f"  score {self.column}: of {self.count} sources{without}"]
        if self.quantiles:
            lines.append(f"    quantiles: {'  '.join(f'{share} % {value:.4g}' for share, value in self.quantiles)}")
        for one in self.thresholds:
            lines.append(f"    data.{one.key} {one.limit:g} keeps {one.kept}")
            lines.append(f"      others: {'; '.join(f'{limit:.4g} keeps {kept}' for limit, kept in one.others)}")
        return lines


@dataclass
class ScoreLimits:
    """The thresholds of a config, and the scores that they were compared with."""

    least: Mapping[str, float]
    greatest: Mapping[str, float]
    seen: dict[str, ScoreColumn] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.seen = {column: ScoreColumn() for column in self.columns}

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that have a threshold."""
        return tuple(dict.fromkeys((*self.least, *self.greatest)))

    @classmethod
    def of(cls, data: DataConfig) -> ScoreLimits:
        return cls(data.min, data.max)

    def refusal(self, scores: Mapping[str, Any]) -> tuple[Reason, str] | None:
        """Count the scores of a source; return the reason for which it is rejected, with the column and the score."""
        refusals = [self._refusal(column, scores) for column in self.columns]
        return next((refusal for refusal in refusals if refusal is not None), None)

    def _refusal(self, column: str, scores: Mapping[str, Any]) -> tuple[Reason, str] | None:
        try:
            score = number(scores.get(column))
        except ValueError as error:
            self.seen[column].missing += 1
            return Reason.NO_SCORE, f"'{column}' {error}"
        self.seen[column].values.append(score)
        if column in self.least and score < self.least[column]:
            return Reason.BELOW_MINIMUM, f"'{column}' is {score:g}, and data.min asks for {self.least[column]:g}"
        if column in self.greatest and score > self.greatest[column]:
            return Reason.ABOVE_MAXIMUM, f"'{column}' is {score:g}, and data.max allows {self.greatest[column]:g}"
        return None

    def summaries(self) -> list[ScoreSummary]:
        """Quantiles of each column, and the sources that each threshold and some others keep."""
        return [self._summary(column) for column in self.columns]

    def _summary(self, column: str) -> ScoreSummary:
        seen = self.seen[column]
        values_N = np.sort(np.frombuffer(seen.values)) if seen.values else np.empty(0)
        if not len(values_N):
            return ScoreSummary(column, 0, seen.missing)
        quantiles = np.percentile(values_N, _SHOWN, method="inverted_cdf").tolist()
        thresholds = [
            Threshold(
                key,
                limits[column],
                _kept(values_N, limits[column], at_least),
                tuple((limit, _kept(values_N, limit, at_least)) for limit in _others(values_N, at_least)),
            )
            for key, limits, at_least in (("min", self.least, True), ("max", self.greatest, False))
            if column in limits
        ]
        pairs = tuple(zip(_SHOWN, quantiles, strict=True))
        return ScoreSummary(column, len(values_N), seen.missing, pairs, tuple(thresholds))


def number(value: Any) -> float:
    """A score as a number. Raises ValueError, in words that follow the column's name, for a field that holds none."""
    if is_missing(value) or value == "":
        raise ValueError("is missing")
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"is a {type(value).__name__}, not a number")
    try:
        score = float(value)
    except (ValueError, OverflowError):
        raise ValueError(f"is {str(value)[:40]!r}, not a number") from None
    if not math.isfinite(score):
        raise ValueError(f"is {str(value)[:40]}, not a finite number")
    return score


def _others(values_N: np.ndarray, at_least: bool) -> list[float]:
    """Rounded thresholds that keep about 90, 75, 50, 25 and 10 percent of ascending values, without repeats."""
    shares = [100 - share if at_least else share for share in _OTHER_SHARES]
    limits_N = np.percentile(values_N, shares, method="inverted_cdf")
    return list(dict.fromkeys(float(f"{value:.3g}") for value in limits_N))


def _kept(values_N: np.ndarray, limit: float, at_least: bool) -> str:
    """The number and share of ascending values within a limit, in words."""
    below = int(np.searchsorted(values_N, limit, side="left" if at_least else "right"))
    kept = len(values_N) - below if at_least else below
    return f"{kept} ({kept / len(values_N):.0%})"
