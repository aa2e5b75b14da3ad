"""The memory of the ranks of a pipeline: what their stages hold beside blocks, and the micro-batches and messages that wait there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mmspeed.config import RunConfig
from mmspeed.memory.planning.knapsack import Option
from mmspeed.memory.planning.measure import Profiler
from mmspeed.memory.planning.options import Flight, StepFigures, static_bytes
from mmspeed.parallel.stages import HandedOver, Passing, StageBlock, Stages, StandIn
from mmspeed.pipelines.tasks import Task
from mmspeed.pipelines.tuning.blocks import other_blocks
from mmspeed.pipelines.tuning.memory_measure import NextLayer, emptied, weights_of
from mmspeed.plan.schedules import Pipeline
from mmspeed.protocols import blocks_of
from mmspeed.torch_internals import with_receipts


@dataclass(frozen=True)
class StageEnds:
    """Bytes of a micro-batch in a stage beside its blocks. kept: from its forward to its backward. tail: above them at the peak."""

    kept: int
    tail: int


@dataclass(frozen=True)
class RankEnds:
    """A rank's stages beside their blocks: what they hold, and the bytes of a micro-batch and of a message between stages.

    stages: by the numbers of the rank's stages. numbers, frozen: of weights outside of blocks, as `weights_of`. fresh: bytes of the largest
    gradient of every block of the model.
    """

    stages: dict[int, StageEnds]
    numbers: int
    frozen: int
    batch: int
    message: int
    fresh: tuple[int, ...] = ()


def rank_ends(
    model: nn.Module, stages: Stages, make: Callable[[], Any], loss: Callable[[Any], Tensor], gauge: Profiler
) -> RankEnds:
    """The ends of a rank's stages; `model` is cut into them. Blocks do not run here."""
    made: list[Any] = []
    of_batch, _ = gauge.section(lambda: made.append(make()))
    like = stages.shapes(1, lambda: loss(made[0]))
    message = sum(tensor.nbytes for tensor in like)
    numbers, frozen = weights_of(model)
    for _, block in blocks_of(model):
        of_block = weights_of(block)
        numbers, frozen = numbers - of_block[0], frozen - of_block[1]
    last = stages.count - 1
    found: dict[int, StageEnds] = {}
    with other_blocks(model, _stand_in):
        for stage in stages.own:
            between = next((one for one in found if one not in (0, last)), None)
            if between is not None and stage != last:  # as another one between the first and the last
                found[stage] = found[between]
                continue
            bounds = stages.bounds[stage]
            place = bounds.stop if stage == last else bounds.start
            come = [torch.empty_like(each).requires_grad_() for each in like] if stage else []
            kept, tail = _measured(model, stages, range(place, place), come, make, loss, gauge)
            found[stage] = StageEnds(kept + (message if stage != last else 0), tail)
    return RankEnds(found, numbers, frozen, of_batch, message)


def _stand_in(block: nn.Module) -> nn.Module:
    assert isinstance(block, StageBlock)
    return StandIn(block._stages, block._place)


def _measured(
    model: nn.Module,
    stages: Stages,
    place: range,
    come: list[Tensor],
    make: Callable[[], Any],
    loss: Callable[[Any], Tensor],
    gauge: Profiler,
) -> tuple[int, int]:
    """(bytes kept, bytes above them at the peak) of a call without blocks, with what blocks get from outside of them."""
    left: list[Tensor] = []
    given: list[Tensor] = []  # to blocks, beside what travels

    def take(block: StandIn, args: Any, kwargs: Any) -> None:
        assert block._place is not None
        named = dict(zip(block._place.arguments, args, strict=False)) | kwargs
        others = [value for name, value in named.items() if name not in stages.carries.arguments]
        given[:] = [value for value in others if isinstance(value, Tensor) and value.requires_grad]

    def forward() -> None:
        try:
            with stages.call(Passing(place, come)):
                out: Any = (loss(make()),)
        except HandedOver as over:
            out = over.tensors
        left.extend(NextLayer.apply(each) for each in (*out, *given) if each.requires_grad)

    blocks = [block for block in model.modules() if isinstance(block, StandIn) and block._place is not None]
    handles = [block.register_forward_pre_hook(take, with_kwargs=True) for block in blocks]
    try:
        for _ in range(2):  # the second one adds to gradients
            kept, peak = gauge.section(forward)
            _, backward = gauge.section(lambda: torch.autograd.backward(list(emptied(left))))
            given.clear()
    finally:
        for handle in handles:
            handle.remove()
    model.zero_grad(set_to_none=True)
    return kept, max(0, peak - kept, backward)


