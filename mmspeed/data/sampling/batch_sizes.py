"""Batch sizes: the samples of each bucket that a device computes at a time, from a budget and the cost of a sample."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mmspeed.config.inputs import DataConfig
from mmspeed.config.parallel import ParallelConfig
from mmspeed.config.training import BatchingConfig, StageConfig, TrainConfig
from mmspeed.data.cache.files import write_whole
from mmspeed.errors import UserError
from mmspeed.protocols import CountsFlops, OrderedSample, ShapeClass
from mmspeed.shapes import Bucket, Strides, as_bucket

from .assignment import Cost
from .order import Batching, TrainingStage
from .sampler import S

FORMAT = 1
COUNTED_TEXT_TOKENS = 64  # caption tokens that a sample's FLOPs are counted with
SAME_SLOPE = 1.05  # a slope larger by at most this counts as the same line
MEASURED_NAME = "buckets.json"  # in the folder of a run


@dataclass(frozen=True)
class Measurement:
    """One training step of one device: `batch` samples of a bucket, seconds (median), and the peak of memory in bytes."""

    bucket: ShapeClass
    batch: int
    seconds: float
    peak_bytes: int


def line_slope(rows: Sequence[Measurement]) -> float | None:
    """Bytes per additional sample, by the two largest of `rows` (smaller batches first); None if they do not determine it.

    The peak is the largest of several moments, of which one (the update's temporary tensors) does not grow with the batch and may hide
    those that do. So the slope is trusted only if the previous pair of rows has the same one.
    """
    if len(rows) < 3:
        return None
    first, second = (
        (more.peak_bytes - less.peak_bytes) / (more.batch - less.batch)
        for less, more in ((rows[-3], rows[-2]), (rows[-2], rows[-1]))
    )
    return second if 0 < second <= SAME_SLOPE * first else None


@dataclass(frozen=True)
class Measured:
    """Measurements of `mmspeed bench buckets` on a device. `setting` is everything that the figures depend on beside the bucket."""

    rows: tuple[Measurement, ...]
    limit_bytes: int  # of device memory, that no batch may exceed
    setting: Mapping[str, Any] = field(default_factory=dict)
    too_large: Mapping[ShapeClass, int] = field(default_factory=dict)  # the smallest batch that ran out of memory

    def cost(self, bucket: ShapeClass) -> Cost:
        """Seconds of n samples: a line through the measured points (least relative errors); through zero if there is only one.

        Also through zero if the best line would have a negative fixed cost, which is impossible; by the largest batch alone if
        the points do not rise, which happens with small batches on a noisy machine.
        """
        rows = self._of(bucket)
        batches, seconds = np.array([row.batch for row in rows], float), np.array([row.seconds for row in rows])
        largest = int(batches.argmax())
        # errors are relative: small batches would count for little otherwise
        through_zero = Cost(0.0, float(len(batches) / (batches / seconds).sum()))
        if len(set(batches)) == 1:
            return through_zero
        each, fixed = np.polyfit(batches, seconds, 1, w=1 / seconds).tolist()
        if each * batches[largest] <= 1e-6 * seconds[largest]:  # flat up to rounding
            return Cost(0.0, float(seconds[largest] / batches[largest]))
        return through_zero if fixed < 0 else Cost(fixed, each)

    def misfit(self, bucket: ShapeClass) -> float:
        """The largest deviation of a measured time from `cost`, as a share of the measured one."""
        cost = self.cost(bucket)
        return max(abs(cost.of(row.batch) / row.seconds - 1) for row in self._of(bucket))

    def most(self, bucket: ShapeClass) -> int:
        """The most samples whose peak of memory stays within the limit; 0 if even one does not.

        Between two measured batches of which the larger exceeds the limit, by the line through them. Beyond the largest, by
        `line_slope` and less than twice the largest; no more than was measured if there is no slope, or if a larger
        batch ran out of memory.
        """
        if self.too_large.get(bucket) == 1:
            return 0
        rows = sorted({row.batch: row for row in self._of(bucket)}.values(), key=lambda row: row.batch)
        fitting = [row for row in rows if row.peak_bytes <= self.limit_bytes]
        if not fitting:
            return 0
        last = fitting[-1]
        over = next((row for row in rows if row.batch > last.batch), None)
        each: float | None
        if over is not None:
            top, each = over.batch - 1, (over.peak_bytes - last.peak_bytes) / (over.batch - last.batch)
        elif bucket in self.too_large:
            return last.batch  # memory ran out below the line's limit, so the line does not hold
        else:
            top, each = 2 * last.batch - 1, line_slope(fitting)
        return last.batch if each is None else min(top, last.batch + int((self.limit_bytes - last.peak_bytes) / each))

    def save(self, path: Path) -> None:
        """Write the measurements as JSON, atomically."""
        rows = [asdict(row) | {"bucket": row.bucket.name} for row in self.rows]
        content = {
            "format": FORMAT,
            "limit_bytes": self.limit_bytes,
            "setting": dict(self.setting),
            "too_large": {bucket.name: batch for bucket, batch in self.too_large.items()},
            "rows": rows,
        }
        write_whole(path, (json.dumps(content, indent=2) + "\n").encode())

    @classmethod
    def load(cls, path: Path) -> Measured:
        """Read measurements from a file. Raises UserError if it does not exist, or cannot be read."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["format"] != FORMAT:
                raise ValueError(f"format {content['format']}")
            rows = tuple(
                Measurement(
                    Bucket.parse(row["bucket"]), int(row["batch"]), float(row["seconds"]), int(row["peak_bytes"])
                )
                for row in content["rows"]
            )
            if not rows or any(row.batch < 1 or not row.seconds > 0 for row in rows):
                raise ValueError("no measurements, or impossible ones")
            too_large: dict[ShapeClass, int] = {
                Bucket.parse(name): int(batch) for name, batch in content["too_large"].items()
            }
            return cls(rows, int(content["limit_bytes"]), dict(content["setting"]), too_large)
        except FileNotFoundError:
            raise UserError(
                f"batching.by: time needs {path}, which does not exist: run `mmspeed bench buckets CONFIG` on the device first"
            ) from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path} is not as `mmspeed bench buckets` writes it ({error}): run it again") from None

    def _of(self, bucket: ShapeClass) -> list[Measurement]:
        rows = [row for row in self.rows if row.bucket == bucket]
        if not rows:
            raise UserError(f"bucket {bucket} was not measured: run `mmspeed bench buckets CONFIG` again")
        return rows


