"""The bench of the order of training without a device: cost imbalance, losses, time and memory of whole epochs, beside two other rules.

The data set is that of `web_video`, costs are the model's own count of FLOPs, and every figure of our rule comes from the code
that training uses: `Order`, `BucketUses`, `assign_slots`, `forecast`. Each row is made in a process of its own, so that its peak of memory
is its own.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mmspeed.config.schema import ModelConfig
from mmspeed.config.training import BatchingConfig, TrainConfig
from mmspeed.data import Batching
from mmspeed.data.sampling.assignment import assign_slots
from mmspeed.data.sampling.batch_sizes import SampleCosts, make_batching, sample_costs
from mmspeed.data.sampling.forecast import forecast
from mmspeed.data.sampling.mixture import BucketUses
from mmspeed.data.sampling.order import Order
from mmspeed.data.sampling.rank_batches import bucket_batches_of, dp_groups_of
from mmspeed.data.sampling.schedule import Array, EpochSchedule
from mmspeed.errors import UserError
from mmspeed.log import progress, setup
from mmspeed.protocols import ShapeClass
from mmspeed.rng import permutation
from mmspeed.shapes import Strides

from .web_video import DataSet, hand_size, make_data_set

STRIDES, LATENT_CHANNELS, TEXT_WIDTH, TEXT_TOKENS = Strides(4, 8), 16, 4096, 256
SIZE = "3B"
BUDGET_SAMPLES = 2  # of the costliest bucket on a device, as the hand-tuned sizes have
MAX_IMBALANCE, MAX_SECONDS, MAX_BYTES = 1.02, 10.0, 500_000_000
AIM_CLIPS = 1_000_000
SAME = "ours: same"
# our mixes, with the micro-batches of a step
OURS: dict[str, tuple[Literal["same", "matched", "window"], int]] = {
    SAME: ("same", 1),
    "ours: matched": ("matched", 1),
    "ours: window of 4": ("window", 4),
}


@dataclass(frozen=True)
class ScheduleRow:
    """An epoch by one rule at one number of ranks. `imbalance`, `worst`: greatest / mean cost of the ranks, over steps."""

    rule: str
    ranks: int
    steps: int
    imbalance: float
    worst: float
    epoch: float  # greatest over mean of the epoch's whole cost
    once: float  # mean over steps, where ranks meet once a step and not in every micro-batch
    lost: int  # samples in no step
    twice: int  # samples in several
    idle: int  # micro-batches of some rank without a sample
    seconds: float
    peak_bytes: int  # resident memory, above that of the process before

    def line(self) -> str:
        figures = f"{self.imbalance:.4f}  {self.worst:6.3f}  {self.epoch:.4f}  {self.once:.4f}"
        time_and_memory = f"{self.seconds:7.2f}  {self.peak_bytes / 1e6:6.1f}"
        return (
            f"{self.rule:<27} {self.ranks:5d} {self.steps:9,d}     {figures} {self.lost:9,d} {self.idle:7,d}"
            f"  {time_and_memory}"
        )


HEADER = f"{'rule':<27} {'ranks':>5} {'steps':>9}  imbalance   worst   epoch    once  {'lost':>9} {'idle':>7}  seconds      MB"


@dataclass(frozen=True)
class ScheduleTable:
    """All rows by one model's costs."""

    arrangement: str
    budget: float  # TFLOP of a device batch
    rows: tuple[ScheduleRow, ...]

    def lines(self) -> list[str]:
        about = f"costs of {SIZE}, {self.arrangement} attention, forward and backward; a device batch of at most {self.budget:,.0f} TFLOP"
        return [about, HEADER, *(row.line() for row in self.rows)]


