"""`mmspeed bench buckets CONFIG`: time and memory of a training step of each bucket, as a table, and in the run's folder."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from mmspeed import log
from mmspeed.config import load_config
from mmspeed.config.memory import parse_bytes
from mmspeed.config.training import BatchingConfig, TrainConfig
from mmspeed.data.sampling.batch_sizes import Measured, line_slope, make_batching
from mmspeed.errors import UserError
from mmspeed.pipelines.tuning.profile import BucketProfile, profile
from mmspeed.protocols import ShapeClass, shape_words


def profile_buckets(
    config_path: Path,
    overrides: Sequence[str] = (),
    output: Path | None = None,
    *,
    memory_limit: str | None = None,
    budget_seconds: float = 30.0,
    most: int | None = None,
    repeats: int = 5,
    minutes: float = 10.0,
) -> Measured:
    """Measure, write `buckets.json`, and print the tables (on the first process). Raises UserError as `profile`.

    Args:
        output: folder of the file, instead of the run's folder, where training looks for it.
        memory_limit: `70GB`, `64GiB`, a number of bytes, or a share such as `80%` or `0.8`.
        budget_seconds: a step that takes longer is the last of its bucket.
        most: the most samples of a step.
        repeats: timed steps of each batch; the median counts.
        minutes: the time after which no larger batch, and no further round of timed steps, is begun.
    """
    limit = parse_memory(memory_limit) if memory_limit is not None else None
    if budget_seconds <= 0 or minutes <= 0 or repeats < 1 or (most is not None and most < 1):
        raise UserError("--budget-seconds, --minutes, --repeats and --most must be positive")
    config = load_config(config_path, overrides)
    profiled = profile(
        config, output, memory=limit, seconds=budget_seconds, most=most, repeats=repeats, minutes=minutes
    )
    if log.rank() == 0:
        print("\n".join(lines(profiled)))
    return profiled.measured


def parse_memory(text: str) -> float:
    """A share (up to 1) or a number of bytes. Raises UserError for a text that is neither."""
    number, percent = text.strip().removesuffix("%"), text.strip().endswith("%")
    share: float | None
    try:
        share = float(number) / (100 if percent else 1)
    except ValueError:  # with a unit
        share = None
    if share is not None and 0 < share <= 1:
        return share
    if percent and share is not None:
        raise UserError(f"--memory-limit {text}: a share is more than 0% and at most 100%")
    try:
        limit = parse_bytes(text)
    except ValueError:
        limit = 0
    if not limit:
        raise UserError(f"--memory-limit {text}: use bytes, such as 70GB or 64GiB, or a share, such as 80%")
    return limit


def lines(profiled: BucketProfile) -> list[str]:
    """The lines to print."""
    measured, setting = profiled.measured, profiled.measured.setting
    fitting = [bucket for bucket in _buckets(profiled) if measured.most(bucket)]
    limit = log.format_bytes(measured.limit_bytes)
    processes = (
        "1 process"
        if profiled.world == 1
        else f"{profiled.world} processes (each line: one device, the slowest and fullest)"
    )
    result = [
        f"{setting['device.name']}, {setting['device.dtype']}, {setting['parallel.strategy']}, {processes}; limit {limit}, "
        f"of which weights, optimizer and average take {log.format_bytes(profiled.state_bytes)}",
        f"memory: {profiled.counted}; time: median of {profiled.rounds} steps of each batch",
        "",
        *_steps_table(profiled),
        "",
    ]
    for bucket in profiled.measured.too_large:
        if measured.most(bucket):
            result.append(f"{shape_words(bucket)}: memory ran out at a batch of {measured.too_large[bucket]}")
    for bucket in _buckets(profiled):
        if not measured.most(bucket):
            why = "by the memory of smaller buckets, it was not tried" if bucket in profiled.untried else "measured"
            result.append(
                f"{shape_words(bucket)}: not even one sample fits in {limit} ({why}); `batching.by: time` will refuse it"
            )
    if not fitting:
        return [*result, f"written: {profiled.path}"]
    budget = suggested_budget(measured, fitting)
    result += [*_batches_table(profiled, fitting), "", f"written: {profiled.path}; to train by it, set in the config:"]
    result.append(f"  batching: {{by: time, budget: {budget:g}}}   # seconds; without a budget, what memory allows")
    return result


def suggested_budget(measured: Measured, buckets: Sequence[ShapeClass]) -> float:
    """The greatest time in seconds that device batches of all buckets can fill, at least that of one sample of any bucket."""
    full = min(measured.cost(bucket).of(measured.most(bucket)) for bucket in buckets)
    one = max(measured.cost(bucket).of(1) for bucket in buckets)
    return _ceil(max(full, one))


def _ceil(value: float) -> float:
    """A value rounded up to three digits, so that the batch that it came from still fits."""
    step = 10.0 ** (math.floor(math.log10(value)) - 2)
    return float(f"{math.ceil(value / step) * step:.3g}")


def _buckets(profiled: BucketProfile) -> list[ShapeClass]:
    return sorted(profiled.shapes)


def _steps_table(profiled: BucketProfile) -> list[str]:
    rows = []
    for bucket in _buckets(profiled):
        tokens = profiled.costs.tokens(bucket)
        for row in (row for row in profiled.measured.rows if row.bucket == bucket):
            rate = row.batch / row.seconds
            rows.append(
                [
                    shape_words(bucket),
                    f"{tokens:,}",
                    str(row.batch),
                    f"{row.seconds:.4g}",
                    f"{rate:.4g}",
                    f"{rate * tokens:,.0f}",
                    log.format_bytes(row.peak_bytes)
                    + ("" if row.peak_bytes <= profiled.measured.limit_bytes else " !"),
                ]
            )
    return table(["bucket", "tokens", "batch", "s/step", "samples/s", "tokens/s", "peak memory"], rows)


def _batches_table(profiled: BucketProfile, buckets: Sequence[ShapeClass]) -> list[str]:
    """The fitted line of each bucket, and its batches by different rules."""
    measured, config = profiled.measured, profiled.config
    rule = config.batching if config.batching.by == "time" else BatchingConfig(by="time")
    train = config.train if config.batching.by == "time" else TrainConfig()
    even = BatchingConfig(by="time", budget=suggested_budget(measured, buckets))
    used = _sizes(profiled, rule, train, buckets)
    balanced = _sizes(profiled, even, TrainConfig(), buckets)
    # budgets of tokens and FLOPs are such that the costliest bucket has the batch of the balanced rule
    costliest = max(buckets, key=profiled.costs.tokens)
    reference = balanced[costliest]
    tokens = _sizes(
        profiled,
        BatchingConfig(by="tokens", budget=reference * profiled.costs.tokens(costliest)),
        TrainConfig(),
        buckets,
    )
    flops = _sizes(
        profiled,
        BatchingConfig(by="flops", budget=reference * profiled.costs.flops(costliest) / 1e12),
        TrainConfig(),
        buckets,
    )
    rows = []
    for bucket in buckets:
        cost, most = measured.cost(bucket), measured.most(bucket)
        rows.append(
            [
                shape_words(bucket),
                f"{cost.fixed:.4g} + n x {cost.each:.4g} s",
                f"{measured.misfit(bucket):.1%}",
                f"{most}{'+' if _more(measured, bucket) else ''}",
                str(used[bucket]),
                str(balanced[bucket]),
                *(f"{sizes[bucket]}{'' if sizes[bucket] <= most else ' !'}" for sizes in (tokens, flops)),
            ]
        )
    budget = "memory alone" if rule.budget is None else f"{rule.budget:g} s"
    head = ["bucket", "seconds of n samples", "off by", "most", budget, f"{even.budget:g} s", "by tokens", "by FLOPs"]
    notes = [
        "most: samples that fit; +: perhaps more, which was not measured. The columns after it are device batches: with",
        f"`by: time` and {budget}, with {even.budget:g} s, and, for the same batch of {shape_words(costliest)} ({reference}), by tokens",
        "and by modelled FLOPs; ! is over `most`.",
    ]
    return [*table(head, rows), *notes]


def _more(measured: Measured, bucket: ShapeClass) -> bool:
    """True where `most` is limited by the measured batches, and not by memory."""
    rows = sorted((row for row in measured.rows if row.bucket == bucket), key=lambda row: row.batch)
    if bucket in measured.too_large or rows[-1].peak_bytes > measured.limit_bytes:
        return False
    return line_slope(rows) is None or measured.most(bucket) == 2 * rows[-1].batch - 1


def _sizes(
    profiled: BucketProfile, rule: BatchingConfig, train: TrainConfig, buckets: Sequence[ShapeClass]
) -> Mapping[ShapeClass, int]:
    return make_batching(rule, train, buckets, profiled.costs, profiled.world, measured=profiled.measured).sizes


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table, the first column aligned to the left and the others to the right."""
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]

    def line(row: Sequence[str]) -> str:
        first, *others = (
            cell.rjust(width) if n else cell.ljust(width)
            for n, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        return "  ".join([first, *others]).rstrip()

    return [line(head), "  ".join("-" * width for width in widths), *map(line, rows)]