def make_batching(
    batching: BatchingConfig,
    train: TrainConfig,
    buckets: Iterable[ShapeClass],
    costs: SampleCosts,
    world: int,
    parallel: ParallelConfig | None = None,
    measured: Measured | None = None,
) -> Batching:
    """The batching of a config.

    Args:
        buckets: all buckets that have samples.
        costs: the costs of one sample of a bucket.
        world: number of devices; it matters only if neither `train.batch_size` nor `batching.slots` fixes the size of a step.
        parallel: determines the number of devices that compute one video together; None: one.
            Steps of `by: samples`, and with `batching.slots`, do not depend on it.
        measured: measurements, for `by: time`.
    """
    sorted_buckets = sorted(set(buckets))
    group, tensor = (parallel.together(True), parallel.together(False)) if parallel is not None else (1, 1)

    def counted(bucket: ShapeClass, ranks: int = 1) -> Cost:
        one = costs.tokens(bucket) if batching.by == "tokens" else costs.flops(bucket) / 1e12
        return Cost(0.0, one / ranks)

    each = {bucket: counted(bucket, group if bucket.splits else tensor) for bucket in sorted_buckets}
    # if the size of a step is given, its samples do not depend on the number of devices that compute a video together
    alone = {bucket: counted(bucket) for bucket in sorted_buckets}
    if batching.by == "samples":
        slots, at_once = train.samples_per_step, train.micro_batch_size
        return Batching(slots, {}, each, batching.mix, batching.tolerance, group, at_once, tensor, alone, costs.share)
    most: dict[ShapeClass, int] = {}
    if batching.by == "time":
        if measured is None:
            raise ValueError("batching by time needs measurements")
        most = {bucket: measured.most(bucket) for bucket in sorted_buckets}
        for bucket in (bucket for bucket in sorted_buckets if not most[bucket]):
            raise UserError(
                f"bucket {bucket} does not fit the device's memory even with one sample, as `mmspeed bench buckets` measured: set "
                "memory.activation_policy: {block: recompute}, shard the model, or take it out of data.buckets"
            )
        each = alone = {bucket: measured.cost(bucket) for bucket in sorted_buckets}
    fixed = batching.slots is not None
    budget = batching.budget
    if budget is None and batching.by != "time":
        budget = max(cost.of(1) for cost in (alone if fixed else each).values())
    sizes = {}
    for bucket in sorted_buckets:
        size = most[bucket] if budget is None else max(1, (alone if fixed else each)[bucket].fitting(budget))
        limits = [most.get(bucket), batching.max_batch, train.micro_batch_size]
        sizes[bucket] = min([size, *(limit for limit in limits if limit is not None)])
    slots = batching.slots or world * batching.accumulate
    return Batching(
        slots,
        sizes,
        each,
        batching.mix,
        batching.tolerance,
        group,
        tensor=tensor,
        alone=alone if fixed else None,
        share=costs.share,
    )


