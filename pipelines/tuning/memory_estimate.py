"""Estimates of a step's memory, and of the choice under a budget, from shapes alone: no device, no weights, no computation.

Bytes are those of all tensors of a step, counted on torch's fake tensors, without the workspaces of operations. Time is that of the
roofline model. A layout over several devices is estimated by division, but for experts over devices (`expert_outline`), which are counted
as one process computes them, with even loads.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import mul
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from mmspeed.axes import mesh_table
from mmspeed.comm import Ledger
from mmspeed.config import RunConfig
from mmspeed.config.memory import parse_bytes
from mmspeed.device import Device, parse_dtype, pick
from mmspeed.errors import UserError
from mmspeed.log import format_bytes
from mmspeed.loop.optimizers.make_optimizer import by_lists
from mmspeed.memory import ActivationPolicies
from mmspeed.memory.chunks import set_chunks
from mmspeed.memory.offload.offloader import Offloader, OffloadGroup
from mmspeed.memory.offload.storage_view import StorageView, guarded, part_of_storage
from mmspeed.memory.planning.knapsack import Option
from mmspeed.memory.planning.measure import FakeTensorProfiler
from mmspeed.memory.planning.options import StepFigures, kinds_of, runs_of, static_bytes, words_of
from mmspeed.parallel import autocast, make_half
from mmspeed.parallel.expert_outline import outline_experts
from mmspeed.parallel.experts import spread_modules
from mmspeed.parallel.stage_weights import let_weights_wait
from mmspeed.pipelines.run.assembly import gathers_again, is_cast
from mmspeed.pipelines.tasks import Task, make_task
from mmspeed.pipelines.tuning.memory_measure import BlockProfiler, budget_bytes, key_of, step_figures, weights_of
from mmspeed.pipelines.tuning.memory_stages import RankEnds, rank_ends, rank_figures
from mmspeed.pipelines.tuning.synthetic_step import learning_model
from mmspeed.plan.schedules import Pipeline
from mmspeed.protocols import MicroBatchSize, RunPlace, blocks_of, shape_words
from mmspeed.protocols.plan import keep_blocks, single_blocks
from mmspeed.torch_internals import FakeTensorMode, base_of

FEW_OPTIONS = 8  # of a kind of block: fake tensors are slow


@dataclass(frozen=True)
class DeviceSpeeds:
    """The speeds of a device: operations per second, bytes per second of its memory, and to and from the host."""

    flops: float = 150e12  # half of the peak of an accelerator of the A100's class
    memory: float = 1.5e12
    host: float = 20e9

    def swap_seconds(self, nbytes: int, block_seconds: float) -> float:
        """Seconds that a block takes longer when `nbytes` leave in its forward and come back in its backward, beside the computation."""
        each, forward = nbytes / self.host, block_seconds / 3
        return max(0.0, each - forward) + max(0.0, each - 2 * forward)


@dataclass(frozen=True)
class MemoryPlan:
    """A step's memory, and the choice under a budget where there is one.

    alone: the figures of a device that computes all by itself, with the experts of one process. experts: devices that share them. ranks:
    the figures of each rank of a pipeline; `figures` are those of the fullest.
    """

    step: MicroBatchSize
    figures: StepFigures
    alone: StepFigures
    speeds: DeviceSpeeds
    budget: int | None
    chosen: list[int] | None  # None: no budget, or nothing fits
    experts: int = 1
    ranks: tuple[StepFigures, ...] = ()

    def lines(self) -> list[str]:
        """The plan as a table for a terminal."""
        figures, static = self.figures, self.figures.static
        activations = figures.plain_peak() - static.between - static.gradients
        (first, *others), *_ = figures.options
        lines = [
            f"memory of a step of {shape_words(self.step.shape)} x {self.step.items}, estimated from shapes: "
            f"{format_bytes(figures.plain_peak())} with {words_of(first.ways) if first.ways else 'all saved'} (weights, optimizer, "
            f"average {format_bytes(static.between)}, gradients {format_bytes(static.gradients)}, activations about "
            f"{format_bytes(max(0, activations))})" + (f"; least {format_bytes(figures.least())}" if others else "")
        ]
        if self.experts > 1:
            lines.append(
                f"  experts over {self.experts} devices: counted with even loads, so that as many rows come to each device as it sends"
            )
        if self.ranks:
            lines += self._of_ranks()
        if self.budget is None:
            return lines
        if self.chosen is None:
            return [
                *lines,
                f"  budget {format_bytes(self.budget)}: nothing fits; a step takes at least {format_bytes(figures.least())}",
            ]
        ways = figures.ways(self.chosen)
        lines.append(
            f"  budget {format_bytes(self.budget)}: {'; '.join(f'{n} x {words}' for words, n in runs_of(ways))}; expected "
            f"{format_bytes(figures.peak(self.chosen))}, {figures.added_share(self.chosen):+.1%} time of the blocks"
        )
        if self.ranks:  # each has blocks of its own
            return lines
        lines.append(f"  {'options of a block':<74} {'keeps':>9} {'peak':>9} {'host':>9} {'time':>7}  blocks")
        chosen_words = [words_of(each) for each in ways]
        for kind, options in enumerate(figures.options):
            here = [words for words, of in zip(chosen_words, figures.kinds, strict=True) if of == kind]
            plain = figures.plain_seconds[kind]
            if len(figures.options) > 1:
                numbers = [number for number, of in enumerate(figures.kinds) if of == kind]
                lines.append(f"  of blocks {_listed(numbers)}")
            lines += [_row(option, plain, here.count(words_of(option.ways))) for option in options]
        speeds = self.speeds
        lines.append(
            f"  time is estimated for a device that does {speeds.flops / 1e12:.0f} TFLOP/s and moves {speeds.memory / 1e12:.1f} TB/s, and "
            f"{speeds.host / 1e9:.0f} GB/s from the host; training measures it"
        )
        return lines

    def _of_ranks(self) -> Iterator[str]:
        """A line for each rank of a pipeline, the fullest first; that one's figures are those above and below."""
        for peak, rank in sorted(((each.plain_peak(), -rank) for rank, each in enumerate(self.ranks)), reverse=True):
            figures = self.ranks[-rank]
            chosen = None if self.budget is None else figures.choose(self.budget)
            ways = (
                ""
                if chosen is None
                else f"; in the budget {'; '.join(f'{n} x {words}' for words, n in runs_of(figures.ways(chosen)))}"
            )
            flying = figures.heaviest.blocks
            yield (
                f"  rank {-rank} of pp: {format_bytes(peak)}, {len(figures.kinds)} blocks, of which "
                f"{_listed(sorted(set(flying)))} micro-batches at a time{ways}"
            )


