"""Write the page of `mmspeed check` and `mmspeed preprocess`, its thumbnails, and a build's record for later estimates."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mmspeed import pages
from mmspeed.config import Bucket, Config, dump_config
from mmspeed.data import Sample
from mmspeed.data.cache.files import write_whole
from mmspeed.data.sampling.batch_sizes import COUNTED_TEXT_TOKENS
from mmspeed.device import UTILISATION
from mmspeed.errors import UserError
from mmspeed.log import format_seconds, get_logger
from mmspeed.media.rejections import Reason, Rejected
from mmspeed.models.sections import size_of
from mmspeed.preprocess.decoding.worker import DecodeWorker
from mmspeed.preprocess.records.bucket_use import BucketUse
from mmspeed.preprocess.records.build_report import BuildReport
from mmspeed.preprocess.records.stale_entries import SectionState
from mmspeed.preprocess.records.statistics import DataStatistics, ThumbnailSource
from mmspeed.preprocess.report.costs import Costs, estimate, folder_bytes, free_bytes, hints, peaks, pixels
from mmspeed.preprocess.sources.fetched import MediaStore
from mmspeed.preprocess.sources.listing import SourceListing
from mmspeed.preprocess.sources.scores import ScoreSummary
from mmspeed.redaction import redacted
from mmspeed.shapes import Strides

_ENOUGH = 8  # fewest clips of a build for a reliable rate

log = get_logger("preprocess")

THUMBNAIL_WIDTH, THUMBNAIL_HEIGHT, THUMBNAIL_QUALITY = 160, 240, 70
_THUMBNAIL_SECONDS = 10.0  # limit for one
PAGE_BYTES = 2_000_000  # thumbnails beyond it are left out
_WORDS_BYTES = 2_000  # of a thumbnail's name and caption, at most
_CONFIG = 60_000  # characters shown
_HISTOGRAMS = (
    ("seconds", "Length of videos", "seconds; "),
    ("fps", "Frames per second of videos", ""),
    ("megapixels", "Size of pictures", "megapixels: 720p has 0.92, 1080p 2.07; "),
    ("aspect", "Aspect ratio", "width / height: 16:9 is 1.78, 9:16 is 0.56; "),
    ("caption_chars", "Length of captions", "characters; "),
    ("caption_tokens", "Length of distinct captions", "tokens; "),
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
    thumbnails: Sequence[tuple[ThumbnailSource, bytes | None]] = ()  # JPEG; None: it could not be read


def render(page: DataPage) -> str:
    """Render the page as HTML, of at most `PAGE_BYTES`: thumbnails that do not fit are left out."""
    numbers, costs = page.statistics, page.costs
    train, val, use = numbers.samples("train"), numbers.samples("val"), numbers.buckets()
    config_text = redacted(dump_config(page.config))
    more = f"\n... {len(config_text) - _CONFIG} characters more" if len(config_text) > _CONFIG else ""
    reasons = sorted(numbers.reasons.items(), key=lambda item: (-item[1], item[0]))
    content: dict[str, Any] = {
        "title": f"{page.config.name}: data",
        "page": page,
        "numbers": numbers,
        "schedule": None if costs is None else costs.schedule,
        "train": train,
        "val": val,
        "files": _file_rows(numbers),
        "histograms": [
            (heading, unit, numbers.histograms[key])
            for key, heading, unit in _HISTOGRAMS
            if numbers.histograms[key].count
        ],
        "rejected": [
            (reason, count, Reason(reason).explanation, numbers.examples.get(reason, [])) for reason, count in reasons
        ],
        "buckets": [] if costs is None else [(row, use.get(row.bucket, BucketUse())) for row in costs.buckets],
        "counts": [
            (bucket, f"{train.get(bucket, 0):,}", f"{val.get(bucket, 0):,}")
            for bucket in sorted({*page.config.buckets, *train, *val})
        ],
        "times": _time_table(page),
        "size": size_of(page.config.model),
        "text_tokens": min(COUNTED_TEXT_TOKENS, page.config.text.max_tokens),
        "utilisation": UTILISATION,
        "config_text": config_text[:_CONFIG] + more,
    }
    room = PAGE_BYTES - len(pages.render("data.html", **content, thumbnails=[], left_out=0)) - 10_000
    thumbnails = []
    for source, jpeg in page.thumbnails:
        picture = pages.data_uri(jpeg, "image/jpeg") if jpeg else ""
        if len(picture) + _WORDS_BYTES <= room:
            room -= len(picture) + _WORDS_BYTES
            thumbnails.append((source, [Bucket.parse(name) for name in source.buckets], picture))
    return pages.render("data.html", **content, thumbnails=thumbnails, left_out=len(page.thumbnails) - len(thumbnails))


def _file_rows(numbers: DataStatistics) -> list[tuple[str, str, int, str]]:
    """(key, name, count, note) of what the files, rows and members are; they sum to all of them."""
    sums = numbers.sums
    rows = [
        ("usable_row", "usable sources", numbers.usable, ""),
        ("rejected_sources", "rejected sources", sums["rejected_sources"], "opened, and found unusable"),
        ("rejected_files", "rejected files", sums["rejected_files"], "no source: not media, no caption, a bad row"),
        ("caption_files", "caption files", sums["caption_files"], "beside their media"),
        ("ignored", "ignored", sums["ignored"], "hidden files, other members of a tar"),
        ("beyond_limit", "left out", sums["beyond_limit"], "beyond data.limit"),
    ]
    rest = sums["files"] - sum(count for _, _, count, _ in rows)
    # only if a count is wrong, which must be visible
    return [*rows, ("not_accounted", "not accounted for", rest, "")] if rest else rows


def _time_table(page: DataPage) -> list[tuple[str, ...]]:
    """Training time of each device, for each number of devices of the schedule; the head first."""
    if page.costs is None or page.costs.schedule is None:
        return []
    worlds = page.costs.schedule.worlds
    head = ("device", "peak, TFLOP/s", *(f"{world:,} device{'s'[: world != 1]}" for world in worlds))
    rows = [(name, f"{peak / 1e12:,.2f}", *map(format_seconds, page.costs.seconds(peak))) for name, peak in page.peaks]
    return [head, *rows]


def default_path(config: Config) -> Path:
    """The default path of the page: beside the run's folder."""
    return Path(config.output) / f"{config.name}-data.html"