def flights(
    pipeline: Pipeline, batches: int, rank: int, blocks: dict[int, range], ends: RankEnds, exchanges: bool = False
) -> tuple[Flight, ...]:
    """The times of a rank's step at which its memory may be at its peak. blocks: the places of each stage's blocks among the rank's.

    exchanges: stages exchange within themselves, so that the passes of a pair take turns.
    """
    later = dict.fromkeys(blocks, 0)  # micro-batches whose gradients of weights wait
    ahead = range(0)
    flying, waiting, held, read = dict.fromkeys(blocks, 0), set[tuple[str, int, int]](), dict[int, int](), 0
    sent: set[int] = set()  # stages whose last gradient is kept until the next one goes
    behind = dict.fromkeys(blocks, 0)  # backward passes of each stage
    found: dict[Flight, None] = {}

    def look(number: int) -> None:
        nonlocal read
        held.update((each, len(blocks)) for each in range(read, number + 1))
        read = max(read, number + 1)

    def note(kind: str, stage: int, taken: int = 0) -> None:
        beside = (len(held) - taken) * ends.batch + (len(waiting) + len(sent)) * ends.message
        each, wait = (tuple(of[own] for own, places in blocks.items() for _ in places) for of in (flying, later))
        made = tuple(
            behind[own] > (own == stage and kind in ("backward", "weight"))
            for own, places in blocks.items()
            for _ in places
        )
        found[Flight(each, blocks[stage], beside, behind[stage] == batches, kind, ahead, wait, made)] = None

    rows = list(_rows(pipeline, batches)[rank])
    pairs = [entry.parts for entry in pipeline.table(batches)[rank] if len(entry.parts) > 1]
    firsts = {("forward", parts[0].stage, parts[0].batch) for parts in pairs}
    if not exchanges:  # the backward pass of a pair goes first, and nothing stops it
        for place in [place for place, row in enumerate(rows) if row in firsts]:
            rows[place], rows[place + 1] = rows[place + 1], rows[place]
    for kind, stage, batch in rows:
        if kind.startswith("receive"):
            look(batch)
            waiting.add((kind, stage, batch))
        elif kind == "forward":
            look(batch)
            waiting.discard(("receive_input", stage, batch))
            flying[stage] += 1
            if exchanges and (kind, stage, batch) in firsts:
                ahead = blocks[stage]
            else:
                note(kind, stage, taken=1)
            held[batch] -= 1
            if not held[batch]:
                del held[batch]
        else:
            behind[stage] += kind != "input"
            note(kind, stage)
            ahead = range(0)
            waiting.discard(("receive_gradient", stage, batch))
            sent |= {stage} if stage and kind != "weight" else set()
            flying[stage] -= kind != "weight"
            later[stage] += {"input": 1, "backward": 0, "weight": -1}[kind]
    return tuple(found)


@cache
def _rows(pipeline: Pipeline, batches: int) -> list[list[tuple[str, int, int]]]:
    return with_receipts(pipeline.table(batches), pipeline.rank_of, pipeline.stages)


def rank_figures(
    figures: StepFigures,
    config: RunConfig,
    rank: int,
    pipeline: Pipeline,
    bounds: Sequence[range],
    ends: RankEnds,
    batches: int,
) -> StepFigures:
    """The figures of one rank that computes its stages alone; `figures`: of the whole model. Blocks keep what their stage keeps too."""
    own = pipeline.own(rank)
    numbered = [place for stage in own for place in bounds[stage]]
    places: dict[int, range] = {}
    options: list[tuple[Option, ...]] = [figures.options[figures.kinds[place]] for place in numbered]
    for stage in own:
        start = sum(map(len, places.values()))
        places[stage] = range(start, start + len(bounds[stage]))
        of, busy = ends.stages[stage], places[stage][-1 if stage == pipeline.stages - 1 else 0]
        options[start] = tuple(replace(one, kept=one.kept + of.kept) for one in options[start])
        options[busy] = tuple(
            replace(one, forward=max(one.forward, of.tail), backward=max(one.backward, of.tail))
            for one in options[busy]
        )
    pick = partial(_picked, numbered)
    gradients, frozen = pick(figures.gradients), pick(figures.frozen)
    memory = config.memory
    static = static_bytes(
        ends.numbers + sum(gradients) // 4,
        memory,
        average=figures.static.average > 0,
        optimizer=config.train.optimizer,
        frozen=ends.frozen + sum(frozen),
    )
    return replace(
        figures,
        static=replace(static, update=min(static.update, figures.static.update)),
        ends=0,
        tail=0,
        kinds=tuple(range(len(numbered))),
        options=tuple(options),
        gradients=gradients,
        frozen=frozen,
        experts=pick(figures.experts),
        plain_seconds=tuple(figures.plain_seconds[figures.kinds[place]] for place in numbered),
        gradients_stay=batches > 1 or pipeline.weights_wait,
        fresh=pick(ends.fresh),
        flights=flights(pipeline, batches, rank, places, ends, config.parallel.exchanges),
        weights_wait=pipeline.weights_wait,
        fills=pipeline.carries,
    )


def _picked(places: list[int], values: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(values[place] for place in places) if values else ()


def stage_of(config: RunConfig) -> int:
    """The place of this process in its pipeline: processes with the same stages have consecutive numbers."""
    return dist.get_rank() * Pipeline.of(config.parallel).ranks // dist.get_world_size()


def own_blocks(config: RunConfig, task: Task) -> list[int]:
    """The numbers of the blocks that this process has, among all of the model."""
    model = task.build()[task.updates()[0].role]
    stages = task.cut(model, config.parallel, None, stage_of(config))
    return [place for stage in stages.own for place in stages.bounds[stage]]