def _listed(numbers: Sequence[int]) -> str:
    """A list of numbers as text: the first ones, and their count."""
    shown = ", ".join(map(str, numbers[:4]))
    return shown if len(numbers) <= 4 else f"{shown}, ... ({len(numbers)})"


def _row(option: Option, plain: float, taken: int) -> str:
    peak = option.kept + max(option.forward, option.backward)
    host = format_bytes(option.host) if option.host else ""
    return (
        f"  {words_of(option.ways):<74} {format_bytes(option.kept):>9} {format_bytes(peak):>9} {host:>9} "
        f"{option.seconds / plain:>+7.1%}  {taken or ''}"
    )


def plan_memory(
    config: RunConfig,
    *,
    task: Task | None = None,
    step: MicroBatchSize | None = None,
    budget: int | None = None,
    world: int | None = None,
    speeds: DeviceSpeeds | None = None,
    with_swap: bool = True,
    options: bool = True,
) -> MemoryPlan:
    """The memory of a config's step on one of `world` devices, and the choice under `budget` bytes.

    Args:
        task: None: the one that the config names, opened without data.
        step: None: the largest of the config's.
        budget: None: the config's, which may be none; a fraction is one of this machine's device.
        options: whether the ways of blocks are compared; False: a config without a budget has its own policies alone, which takes a tenth
            of the time.
        world: None: the fewest devices of the layout.

    Raises UserError for devices that experts do not divide, a shape class that does not fit the model, for `memory.mlp_chunk` beside options, for a model that computes by
    values, and as `Domain.open_without_data`.
    """
    options = options or budget is not None or config.memory.chooses
    if options and config.memory.mlp_chunk is not None:
        raise UserError("a plan chooses the computation of MLPs, and memory.mlp_chunk sets it: leave mlp_chunk out")
    parallel, speeds = config.parallel, speeds or DeviceSpeeds()
    world = world or parallel.least_devices
    if parallel.expert_devices > 1:
        mesh_table(world, parallel.axis_sizes())
    if task is None:
        task = make_task(config)
        task.domain.open_without_data()
    if step is None:
        place = RunPlace(Device("cpu", 0), world=world, dealt=parallel.dealt(world), groups=parallel.groups(world))
        step = task.domain.largest_micro_batch(place)
    alone = shape_figures(config, task, step, speeds, with_swap, options)
    ranks = figures_of_ranks(alone, config, task, step, world) if Pipeline.of(parallel).ranks > 1 else ()
    figures = max(ranks, key=StepFigures.plain_peak) if ranks else spread(alone, config, world)
    if budget is None and config.memory.chooses:
        budget = budget_bytes(config.memory, pick(config.device.kind))
    chosen = None if budget is None else figures.choose(budget)
    return MemoryPlan(step, figures, alone, speeds, budget, chosen, parallel.expert_devices, ranks)


