"""The choice of ways of all spans under a budget: measure blocks, choose, try a real step, and record the results.

runs/NAME/memory.json holds the choice, its expected and its measured memory; a run that resumes with the same setting takes it from
there.
"""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist

from mmspeed import comm
from mmspeed.config import RunConfig
from mmspeed.config.memory import MemoryConfig, parse_bytes
from mmspeed.device import Device
from mmspeed.errors import UserError
from mmspeed.log import ProgressLine, format_bytes, get_logger
from mmspeed.loop.optimizers.make_optimizer import by_lists
from mmspeed.memory import ActivationPolicies, set_policies
from mmspeed.memory.offload.offloader import Offloader
from mmspeed.memory.planning.measure import DeviceProfiler
from mmspeed.memory.planning.options import StepFigures, kinds_of, runs_of, words_of
from mmspeed.pipelines.run.measured import UNMEASURED, setting_of
from mmspeed.pipelines.run.run_folder import write_text
from mmspeed.pipelines.tasks import Task
from mmspeed.pipelines.tuning.memory_estimate import plan_memory
from mmspeed.pipelines.tuning.memory_measure import BlockProfiler, budget_bytes, key_of, step_figures
from mmspeed.pipelines.tuning.memory_stages import own_blocks, stage_of
from mmspeed.pipelines.tuning.synthetic_step import SyntheticStep, learning_model
from mmspeed.plan.schedules import Pipeline
from mmspeed.protocols import MicroBatchSize, RunPlace, blocks_of, shape_words, single_blocks

MEMORY_NAME = "memory.json"
TRIES = 5  # real steps that are taken to verify a choice
HOST_SHARE = 0.8  # of the host's free memory; the rest is for loaders and the system
NEAR = 0.03  # unused share of the budget below which a choice is final

log = get_logger("train")


@dataclass(frozen=True)
class MemoryChoice:
    """The chosen ways of each block, with their expected and measured figures."""

    ways: tuple[ActivationPolicies, ...]
    budget: int
    expected_peak: int
    measured_peak: int
    added_seconds: float  # of a micro-batch, expected
    added_share: float  # of the blocks' own time
    step_seconds: float | None  # of a whole step, measured
    tries: tuple[dict[str, Any], ...] = ()

    def lines(self) -> list[str]:
        """The choice as lines of text."""
        words = "; ".join(f"{count} x {ways}" for ways, count in runs_of(self.ways))
        return [
            f"memory: {len(self.ways)} blocks: {words}",
            f"memory: expected {format_bytes(self.expected_peak)}, measured {format_bytes(self.measured_peak)} of "
            f"{format_bytes(self.budget)}, {self.added_share:+.1%} time of the blocks",
        ]


# -- budget and setting -----------------------------------------------------------------------------------------------


def host_room(config: RunConfig, figures: StepFigures, device: Device) -> int | None:
    """Bytes of the host's memory that one device may offload to, the least over processes; None on a CPU, which does not. A collective call."""
    if device.kind == "cpu":
        return None
    free = Device("cpu", 0).free_memory_bytes() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    room = int(HOST_SHARE * free) - (sum(figures.frozen) if config.host_base else 0)
    return max(0, -int(comm.all_reduce_max([-float(room)])[0]))


def full_setting(config: RunConfig, task: Task, place: RunPlace, step: MicroBatchSize) -> dict[str, Any]:
    """The settings that a choice depends on, in JSON's types."""
    memory = {f"memory.{k}": v for k, v in config.memory.model_dump(mode="json").items() if k not in UNMEASURED}
    train = {"train.optimizer": config.train.optimizer, "train.ema": config.train.ema_decay is not None}
    setting = setting_of(config, task.domain.setting(), place) | memory | train
    setting |= {"bucket": str(step.shape), "micro_batch": step.items, "accumulates": step.accumulates}
    if Pipeline.of(config.parallel).ranks > 1:
        pipeline = config.parallel.model_dump(include={"virtual", "schedule", "extra_warmup"})
        setting |= {f"parallel.{key}": value for key, value in pipeline.items()} | {"micro_batches": step.batches}
    longest = task.domain.longest_text()
    return setting if longest is None else setting | {"text.max_tokens": longest}


# -- choosing ---------------------------------------------------------------------------------------------------------