@dataclass(frozen=True)
class SimulatedResult:
    """What the bench found."""

    data: DataSet
    tables: tuple[ScheduleTable, ...]

    def verdicts(self) -> list[tuple[str, bool]]:
        """What is wanted of the default rule, in words, and whether it holds."""
        lines = []
        for table in self.tables:
            for row in (row for row in table.rows if row.rule == SAME):
                lines.append(
                    (
                        f"{table.arrangement}, {row.ranks} ranks: imbalance {row.imbalance:.4f}, at most {MAX_IMBALANCE}",
                        row.imbalance <= MAX_IMBALANCE,
                    )
                )
        ours = [row for table in self.tables for row in table.rows if row.rule in OURS]
        lost, twice = sum(row.lost for row in ours), sum(row.twice for row in ours)
        seconds, peak = max(row.seconds for row in ours), max(row.peak_bytes for row in ours)
        return [
            *lines,
            (
                f"samples lost {lost}, twice {twice}: each of {self.data.clips:,} counted in {len(ours)} epochs",
                not lost and not twice,
            ),
            (f"schedule in {seconds:.2f} s at most, under {MAX_SECONDS:.0f} s", seconds < MAX_SECONDS),
            (f"schedule in {peak / 1e6:.0f} MB at most, under {MAX_BYTES / 1e6:.0f} MB", peak < MAX_BYTES),
        ]

    def passed(self) -> bool:
        return all(holds for _, holds in self.verdicts())

    def lines(self) -> list[str]:
        messages = self.data.lines()
        if self.data.clips < AIM_CLIPS:
            messages.append(
                f"the aims below are for {AIM_CLIPS:,} clips: in a small set the few uneven steps at the end of buckets weigh more"
            )
        for table in self.tables:
            messages += ["", *table.lines()]
        return [*messages, "", *(f"{'PASSED' if holds else 'FAILED'}  {text}" for text, holds in self.verdicts())]


def simulate_buckets(clips: int, ranks: str, seed: int) -> SimulatedResult:
    """Epochs of a synthetic data set at each number of `ranks` (as "8,64,512").

    All rules with full attention, and the default rule with factorised attention. Raises UserError for odd options.
    """
    worlds = parse_ranks(ranks)
    data = make_data_set(clips, seed)
    tables = []
    for arrangement in ("full", "factorised"):
        costs = model_costs(arrangement)
        budget = BUDGET_SAMPLES * max(costs.flops(bucket) for bucket in data.counts) / 1e12
        jobs = list(_jobs(data, costs, budget, worlds, seed, whole=arrangement == "full"))
        rows = [in_fresh_process(job, arguments) for job, arguments in progress(jobs, arrangement, unit="rows")]
        tables.append(ScheduleTable(arrangement, budget, tuple(rows)))
    return SimulatedResult(data, tuple(tables))


