"""Suggested buckets in words: lines to paste into a config, and what they lose beside other lists."""

from __future__ import annotations

from collections.abc import Sequence

from mmspeed.config import Config
from mmspeed.preprocess.records.source_shapes import ShapeHistogram
from mmspeed.preprocess.report.suggest import BucketOutcome, BucketSuggestion, grid_of, suggest

_HEAD = ("", "buckets", "cropped", "trimmed", "scaled", "rejected", "kept")


def suggest_lines(config: Config, cells: ShapeHistogram, number: int) -> list[str]:
    """What `mmspeed check --suggest-buckets` says of the sources in `cells`."""
    if not len(cells):
        return ["suggested buckets: none, since no source could be probed"]
    present = config.buckets
    made = suggest(cells, present, grid_of(config), number, config.data.allow_upscale)
    lines = [_headline(made), *_list_lines(made), *_table(made)]
    if any(bucket.keep < 1 for bucket in config.data.buckets):
        lines.append("  (as if data.buckets[].keep were 1 throughout)")
    if made.binned:
        lines.append(
            "  (sources of nearly one shape are counted as the smallest of them, so a little more may be kept)"
        )
    return lines + [f"  {note}" for note in _left_out(config, cells, made.suggested)]


def _headline(made: BucketSuggestion) -> str:
    found = len(made.suggested.buckets)
    if not found:
        return "suggested buckets: none, since no bucket as large as data.buckets asks for takes any of the sources"
    if found < made.asked:
        fewer = f"{found} bucket{'s' if found > 1 else ''}, and not {made.asked}, since more would keep no more"
        return f"suggested buckets for {made.sources:,} sources: {fewer}"
    sure = "the best that there are" if made.exact else "found by search"
    return f"suggested buckets for {made.sources:,} sources ({sure}):"


def _list_lines(made: BucketSuggestion) -> list[str]:
    """YAML to paste under `data:`."""
    if not made.suggested.buckets:
        return []
    rows = [f"- {{frames: {b.frames}, height: {b.height}, width: {b.width}}}" for b in made.suggested.buckets]
    width = max(map(len, rows))
    counts = [f"{clips:,} clip{'s' if clips != 1 else ''}" for clips in made.suggested.clips]
    return [
        "  buckets:",
        *(f"    {row:<{width}}  # {count}" for row, count in zip(rows, counts, strict=True)),
    ]


def _table(made: BucketSuggestion) -> list[str]:
    """A row for each list; shares lost are means over the clips taken, and what is kept is the mean over all."""
    named = {"suggested": made.suggested, **made.others}
    rows = [_HEAD, *(_row(name, outcome) for name, outcome in named.items())]
    first = max(len(row[0]) for row in rows)
    lines = [
        "  lost are pixels by cropping, frames by trimming, and length of the sides by scaling down, of what the largest"
        " of data.buckets could hold; kept is what is left over all sources:"
    ]
    return lines + [f"  {row[0]:<{first}}" + "".join(f"{cell:>10}" for cell in row[1:]) for row in rows]


def _row(name: str, outcome: BucketOutcome) -> Sequence[str]:
    if not any(outcome.clips):
        return name, str(len(outcome.buckets)), "-", "-", "-", f"{outcome.rejected:,}", f"{0:.1%}"
    shares = (f"{share:.1%}" for share in (outcome.cropped, outcome.trimmed, outcome.scaled))
    return name, str(len(outcome.buckets)), *shares, f"{outcome.rejected:,}", f"{outcome.kept:.1%}"


def _left_out(config: Config, cells: ShapeHistogram, outcome: BucketOutcome) -> list[str]:
    """Why some sources are in no suggested bucket, where the config is why."""
    notes = []
    videos = int(cells.counts[~cells.images].sum())
    if videos and all(bucket.is_image for bucket in config.buckets):
        notes.append(f"{videos:,} videos are left out: data.buckets asks for images only (frames: 1)")
    elif outcome.rejected:
        small = "" if config.data.allow_upscale else ", too small (data.allow_upscale)"
        notes.append(f"{outcome.rejected:,} of the sources go to none of these: too short{small}, or of another kind")
    return notes
