"""Pipeline stages of a model: which blocks a process computes, what travels between stages, and what each stage computes for itself.

A process keeps the blocks of its own stages, under their own names; a stand-in takes the place of every other one. A call of the model is
made for one stage: blocks before it pass by, the block right before it gives what has come, and the block behind it ends the call. So a
model needs no change. Modules outside of blocks run in each stage; those behind the last block (`ModelPlan.after`) in the last one alone.
"""

from __future__ import annotations

import inspect
from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mmspeed.comm import Axis, broadcast_object, nbytes
from mmspeed.errors import UserError
from mmspeed.mixin import mix_in
from mmspeed.plan.schedules import Pipeline, check_stages, stage_bounds
from mmspeed.protocols.plan import ModelPlan, base_of_adapters, declare_plan, is_within, kept_plan, plan_of

from .boundaries.boundary import BetweenStages


class HandedOver(BaseException):  # noqa: N818 -- no error: nothing between here and the runner may take it
    """Ends a call of a model behind its stage. `tensors`: what goes to the next one."""

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.tensors = tensors


@dataclass(frozen=True)
class Carries:
    """What travels from a block to the next one.

    arguments: the names of a block's arguments that the next block gets from this one's output, in their order.
    further: blocks return one more output. summed: it is summed over blocks: the block's argument, and its dim, that give its length (1
    without it); None: it does not travel.
    """

    arguments: tuple[str, ...]
    further: bool
    summed: tuple[str, int] | None

    def output(self, values: Sequence[Tensor], summed: Tensor | None = None) -> Any:
        """The values as a block returns them."""
        if self.further:
            return (*values, summed)
        return values[0] if len(values) == 1 else tuple(values)


@dataclass(frozen=True)
class BlockPlace:
    """A block's number among all of the model, and the names of its forward's arguments."""

    number: int
    arguments: tuple[str, ...]

    @classmethod
    def of(cls, number: int, block: nn.Module) -> BlockPlace:
        """The place of a block."""
        names = inspect.signature(type(block).forward).parameters
        return cls(number, tuple(name for name in names if name != "self"))


@dataclass
class Passing:
    """A call of a model for one stage. blocks: those of it. come: what the stage before gave; None: only its shapes are asked for."""

    blocks: range
    come: Sequence[Tensor] | None = ()
    sums: list[Tensor] = field(default_factory=list)
    ended: bool = False