@dataclass(frozen=True)
class RankBytes:
    """Bytes of a rank of a pipeline. fixed: what does not depend on micro-batches. kept: of one micro-batch in each of its stages."""

    fixed: int
    kept: dict[int, int]
    peak: int


def rank_bytes(config: RunConfig, world: int | None = None) -> list[RankBytes]:
    """The estimated bytes of each rank of a config's pipeline with its own policies, for searches of its schedule and degrees.

    Weights, states and all gradients are `fixed`, and so is what a pass takes beside what it keeps; `kept` lies from the forward to the
    backward pass of a micro-batch in a stage: so a rank takes about `fixed` and the sum of `kept` by the micro-batches in flight.
    """
    figures = plan_memory(config, world=world, options=False).ranks
    pipeline, found = Pipeline.of(config.parallel), []
    for rank, of in enumerate(figures):
        own, kept, peak = pipeline.own(rank), [options[0].kept for options in of.blocks()], of.plain_peak()
        places = sorted({flight.at.start: flight.at for flight in of.flights}.items())
        stages = {stage: sum(kept[at.start : at.stop]) for stage, (_, at) in zip(own, places, strict=True)}
        found.append(RankBytes(peak - sum(map(mul, of.heaviest.blocks, kept)), stages, peak))
    return found


KnownEnds = dict[int, tuple[RankEnds, Sequence[range]]]  # by rank; and the blocks of all stages


