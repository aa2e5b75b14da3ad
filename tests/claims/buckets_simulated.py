"""The bench of the order of training without a device: cost imbalance, losses, time and memory of whole epochs, beside two other rules.

The data set is that of `web_video`, costs are the model's own count of FLOPs, and every figure of our rule comes from the code
that training uses: `Order`, `BucketUses`, `forecast`. Each row is made in a process of its own, so that its peak of memory
is its own.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mmspeed.config.schema import ModelConfig
from mmspeed.config.training import BatchingConfig, TrainConfig
from mmspeed.data import Batching
from mmspeed.data.sampling.batch_sizes import SampleCosts, make_batching, sample_costs
from mmspeed.data.sampling.forecast import forecast
from mmspeed.data.sampling.mixture import BucketUses
from mmspeed.data.sampling.order import Order
from mmspeed.data.sampling.schedule import Array
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

    def passed(self) -> bool:
        """True where the default rule is balanced, and no rule of ours loses a sample, or takes long or much memory."""
        ours = [row for table in self.tables for row in table.rows if row.rule in OURS]
        balanced = all(row.imbalance <= MAX_IMBALANCE for row in ours if row.rule == SAME)
        cheap = all(row.seconds < MAX_SECONDS and row.peak_bytes < MAX_BYTES for row in ours)
        return balanced and cheap and not any(row.lost for row in ours)

    def lines(self) -> list[str]:
        messages = self.data.lines()
        for table in self.tables:
            messages += ["", *table.lines()]
        wanted = f"imbalance {MAX_IMBALANCE} with {SAME}, nothing lost, {MAX_SECONDS:.0f} s, {MAX_BYTES / 1e6:.0f} MB at most"
        return [*messages, "", f"{'PASSED' if self.passed() else 'FAILED'}: {wanted}, of {AIM_CLIPS:,} clips"]


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
    jobs: list[tuple[Callable[..., ScheduleRow], tuple[Any, ...]]] = []
    for rule, (mix, accumulate) in OURS.items():
        if whole or rule == SAME:
            config = BatchingConfig(by="flops", budget=budget, mix=mix, accumulate=accumulate)
            for world in worlds:
                batching = make_batching(config, TrainConfig(), data.counts, costs, world)
                jobs.append((our_row, (rule, data.counts, batching, tokens, world, seed)))
    if whole:
        each = {bucket: costs.flops(bucket) / 1e12 for bucket in data.counts}
        by_hand = {bucket: hand_size(bucket) for bucket in data.counts}
        by_budget = {bucket: max(1, int(budget / cost * (1 + 1e-12))) for bucket, cost in each.items()}
        for rule, make, sizes in (
            ("dealt out, hand-tuned", dealt_out_row, by_hand),
            ("dealt out, our sizes", dealt_out_row, by_budget),
            ("same shape, tails drop", same_shape_row, by_budget),
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


# -- in processes of their own -------------------------------------------------------------------------------------------


def our_row(
    rule: str,
    counts: Mapping[ShapeClass, int],
    batching: Batching,
    tokens: Mapping[ShapeClass, int],
    world: int,
    seed: int,
) -> ScheduleRow:
    """An epoch by our rule. Timed: the order of the steps and of the samples within them, from the places of each bucket's samples."""
    before, began = _memory("VmRSS"), time.perf_counter()
    order = Order(grouped(counts), batching, seed)
    plan, buckets = order.whole_epoch()
    uses = [BucketUses(pools, 0, seed) for pools in order.pools[0].values()]
    seconds, peak = time.perf_counter() - began, _memory("VmHWM") - before
    assert len(uses) == len(counts)
    prediction = forecast(plan, buckets, batching, world, order.uses(), tokens.__getitem__)
    return ScheduleRow(
        rule,
        world,
        prediction.steps,
        float(prediction.lockstep.mean()),
        float(prediction.lockstep.max()),
        prediction.epoch_imbalance,
        float(prediction.window.mean()),
        sum(counts.values()) - prediction.samples,
        prediction.idle,
        seconds,
        peak,
    )


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
    drawn = drawn[permutation(len(drawn), seed, "rival_order")]
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
    steps = steps[permutation(len(steps), seed, "rival_order")]
    seconds, peak = time.perf_counter() - began, _memory("VmHWM") - before
    size = np.array([sizes[bucket] for bucket in counts])
    cost = (size * np.array([each[bucket] for bucket in counts]))[steps]
    return _row_of(rule, world, cost, cost, sum(counts.values()) - world * int(size[steps].sum()), seconds, peak)


def _row_of(rule: str, world: int, greatest: Array, mean: Array, lost: int, seconds: float, peak: int) -> ScheduleRow:
    """A row of one micro-batch a step. Without a step its imbalance is not a number."""
    ratio = greatest / mean if len(mean) else np.array([math.nan])
    average, epoch = float(ratio.mean()), float(greatest.sum() / mean.sum()) if len(mean) else math.nan
    return ScheduleRow(rule, world, len(mean), average, float(ratio.max()), epoch, average, lost, 0, seconds, peak)


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
