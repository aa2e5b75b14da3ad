"""Estimate the cost of a data set: model size, tokens, steps, bytes and arithmetic; and hints, each with the setting to change."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mmspeed.config import Bucket, Config
from mmspeed.data.sampling.batch_sizes import MEASURED_NAME, Measured, sample_costs
from mmspeed.device import PEAK_FLOPS, UTILISATION, accelerators, parse_dtype, pick
from mmspeed.errors import UserError
from mmspeed.log import format_bytes, format_figure
from mmspeed.media.rejections import Reason
from mmspeed.memory.recompute.regions import check_policies
from mmspeed.models.families.base import DescribesAttention
from mmspeed.models.families.complete import objective_warnings
from mmspeed.models.sections import FamilyCounts, check_inputs, counts_of, opened_of, outline, size_warnings, words_of
from mmspeed.models.text.encoders import text_width
from mmspeed.parallel import check_layout
from mmspeed.plan.degrees import degree_lines
from mmspeed.preprocess.records.statistics import DataStatistics
from mmspeed.preprocess.report.schedule import ScheduleForecast, forecast_schedule
from mmspeed.protocols.plan import blocks_of
from mmspeed.shapes import Strides

CHARS_A_TOKEN = 4.0  # for English text and tokenizers
_BYTES = {"bfloat16": 2, "float32": 4}
_KNOBS = {
    Reason.NO_CAPTION: "give each a caption: a .txt of the same stem, or the manifest's caption_column",
    Reason.TOO_LARGE: "raise data.max_file_mb or data.max_pixels to take them",
    Reason.TOO_SHORT: "add a bucket of fewer frames to data.buckets, or raise data.fps",
    Reason.TOO_SMALL: "add a smaller bucket to data.buckets, or set data.allow_upscale: true",
    Reason.NO_BUCKET: "add a bucket to data.buckets: frames: 1 for images, more for videos",
    Reason.REPEATED: "lower data.fps, or raise data.max_repeated",
    Reason.NOT_KEPT: "raise data.buckets[].keep, or add a bucket without it, for them to go to",
    Reason.BELOW_MINIMUM: "lower data.min to take them; the lines on scores say how many other thresholds keep",
    Reason.ABOVE_MAXIMUM: "raise data.max to take them; the lines on scores say how many other thresholds keep",
    Reason.NO_SCORE: "score them, or leave the column out of data.min and data.max",
    Reason.TIME_LIMIT: "raise preprocess.time_limit to take them",
}


@dataclass(frozen=True)
class BucketCost:
    """A bucket's samples and the cost of one of them. `flops` are of forward and backward."""

    bucket: Bucket
    train: int
    val: int
    clips: int
    tokens: int
    flops: float


@dataclass(frozen=True)
class Costs:
    """The estimate for a config's whole training. Bytes are those of a complete cache; `schedule` is None if it is unknown."""

    parameters: int
    buckets: tuple[BucketCost, ...]
    latent_bytes: float
    text_bytes: float
    schedule: ScheduleForecast | None
    attention: tuple[str, ...] = ()  # its sparse part, in words
    degrees: tuple[str, ...] = ()  # traffic of each degree of sequence parallelism, in words

    def seconds(self, peak_flops: float) -> tuple[float, ...]:
        """Training time at `UTILISATION` of the devices' peak, for each number of devices of the schedule; all wait for the busiest."""
        busiest = [] if self.schedule is None else self.schedule.flops_of_busiest
        return tuple(flops / (UTILISATION * peak_flops) for flops in busiest)


