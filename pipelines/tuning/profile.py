"""Time and memory of a training step of each bucket, measured on the device, for `batching.by: time`.

The steps are those of `mmspeed.pipelines.tuning.synthetic_step`.
A batch that may run out of memory is never tried where that would harm other processes: see `next_batch`.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch.distributed as dist

from mmspeed import comm, rng
from mmspeed.config import RunConfig
from mmspeed.data.sampling.batch_sizes import MEASURED_NAME, Measured, Measurement, SampleCosts, line_slope
from mmspeed.device import Device, pick
from mmspeed.errors import UserError
from mmspeed.log import ProgressLine
from mmspeed.mesh import process_group
from mmspeed.pipelines.run.measured import setting_of
from mmspeed.pipelines.tasks import Task, make_task
from mmspeed.pipelines.tuning.synthetic_step import SyntheticStep, does_not_fit
from mmspeed.protocols import ShapeClass, shape_words

ACCELERATOR_SHARE, HOST_SHARE = (
    0.9,
    0.6,
)  # of a device's whole memory; of the free memory of a host, which others use too

# -- limits -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ProfileLimits:
    """The limits of a measurement."""

    memory_bytes: int
    seconds: float = 30.0  # a step that takes longer is its bucket's last
    most: int | None = None  # samples of a step
    repeats: int = 5  # timed steps of each batch
    minutes: float = 10.0  # of the whole measurement: about half to find batches, the rest for rounds of timed steps


@dataclass(frozen=True)
class BucketMeasurements:
    """The results of a bucket so far: steps that ran, smaller ones first, and the smallest batch that ran out of memory."""

    rows: tuple[Measurement, ...] = ()
    too_large: int | None = None


def next_batch(tried: BucketMeasurements, limits: ProfileLimits, state_bytes: int, careful: bool) -> int | None:
    """The batch to try next, larger than all that ran; None when another one is of no use.

    Batches double while the line through the last two predicts memory within the limit, else the largest batch within it is tried; after
    one that ran out of memory, the middle. `careful` never exceeds the limit: it extrapolates by `line_slope`, and without a slope it
    assumes that a step's memory beyond `state_bytes` (weights, optimizer) is at most proportional to its batch.
    """
    if not tried.rows:
        return 1 if tried.too_large is None else None
    last = tried.rows[-1]
    if last.peak_bytes > limits.memory_bytes or last.seconds > limits.seconds:
        return None
    wanted = [2 * last.batch]
    if limits.most is not None:
        wanted.append(limits.most)
    if tried.too_large is not None:
        wanted.append((last.batch + tried.too_large) // 2)
    each = line_slope(tried.rows)
    if careful and each is None:
        room, used = limits.memory_bytes - state_bytes, max(1, last.peak_bytes - state_bytes)
        wanted.append(last.batch * room // used)
    elif each is None and len(tried.rows) > 1:
        before = tried.rows[-2]
        each = (last.peak_bytes - before.peak_bytes) / (last.batch - before.batch)
    if each is not None and each > 0:
        wanted.append(last.batch + int((limits.memory_bytes - last.peak_bytes) / each))
    # near the end, a batch of an eighth more adds little to the line
    smallest = last.batch + max(1, last.batch // 8)
    return min(wanted) if min(wanted) >= smallest else None


def memory_limit(device: Device, wanted: float | None) -> int:
    """Bytes for this process, from a share (up to 1) or a number of bytes; by default with room for uncounted memory.

    Processes of one host share its memory, so each gets its part of a share.
    """
    together = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if device.kind == "cpu" else 1
    if wanted is not None and wanted > 1:
        return int(wanted)
    if wanted is not None:
        return int(wanted * device.total_memory_bytes() / together)
    if device.kind == "cpu":
        return int(HOST_SHARE * device.free_memory_bytes() / together)
    return int(ACCELERATOR_SHARE * device.total_memory_bytes())


# -- the measurement --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BucketProfile:
    """The measurements, and the costs to compare them with."""

    path: Path  # of buckets.json
    measured: Measured
    config: RunConfig
    shapes: Sequence[ShapeClass]
    costs: SampleCosts
    state_bytes: int
    counted: str  # the kind of memory that is counted
    world: int
    untried: tuple[ShapeClass, ...] = ()  # judged by smaller buckets, since trying them might have harmed others
    rounds: int = 0  # timed steps of each batch


def profile(
    config: RunConfig,
    folder: Path | None = None,
    *,
    task: Task | None = None,
    memory: float | None = None,
    seconds: float = 30.0,
    most: int | None = None,
    repeats: int = 5,
    minutes: float = 10.0,
) -> BucketProfile:
    """Measure every shape class of a task, and write `buckets.json` into its run's folder, or into `folder`.

    `memory` is a share of the device's memory or a number of bytes; after `minutes` no larger batch and no further round is
    begun. A collective call where a launcher started several processes. Raises UserError for a bucket that fits neither codec
    nor model, a folder that cannot be written to, or when no bucket fits.
    """
    if config.memory.chooses:
        raise UserError(
            "memory's budget chooses policies for given batches, and this measures batches under given policies: "
            "set memory.activation_policy instead of a budget"
        )
    device = pick(config.device.kind)
    device.activate()
    with process_group(device):
        rank = dist.get_rank()
        path = (folder or config.run_dir) / MEASURED_NAME
        comm.first_does(lambda: _check_folder(path.parent), rank)
        limits = ProfileLimits(memory_limit(device, memory), seconds, most, repeats, minutes)
        limits = replace(limits, memory_bytes=-int(comm.all_reduce_max([-float(limits.memory_bytes)])[0]))
        task = task or make_task(config)
        task.domain.open_without_data()
        steps = SyntheticStep(config, task, device, limits.memory_bytes)
        began = time.monotonic()
        explored, untried = explore(steps, limits, began)
        rows, explored, rounds = timed(steps, explored, limits, began)
        too_large = {bucket: tried.too_large for bucket, tried in explored.items() if tried.too_large is not None}
        setting = setting_of(config, task.domain.setting(), steps.place)
        measured = Measured(tuple(rows), limits.memory_bytes, setting, too_large)
        if all(row.peak_bytes > limits.memory_bytes for row in rows):
            raise does_not_fit(steps.state_bytes, limits.memory_bytes)
        comm.first_does(lambda: measured.save(path), rank)
        counted = "allocator's count on CPU" if device.kind == "cpu" else "allocator's peak on the device"
        return BucketProfile(
            path,
            measured,
            config,
            task.domain.shapes(),
            SampleCosts(task.domain.tokens, task.domain.cost),
            steps.state_bytes,
            counted,
            steps.world,
            untried,
            rounds,
        )


def out_of_time(began: float, minutes: float) -> bool:
    """True where `minutes` minutes have passed on any process. A collective call."""
    return comm.all_reduce_max([time.monotonic() - began])[0] > 60 * minutes


def explore(
    steps: SyntheticStep, limits: ProfileLimits, began: float
) -> tuple[dict[ShapeClass, BucketMeasurements], tuple[ShapeClass, ...]]:
    """Measure batches of each bucket once, one more of every bucket in turn. Returns them and the buckets that were not tried.

    Every bucket has its batch of 1; after half of the time no larger batch is tried.
    """
    results = {
        bucket: BucketMeasurements() for bucket in sorted(steps.task.domain.shapes(), key=steps.task.domain.tokens)
    }
    untried, going = [], list(results)
    with ProgressLine("find batches", None, "step") as line:
        while going:
            for bucket in list(going):
                batch = next_batch(results[bucket], limits, steps.state_bytes, steps.careful)
                if batch is None or (batch > 1 and out_of_time(began, limits.minutes / 2)):
                    going.remove(bucket)
                    continue
                if batch == 1 and steps.careful and _too_large_alone(bucket, steps, results, limits):
                    untried.append(bucket)
                    row = None
                else:
                    row = steps.probe(bucket, batch)
                    if (
                        row is not None and row.seconds > limits.seconds
                    ):  # once more, in case something else disturbed it
                        row = replace(row, seconds=min(row.seconds, steps.seconds(bucket, batch)))
                tried = results[bucket]
                results[bucket] = (
                    replace(tried, too_large=batch) if row is None else replace(tried, rows=(*tried.rows, row))
                )
                line.advance(note=f"{shape_words(bucket)} x {batch}" + ("" if row else ": no room"))
    return results, tuple(untried)


def _too_large_alone(
    bucket: ShapeClass, steps: SyntheticStep, results: Mapping[ShapeClass, BucketMeasurements], limits: ProfileLimits
) -> bool:
    """True where one sample would exceed the limit, by the tokens of smaller buckets' samples."""
    ones = [tried.rows[0] for tried in results.values() if tried.rows]
    if not ones:
        return False
    state, tokens = steps.state_bytes, steps.task.domain.tokens
    each = min((row.peak_bytes - state) / tokens(row.bucket) for row in ones)
    return state + each * tokens(bucket) > limits.memory_bytes