class Stages:
    """The stages of one model on one process.

    own: their numbers. bounds: the blocks of every stage. group: of the processes with the other stages. everywhere: the names of
    parameters that every stage holds.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        bounds: Sequence[range],
        carries: Carries,
        group: dist.ProcessGroup | None,
        rank: int | None = None,
    ) -> None:
        self.pipeline, self.bounds, self.carries, self.group = pipeline, tuple(bounds), carries, group
        self.own = tuple(pipeline.own(dist.get_rank(group) if rank is None else rank))
        self.everywhere: tuple[str, ...] = ()
        self.tokens: BetweenStages | None = None  # of a model whose tokens several processes share
        self.axis = Axis.alone("pp")  # of these processes; its ledger counts all exchanges
        self.gathers_again = False  # each pass gathers the shards of weights, block by block
        self.passing: Passing | None = None

    def __deepcopy__(self, memo: Any) -> Stages:
        return self

    @property
    def count(self) -> int:
        """All stages of the model."""
        return len(self.bounds)

    def count_sent(self, what: str, to: int, tensors: Sequence[Tensor]) -> None:
        """Count a message to a stage in the ledger."""
        size, place = sum(map(nbytes, tensors)), self.pipeline.rank_of(to)
        self.axis.count(what, [size if other == place else 0 for other in range(self.axis.size)])

    @contextmanager
    def call(self, passing: Passing) -> Iterator[None]:
        """Calls of the model inside are for a stage."""
        self.passing = passing
        try:
            yield
        finally:
            self.passing = None

    def shapes(self, stage: int, call: Callable[[], Any]) -> list[Tensor]:
        """Tensors like those that come to a stage for a micro-batch, without values; `call`: the call of the model."""
        passing = Passing(self.bounds[stage], None)
        with self.call(passing), torch.no_grad():
            try:
                call()
            except HandedOver as over:
                return list(over.tensors)
        raise RuntimeError("the model made no call of its first block")

    def run_stage(self, stage: int, come: Sequence[Tensor], call: Callable[[], Any]) -> Any:
        """What a stage hands over, a tuple; of the last stage what `call` returns."""
        with self.call(Passing(self.bounds[stage], come)):
            try:
                return call()
            except HandedOver as over:
                return over.tensors

    def through(self, call: Callable[[], Any]) -> Any:
        """What the last stage returns, on every process: a call through all stages, one after another, without gradients."""
        if torch.is_grad_enabled():
            raise RuntimeError("a model in stages is trained by its runner alone")
        rank_of = self.pipeline.rank_of
        tensors: Sequence[Tensor] = ()
        result: Any = None
        for stage in self.own:
            if stage and stage - 1 not in self.own:
                tensors = [
                    torch.empty_like(each, memory_format=torch.contiguous_format) for each in self.shapes(stage, call)
                ]
                for tensor in tensors:
                    dist.recv(tensor, group=self.group, group_src=rank_of(stage - 1))
            result = tensors = self.run_stage(stage, tensors, call)
            if stage + 1 < self.count and stage + 1 not in self.own:
                self.count_sent("activations", stage + 1, tensors)
                for tensor in tensors:
                    dist.send(tensor, group=self.group, group_dst=rank_of(stage + 1))
        last, parts = rank_of(self.count - 1), list[Tensor]()
        ends = self.count - 1 in self.own
        form = broadcast_object(_form(result, parts) if ends else None, last, self.group)
        if ends:
            parts = [part.contiguous() for part in parts]
        else:
            parts = [torch.empty(shape, dtype=dtype, device=tensors[0].device) for shape, dtype in _tensors_of(form)]
        for part in parts:
            dist.broadcast(part, group=self.group, group_src=last)
        return result if ends else _output(form, iter(parts))

    def at_block(
        self, at: BlockPlace, args: Sequence[Any], kwargs: dict[str, Any], compute: Callable[..., Any] | None
    ) -> Any:
        """Compute a block, pass it by, or end the call. compute: None for a block of another process."""
        passing, place = self.passing, at.number
        if passing is None:
            raise RuntimeError("a model in stages is called by its runner alone")
        if place == 0 and self.tokens is not None:
            args, kwargs = self.tokens.enter(at.arguments, tuple(args), kwargs)
        given = dict(zip(at.arguments, args, strict=False)) | kwargs
        values = [given[name] for name in self.carries.arguments]
        if passing.come is None:
            passing.ended = True
            if self.tokens is not None:
                named = zip(self.carries.arguments, values, strict=True)
                values = [self.tokens.left_by(passing.blocks.start - 1, name, value) for name, value in named]
            raise HandedOver((*values, *self._sum_like(values[0], given)))
        if place >= passing.blocks.stop:
            passing.ended = True
            sums = self._sum_like(values[0], given)
            if sums and passing.sums:
                sums = [torch.stack(passing.sums).sum(0)]
            raise HandedOver((*(value.contiguous() for value in values), *sums))
        if place == passing.blocks.start - 1:
            travelled = len(self.carries.arguments)
            passing.sums.extend(passing.come[travelled:])
            return self.carries.output(passing.come[:travelled], *passing.come[travelled:])
        if place < passing.blocks.start:
            return self.carries.output(values)
        assert compute is not None
        out = compute(*args, **kwargs)
        if self.carries.summed is not None and out[-1] is not None:
            passing.sums.append(out[-1])
        return out

    def _sum_like(self, x: Tensor, given: dict[str, Any]) -> list[Tensor]:
        """A sum of nothing, where a sum travels."""
        if self.carries.summed is None:
            return []
        name, dim = self.carries.summed
        size = given.get(name)
        length = 1 if size is None else size.shape[dim]
        return [torch.zeros(length, device=x.device, dtype=torch.float32, requires_grad=torch.is_grad_enabled())]


class StageBlock(nn.Module):
    """Mixed in before a block of this process."""

    _stages: Stages
    _place: BlockPlace

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._stages.at_block(self._place, args, kwargs, super().__call__)


class StandIn(nn.Module):
    """In the place of a module of another process."""

    def __init__(self, stages: Stages, place: BlockPlace | None) -> None:
        super().__init__()
        self._stages, self._place = stages, place

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._place is None:
            raise RuntimeError("a module behind the last block was called in another stage than the last")
        return self._stages.at_block(self._place, args, kwargs, None)


class StageModel(nn.Module):
    """Mixed in around a model in stages: a call that ends behind its stage returns what goes on, so that engines see an end of the call."""

    _stages: Stages

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        forward = super().forward
        if self._stages.passing is None:
            return self._stages.through(lambda: forward(*args, **kwargs))
        try:
            return forward(*args, **kwargs)
        except HandedOver as over:
            return over.tensors


def end_calls_at_stages(model: nn.Module, stages: Stages) -> None:
    """Let calls of a model end with their stage; after everything else is done to it, so that engines see a call that returns."""

    def end(module: nn.Module, args: Any, output: Any) -> None:
        if stages.passing is not None and stages.passing.ended:
            raise HandedOver(output)

    model.register_forward_hook(end)


DTYPES = {
    str(dtype): dtype
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool)
}


def _form(output: Any, parts: list[Tensor]) -> Any:
    """An output in JSON, without its tensors, which are added to `parts`."""
    if isinstance(output, Tensor):
        parts.append(output)
        return {"tensor": [list(output.shape), str(output.dtype)]}
    if isinstance(output, Mapping) or (isinstance(output, tuple) and hasattr(output, "_fields")):
        named = output.items() if isinstance(output, Mapping) else zip(output._fields, output, strict=True)
        return {"named": [[name, _form(value, parts)] for name, value in named]}
    if isinstance(output, tuple | list):
        return {"list": [_form(value, parts) for value in output]}
    return {"value": output}


def _tensors_of(form: Any) -> Iterator[tuple[list[int], torch.dtype]]:
    """The shape and number type of each tensor of an output, in the order of `_form`."""
    if "tensor" in form:
        shape, dtype = form["tensor"]
        yield shape, DTYPES[dtype]
    for value in form.get("list", ()):
        yield from _tensors_of(value)
    for _, value in form.get("named", ()):
        yield from _tensors_of(value)


def _output(form: Any, parts: Iterator[Tensor]) -> Any:
    """An output by its form; names become those of a named tuple."""
    if "tensor" in form:
        return next(parts)
    if "list" in form:
        return tuple(_output(value, parts) for value in form["list"])
    if "named" in form:
        names = [name for name, _ in form["named"]]
        return namedtuple("Output", names)(*(_output(value, parts) for _, value in form["named"]))  # type: ignore[misc]
    return form["value"]


def stages_of(model: nn.Module) -> Stages | None:
    """The stages of a model; None for a whole one."""
    return vars(model).get("_stages")


def cut_into_stages(
    model: nn.Module, group: dist.ProcessGroup | None, pipeline: Pipeline, rank: int | None = None
) -> Stages:
    """Leave a process the blocks of its stages, in place; before anything else is done to the model.

    rank: the place in `pipeline` of a process that is not there, whose memory is estimated; None: this one's in `group`.

    Raises UserError for a model without a plan that says what travels, and for more stages than blocks.
    """
    plan = plan_of(model)
    if plan is None or not plan.carried:
        raise UserError(
            f"parallel.pp: the plan of {type(model).__name__} does not say what travels between blocks (carried)"
        )
    units = _units(plan)
    check_stages(len(units), pipeline)
    parts = stage_bounds(len(units), pipeline.stages)
    bounds = [range(units[part.start].start, units[part.stop - 1].stop) for part in parts]
    stages = Stages(pipeline, bounds, Carries(plan.carried, plan.further, plan.summed), group, rank)
    held = {place for stage in stages.own for place in bounds[stage]}
    last = len(bounds) - 1 in stages.own
    behind = (*plan.after, *_around_blocks(model, plan))
    others = [block.name for place, block in enumerate(plan.blocks) if place not in held]
    kept = kept_plan(model, plan, others if last else (*others, *behind))
    for place, block in enumerate(plan.blocks):
        module = model.get_submodule(block.name)
        at = BlockPlace.of(place, base_of_adapters(module))
        if place in held:
            held_block = mix_in(module, StageBlock, rename=False)
            held_block._stages, held_block._place = stages, at
        else:
            _put(model, block.name, StandIn(stages, at))
    for name in () if last else behind:
        _put(model, name, StandIn(stages, None))
    declare_plan(model, kept)
    apart = (*(block.name for block in plan.blocks), *behind)
    stages.everywhere = tuple(name for name, _ in model.named_parameters() if not is_within(name, apart))
    vars(model)["_stages"] = stages
    return stages


def everywhere(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters that every stage of a model holds, by name; none of a whole model."""
    stages = stages_of(model)
    named = {} if stages is None else dict(model.named_parameters())
    return [] if stages is None else [(name, named[name]) for name in stages.everywhere]


def _units(plan: ModelPlan) -> list[range]:
    """The blocks between which a model may be cut, in runs."""
    cuts = None if plan.cuts is None else set(plan.cuts)
    begins = [place for place, block in enumerate(plan.blocks) if place == 0 or cuts is None or block.name in cuts]
    return [range(begin, end) for begin, end in zip(begins, [*begins[1:], len(plan.blocks)], strict=True)]


def _around_blocks(model: nn.Module, plan: ModelPlan) -> list[str]:
    """The modules that hold blocks and compute themselves, such as those that predict further tokens behind the last block."""
    parents = dict.fromkeys(block.name.rpartition(".")[0] for block in plan.blocks)
    lists = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
    return [name for name in parents if name and not isinstance(model.get_submodule(name), lists)]


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    model.get_submodule(parent).register_module(child, module)