def write_page(page: DataPage, path: Path) -> Path:
    """Write the page atomically and return `path`. Raises UserError if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, render(page).encode("utf-8", "replace"))
    except OSError as error:
        raise UserError(
            f"the page {path} cannot be written ({error.strerror or error}); name another with --report"
        ) from None
    return path


def take_thumbnails(config: Config, shown: Sequence[ThumbnailSource]) -> list[tuple[ThumbnailSource, bytes | None]]:
    """A JPEG of each source, decoded in a separate process; None if it cannot be decoded."""
    limit = min(_THUMBNAIL_SECONDS, config.preprocess.time_limit)
    thumbnails: list[tuple[ThumbnailSource, bytes | None]] = []
    with DecodeWorker() as worker, closing(MediaStore.of(config.data)) as media:
        for one in shown:
            try:
                with media.local(one.source()) as source:
                    thumbnails.append((one, thumbnail_jpeg(worker.thumbnail(source, THUMBNAIL_WIDTH, limit))))
            except (Rejected, OSError):
                thumbnails.append((one, None))
    return thumbnails


def thumbnail_jpeg(picture_HWC: np.ndarray) -> bytes:
    """Encode uint8 pixels (H, W, 3) as a JPEG of at most `THUMBNAIL_WIDTH` x `THUMBNAIL_HEIGHT`."""
    small = Image.fromarray(picture_HWC)
    small.thumbnail((THUMBNAIL_WIDTH, THUMBNAIL_HEIGHT))
    sink = io.BytesIO()
    small.save(sink, "JPEG", quality=THUMBNAIL_QUALITY)
    return sink.getvalue()


def write_build_page(
    config: Config,
    listing: SourceListing,
    statistics: DataStatistics,
    report: BuildReport,
    samples: Iterable[Sample],
    channels: int,
    strides: Strides,
    state: str,
) -> Path | None:
    """Write the page of a finished build, and beside it, as JSON, its numbers, its rate and its `state`; return the page's path.

    `statistics` hold every source of all processes, selected or rejected; the listing and the samples are added here. If the
    page cannot be written, the build still succeeds: a warning is logged, and None is returned.
    """
    try:
        statistics.add_listing(listing)
        for sample in samples:
            statistics.add_sample(sample.bucket, sample.split, sample.dataset)
        page = _build_page(config, statistics, report, channels, strides)
        page.scores = [] if listing.scores is None else listing.scores.summaries()
        path = write_page(page, default_path(config))
        _write_record(config, statistics, report, state)
        return path
    except (UserError, OSError) as error:
        log.warning(f"the cache is complete, but its page could not be written: {error}")
        return None


def _build_page(
    config: Config, statistics: DataStatistics, report: BuildReport, channels: int, strides: Strides
) -> DataPage:
    captions = report.texts + report.texts_reused
    costs, problems = estimate(config, statistics, captions, channels, strides)
    advice = hints(config, statistics, costs, report.captions_truncated)
    encode = [
        ("clips encoded now", f"{report.clips_encoded:,}", f"{report.clips_reused:,} were already in the cache"),
        ("captions encoded now", f"{report.texts:,}", f"{report.texts_reused:,} were already in the cache"),
        ("time", format_seconds(report.seconds), "measured"),
    ]
    if report.clips_encoded and report.seconds:
        rate = f"{report.clips_encoded / report.seconds:.2f} clips, {report.seconds_of_video / report.seconds:.1f} s of video a second"
        encode.append(
            ("rate", rate, f"measured, from files to the cache; the codec was busy {report.busy:.0%} of its time")
        )
    return DataPage(
        config=config,
        command="preprocess",
        statistics=statistics,
        headline=f"Done: {report.encoded + report.reused:,} of {report.sources:,} sources are in the cache",
        decoded=True,
        problems=problems if costs is None else (),
        hints=advice
        if costs is None
        else [*problems, *advice],  # the cache is complete, even if the schedule has problems
        costs=costs,
        cache=CacheState(report.root, bytes=folder_bytes(report.root), free=free_bytes(report.root)),
        encode=encode,
        peaks=peaks(config),
        thumbnails=take_thumbnails(config, statistics.shown),
    )


def encode_estimate(config: Config, missing_pixels: int, missing_captions: int) -> tuple[str, str]:
    """The estimated time of encoding the missing clips, by the last build of this config that encoded some; and its basis."""
    build = read_record(config).get("build")
    if missing_pixels == 0:
        if missing_captions:
            return f"{missing_captions:,} captions", "every latent is in the cache; the time for captions is unknown"
        return "nothing to encode", "every entry is in the cache"
    if not isinstance(build, dict) or not build.get("pixels") or not build.get("seconds"):
        return "unknown until the first build", "it depends on the codec and the device, and is measured while building"
    if build.get("vae") != config.vae.model_dump(mode="json"):
        return "unknown until the first build", "the last build had another codec"
    if build["clips"] < _ENOUGH:
        return "unknown", f"the last build encoded only {build['clips']} clips, too few for an estimate"
    seconds = missing_pixels * build["seconds"] / build["pixels"]
    how = f"as fast as the last build: {build['clips']:,} clips in {format_seconds(build['seconds'])}"
    return f"about {format_seconds(seconds)}", f"{how}, on {build['processes']} process(es), device {build['device']}"


def _record_path(config: Config) -> Path:
    return default_path(config).with_suffix(".json")


def read_record(config: Config) -> dict[str, Any]:
    """The record of the last build; empty if there is no readable one."""
    try:
        tree = json.loads(_record_path(config).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return tree if isinstance(tree, dict) else {}


def _write_record(config: Config, statistics: DataStatistics, report: BuildReport, state: str) -> None:
    """Write the numbers of the page, and the rate; a build that encoded nothing keeps the previous rate."""
    build = read_record(config).get("build")
    clips = statistics.clips()
    if report.clips_encoded and (count := sum(clips.values())):
        processes = int(os.environ.get("WORLD_SIZE", "1"))
        build = {
            "clips": report.clips_encoded,
            "pixels": round(report.clips_encoded * pixels(clips) / count),  # at the mean size of all clips
            "seconds": round(
                max(report.latent_seconds - report.start_seconds, 1e-3) / processes, 3
            ),  # all work in parallel
            "vae": config.vae.model_dump(mode="json"),
            "device": config.device.kind,
            "processes": processes,
        }
    counts = {name: value for name, value in report.to_json().items() if name != "rejections"}
    whole = {"state": state, "report": counts, "held_out": report.held_out_copies}
    tree = {"build": build, "statistics": statistics.to_json(), "whole": whole}
    write_whole(_record_path(config), (json.dumps(tree, ensure_ascii=True, sort_keys=True) + "\n").encode())
