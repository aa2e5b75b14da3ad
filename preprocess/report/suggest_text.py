"""Describe suggested buckets: lines to paste into a config, and their losses compared with other lists."""

from __future__ import annotations

from collections.abc import Sequence

from mmspeed.config import Config
from mmspeed.preprocess.records.source_shapes import ShapeHistogram
from mmspeed.preprocess.report.suggest import BucketOutcome, BucketSuggestion, grid_of, suggest

_HEAD = ("", "buckets", "cropped", "trimmed", "scaled", "rejected", "kept")


def suggest_lines(config: Config, cells: ShapeHistogram, number: int) -> list[str]:
    """The lines of `mmspeed check --suggest-buckets` for the sources in `cells`."""
    if not len(cells):
        return ["suggested buckets: none, since no source could be probed"]
    present = config.buckets
    suggestion = suggest(cells, present, grid_of(config), number, config.data.allow_upscale)
    lines = [_headline(suggestion), *_list_lines(suggestion), *_table(suggestion)]
    if any(bucket.keep < 1 for bucket in config.data.buckets):
        lines.append("  (as if data.buckets[].keep were 1 throughout)")
    if suggestion.binned:
        lines.append(
            "  (sources of nearly one shape are counted as the smallest of them, so a little more may be kept)"
        )
    return lines + [f"  {note}" for note in _left_out(config, cells, suggestion.suggested)]


def _headline(suggestion: BucketSuggestion) -> str:
    count = len(suggestion.suggested.buckets)
    if not count:
        return "suggested buckets: none, since no bucket up to the size of data.buckets takes any of the sources"
    if count < suggestion.asked:
        fewer = f"{count} bucket{'s' if count > 1 else ''}, and not {suggestion.asked}, since more would keep no more"
        return f"suggested buckets for {suggestion.sources:,} sources: {fewer}"
    sure = "optimal" if suggestion.exact else "found by search"
    return f"suggested buckets for {suggestion.sources:,} sources ({sure}):"


def _list_lines(suggestion: BucketSuggestion) -> list[str]:
    """YAML to paste under `data:`."""
    if not suggestion.suggested.buckets:
        return []
    rows = [f"- {{frames: {b.frames}, height: {b.height}, width: {b.width}}}" for b in suggestion.suggested.buckets]
    width = max(map(len, rows))
    counts = [f"{clips:,} clip{'s' if clips != 1 else ''}" for clips in suggestion.suggested.clips]
    return [
        "  buckets:",
        *(f"    {row:<{width}}  # {count}" for row, count in zip(rows, counts, strict=True)),
    ]


def _table(suggestion: BucketSuggestion) -> list[str]:
    """A row for each list; lost shares are means over the accepted clips, the kept share is the mean over all."""
    outcomes = {"suggested": suggestion.suggested, **suggestion.others}
    rows = [_HEAD, *(_row(name, outcome) for name, outcome in outcomes.items())]
    first = max(len(row[0]) for row in rows)
    lines = [
        "  lost are pixels by cropping, frames by trimming, and length of the sides by scaling down, of what the largest"
        " of data.buckets could hold; kept is the remaining share over all sources:"
    ]
    return lines + [f"  {row[0]:<{first}}" + "".join(f"{cell:>10}" for cell in row[1:]) for row in rows]


def _row(name: str, outcome: BucketOutcome) -> Sequence[str]:
    if not any(outcome.clips):
        return name, str(len(outcome.buckets)), "-", "-", "-", f"{outcome.rejected:,}", f"{0:.1%}"
    shares = (f"{share:.1%}" for share in (outcome.cropped, outcome.trimmed, outcome.scaled))
    return name, str(len(outcome.buckets)), *shares, f"{outcome.rejected:,}", f"{outcome.kept:.1%}"


def _left_out(config: Config, cells: ShapeHistogram, outcome: BucketOutcome) -> list[str]:
    """Notes about sources that are in no suggested bucket because of the config."""
    notes = []
    videos = int(cells.counts[~cells.images].sum())
    if videos and all(bucket.is_image for bucket in config.buckets):
        notes.append(f"{videos:,} videos are left out: data.buckets has images only (frames: 1)")
    elif outcome.rejected:
        small = "" if config.data.allow_upscale else ", too small (data.allow_upscale)"
        notes.append(f"{outcome.rejected:,} of the sources go to none of these: too short{small}, or of another kind")
    return notes