def measured_figures(
    config: RunConfig, task: Task, device: Device, step: MicroBatchSize, with_swap: bool | None = None
) -> StepFigures:
    """The figures of a config's step, from a model of two blocks of each kind that is freed afterwards. A collective call.

    with_swap: True: policies that swap are options; None: on all but a CPU, where the host's memory is the device's.
    """
    whole = learning_model(task, task.build())
    kinds, members = kinds_of([key_of(block) for _, block in blocks_of(whole)])
    wanted = sorted({block for blocks in members for block in blocks[:2]} | set(single_blocks(whole)))
    chosen = [[wanted.index(block) for block in blocks[:2]] for blocks in members]
    # the optimizer's step is not measured here
    memory = config.memory.model_copy(update={"budget": None, "fraction": None, "release_gradients": False})
    train = config.train.model_copy(update={"ema_decay": None})
    plain = config.model_copy(update={"memory": memory, "train": train})
    running = ExitStack()
    try:
        steps = SyntheticStep(
            plain, task, device, choice=[{}] * len(wanted), blocks=wanted, text_tokens=task.domain.longest_text()
        )
        swap = Offloader(device, parse_bytes(memory.offload_from))
        swapping = device.kind != "cpu" if with_swap is None else with_swap
        line = running.enter_context(ProgressLine("measure memory", None, "run"))
        bench = BlockProfiler(DeviceProfiler(device), swap, swapping, memory.exchange_again, progress=line.advance)
        figures = step_figures(
            bench,
            steps.model,
            lambda: steps.batch(step.shape, step.items),
            partial(task.loss, steps.bare),
            kinds,
            chosen,
            memory=config.memory,
            average=config.train.ema_decay is not None,
            optimizer=config.train.optimizer,
            by_lists=by_lists(config.train.optimizer, device.kind),
            gradients_stay=step.accumulates or steps.strategy == "ddp",
            keep_last=config.memory.keep_last,
        )
        return figures.with_host_base() if config.host_base and device.kind != "cpu" else figures
    finally:
        running.close()
        steps = bench = None  # type: ignore[assignment]
        gc.collect()
        device.empty_cache()


class MeasuredModel:
    """A config's whole model, for real steps in one choice after another."""

    def __init__(
        self, config: RunConfig, task: Task, device: Device, step: MicroBatchSize, ways: Sequence[ActivationPolicies]
    ) -> None:
        memory = config.memory.model_copy(update={"budget": None, "fraction": None})
        self.memory = memory
        batches = step.batches if Pipeline.of(config.parallel).ranks > 1 else 2 if step.accumulates else 1
        self._step = (step.shape, step.items, batches)
        plain = config.model_copy(update={"memory": memory})
        self.steps = SyntheticStep(plain, task, device, choice=list(ways), text_tokens=task.domain.longest_text())
        self.swap = Offloader(device, parse_bytes(memory.offload_from))
        self._ran = False

    def peak(self, ways: Sequence[ActivationPolicies]) -> int | None:
        """Bytes at the peak of a step; None where memory ran out. A collective call."""
        for (_, block), policies in zip(blocks_of(self.steps.model), ways, strict=True):
            set_policies(block, policies, self.swap.group, exchange_again=self.memory.exchange_again)

        def work() -> int:
            if not self._ran:
                self.steps.run(*self._step)  # makes the optimizer's states
            self._ran = True
            return self.steps.peak(*self._step)

        return self.steps.attempt(work)

    def seconds(self) -> float:
        """Time of a step."""
        return self.steps.seconds(*self._step)


class MeasuredStage(MeasuredModel):
    """The same for the stages of one process of a pipeline, whose steps all processes take: each searches for its own choice."""

    def peak(self, ways: Sequence[ActivationPolicies]) -> int | None:
        comm.all_reduce_max([1.0])  # tells that a step follows
        return super().peak(ways)

    def seconds(self) -> float:
        """0: a step is timed when all have chosen."""
        return 0.0

    def settle(self, choice: MemoryChoice | UserError) -> MemoryChoice:
        """Take steps until all have chosen; the choice, with the time of a step. Raises UserError on all where one has none."""
        ways = () if isinstance(choice, UserError) else choice.ways
        while comm.all_reduce_max([0.0])[0]:
            super().peak(ways or [{}] * len(blocks_of(self.steps.model)))
        found = comm.all_gather_objects([self.steps.placement.mesh.stage, str(choice) if not ways else None])
        failed = sorted((stage, error) for stage, error in found if error is not None)
        if failed or isinstance(choice, UserError):
            raise UserError(f"{failed[0][1]} (stages of process {failed[0][0]} of pp)")
        return replace(choice, step_seconds=super().seconds())