@dataclass(frozen=True)
class SampleCosts:
    """Costs of one sample of a bucket, by the model's own count.

    `share` is for samples of a bucket that differ in cost: it gives a sample's cost over its bucket's.
    """

    tokens: Callable[[ShapeClass], int]
    flops: Callable[[ShapeClass], float]  # of forward and backward
    share: Callable[[OrderedSample], float] | None = None


def costs_of_samples(costs: SampleCosts, samples: Iterable[S], flops: Callable[[S], float]) -> SampleCosts:
    """The costs of samples that have individual FLOPs; a bucket takes their mean.

    Returns `costs` unchanged if every sample has its bucket's FLOPs. Raises UserError unless FLOPs are a finite number above zero.
    """
    sample_flops: dict[ShapeClass, dict[str, float]] = {}
    sources: dict[str, str] = {}
    for sample in samples:
        sample_flops.setdefault(sample.bucket, {})[sample.key] = flops(sample)
        sources[sample.key] = sample.source
    every = [(bucket, key, one) for bucket, of in sample_flops.items() for key, one in of.items()]
    if all(one == costs.flops(bucket) for bucket, _, one in every):
        return costs
    for _, key, one in every:
        if not (math.isfinite(one) and one > 0):
            raise UserError(f"{sources[key]}: a sample's cost is a number of FLOPs above zero, not {one}")
    means = {bucket: math.fsum(of.values()) / len(of) for bucket, of in sample_flops.items()}
    shares = {key: one / means[bucket] for bucket, key, one in every}
    return SampleCosts(costs.tokens, means.__getitem__, lambda sample: shares[sample.key])


def sample_costs(model: CountsFlops, strides: Strides, max_text_tokens: int) -> SampleCosts:
    """The costs of a model, which may be on the meta device."""
    text = min(COUNTED_TEXT_TOKENS, max_text_tokens)
    return SampleCosts(
        tokens=lambda bucket: strides.tokens(as_bucket(bucket), model.tokens),
        flops=lambda bucket: 3.0 * model.flops(strides.latent(as_bucket(bucket)), text),
    )


def make_stages(data: DataConfig, curriculum: Sequence[StageConfig]) -> list[TrainingStage]:
    """The stages of a config; a single one of all buckets if it has no curriculum."""
    repeats = {
        name: data.repeats * source.repeats for name, source in zip(data.dataset_names, data.sources, strict=True)
    }
    weights = {
        name: source.weight
        for name, source in zip(data.dataset_names, data.sources, strict=True)
        if source.weight is not None
    }
    stages = []
    for stage in curriculum or [StageConfig()]:
        stage_weights = stage.weights if stage.weights is not None else weights or None
        stages.append(
            TrainingStage(
                stage.steps, _taker(stage), repeats, stage_weights, data.temperature if stage_weights is None else None
            )
        )
    return stages


def _taker(stage: StageConfig) -> Callable[[ShapeClass], bool]:
    """A predicate that is true for the buckets of a stage."""
    return lambda shape: stage.takes(as_bucket(shape))
