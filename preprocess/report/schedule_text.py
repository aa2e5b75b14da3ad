"""Describe the schedule in words: tables for the lines of `mmspeed check` and its page, and suggested changes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from mmspeed.config import Config
from mmspeed.log import format_figure
from mmspeed.preprocess.report.schedule_preview import BucketPreview, EpochPreview, SchedulePreview, StagePreview

UNEVEN = 1.05  # imbalance above which a hint is given
UNEVEN_GRADIENT = 0.05  # share of the gradient beyond that of the samples above which a hint is given


@dataclass(frozen=True)
class TextTable:
    """A table of formatted cells. The first cell of a row is its name; `key` identifies its numbers for programs."""

    key: str
    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""

    def lines(self) -> list[str]:
        """The table as aligned lines: the first column to the left, the others to the right."""
        every = [self.head, *self.rows]
        widths = [max(len(row[place]) for row in every) for place in range(len(self.head))]
        return [
            "    "
            + "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
            for row in every
        ] + ([f"    ({self.note})"] if self.note else [])


def preview_lines(outlook: SchedulePreview) -> list[str]:
    """The lines of the schedule, as `mmspeed check` prints them."""
    lines = []
    for stage in outlook.stages:
        lines.append(f"{', '.join(filter(None, ('schedule', stage_title(outlook, stage))))}: {stage_sentence(stage)}")
        for table in stage_tables(outlook, stage):
            lines += [f"  {table.title}", *table.lines()]
    training = training_table(outlook)
    return [*lines, training.title, *training.lines()]


def stage_title(outlook: SchedulePreview, stage: StagePreview) -> str:
    """The title of a stage; empty if it is the only one."""
    if len(outlook.stages) == 1:
        return ""
    if stage.begin == stage.end:
        return f"stage {stage.number + 1} (not reached by train.steps)"
    return f"stage {stage.number + 1} (steps {stage.begin + 1:,} to {stage.end:,})"


def stage_sentence(stage: StagePreview) -> str:
    """A sentence about the samples that an epoch uses, and those in no step."""
    samples = sum(bucket.samples for bucket in stage.buckets)
    uses = sum(bucket.uses for bucket in stage.buckets)
    left_out = max(epoch.left_out for epoch in stage.epochs)
    outcome = f"{left_out:,} are in NO step" if left_out else "each is in exactly one step; 0 dropped, 0 held over"
    return f"an epoch has {_count(uses, 'use')} of {_count(samples, 'sample')}; {outcome}"


def stage_tables(outlook: SchedulePreview, stage: StagePreview) -> list[TextTable]:
    """Tables of an epoch on each number of devices, its buckets, and its data sets if there are several."""
    key, worlds = f"stage{stage.number}", _together(map(str, outlook.worlds))
    tables = [
        TextTable(
            f"{key}-epoch",
            "an epoch, by devices",
            (*_EPOCH_HEAD, *(("padding",) if _padding_known(stage) else ())),
            tuple(_merged((str(e.world), *_epoch_cells(e, _padding_known(stage))) for e in stage.epochs)),
            _legend(outlook) if stage.number == 0 else "",
        ),
        TextTable(
            f"{key}-buckets",
            f"its buckets (cost in {outlook.unit}; gradient: of an epoch, by {outlook.weighting}; where numbers of devices differ:"
            f" on {worlds})",
            (
                *("bucket", "samples", "uses", "tokens", "cost", "share of cost", "share of gradient"),
                *("full step", "a device at a time"),
            ),
            tuple(_bucket_cells(bucket) for bucket in stage.buckets),
        ),
    ]
    if len(stage.datasets) > 1:
        tables.append(
            TextTable(
                f"{key}-datasets",
                "its data sets",
                ("data set", "samples", "uses", "share asked", "share", "share of gradient", "all used within"),
                tuple(
                    (
                        *(one.name, f"{one.samples:,}", f"{one.uses:,}", f"{one.asked:.2%}", f"{one.share:.2%}"),
                        _each_share(one.gradient),
                        _count(one.epochs, "epoch") if one.epochs else "never",
                    )
                    for one in stage.datasets
                ),
            )
        )
    return tables


def _legend(outlook: SchedulePreview) -> str:
    meet = "in every micro-batch" if outlook.lockstep else "once a step"
    return (
        f"imbalance: greatest / mean cost across ranks, which synchronise {meet}: mean over steps, worst step, the epoch's;"
        " idle: micro-batches without a sample; mixed: steps of several buckets; short: of less than 0.9 of the median's cost;"
        " padding: of captions, about; tokens: of the model"
    )


def training_table(outlook: SchedulePreview) -> TextTable:
    """Table of the whole training: each stage, and their sum, on each number of devices."""
    rows: list[tuple[str, ...]] = []
    several = len(outlook.stages) > 1
    for stage in outlook.stages:
        stage_cell = (f"stage {stage.number + 1}",) if several else ()
        for devices, *cells in _merged((str(epoch.world), *_training_cells(epoch)) for epoch in stage.epochs):
            rows.append((devices, *stage_cell, *cells))
    if several:
        sums = zip(
            *(outlook.total(lambda e: e.trained), outlook.total(lambda e: e.epochs)),
            *(outlook.total(lambda e: e.total_samples), outlook.total(lambda e: e.total_tokens)),
            *(outlook.flops, outlook.total(_unmet)),
            strict=True,
        )
        sum_rows = ((str(world), *_totals(*numbers)) for world, numbers in zip(outlook.worlds, sums, strict=True))
        rows += [(devices, "all", *cells) for devices, *cells in _merged(sum_rows)]
    head = ("devices", *(("stage",) if several else ()), *_TRAINING_HEAD)
    note = "not reached: uses of a stage's last epoch, which ends before them" if any(outlook.total(_unmet)) else ""
    return TextTable("training", "training", head, tuple(rows), note)


def preview_hints(config: Config, outlook: SchedulePreview) -> list[str]:
    """Sentences about waiting and idle devices, each with the setting to change."""
    sentences = []
    batching = config.batching
    slots = config.train.samples_per_step if batching.by == "samples" else batching.slots
    name = "train.batch_size" if batching.by == "samples" else "batching.slots"
    group = config.parallel.group
    reported: set[int] = set()
    if slots is not None and (uneven := [world for world in outlook.worlds if slots % (world // group)]):
        reported.update(uneven)
        few = " (some compute nothing at all)" if any(world // group > slots for world in uneven) else ""
        sentences.append(
            f"{name} {slots} cannot be divided evenly by {_together(map(str, uneven))} devices{few}; make it a multiple of the devices"
            + (f", or of their groups of {group}" if group > 1 else "")
        )
    for stage in outlook.stages:
        where = f"stage {stage.number + 1}: " if len(outlook.stages) > 1 else ""
        uses = sum(bucket.uses for bucket in stage.buckets)
        if few_for := [world for world in outlook.worlds if uses < world and world not in reported]:
            sentences.append(
                f"{where}an epoch has {_count(uses, 'use')} of samples, fewer than {_together(map(str, few_for))} devices: some"
                " compute nothing; use fewer, or raise data.repeats"
            )
        wait = [
            epoch for epoch in stage.epochs if epoch.world not in {*reported, *few_for} and _imbalance(epoch) > UNEVEN
        ]
        if wait:
            worst = max(wait, key=_imbalance)
            devices = _together(str(epoch.world) for epoch in wait)
            sentences.append(
                f"{where}on {devices} devices the busiest computes up to {_imbalance(worst):.2f} of the mean, and the others wait;"
                f" {_knob(config)}"
            )
        sentences += _budget_hints(config, outlook, stage, where)
        sentences += _share_hints(stage, where)
        sentences += _gradient_hints(outlook, stage, where)
    return sentences


def _share_hints(stage: StagePreview, where: str) -> list[str]:
    """Sentences about data sets whose share differs from the requested one: each bucket of a data set is used in every epoch."""
    total_share = sum(one.asked for one in stage.datasets if one.samples)  # these get the others' shares
    sentences = []
    for one in stage.datasets:
        expected = one.asked / total_share if total_share and one.samples else 0.0
        if expected and abs(one.share - expected) > max(0.005, 0.2 * expected):
            sentences.append(
                f"{where}data set {one.name} makes {one.share:.2%} of an epoch, not {expected:.2%}: it is used at least once for each of"
                " its buckets; raise data.repeats, or give it fewer buckets"
            )
    return sentences


def _gradient_hints(outlook: SchedulePreview, stage: StagePreview, where: str) -> list[str]:
    """A sentence about the bucket whose samples count most beyond their number, where steps count alike."""
    uses = sum(bucket.uses for bucket in stage.buckets)
    over = {bucket: max(bucket.gradient) - bucket.uses / uses for bucket in stage.buckets}
    most = max(over, key=over.__getitem__)
    if outlook.weighting != "step" or over[most] <= UNEVEN_GRADIENT:
        return []
    return [
        f"{where}bucket {most.bucket} is {most.uses / uses:.1%} of the samples and {_each_share(most.gradient)} of the gradient, since each"
        " step counts alike; with objective.weighting: sample (in a new run) it does not depend on batching"
    ]


def _budget_hints(config: Config, outlook: SchedulePreview, stage: StagePreview, where: str) -> list[str]:
    budget = config.batching.budget
    over = [bucket for bucket in stage.buckets if budget is not None and bucket.cost > budget * (1 + 1e-9)]
    return [
        f"{where}one sample of bucket {bucket.bucket} costs {_cost(bucket.cost)} {outlook.unit}, more than batching.budget"
        f" ({budget:g}): its batches are larger than the budget; raise it, or leave the bucket out"
        for bucket in over
    ]


def _imbalance(epoch: EpochPreview) -> float:
    return max(epoch.mean_imbalance, epoch.epoch_imbalance)


def _knob(config: Config) -> str:
    if config.batching.by == "samples":
        return "use batching.by: flops, whose steps have equal cost"
    more = "a larger batching.accumulate, more data.repeats, or fewer devices reduce it"
    if config.batching.mix == "same":
        return f"batching.mix: matched, {more}"
    return f"batching.mix: same, {more}" if config.batching.mix == "window" else more


_EPOCH_HEAD = (
    *("devices", "steps", "samples/step", "tokens/step", "micro-batches"),
    *("imbalance", "worst", "epoch's", "idle", "mixed", "short"),
)


def _epoch_cells(epoch: EpochPreview, padding: bool) -> tuple[str, ...]:
    cells = (
        f"{epoch.steps:,}",
        f"{epoch.samples / epoch.steps:,.1f}",
        f"{epoch.tokens / epoch.steps:,.0f}",
        f"{epoch.micro_batches:,.2f}",
        f"{epoch.mean_imbalance:.4f}",
        f"{epoch.worst_imbalance:.4f}",
        f"{epoch.epoch_imbalance:.4f}",
        f"{epoch.idle:,}",
        f"{epoch.mixed:,}",
        f"{epoch.short:,}",
    )
    return (*cells, f"{epoch.padding or 0.0:.0%}") if padding else cells


def _unmet(epoch: EpochPreview) -> int:
    return epoch.unmet


def _padding_known(stage: StagePreview) -> bool:
    return all(epoch.padding is not None for epoch in stage.epochs)


def _bucket_cells(bucket: BucketPreview) -> tuple[str, ...]:
    return (
        str(bucket.bucket),
        f"{bucket.samples:,}",
        f"{bucket.uses:,}",
        f"{bucket.tokens:,}",
        _cost(bucket.cost),
        f"{bucket.share:.1%}",
        _each_share(bucket.gradient),
        _each(bucket.step),
        _each(bucket.at_a_time),
    )


_TRAINING_HEAD = ("steps", "epochs", "samples", "tokens", "TFLOP", "not reached")


def _training_cells(epoch: EpochPreview) -> tuple[str, ...]:
    return _totals(epoch.trained, epoch.epochs, epoch.total_samples, epoch.total_tokens, epoch.total_flops, epoch.unmet)


def _totals(steps: float, epochs: float, samples: float, tokens: float, flops: float, unmet: float) -> tuple[str, ...]:
    return f"{steps:,}", f"{epochs:,.2f}", f"{samples:,}", f"{tokens:,}", format_figure(flops / 1e12), f"{unmet:,}"


def _merged(rows: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Rows, with neighbours that differ only in their first cell merged into one."""
    merged = []
    for rest, same in groupby(rows, key=lambda row: row[1:]):
        merged.append((", ".join(row[0] for row in same), *rest))
    return merged


def _each(numbers: Sequence[int]) -> str:
    """The common number, or those of each number of devices."""
    return f"{numbers[0]:,}" if len(set(numbers)) == 1 else " / ".join(f"{number:,}" for number in numbers)


def _each_share(shares: Sequence[float]) -> str:
    """The common share in percent, or those of each number of devices."""
    cells = [f"{share:.1%}" for share in shares]
    return cells[0] if len(set(cells)) == 1 else " / ".join(cells)


def _together(words: Iterable[str]) -> str:
    *before, last = words
    return f"{', '.join(before)} and {last}" if before else last


def _cost(cost: float) -> str:
    return f"{cost:,.0f}" if cost >= 1000 or cost == int(cost) else f"{cost:.3g}"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