def fastest_within(figures: StepFigures, budget: int, tried: MeasuredModel, host: int | None = None) -> MemoryChoice:
    """The fastest choice whose real step stays within the budget, and that offloads at most `host` bytes. A collective call.

    Each try shifts the target by the last step's distance from the budget. Raises UserError where not even the least choice fits.
    """
    target, best, smallest = budget, None, figures.smallest()
    tries: list[dict[str, Any]] = []
    seen: list[list[int]] = []
    over: list[list[int]] = []  # choices that took more than the budget
    for turn in range(TRIES + 1):
        chosen = figures.choose(target, host) or smallest
        while chosen in over and chosen != smallest:  # it took more than expected
            target = min(target, figures.peak(chosen)) - 1
            chosen = figures.choose(target, host) or smallest
        if turn == TRIES:
            if best is not None:
                break
            chosen = smallest
        if chosen in seen:
            break
        seen.append(chosen)
        peak, expected, seconds = tried.peak(figures.ways(chosen)), figures.peak(chosen), figures.seconds(chosen)
        tries.append({"aimed_at": target, "expected_bytes": expected, "measured_bytes": peak, "added_seconds": seconds})
        left = budget - peak if peak is not None else -budget // 10
        if left < 0:
            over.append(chosen)
        elif peak is not None and (best is None or seconds < best[2]):
            best = (chosen, peak, seconds)
        if (left >= 0 and (seconds == 0 or left < NEAR * budget)) or (left < 0 and chosen == smallest):
            break
        target += left
    if best is None:
        least = min(
            (one["measured_bytes"] for one in tries if one["measured_bytes"] is not None), default=figures.least()
        )
        raise too_small(budget, max(least, budget + 1), figures)
    chosen, peak, seconds = best
    ways = figures.ways(chosen)
    tried.peak(ways)
    return MemoryChoice(
        tuple(ways),
        budget,
        figures.peak(chosen),
        peak,
        seconds,
        figures.added_share(chosen),
        tried.seconds(),
        tuple(tries),
    )


def too_small(budget: int, least: int, figures: StepFigures) -> UserError:
    """The error for a budget in which nothing fits."""
    static = figures.static
    wanted, available = format_bytes(least), format_bytes(budget)
    if wanted == available:
        wanted, available = f"{least:,} bytes", f"{budget:,}"
    return UserError(
        f"memory: a step takes at least {wanted}, more than the budget of {available}; weights, optimizer and "
        f"gradients are {format_bytes(static.between + static.gradients)} of it. Raise the budget, put memory.master, memory.states or "
        "memory.ema on the host, use parallel.strategy: fsdp or a split of a sample (parallel.dsp or parallel.ulysses), or take smaller "
        "batches or buckets"
    )


# -- recording --------------------------------------------------------------------------------------------------------


def option_rows(figures: StepFigures) -> list[dict[str, Any]]:
    """The options of each kind of block as rows."""
    return [
        {"kind": kind, "blocks": figures.kinds.count(kind), **asdict(option), "words": words_of(option.ways)}
        for kind, options in enumerate(figures.options)
        for option in options
    ]


def write_choice(path: Path, choice: MemoryChoice, figures: StepFigures, setting: Mapping[str, Any]) -> None:
    """Write memory.json, whole or not at all."""
    record = {
        "setting": dict(setting),
        "budget_bytes": choice.budget,
        "blocks": [dict(ways) for ways in choice.ways],
        "expected": {
            "peak_bytes": choice.expected_peak,
            "added_seconds": choice.added_seconds,
            "added_share": choice.added_share,
        },
        "measured": {"peak_bytes": choice.measured_peak, "step_seconds": choice.step_seconds},
        "plain": {"expected_peak_bytes": figures.plain_peak(), "block_seconds": list(figures.plain_seconds)},
        "least_bytes": figures.least(),
        "static": asdict(figures.static) | {"ends": figures.ends, "tail": figures.tail},
        "tries": list(choice.tries),
        "options": option_rows(figures),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(record, indent=1) + "\n")