def estimate(
    config: Config,
    statistics: DataStatistics,
    captions: int,
    channels: int,
    strides: Strides,
    worlds: Sequence[int] | None = None,
) -> tuple[Costs | None, list[str]]:
    """The costs, or None if the buckets do not fit the model; and the problems, including those of the schedule alone.

    `captions` counts distinct ones, `worlds` are the numbers of devices of the schedule (None: the usual ones).
    """
    problems = []
    for bucket in config.buckets:
        try:
            strides.latent(bucket)
        except ValueError as error:
            problems.append(f"data.buckets: {bucket}: {error}")
    if problems:
        return None, problems
    width = text_width(config.text)
    opened = opened_of(config.model)
    model = outline(config.model, channels, width, opened)
    try:
        check_inputs(config.model, model, channels, width, opened)
    except UserError as error:
        return None, [str(error)]
    check_layout(model, config.parallel)
    for _, block in blocks_of(model):
        check_policies(block, config.memory.activation_policy)
    counts_of_one = counts_of(config.model, model, opened)
    costs_of_one = sample_costs(counts_of_one, strides, config.text.max_tokens)
    train, val, clips = statistics.samples("train"), statistics.samples("val"), statistics.clips()
    rows, latent_bytes = [], 0.0
    moments = 1 if config.vae.kind == "linear" else 2  # mean alone, or mean and log-variance
    for bucket in sorted({*config.buckets, *train, *val}):
        try:
            tokens = costs_of_one.tokens(bucket)
        except ValueError as error:
            return None, [f"data.buckets: {bucket}: {error}"]
        counts = train.get(bucket, 0), val.get(bucket, 0), clips.get(bucket, 0)
        rows.append(BucketCost(bucket, *counts, tokens, costs_of_one.flops(bucket)))
        values = channels * math.prod(strides.latent(bucket)) * moments
        latent_bytes += (
            counts[2] * (1 + len(config.data.sources[0].roles)) * values * _BYTES[config.preprocess.latent_dtype]
        )
    text = captions * _mean_tokens(statistics, config.text.max_tokens) * width * _BYTES[config.preprocess.text_dtype]
    schedule = None
    try:
        measured = Measured.load(config.run_dir / MEASURED_NAME) if config.batching.by == "time" else None
        schedule = forecast_schedule(config, statistics.samples_by_group("train"), costs_of_one, worlds, measured)
    except UserError as error:
        problems.append(f"the schedule is not known: {error}")
    parameters = sum(p.numel() for p in model.parameters())
    latents = {row.bucket: strides.latent(row.bucket) for row in rows if row.train}
    attention: list[str] = []
    degrees: list[str] = []
    if isinstance(counts_of_one.call, DescribesAttention):
        attention, _ = counts_of_one.call.sparse_notes(counts_of_one.config, latents, config)
        degrees = _degree_lines(config, counts_of_one, strides, rows, worlds)
    return Costs(parameters, tuple(rows), latent_bytes, text, schedule, tuple(attention), tuple(degrees)), problems


def _mean_tokens(statistics: DataStatistics, most: int) -> float:
    """The mean tokens of a caption, of at most `most`: as counted, else by its characters."""
    tokens, chars = statistics.histograms["caption_tokens"], statistics.histograms["caption_chars"]
    if not chars.count and not tokens.count:
        return 0.0
    return min(tokens.mean if tokens.count else chars.mean / CHARS_A_TOKEN + 2, float(most))  # 2: begin and end