def figures_of_ranks(
    alone: StepFigures,
    config: RunConfig,
    task: Task,
    step: MicroBatchSize,
    world: int,
    known: KnownEnds | None = None,
) -> tuple[StepFigures, ...]:
    """The figures of each rank of a pipeline; `alone`: those of the whole model on one device.

    Ranks between the first and the last one hold the same beside their blocks, which is measured once. known: what other schedules of the same
    stages measured; more is added.
    """
    pipeline, ends = Pipeline.of(config.parallel), {} if known is None else known
    figures = []
    for rank in range(pipeline.ranks):
        like = rank if rank in (0, pipeline.ranks - 1) else 1
        if like not in ends:
            ends[like] = _ends_of(config, task, step, pipeline, like)
        of_like, bounds = ends[like]
        own = replace(of_like, stages=dict(zip(pipeline.own(rank), of_like.stages.values(), strict=True)))
        whole = rank_figures(alone, config, rank, pipeline, bounds, own, step.batches)
        figures.append(spread(whole, config, world // pipeline.ranks))
    return tuple(figures)


def _ends_of(
    config: RunConfig, task: Task, step: MicroBatchSize, pipeline: Pipeline, rank: int
) -> tuple[RankEnds, Sequence[range]]:
    """What a rank holds beside its blocks, from shapes; and the blocks of all stages."""
    bare = task.build()[task.updates()[0].role]
    trained = [[p.numel() for p in block.parameters() if p.requires_grad] for _, block in blocks_of(bare)]
    stages = task.cut(bare, config.parallel, None, rank)
    task.domain.shapes()
    batch, loss = task.sketch(bare, step.shape, step.items)
    with _without_values(bare, config) as dtype:
        stages.type_outlines(dtype)
        ends = rank_ends(bare, stages, batch, loss, FakeTensorProfiler(1.0, 1.0))
    width = 2 if _gathers_half(config) else 4
    return replace(ends, fresh=tuple(width * max(numbers, default=0) for numbers in trained)), stages.bounds


def _gathers_half(config: RunConfig) -> bool:
    """True where stages gather float32 weights in bfloat16, and keep the sum of earlier micro-batches' gradients apart, in float32."""
    parallel = config.parallel
    return Pipeline.of(parallel).ranks > 1 and is_cast(config) and parallel.strategy in ("auto", "fsdp")


def shape_figures(
    config: RunConfig,
    task: Task,
    step: MicroBatchSize,
    speeds: DeviceSpeeds,
    with_swap: bool = True,
    options: bool = True,
) -> StepFigures:
    """The figures of a step on one device that computes all of it, with the experts of one process of `parallel.ep` x `etp`.

    `options`: those of all ways of blocks; False: of the config's alone.

    Raises UserError for a model that computes by the values of tensors, which shapes do not tell.
    """
    memory = config.memory
    policies = {name: way for name, way in memory.activation_policy.items() if way != "save"}
    given = None if options else cast(ActivationPolicies, policies)
    with outlined_step(config, task, step) as outline:
        swap = FakeOffloader(Device("cpu", 0), parse_bytes(memory.offload_from))
        gauge = FakeTensorProfiler(speeds.flops, speeds.memory)
        pipeline = Pipeline.of(config.parallel)
        waiting = let_weights_wait(outline.model) if pipeline.weights_wait else None
        bench = BlockProfiler(
            gauge,
            swap,
            with_swap,
            memory.exchange_again,
            most=FEW_OPTIONS,
            swap_seconds=speeds.swap_seconds,
            given=given,
            greatest=list,  # shapes are the same on all processes
            stay=pipeline.ranks > 1 and not _gathers_half(config),
            waiting=waiting,
            filled=outline.sent if pipeline.carries else None,
        )
        figures = step_figures(
            bench,
            outline.model,
            outline.batch,
            outline.loss,
            outline.kinds,
            [[place] for place in outline.places],
            memory=memory,
            average=config.train.ema_decay is not None,
            optimizer=config.train.optimizer,
            by_lists=by_lists(config.train.optimizer, _kind(config)),
            gradients_stay=step.accumulates or config.parallel.strategy == "ddp",
            keep_last=memory.keep_last and options,
        )
    outlined = [sum_of(weights_of(module) for module in spread_modules(block)) for _, block in blocks_of(outline.model)]
    experts = [outlined[place] for place in outline.places]
    return replace(figures, head_widths=gauge.head_widths, experts=tuple(experts[kind] for kind in outline.kinds))


@dataclass(frozen=True)
class OutlinedStep:
    """A step of one micro-batch on fake tensors, by a model that has one block of each kind and the experts of one process.

    kinds: the kind of each block of the whole model. places: of each kind, the place of its block in `model`. sent: what it sends to
    experts of other processes.
    """

    model: nn.Module
    batch: Callable[[], Any]
    loss: Callable[[Any], Tensor]
    kinds: tuple[int, ...]
    places: tuple[int, ...]
    sent: Ledger


@contextmanager
def outlined_step(config: RunConfig, task: Task, step: MicroBatchSize) -> Iterator[OutlinedStep]:
    """A step of a config's model, on fake tensors inside. Raises UserError for what shapes do not tell."""
    memory, role = config.memory, task.updates()[0].role
    bare = task.build()[role]
    model = learning_model(task, {role: bare})
    kinds, members = kinds_of([key_of(block) for _, block in blocks_of(model)])
    wanted = sorted({blocks[0] for blocks in members} | set(single_blocks(bare)))
    keep_blocks(bare, wanted)
    sent = outline_experts(bare, config.parallel)
    if memory.mlp_chunk is not None:
        for _, block in blocks_of(bare):
            set_chunks(block, memory.mlp_chunk)
    task.domain.shapes()
    batch, loss = task.sketch(bare, step.shape, step.items)  # before FakeTensorMode, since it reads values of tensors
    with _without_values(bare, config):
        yield OutlinedStep(model, batch, loss, kinds, tuple(wanted.index(blocks[0]) for blocks in members), sent)


def sum_of(weights: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """The sum of pairs as of `weights_of`."""
    numbers, frozen = map(sum, zip((0, 0), *weights, strict=True))
    return numbers, frozen


@contextmanager
def _without_values(bare: nn.Module, config: RunConfig) -> Iterator[torch.dtype]:
    """Have shapes alone inside, and a model computed in the config's number types; yields that of its products."""
    if config.memory.master != "parameters" or _gathers_half(config):
        make_half(bare)
    with FakeTensorMode(), _shapes_alone():
        without_values(bare)
        dtype = parse_dtype(config.device.dtype)
        if dtype != torch.float32:
            autocast(bare, dtype)
        yield dtype


@contextmanager
def _shapes_alone() -> Iterator[None]:
    """Raise UserError for a computation inside that fake tensors do not take, such as one that asks for values."""
    logger = logging.getLogger(FakeTensorMode.__module__)
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # it prints tracebacks
    try:
        yield
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"the model computes what shapes alone do not tell ({reason})") from error
    finally:
        logger.setLevel(level)


def _kind(config: RunConfig) -> str:
    """The kind of device that a config asks for; `auto`: of the one that is here."""
    return pick("auto").kind if config.device.kind == "auto" else config.device.kind


def spread(figures: StepFigures, config: RunConfig, world: int) -> StepFigures:
    """The figures of one of `world` devices, by division: activations over devices that compute a video together, weights over shards.

    Experts of one process are sharded, and gathered, over the devices that hold the same ones.
    """
    parallel, memory = config.parallel, config.memory
    engine = world > 1 or (Pipeline.of(parallel).ranks > 1 and (is_cast(config) or config.host_base))
    sharded = parallel.strategy == "fsdp" or (parallel.strategy == "auto" and engine)
    shards = (
        max(1, world // parallel.replicas) if sharded else 1
    )  # over the devices of a video too; tensor-parallel parts are parts of shards
    group, same = parallel.group, max(1, shards // parallel.expert_devices)
    if group == shards == 1 and not (figures.flights and sharded):
        return _swapped(figures) if config.host_base else figures

    def part(count: float, parts: int) -> int:
        return -int(-count // parts)

    def held(count: float, of_experts: int) -> int:
        return part(count - of_experts, shards) + part(of_experts, same)

    def whole(count: int, of_experts: int) -> int:
        return part(count - of_experts, parallel.together(split=False)) + part(of_experts, parallel.expert_devices)

    def option(one: Option) -> Option:
        kept_, forward, backward, host = (part(n, group) for n in (one.kept, one.forward, one.backward, one.host))
        return Option(kept_, forward, backward, host, one.seconds / group, one.ways, part(one.waits, group))

    numbers = figures.static.parameters // (4 if memory.master == "parameters" else 2)
    experts = figures.experts or ((0, 0),) * len(figures.kinds)
    of_experts, frozen_experts = sum_of(experts)
    static = static_bytes(
        held(numbers, of_experts),
        memory,
        average=figures.static.average > 0,
        optimizer=config.train.optimizer,
        frozen=held(figures.static.frozen, frozen_experts),
    )
    if not (memory.tiered or by_lists(config.train.optimizer, _kind(config))):
        static = replace(static, update=part(figures.static.update, same if of_experts else shards))
    blocks = list(zip(figures.gradients, figures.frozen, experts, strict=True))
    gathered = 0
    if sharded:  # the weights of the block that computes, and of the next one
        width = parse_dtype(config.device.dtype).itemsize
        gathered = 2 * max(own // 4 - trained for own, _, (trained, _) in blocks) * width // parallel.together(False)
        gathered += 2 * max(trained for trained, _ in experts) * width
        gathered += 2 * max(figures.frozen)  # never more bytes than they are kept in
    gradients = [held(own, 4 * trained) for own, _, (trained, _) in blocks]
    sums: list[int] = []
    if figures.flights:  # of a pipeline's rank: what is outside of blocks is gathered for each call, and gradients are whole until the last one
        width = parse_dtype(config.device.dtype).itemsize
        whole_blocks = [whole(own // 4, trained) * width + whole(kept, fixed) for own, kept, (trained, fixed) in blocks]
        if Pipeline.of(parallel).overlaps:  # neither pass frees the weights that the other one uses
            gathered, freed = sum(own // 4 for own in figures.gradients) * width, [0] * len(blocks)
        elif gathers_again(config):
            gathered //= 2 if shards == 1 else 1  # the next block is not fetched before
            freed = [gathered] * len(blocks)
        else:  # those of one stage stay
            gathered, freed = max(sum(whole_blocks[at] for at in flight.at) for flight in figures.flights), whole_blocks
            if shards > 1 and Pipeline.of(parallel).virtual > 1:  # and as it arrives, a block of the stage that follows
                gathered += max(whole_blocks)
        gathered += (numbers - sum(own // 4 for own in figures.gradients)) * width
        parts, gradients = gradients, [whole(own, 4 * trained) for own, _, (trained, _) in blocks]
        sums = [own + shard - less for own, shard, less in zip(gradients, parts, freed, strict=True)]
        static = replace(static, gradients=4 * whole(numbers, of_experts))
    spread_ = replace(
        figures,
        static=static,
        ends=part(figures.ends, group) + gathered,
        tail=part(figures.tail, group),
        carried=part(figures.carried, group),
        options=tuple(tuple(map(option, options)) for options in figures.options),
        gradients=tuple(gradients),
        sums=tuple(sums),
        fresh=tuple(map(min, figures.fresh, gradients)),
        frozen=tuple(held(own, frozen) for _, own, (_, frozen) in blocks),
        plain_seconds=tuple(seconds / group for seconds in figures.plain_seconds),
        flights=tuple(replace(flight, beside=part(flight.beside, group)) for flight in figures.flights),
    )
    return _swapped(spread_, gathered > 0) if config.host_base else spread_


def _swapped(figures: StepFigures, gathered: bool = False) -> StepFigures:
    """The figures with the frozen weights of blocks on the host: the device has those of two blocks, which may be counted as `gathered`."""
    ends = figures.ends + (0 if gathered else 2 * max(figures.frozen))
    return replace(figures.with_host_base(), ends=ends)


def _empty(parameter: nn.Parameter) -> nn.Parameter:
    """A parameter like another, on the CPU."""
    return nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype), requires_grad=parameter.requires_grad)


def without_values(model: nn.Module) -> None:
    """Move a model from the meta device to the CPU, in place, inside of a `FakeTensorMode`, where it takes no memory."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            module.register_parameter(name, _empty(parameter))
        for name, buffer in module.named_buffers(recurse=False):
            saved = name not in module._non_persistent_buffers_set
            module.register_buffer(name, torch.empty(buffer.shape, dtype=buffer.dtype), persistent=saved)


class FakeOffloader(Offloader):
    """An offloader of fake tensors. It copies nothing; bytes are counted as for real tensors."""

    def group(self) -> OffloadGroup:
        return _FakeOffloadGroup(self)

    def stays(self, tensor: Tensor) -> bool:
        root: Any = tensor if (base := base_of(tensor)) is None else base
        if any(isinstance(each, nn.Parameter) or (each.is_leaf and each.requires_grad) for each in (tensor, root)):
            return True
        return tensor.numel() == 0 or _reach(tensor) < self.from_bytes


def _reach(tensor: Tensor) -> int:
    """Bytes of memory from the first to the last one of a tensor."""
    start, end = StorageView.of(tensor).reach()
    return end - start


def _cast_of(tensor: Tensor) -> Tensor | None:
    """The parameter that autocast made `tensor` of, like `looks.cast_of_parameter`, which supports torch's own tensors only."""
    copy: Tensor = tensor if (base := base_of(tensor)) is None else base
    if copy.grad_fn is None or copy.grad_fn.name() != "ToCopyBackward0":
        return None
    source = getattr(copy.grad_fn.next_functions[0][0], "variable", None)
    return source if isinstance(source, nn.Parameter) and source.shape == copy.shape else None


class _FakeOffloadedStorage:
    """A storage, or a part of it, in the host's memory."""

    def __init__(self, swap: FakeOffloader, nbytes: int) -> None:
        self.swap, self.nbytes = swap, nbytes
        swap.pool.used += nbytes
        self._here: Any = None

    def load(self) -> Tensor:
        """The bytes on the device; those of an earlier load while they are in use."""
        here = None if self._here is None else self._here()
        if here is None:
            here = torch.empty(self.nbytes, dtype=torch.uint8)
            self._here = weakref.ref(here)
        return here

    def __del__(self) -> None:
        self.swap.pool.used -= self.nbytes


class _FakeOffloadedTensor:
    """A stored tensor, which holds its memory from its return until it is used."""

    def __init__(self, group: _FakeOffloadGroup, part: _FakeOffloadedStorage) -> None:
        self.group, self.part = group, part
        self.arrival: Tensor | None = None

    def take(self) -> Tensor:
        self.group.fetch()
        arrival, self.arrival = self.arrival, None
        return self.part.load() if arrival is None else arrival


class _FakeOffloadGroup:
    def __init__(self, swap: FakeOffloader) -> None:
        self.swap = swap
        self.parts: dict[tuple[int, int, int], tuple[StorageWeakRef, _FakeOffloadedStorage]] = {}
        self.held: list[weakref.ref[_FakeOffloadedTensor]] = []

    def store(self, tensor: Tensor) -> Callable[[], Tensor]:
        source = _cast_of(tensor)
        if self.swap.stays(tensor):
            return guarded(tensor)
        look, storage = StorageView.of(tensor), tensor.untyped_storage()
        if source is not None:
            return lambda: source.detach().to(look.dtype).as_strided(look.shape, look.strides)
        start, end = part_of_storage(look, storage.nbytes())
        weak = StorageWeakRef(storage)  # while it exists, its address is not used again
        _, part = self.parts.setdefault((weak.cdata, start, end), (weak, _FakeOffloadedStorage(self.swap, end - start)))
        stored = _FakeOffloadedTensor(self, part)
        self.held.append(weakref.ref(stored))

        def give() -> Tensor:
            memory_Z = stored.take()
            usable = memory_Z.numel() // look.dtype.itemsize * look.dtype.itemsize
            offset = (look.offset - start) // look.dtype.itemsize
            return memory_Z[:usable].view(look.dtype).as_strided(look.shape, look.strides, offset)

        return give

    def close(self) -> None:
        self.parts.clear()

    def fetch(self) -> None:
        """Load all stored tensors of the group, with the first one that is used."""
        waiting, self.held = self.held, []
        for weak in waiting:
            stored = weak()
            if stored is not None:
                stored.arrival = stored.part.load()

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        return torch.autograd.graph.saved_tensors_hooks(self.store, lambda give: give())