def read_choice(path: Path, setting: Mapping[str, Any], blocks: int) -> MemoryChoice | None:
    """The choice of a run for this setting; None where there is none, where it is for another setting, or (with a warning) damaged."""
    if not path.exists():
        return None
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if "setting" not in record and "report" in record:  # of `mmspeed bench memory` alone
            return None
        if record["setting"] != json.loads(json.dumps(setting)):
            return None
        expected, measured = record["expected"], record["measured"]
        ways = tuple(
            MemoryConfig.model_validate({"activation_policy": each}).activation_policy for each in record["blocks"]
        )
        if len(ways) != blocks:
            raise ValueError(f"ways of {len(ways)} blocks")
        return MemoryChoice(
            cast(tuple[ActivationPolicies, ...], ways),
            record["budget_bytes"],
            expected["peak_bytes"],
            measured["peak_bytes"],
            expected["added_seconds"],
            expected["added_share"],
            measured["step_seconds"],
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        reason = str(error).splitlines()[0]
        log.warning(
            f"memory: {path} is damaged ({type(error).__name__}: {reason}): the ways are measured and chosen again"
        )
        return None


def choose_policies(
    config: RunConfig,
    task: Task,
    device: Device,
    step: MicroBatchSize,
    folder: Path,
    setting: Mapping[str, Any],
    rank: int,
) -> MemoryChoice:
    """The ways under the config's budget: those of the run's folder, or new ones, which are written there. A collective call.

    All ranks take rank 0's, which has those of all stages of a pipeline. Raises UserError where nothing fits.
    """
    path, blocks = folder / MEMORY_NAME, len(blocks_of(learning_model(task, task.build())))
    before = read_choice(path, setting, blocks) if rank == 0 else None
    recorded = comm.broadcast_object(None if before is None else asdict(before))
    if recorded is not None:
        if rank == 0:
            log.info(f"memory: the choice of {path} is used again")
        return MemoryChoice(**{**recorded, "ways": tuple(recorded["ways"]), "tries": ()})
    began = time.monotonic()
    budget = budget_bytes(config.memory, device)
    staged = Pipeline.of(config.parallel).ranks > 1
    if staged:  # blocks are not measured apart from their stages
        figures = _figures_of_rank(config, task, device, step)
    else:
        figures = measured_figures(config, task, device, step)
    host = host_room(config, figures, device)
    first = figures.choose(budget, host)
    measured = MeasuredStage if staged else MeasuredModel
    tried = measured(config, task, device, step, figures.ways(first or figures.smallest()))
    try:
        if isinstance(tried, MeasuredStage):
            choice = _of_all(config, task, tried, figures, budget, host)
        else:
            choice = fastest_within(figures, budget, tried, host)
    finally:
        del tried
        gc.collect()
        device.empty_cache()
    comm.first_does(lambda: write_choice(path, choice, figures, setting), rank)
    if rank == 0:
        for line in choice.lines():
            log.info(line)
        log.info(f"memory: chosen for {shape_words(step.shape)} x {step.items} in {time.monotonic() - began:.1f} s")
    return replace(choice, ways=tuple(comm.broadcast_object([dict(ways) for ways in choice.ways])))


def _figures_of_rank(config: RunConfig, task: Task, device: Device, step: MicroBatchSize) -> StepFigures:
    """The figures of this process's stages, from shapes."""
    world = dist.get_world_size()
    plan = plan_memory(config, task=task, step=step, world=world, with_swap=device.kind != "cpu")
    return plan.ranks[stage_of(config)]


def _of_all(
    config: RunConfig, task: Task, tried: MeasuredStage, figures: StepFigures, budget: int, host: int | None
) -> MemoryChoice:
    """The choices of all stages of a pipeline as one, of the whole model's blocks. A collective call."""
    own: MemoryChoice | UserError
    try:
        own = fastest_within(figures, budget, tried, host)
    except UserError as error:
        own = error
    own = tried.settle(own)
    blocks = own_blocks(config, task)
    every = comm.all_gather_objects([blocks, asdict(own)])
    ways = {block: way for numbers, each in every for block, way in zip(numbers, each["ways"], strict=True)}
    most = {
        key: max(each[key] for _, each in every)
        for key in ("expected_peak", "measured_peak", "added_seconds", "added_share")
    }
    return replace(own, ways=tuple(ways[block] for block in sorted(ways)), **most)


def policies_under_budget(config: RunConfig, task: Task, place: RunPlace) -> list[ActivationPolicies] | None:
    """The ways of each block that this process holds; None without a budget. A collective call."""
    if not config.memory.chooses:
        return None
    if config.batching.by == "time":
        raise UserError(
            "batching.by: time goes by steps that were measured with given ways, and memory's budget chooses them for given batches: set "
            "memory.activation_policy instead of a budget, or use batching.by: tokens or flops"
        )
    step = task.domain.largest_micro_batch(place)
    setting = full_setting(config, task, place, step)
    ways = choose_policies(config, task, place.device, step, config.run_dir, setting, place.rank).ways
    if Pipeline.of(config.parallel).ranks == 1:
        return list(ways)
    return [ways[block] for block in own_blocks(config, task)]