def parse_ranks(ranks: str) -> list[int]:
    """The numbers of a list such as "8,64,512". Raises UserError when one is not a number of at least 1."""
    parts = [part.strip() for part in ranks.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise UserError(f"--ranks {ranks}: use whole numbers of at least 1, such as 8,64,512")
    return [int(part) for part in parts]


def model_costs(arrangement: str) -> SampleCosts:
    """What a sample costs the model of `SIZE`, which needs no memory for its weights."""
    from mmspeed.models import build_model

    config = ModelConfig(size=SIZE, arrangement="full" if arrangement == "full" else "factorised")
    return sample_costs(build_model(config, LATENT_CHANNELS, TEXT_WIDTH, device="meta"), STRIDES, TEXT_TOKENS)


def in_fresh_process(job: Callable[..., ScheduleRow], arguments: tuple[Any, ...]) -> ScheduleRow:
    """`job(*given)` in a process that has imported this file and done nothing yet."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(job, *arguments).result()


def _jobs(
    data: DataSet, costs: SampleCosts, budget: float, worlds: Sequence[int], seed: int, whole: bool
) -> list[tuple[Callable[..., ScheduleRow], tuple[Any, ...]]]:
    """What to run for each row: all rules, or the default one."""
    tokens = {bucket: costs.tokens(bucket) for bucket in data.counts}
    met = sample_of_use(Order(grouped(data.counts), Batching(1), seed), seed)
    jobs: list[tuple[Callable[..., ScheduleRow], tuple[Any, ...]]] = []
    for rule, (mix, accumulate) in OURS.items():
        if whole or rule == SAME:
            config = BatchingConfig(by="flops", budget=budget, mix=mix, accumulate=accumulate)
            for world in worlds:
                batching = make_batching(config, TrainConfig(), data.counts, costs, world)
                jobs.append((our_row, (rule, data.counts, batching, tokens, met, world, seed)))
    if whole:
        each = {bucket: costs.flops(bucket) / 1e12 for bucket in data.counts}
        by_hand = {bucket: hand_size(bucket) for bucket in data.counts}
        by_budget = {bucket: max(1, int(budget / cost * (1 + 1e-12))) for bucket, cost in each.items()}
        for rule, make, sizes in (
            ("(a) dealt out, hand-tuned", dealt_out_row, by_hand),
            ("(a) dealt out, our sizes", dealt_out_row, by_budget),
            ("(b) same shape, tails drop", same_shape_row, by_budget),
        ):
            jobs += [(make, (rule, data.counts, sizes, each, world, seed)) for world in worlds]
    return jobs


def grouped(counts: Mapping[Any, int]) -> dict[tuple[ShapeClass, str], Array]:
    """Samples numbered through the buckets."""
    ends = np.cumsum(list(counts.values()))
    return {
        (bucket, ""): np.arange(end - count, end, dtype=np.int32)
        for (bucket, count), end in zip(counts.items(), ends.tolist(), strict=True)
    }


def sample_of_use(order: Order, seed: int) -> dict[ShapeClass, Array]:
    """The sample of each use in an epoch's order, asked of `BucketUses` one by one. It depends on no batching and no world size."""
    return {
        bucket: np.array([place for place, _ in BucketUses(pools, 0, seed)[0 : sum(pool.uses for pool in pools)]])
        for bucket, pools in order.pools[0].items()
    }


# -- in processes of their own -------------------------------------------------------------------------------------------


def our_row(
    rule: str,
    counts: Mapping[ShapeClass, int],
    batching: Batching,
    tokens: Mapping[ShapeClass, int],
    met: Mapping[ShapeClass, Array],
    world: int,
    seed: int,
) -> ScheduleRow:
    """An epoch by our rule. Timed: the order of the steps and of the samples within them, from the places of each bucket's samples."""
    before, began = _memory("VmRSS"), time.perf_counter()
    order = Order(grouped(counts), batching, seed)
    plan, buckets = order.whole_epoch()
    uses = {bucket: BucketUses(pools, 0, seed) for bucket, pools in order.pools[0].items()}
    seconds, peak = time.perf_counter() - began, _memory("VmHWM") - before
    if any([place for place, _ in uses[bucket][0:4]] != places[:4].tolist() for bucket, places in met.items()):
        raise AssertionError("the order of samples depends on the batching")
    times = np.zeros(sum(counts.values()), np.int64)
    for bucket, steps in steps_of_uses(plan, buckets, [len(met[bucket]) for bucket in buckets]).items():
        times[met[bucket]] += steps
    undealt, redealt = count_dealing(plan, buckets, batching, world)
    prediction = forecast(plan, buckets, batching, world, order.uses(), tokens.__getitem__)
    return ScheduleRow(
        rule,
        world,
        prediction.steps,
        prediction.mean_imbalance,
        prediction.worst_imbalance,
        prediction.epoch_imbalance,
        float(prediction.window.mean()),
        int((times == 0).sum()) + undealt,
        int((times > 1).sum()) + redealt,
        prediction.idle,
        seconds,
        peak,
    )


def steps_of_uses(plan: EpochSchedule, buckets: Sequence[ShapeClass], uses: Sequence[int]) -> dict[ShapeClass, Array]:
    """For each use of each bucket, how many steps of the plan hold it: once, if the plan is right."""
    results = {}
    for number, bucket in enumerate(buckets):
        own = plan.bucket == number
        start, stop = plan.start[own], plan.start[own] + plan.count[own]
        size = max(uses[number], int(stop.max(initial=0))) + 1
        edges = np.bincount(start, minlength=size) - np.bincount(stop, minlength=size)
        results[bucket] = np.cumsum(edges)[: uses[number]]
    return results


def count_dealing(
    plan: EpochSchedule, buckets: Sequence[ShapeClass], batching: Batching, world: int
) -> tuple[int, int]:
    """Samples of all steps that dealing gives to no rank, and to several. Steps of one make are dealt alike."""
    makes = Counter(tuple((bucket, count) for bucket, _, count in plan.pieces(step)) for step in range(plan.steps))
    none = several = 0
    for make, steps in makes.items():
        for pieces, ranks in dp_groups_of([(buckets[bucket], count) for bucket, count in make], batching):
            lots = bucket_batches_of(pieces, batching)
            counts = [np.zeros(lot.count, np.int64) for lot in lots]
            for row in assign_slots(lots, world // ranks):
                for cell in row:
                    if cell is not None:
                        counts[cell.lot][cell.start : cell.stop] += 1
            none += steps * sum(int((one == 0).sum()) for one in counts)
            several += steps * sum(int((one > 1).sum()) for one in counts)
    return none, several


def dealt_out_row(
    rule: str,
    counts: Mapping[ShapeClass, int],
    sizes: Mapping[ShapeClass, int],
    each: Mapping[ShapeClass, float],
    world: int,
    seed: int,
) -> ScheduleRow:
    """Open-Sora's and VideoSys's rule: full batches of all buckets in one shuffled list, of which every `world` in turn make a step.

    What fills no batch, and the batches that make no step, are dropped.
    """
    before, began = _memory("VmRSS"), time.perf_counter()
    batches = np.array([counts[bucket] // sizes[bucket] for bucket in counts])
    drawn = np.repeat(np.arange(len(batches)), batches)
    drawn = drawn[_shuffled(len(drawn), seed)]
    steps = drawn[: len(drawn) // world * world].reshape(-1, world)
    seconds, peak = time.perf_counter() - began, _memory("VmHWM") - before
    size = np.array([sizes[bucket] for bucket in counts])
    costs = (size * np.array([each[bucket] for bucket in counts]))[steps]
    lost = sum(counts.values()) - int(size[steps].sum())
    return _row_of(rule, world, costs.max(1), costs.mean(1), lost, seconds, peak)


def same_shape_row(
    rule: str,
    counts: Mapping[ShapeClass, int],
    sizes: Mapping[ShapeClass, int],
    each: Mapping[ShapeClass, float],
    world: int,
    seed: int,
) -> ScheduleRow:
    """Open-Sora-Plan's rule: samples sorted by shape, cut into steps of `world` batches of one shape, and the steps shuffled.

    What is left of a shape, of which Open-Sora-Plan makes steps of mixed shapes, is dropped here.
    """
    before, began = _memory("VmRSS"), time.perf_counter()
    number = np.array([counts[bucket] // (world * sizes[bucket]) for bucket in counts])
    steps = np.repeat(np.arange(len(number)), number)
    steps = steps[_shuffled(len(steps), seed)]
    seconds, peak = time.perf_counter() - began, _memory("VmHWM") - before
    size = np.array([sizes[bucket] for bucket in counts])
    cost = (size * np.array([each[bucket] for bucket in counts]))[steps]
    lost = sum(counts.values()) - world * int(size[steps].sum())
    return _row_of(rule, world, cost, cost, lost, seconds, peak)


def _shuffled(count: int, seed: int) -> Array:
    order: Array = permutation(count, seed, "rival_order")
    return order


def _row_of(rule: str, world: int, greatest: Array, mean: Array, lost: int, seconds: float, peak: int) -> ScheduleRow:
    """A row of one micro-batch a step. Without a step its imbalance is not a number."""
    ratio = greatest / mean if len(mean) else np.array([math.nan])
    average = float(ratio.mean())
    epoch = float(greatest.sum() / mean.sum()) if len(mean) else math.nan
    return ScheduleRow(rule, world, len(mean), average, float(ratio.max()), epoch, average, lost, 0, 0, seconds, peak)


def _memory(field: str) -> int:
    """A line of this process's status in bytes: VmRSS, its resident memory, or VmHWM, the peak of it."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def main() -> int:
    """Compare orders of a synthetic data set; 1 where ours misses an aim."""
    parser = argparse.ArgumentParser(prog="python -m tests.claims.buckets_simulated", description=main.__doc__)
    parser.add_argument("--clips", type=int, default=AIM_CLIPS, help="samples of the data set")
    parser.add_argument("--ranks", default="8,64,512", metavar="N,...", help="numbers of ranks")
    parser.add_argument("--seed", type=int, default=0, help="of the data set and its order")
    chosen = parser.parse_args()
    setup()
    result = simulate_buckets(chosen.clips, chosen.ranks, chosen.seed)
    print("\n".join(result.lines()))
    return 0 if result.passed() else 1


if __name__ == "__main__":
    raise SystemExit(main())