def _degree_lines(
    config: Config, counts: FamilyCounts, strides: Strides, rows: Sequence[BucketCost], worlds: Sequence[int] | None
) -> list[str]:
    """Lines about the degrees' traffic for the longest video, on the devices of the config, `worlds` or this machine; none for one."""
    videos = [row for row in rows if row.train and not row.bucket.is_image]
    parallel = config.parallel
    shared = [world // parallel.together(split=False) for world in sorted(worlds or [accelerators(config.device.kind)])]
    devices = parallel.sequence if parallel.sequence > 1 else next((count for count in shared if count > 1), 1)
    if not videos or devices < 2:
        return []
    bucket = max(videos, key=lambda row: row.tokens).bucket
    assert isinstance(counts.call, DescribesAttention)
    work = counts.call.attention_workload(
        counts.config, strides.latent(bucket), config.text.max_tokens, _BYTES[config.device.dtype]
    )
    return degree_lines(work, parallel, devices, f"video {bucket}")


def peaks(config: Config) -> list[tuple[str, float]]:
    """(device, FLOP/s) of this config's device if it is present, then of the known data sheets, by speed."""
    dtype = parse_dtype(config.device.dtype)
    rows: list[tuple[str, float]] = []
    if config.device.peak_tflops is not None:
        rows.append(("device.peak_tflops", config.device.peak_tflops * 1e12))
    else:
        try:
            peak, origin = pick(config.device.kind).peak_flops(dtype)
            rows.append((f"this machine ({origin})", peak))
        except UserError:  # the device of the config is not in this machine
            pass
    sheets: dict[float, list[str]] = {}
    for label, (bf16, fp32) in PEAK_FLOPS.items():
        sheets.setdefault(bf16 if config.device.dtype == "bfloat16" else fp32, []).append(label)
    return rows + [(", ".join(labels), peak) for peak, labels in sorted(sheets.items(), reverse=True)]


def free_bytes(path: Path) -> int | None:
    """Free space of the disk that `path` is or will be on; None if it is unknown."""
    existing = next((p for p in (path, *path.absolute().parents) if p.exists()), None)
    try:
        return shutil.disk_usage(existing).free if existing is not None else None
    except OSError:
        return None


def folder_bytes(root: Path) -> int:
    """Bytes of the files below a folder; 0 if there is none."""
    total = 0
    for folder, _, files in os.walk(root):
        for name in files:
            try:
                total += os.lstat(os.path.join(folder, name)).st_size
            except OSError:  # a temporary file of an active writer
                continue
    return total


def hints(config: Config, statistics: DataStatistics, costs: Costs | None, truncated: int = 0) -> list[str]:
    """Suggested changes, each in a sentence with the setting. `truncated` captions were cut to the token limit."""
    suggestions = _bucket_hints(config, costs) if costs is not None else []
    sums = statistics.sums
    total, used_time, possible = (sums[f"milliseconds{part}"] for part in ("", "_taken", "_possible"))
    if total and 1 - used_time / total >= 0.1:
        line = f"{1 - used_time / total:.0%} of the video time is not used"
        gain = config.data.windows != "all" and possible > 1.05 * used_time
        suggestions.append(f"{line}; data.windows: all would use {possible / total:.0%}" if gain else line)
    if sums["pixels"] and sums["pixels_kept"] / sums["pixels"] < 0.8:
        lost = 1 - sums["pixels_kept"] / sums["pixels"]
        suggestions.append(
            f"cropping removes {lost:.0%} of the pixels; add buckets of the media's shapes, or raise data.crops"
        )
    for reason, knob in _KNOBS.items():
        if count := statistics.reasons[reason.value]:
            suggestions.append(f"{count} rejected as {reason}: {knob}")
    if sums["missing_captions"]:
        suggestions.append(f"{sums['missing_captions']} sources without a caption: data.missing_caption")
    if sums["captions_cut"]:
        suggestions.append(
            f"{sums['captions_cut']} captions are cut to {config.data.max_caption_chars} characters: data.max_caption_chars"
        )
    if truncated:
        suggestions.append(f"{truncated} captions are cut to {config.text.max_tokens} tokens: text.max_tokens")
    if sums["beyond_limit"]:
        suggestions.append(f"{sums['beyond_limit']} sources are left out by data.limit: {config.data.limit}")
    suggestions += [*objective_warnings(config), *size_warnings(config.model, config.buckets)]
    if statistics.samples("train") and not statistics.samples("val"):
        suggestions.append("nothing is held out for validation; set data.val_fraction, such as 0.02")
    return suggestions


def _bucket_hints(config: Config, costs: Costs) -> list[str]:
    empty_buckets = [
        f"bucket {row.bucket} gets no sample; leave it out of data.buckets"
        for row in costs.buckets
        if row.train == 0 and row.val == 0
    ]
    return empty_buckets if costs.schedule is None else empty_buckets + costs.schedule.hints()


def cost_lines(config: Config, costs: Costs, schedule: bool = False) -> list[str]:
    """The estimate in words, as `mmspeed check` prints it; with the tables of the schedule where they are asked for."""
    opened = opened_of(config.model)
    absent = "; no weights in its folder: training needs them" if opened is not None and opened.weightless else ""
    lines = [f"model: {words_of(config.model)}, {costs.parameters / 1e6:.1f} M parameters{absent}"]
    lines += costs.attention
    parallel = config.parallel
    if parallel.group > 1:
        lines.append(
            f"layout: {parallel.group} devices compute a video together ({parallel.group_in_words()}), "
            f"and {parallel.together(split=False)} an image"
        )
    lines += costs.degrees
    lines += [
        f"  bucket {row.bucket}: {row.tokens} tokens of the model, {format_figure(row.flops / 1e9)} GFLOP forward and backward for a sample"
        for row in costs.buckets
        if row.train or row.val
    ]
    lines.append(
        f"cache size: about {format_bytes(costs.latent_bytes)} of latents and {format_bytes(costs.text_bytes)} of captions"
    )
    return lines if costs.schedule is None else lines + costs.schedule.lines(tables=schedule)


def pixels(clips: Mapping[Bucket, int]) -> int:
    """Pixels of all frames of clips at their buckets' sizes, to which encoding time is proportional."""
    return sum(count * b.frames * b.height * b.width for b, count in clips.items())
