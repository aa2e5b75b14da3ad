"""Render a data set's page as one self-contained HTML text. Nothing is read, measured or written here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mmspeed.config import Bucket, Config, dump_config
from mmspeed.config.schema import DataConfig
from mmspeed.data.sampling.batch_sizes import COUNTED_TEXT_TOKENS
from mmspeed.log import format_bytes, format_figure, format_seconds
from mmspeed.models.build import size_of
from mmspeed.preprocess.records.bucket_use import BucketUse
from mmspeed.preprocess.records.stale_entries import SectionState
from mmspeed.preprocess.records.statistics import DataStatistics, Histogram, ThumbnailSource
from mmspeed.preprocess.report.charts import (
    bars,
    box,
    card,
    cell,
    document,
    foreign,
    jpeg_uri,
    table,
    text,
    tile,
    tiles,
)
from mmspeed.preprocess.report.costs import UTILISATION, Costs
from mmspeed.preprocess.report.page_schedule import schedule_section
from mmspeed.preprocess.sources.rejections import Reason
from mmspeed.preprocess.sources.scores import ScoreSummary
from mmspeed.redaction import redacted
from mmspeed.version import __version__

PAGE_BYTES = 2_000_000  # thumbnails beyond it are left out
_CAPTION, _DETAIL, _CONFIG = 180, 240, 60_000  # characters shown
_HISTOGRAMS = (
    ("seconds", "Length of videos", "seconds"),
    ("fps", "Frames per second of videos", ""),
    ("megapixels", "Size of pictures", "megapixels: 720p has 0.92, 1080p 2.07"),
    ("aspect", "Aspect ratio", "width / height: 16:9 is 1.78, 9:16 is 0.56"),
    ("caption_chars", "Length of captions", "characters"),
    ("caption_tokens", "Length of distinct captions", "tokens"),
    ("captions", "Captions of a source", ""),
)


@dataclass(frozen=True)
class CacheState:
    """The current state of the cache."""

    root: Path
    sections: Sequence[SectionState] = ()
    notes: Sequence[str] = ()
    bytes: int = 0
    free: int | None = None


@dataclass
class DataPage:
    """The content of the page; `render` only adds text around it."""

    config: Config
    command: str  # that makes it
    statistics: DataStatistics
    headline: str
    decoded: bool  # True: the sources were decoded; False: only opened
    problems: Sequence[str] = ()
    hints: Sequence[str] = ()
    costs: Costs | None = None
    cache: CacheState | None = None
    encode: Sequence[tuple[str, str, str]] = ()  # what, how much, how it is known
    peaks: Sequence[tuple[str, float]] = ()  # device, FLOP/s
    scores: Sequence[ScoreSummary] = ()
    thumbnails: Sequence[tuple[ThumbnailSource, bytes | None]] = field(
        default_factory=list
    )  # JPEG; None: it could not be read


def render(page: DataPage) -> str:
    """Render the page as HTML, without scripts and external resources."""
    title = f"{page.config.name}: data"
    parts = [
        f'<h1>{text(title)}</h1><p class="sub">mmspeed {text(__version__)} {text(page.command)} &middot; cache'
        f" {foreign(page.config.cache_dir)}</p>",
        _verdict(page),
        _summary(page),
        _inputs(page.statistics, page.config.data),
        _scores(page.scores),
        _rejects(page),
        _charts(page.statistics),
        _buckets(page),
        schedule_section(page.costs.outlook if page.costs is not None else None),
        _cache(page),
        _cost(page),
    ]
    config_text = redacted(dump_config(page.config))
    more = f"\n... {len(config_text) - _CONFIG} characters more" if len(config_text) > _CONFIG else ""
    tail = f"<h2>Config</h2><details><summary>show</summary><pre>{text_lines(config_text[:_CONFIG] + more)}</pre></details>"
    body = "\n".join(part for part in parts if part)
    return document(title, f"{body}\n{_thumbnails(page, PAGE_BYTES - len(body) - len(tail) - 10_000)}\n{tail}")


def text_lines(value: str) -> str:
    """Escape text of several lines as HTML."""
    return "\n".join(text(line) for line in value.splitlines())


def _verdict(page: DataPage) -> str:
    kind, sign = ("bad", "✗ ") if page.problems else ("good", "✓ ")
    return (
        f'<p class="verdict {kind}">{sign}{text(page.headline)}</p>'
        + box("bad", "Problems", page.problems)
        + box("warn", "Worth knowing", page.hints)
    )


def _summary(page: DataPage) -> str:
    numbers, sums = page.statistics, page.statistics.sums
    train, val = sum(numbers.samples("train").values()), sum(numbers.samples("val").values())
    parts = [
        tile(f"{numbers.usable:,} of {sums['listed']:,}", "sources usable", "usable"),
        tile(f"{train:,}", "training samples", "train"),
        tile(f"{val:,}", "held out for validation", "val"),
        tile(f"{numbers.rejected:,}", "rejected, each with a reason", "rejected"),
        tile(format_seconds(sums["milliseconds"] / 1000), f"of video in {sums['videos']:,} files", "seconds"),
        tile(f"{sums['images']:,}", "still pictures", "images"),
        tile(format_bytes(sums["bytes"]), "of media", "bytes"),
    ]
    if page.costs is not None:
        epochs = page.costs.outlook.total(lambda epoch: epoch.epochs) if page.costs.outlook is not None else ()
        if epochs:
            least, most = f"{min(epochs):,.1f}", f"{max(epochs):,.1f}"
            parts.append(tile(least if least == most else f"{least} to {most}", "epochs, by the number of devices"))
        parts.append(tile(format_bytes(page.costs.latent_bytes + page.costs.text_bytes), "complete cache, about"))
    return tiles(parts)


def _inputs(numbers: DataStatistics, data: DataConfig) -> str:
    sums = numbers.sums
    rows = [
        ("usable sources", numbers.usable, ""),
        ("rejected sources", sums["rejected_sources"], "opened, and found unusable"),
        ("rejected files", sums["rejected_files"], "no source: not media, no caption, a bad row"),
        ("caption files", sums["caption_files"], "beside their media"),
        ("ignored", sums["ignored"], "hidden files, other members of a tar"),
        ("left out", sums["beyond_limit"], "beyond data.limit"),
    ]
    total = sum(count for _, count, _ in rows)
    keys = ("usable_row", "rejected_sources", "rejected_files", "caption_files", "ignored", "beyond_limit")
    count_rows = [
        (cell(text(name)), cell(f"{n:,}", True, key), cell(text(why), words=True))
        for key, (name, n, why) in zip(keys, rows, strict=True)
    ]
    if total != sums["files"]:  # only if a count is wrong, which must be visible
        count_rows.append((cell("not accounted for"), cell(f"{sums['files'] - total:,}", True), cell("")))
    count_rows.append((cell("files, rows and members"), cell(f"{sums['files']:,}", True, "files"), cell("")))
    times = [
        ("frames of videos", f"{sums['frames']:,}", f"{sums['frames_taken']:,} taken{_share(sums, 'frames_taken', 'frames')}"),
        (
            "time of videos",
            format_seconds(sums["milliseconds"] / 1000),
            f"{format_seconds(sums['milliseconds_taken'] / 1000)} inside a clip"
            f"{_share(sums, 'milliseconds_taken', 'milliseconds')}",
        ),
        ("pixels of the frames taken", f"{sums['pixels'] / 1e6:,.1f} M", f"{sums['pixels_kept'] / 1e6:,.1f} M inside the crop"
         f"{_share(sums, 'pixels_kept', 'pixels')}"),
        ("sources without a caption", f"{sums['missing_captions']:,}", "taken by data.missing_caption"),
        ("captions cut", f"{sums['captions_cut']:,}", f"to {data.max_caption_chars:,} characters"),
        ("captions repaired", f"{sums['captions_repaired']:,}", "had bytes that are not UTF-8"),
        ("captions stripped", f"{sums['captions_stripped']:,}", "of control and invisible characters"),
        ("captions dropped", f"{sums['captions_dropped']:,}", "beyond the limit for a source"),
    ]  # fmt: skip
    if data.scenes is not None:
        videos = f"in {sums['cut_videos']:,} of {sums['videos']:,} videos; no clip crosses one (data.scenes)"
        times.append(("scene cuts", f"{sums['scene_cuts']:,}", videos))
    if data.mirror:
        clips = f"{sums['mirrored']:,} of {sum(numbers.clips().values()):,} clips (data.mirror)"
        left = f"{sums['unmirrored']:,} sources have none, for their captions (data.mirror_words)"
        times.append(("mirror images", f"{sums['mirrored']:,}", f"{clips}; {left}"))
    used = [(cell(text(a)), cell(text(b), True), cell(text(c), words=True)) for a, b, c in times]
    kinds = [
        card("File endings", bars(numbers.counts["endings"].top(10), "sources by file ending")),
        card("Codecs", bars(numbers.counts["codecs"].top(10), "sources by codec")),
        card("Sizes", bars(numbers.counts["sizes"].top(10), "sources by width and height in pixels"), "width x height"),
    ]
    return (
        "<h2>Inputs</h2>"
        + table(("", "count", ""), count_rows, (1,), last_is_sum=True, stack=True)
        + table(("use of the sources", "available", "used"), used, (1,), stack=True)
        + f'<div class="cards" style="margin-top:1em">{"".join(kinds)}</div>'
    )


def _share(sums: Mapping[str, int], part: str, whole: str) -> str:
    return f", {sums[part] / sums[whole]:.0%}" if sums[whole] else ""


def _scores(scores: Sequence[ScoreSummary]) -> str:
    """A table of the columns that data.min and data.max name; nothing where they name none."""
    if not scores:
        return ""
    rows = []
    for score in scores:
        missing = f"<br><span class=sub>{score.missing:,} without a number</span>" if score.missing else ""
        quantiles = ", ".join(f"{share} % {value:.4g}" for share, value in score.quantiles)
        limits = "".join(
            f"<li><b>data.{one.key} {one.limit:g} keeps {text(one.kept)}</b><br><span class=sub>others: "
            f"{text('; '.join(f'{limit:.4g} keeps {kept}' for limit, kept in one.others))}</span></li>"
            for one in score.thresholds
        )
        rows.append(
            (
                cell(foreign(_cut(score.column, _DETAIL)), words=True),
                cell(f"{score.count:,}{missing}", True),
                cell(text(quantiles or "none"), words=True),
                cell(f"<ul>{limits}</ul>", words=True),
            )
        )
    note = '<p class="sub">Of all sources with captions, before any threshold.</p>'
    return "<h2>Scores</h2>" + table(("column", "sources", "quantiles", "thresholds"), rows, (1,), stack=True) + note


def _rejects(page: DataPage) -> str:
    numbers, head = page.statistics, "<h2>Rejected</h2>"
    notes = []
    if not page.decoded:
        notes.append("Files were opened, not decoded. Damage inside a file is detected only when it is encoded.")
    if numbers.sums["rejected_clips"]:
        notes.append(f"{numbers.sums['rejected_clips']:,} are single clips of sources.")
    if numbers.sums["rejected_captions"]:
        notes.append(f"{numbers.sums['rejected_captions']:,} are single captions of sources.")
    tail = f'<p class="sub">{text(" ".join(notes))}</p>'
    if not numbers.reasons:
        return f"{head}<p>Nothing was rejected.</p>{tail}"
    rows = []
    for reason, count in sorted(numbers.reasons.items(), key=lambda item: (-item[1], item[0])):
        examples = numbers.examples.get(reason, [])
        example_items = "".join(
            f"<li>{foreign(name)}{f' <span class=sub>{foreign(_cut(why, _DETAIL))}</span>' if why else ''}</li>"
            for name, why in examples
        )
        more = f"<li class=sub>and {count - len(examples):,} more</li>" if count > len(examples) else ""
        why = f"<b>{text(reason)}</b><br><span>{text(Reason(reason).explanation)}</span>"
        rows.append(
            (
                cell(why, words=True),
                cell(f"{count:,}", True, f"reason-{reason}"),
                cell(f"<ul>{example_items}{more}</ul>", words=True),
            )
        )
    return head + table(("reason", "count", "such as"), rows, (1,), stack=True) + tail


def _charts(numbers: DataStatistics) -> str:
    cards = [
        card(heading, bars(numbers.histograms[name].bins(), heading), _note(numbers.histograms[name], unit))
        for name, heading, unit in _HISTOGRAMS
        if numbers.histograms[name].count
    ]
    return f'<h2>Distributions</h2><div class="cards">{"".join(cards)}</div>' if cards else ""


def _note(histogram: Histogram, unit: str) -> str:
    span = f"least {histogram.least:.4g}, mean {histogram.mean:.4g}, greatest {histogram.greatest:.4g}"
    return f"{unit}; {span}" if unit else span


def _buckets(page: DataPage) -> str:
    head = "<h2>Buckets</h2>"
    note = '<p class="sub">frames x height x width in pixels.</p>'
    train, val = page.statistics.samples("train"), page.statistics.samples("val")
    chart = bars([(str(bucket), count) for bucket, count in train.items()], "training samples by bucket")
    if page.costs is None:
        short = [
            (cell(text(b)), cell(f"{train.get(b, 0):,}", True), cell(f"{val.get(b, 0):,}", True))
            for b in sorted({*page.config.buckets, *train, *val})
        ]
        return head + table(("bucket", "train", "val"), short, (1, 2)) + note
    rows = []
    use = page.statistics.buckets()
    for row in page.costs.buckets:
        used = use.get(row.bucket, BucketUse())
        trimmed = "-" if row.bucket.is_image else f"{used.trimmed:.0%} trimmed"
        rows.append(
            (
                cell(text(row.bucket)),
                cell(f"{row.train:,}", True, f"train-{row.bucket}"),
                cell(f"{row.val:,}", True, f"val-{row.bucket}"),
                cell(f"{row.clips:,}", True),
                cell(f"{used.cropped:.0%} cropped, {used.scaled:.0%} scaled away", False, f"pixels-{row.bucket}"),
                cell(trimmed, False, f"frames-{row.bucket}"),
                cell(f"{row.tokens:,}", True),
                cell(format_figure(row.flops / 1e9), True),
            )
        )
    names = (
        "bucket",
        "train",
        "val",
        "clips",
        "pixels lost",
        "frames lost",
        "tokens of the model",
        "GFLOP a sample",
    )
    return (
        head
        + table(names, rows, (1, 2, 3, 6, 7))
        + note
        + f'<div class="cards">{card("Training samples", chart)}</div>'
    )


def _cache(page: DataPage) -> str:
    if page.cache is None:
        return ""
    state, rows = page.cache, []
    for one in state.sections:
        stale = "; ".join(f"{n:,} stale: made with another {names}" for names, n in one.stale.most_common())
        if stale and one.examined < one.missing:
            stale += f" (of {one.examined:,} compared)"
        counts = ((one.wanted, "wanted"), (one.present, "present"), (one.missing, "missing"), (one.unused, "unused"))
        numbers = [cell(f"{count:,}", True, f"{one.section}-{name}") for count, name in counts]
        rows.append((cell(text(one.section)), *numbers, cell(text(stale or "-"), words=True)))
    parts = ["<h2>Cache</h2>", f"<p>{foreign(state.root)}</p>"]
    if rows:
        parts.append(
            table(("entries", "needed", "present", "missing", "not used", "why missing"), rows, range(1, 5), stack=True)
        )
    expected = "unknown"
    if page.costs is not None:
        latents, captions = format_bytes(page.costs.latent_bytes), format_bytes(page.costs.text_bytes)
        expected = f"{latents} of latents, {captions} of captions"
    free = "unknown" if state.free is None else format_bytes(state.free)
    facts = [("on disk now", format_bytes(state.bytes)), ("complete, about", expected), ("disk free", free)]
    parts.append(table(("size", ""), [(cell(text(a)), cell(text(b))) for a, b in facts]))
    parts += [f'<p class="sub">{text(note)}</p>' for note in state.notes]
    return "".join(parts)


def _cost(page: DataPage) -> str:
    parts = ["<h2>Time and cost</h2>"]
    if page.encode:
        encode_rows = [(cell(text(a), words=True), cell(text(b)), cell(text(c), words=True)) for a, b, c in page.encode]
        parts.append(table(("preparing the cache", "", "how this is known"), encode_rows, stack=True))
    costs, config = page.costs, page.config
    if costs is None or costs.outlook is None:
        return "".join(parts)
    worlds = costs.outlook.worlds
    parts.append(
        f"<p>Training: model {text(size_of(config.model))}, {costs.parameters / 1e6:,.1f} M parameters, {config.train.steps:,} steps."
        " Estimated time by number of devices:</p>"
    )
    rows = [
        (
            cell(text(name), words=True),
            cell(f"{peak / 1e12:,.2f}", True),
            *(cell(format_seconds(seconds), True) for seconds in costs.seconds(peak)),
        )
        for name, peak in page.peaks
    ]
    heads = ("device", "peak, TFLOP/s", *(_count(world, "device") for world in worlds))
    numbers = range(1, len(heads))
    this_device, other_devices = rows[:1], rows[1:]
    parts.append(table(heads, this_device, numbers) if this_device else "")
    if other_devices:
        parts.append(f"<details><summary>on other devices</summary>{table(heads, other_devices, numbers)}</details>")
    parts.append(
        f'<p class="sub">An estimate: forward and backward with {min(COUNTED_TEXT_TOKENS, config.text.max_tokens)} caption tokens, in'
        f" {text(config.device.dtype)}, at an assumed {UTILISATION:.0%} of the peak, all waiting for the busiest;"
        " without validation, checkpoints and sampling.</p>"
    )
    return "".join(parts)


def _thumbnails(page: DataPage, room: int) -> str:
    if not page.thumbnails:
        return ""
    figures, left_out = [], 0
    for source, jpeg in page.thumbnails:
        figure = _figure(source, jpeg)
        if len(figure) > room:
            left_out += 1
            continue
        room -= len(figure)
        figures.append(figure)
    note = f"{len(figures)} sources, drawn by their content" + (f"; {left_out} more are left out" if left_out else "")
    return f'<h2>Thumbnails</h2><p class="sub">{note}.</p><div class="thumbs">{"".join(figures)}</div>'


def _figure(source: ThumbnailSource, jpeg: bytes | None) -> str:
    picture = f'<img src="{jpeg_uri(jpeg)}" alt="" loading="lazy">' if jpeg else '<div class="none">unreadable</div>'
    seconds = f", {source.seconds:.1f} s" if source.seconds else ""
    clips = f", {source.clips} clips" if source.clips > 1 else ""
    buckets = ", ".join(str(Bucket.parse(name)) for name in source.buckets)
    return (
        f"<figure>{picture}<figcaption><b>{foreign(_cut(source.name, 80))}</b>"
        f'<span class="sub">{source.width} x {source.height}{seconds} &rarr; {text(buckets)}{clips}</span><br>'
        f"{foreign(_cut(source.caption, _CAPTION))}</figcaption></figure>"
    )


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _cut(value: str, length: int) -> str:
    return value if len(value) <= length else value[: length - 3] + "..."