def timed(
    steps: SyntheticStep, results: Mapping[ShapeClass, BucketMeasurements], limits: ProfileLimits, began: float
) -> tuple[list[Measurement], dict[ShapeClass, BucketMeasurements], int]:
    """(measurements with median times over the rounds that fit into the time, the updated results of the buckets, number of rounds).

    Each round goes through all batches of all buckets in a new order, so that disturbances of the machine affect all equally.
    """
    results = dict(results)
    order = [row for tried in results.values() for row in tried.rows]
    times: dict[tuple[ShapeClass, int], list[float]] = {}
    rounds = 0
    with ProgressLine("time batches", len(order) * limits.repeats, "step") as line:
        for turn in range(limits.repeats):
            if turn and out_of_time(began, limits.minutes):
                break
            rounds += 1
            for place in rng.permutation(len(order), steps.config.seed, "profile_order", turn).tolist():
                bucket, batch = order[place].bucket, order[place].batch
                if batch < (results[bucket].too_large or batch + 1):
                    seconds = steps.attempt(partial(_warm_seconds, steps, bucket, batch))
                    if seconds is None:  # fragmented memory: it fitted before
                        results[bucket] = replace(results[bucket], too_large=batch)
                    else:
                        times.setdefault((bucket, batch), []).append(seconds)
                line.advance(note=f"{shape_words(bucket)} x {batch}")
    rows = [
        replace(row, seconds=statistics.median(times[row.bucket, row.batch]))
        for row in order
        if row.batch < (results[row.bucket].too_large or row.batch + 1)
    ]
    return rows, results, rounds


def _warm_seconds(steps: SyntheticStep, bucket: ShapeClass, batch: int) -> float:
    """Time of a step; on an accelerator the second of two, since the first frees the memory of another shape."""
    if steps.device.kind != "cpu":
        steps.run(bucket, batch)
    return steps.seconds(bucket, batch)


def _check_folder(folder: Path) -> None:
    """Raises UserError when the folder cannot be written to, before the measurement and not after it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the folder {folder} ({error.strerror}); choose another") from None
    if not os.access(folder, os.W_OK):
        raise UserError(f"cannot write to {folder}; choose a folder you may write to")
