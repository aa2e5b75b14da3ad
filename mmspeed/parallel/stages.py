"""Pipeline stages of a model: which blocks a process computes, what travels between stages, and what each stage computes for itself.

A process keeps the blocks of its own stages, under their own names; a stand-in takes the place of every other one. A call of the model is
made for one stage: blocks before it pass by, the block right before it gives what has come, and the block behind it ends the call. So a
model needs no change. Modules outside of blocks run in each stage; those behind the last block (`ModelPlan.after`) in the last one alone,
and those that embed (`ModelPlan.embeds`) in the first: in others they give zeros of the right shapes, without weights.
"""

from __future__ import annotations

import inspect
from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mmspeed.comm import Axis, broadcast_object, nbytes
from mmspeed.errors import UserError
from mmspeed.mixin import mix_in
from mmspeed.plan.schedules import Pipeline, check_stages, given_bounds, stage_bounds
from mmspeed.protocols import BlockWork, stays_float32
from mmspeed.protocols.plan import ModelPlan, Split, base_of_adapters, declare_plan, is_within, kept_plan, plan_of
from mmspeed.torch_internals import FakeTensorMode, is_fake, tree_flatten, tree_map_only

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

    own: their numbers. bounds: the blocks of every stage. numbers: those of all stages' parameters, and of them those that train. group: of
    the processes with the other stages. shared: names of parameters that other stages hold too, the first one among them, with the two
    ranks that do; None: all. outlines: modules that others hold.
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
        self.numbers = (0, 0)
        self.shared: list[tuple[tuple[int, int] | None, tuple[str, ...]]] = []
        self.outlines: list[Outline] = []
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

    def type_outlines(self, dtype: torch.dtype) -> None:
        """Tell modules that other stages hold the number type in which weights are gathered there."""
        for outline in self.outlines:
            outline.set_type(dtype)

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


PLAIN = (int, float, str, torch.dtype, type(None))  # arguments that are no tensors, by which shapes may differ
MOST_KNOWN = 1024  # shapes that an outline remembers


class Outline(nn.Module):
    """Mixed in before a module that another process holds: without memory, what it gives are zeros of the same shapes and number types.

    Its weights are no parameters, and lie on the meta device.
    """

    _weights: list[tuple[nn.Module, str, bool]]  # (module, name, True for a parameter)
    _known: dict[Any, Any]  # what it gives, by what it gets: tensors without values count by their shapes alone

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        leaves, form = tree_flatten((args, kwargs))
        tensors = [each for each in leaves if isinstance(each, Tensor)]
        if any(map(is_fake, tensors)) or not all(isinstance(each, (Tensor, *PLAIN)) for each in leaves):
            return self._computed(tensors, args, kwargs)
        kind = tensors[0].device.type
        casts = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        key = (str(form), *map(_shape, leaves), casts, self.training)
        if key not in self._known:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            self._known[key] = self._computed(tensors, args, kwargs)
        return tree_map_only(Tensor, _zeros, self._known[key])

    def _computed(self, tensors: list[Tensor], args: Any, kwargs: Any) -> Any:
        mode = next((each.fake_mode for each in tensors if is_fake(each)), None) or _outlines()  # type: ignore[attr-defined]
        with torch.no_grad():
            with mode, self._on(tensors[0].device):
                args, kwargs = tree_map_only(Tensor, lambda x: x if is_fake(x) else mode.from_tensor(x), (args, kwargs))
                out = super().forward(*args, **kwargs)
            return tree_map_only(Tensor, _zeros, out)

    @contextmanager
    def _on(self, device: torch.device) -> Iterator[None]:
        """Have weights without memory on a device inside."""
        kept = [vars(module)[name] for module, name, _ in self._weights]
        for (module, name, _), weight in zip(self._weights, kept, strict=True):
            vars(module)[name] = torch.empty(weight.shape, dtype=weight.dtype, device=device)
        try:
            yield
        finally:
            for (module, name, _), weight in zip(self._weights, kept, strict=True):
                vars(module)[name] = weight

    def set_type(self, dtype: torch.dtype) -> None:
        """Set the number type of parameters."""
        self._known.clear()
        for module, name, trained in self._weights:
            if trained and vars(module)[name].is_floating_point():
                vars(module)[name] = torch.empty(vars(module)[name].shape, dtype=dtype, device="meta")


def _zeros(like: Tensor) -> Tensor:
    """Zeros of the same shape and number type, which take one number."""
    return torch.zeros((), dtype=like.dtype, device=like.device).expand(like.shape)


def _shape(value: Any) -> Any:
    """What the shapes of an outline's output can depend on, of an argument."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    return type(value), value


@cache
def _outlines() -> FakeTensorMode:
    """The mode in which outlines compute; it loads much."""
    return FakeTensorMode()


def make_outline(module: nn.Module) -> Outline:
    """Take the weights of a module, in place."""
    outline, weights = mix_in(module, Outline, rename=False), []
    for part in module.modules():
        trained = dict(part.named_parameters(recurse=False))
        for name, weight in (trained | dict(part.named_buffers(recurse=False))).items():
            delattr(part, name)
            vars(part)[name] = torch.empty_like(weight, device="meta", requires_grad=False)
            weights.append((part, name, name in trained))
    outline._weights, outline._known = weights, {}
    return outline


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


def plan_to_cut(model: nn.Module, pipeline: Pipeline) -> ModelPlan:
    """The plan of a model that a pipeline can cut; no weight is read. Raises UserError as `cut_into_stages`."""
    plan = plan_of(model)
    if plan is None or not plan.carried:
        lacks = "has no plan" if plan is None else "has a plan without `carried`"
        raise UserError(
            f"parallel.pp {pipeline.ranks}: {type(model).__name__} {lacks}, which says what travels between blocks: declare it "
            "(docs/extending.md), or leave pp at 1"
        )
    check_stages(len(_units(plan)), pipeline)
    return plan


def cut_into_stages(
    model: nn.Module,
    group: dist.ProcessGroup | None,
    pipeline: Pipeline,
    rank: int | None = None,
    sizes: Sequence[int] | None = None,
    work: BlockWork | None = None,
) -> Stages:
    """Leave a process the blocks of its stages, in place; before anything else is done to the model.

    rank: the place in `pipeline` of a process that is not there, whose memory is estimated; None: this one's in `group`.
    sizes: the blocks of each stage; None: divided by `work`, without which all blocks count alike.

    Raises UserError for a model without a plan that says what travels, or where that does not fit, for more stages than blocks, and for
    sizes of other blocks.
    """
    plan = plan_to_cut(model, pipeline)
    units = _units(plan)
    if sizes is not None:
        parts = given_bounds(sizes, len(units))
    else:
        work = work or BlockWork([1.0] * len(plan.blocks))
        parts = stage_bounds(
            [sum(work.blocks[unit.start : unit.stop]) for unit in units], pipeline, work.before, work.after
        )
    bounds = [range(units[part.start].start, units[part.stop - 1].stop) for part in parts]
    stages = Stages(pipeline, bounds, Carries(plan.carried, plan.further, plan.summed), group, rank)
    stages.numbers = count_parameters(model)
    held = {place for stage in stages.own for place in bounds[stage]}
    last = len(bounds) - 1 in stages.own
    embeds = _embeds(model, plan)
    behind = [name for name in (*plan.after, *_around_blocks(model, plan)) if name not in embeds]
    outlined = [name for name in embeds if not (0 in stages.own or (last and name in plan.after))]
    others = [block.name for place, block in enumerate(plan.blocks) if place not in held]
    whole, gone = _plan_of_stages(model, plan), others if last else (*others, *behind)
    kept = _outlined(kept_plan(model, whole, gone), outlined)
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
    stages.outlines = [make_outline(model.get_submodule(name)) for name in outlined]
    declare_plan(model, kept)
    apart = (*(block.name for block in plan.blocks), *behind, *embeds)
    names = sorted(name for name, _ in model.named_parameters())
    stages.shared = [(None, tuple(name for name in names if not is_within(name, apart)))]
    ends, twice = sorted({0, pipeline.rank_of(len(bounds) - 1)}), [name for name in embeds if name in plan.after]
    if group is not None and twice and len(ends) > 1 and dist.get_rank(group) in ends:
        stages.shared.append(((ends[0], ends[1]), tuple(name for name in names if is_within(name, twice))))
    vars(model)["_stages"] = stages
    return stages


def _plan_of_stages(model: nn.Module, plan: ModelPlan) -> ModelPlan:
    """The plan of a model whose tokens are split where they enter the blocks, in whatever stage, and of whose blocks some may be gone."""
    named, first = kept_plan(model, plan, ()), plan.blocks[0].name
    of_first = named.inputs.get(first, {})
    entering = {name: what for name, what in of_first.items() if name in plan.carried and isinstance(what, Split)}
    inputs = {**named.inputs, first: {name: what for name, what in of_first.items() if name not in entering}}
    before = [None, *(block.attends for block in plan.blocks)]
    return replace(
        named,
        blocks=tuple(replace(block, follows=at) for block, at in zip(named.blocks, before, strict=False)),
        attends=plan.attends_all,
        entering=entering,
        inputs={name: own for name, own in inputs.items() if own},
    )


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """The numbers of a model's parameters, and of those that train; of all its stages."""
    if (stages := stages_of(model)) is not None:
        return stages.numbers
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    return sum(size for size, _ in sizes), sum(size for size, trains in sizes if trains)


def shared_parameters(model: nn.Module) -> list[tuple[tuple[int, int] | None, list[nn.Parameter]]]:
    """The parameters that several stages of a model hold, with the two ranks of its pipeline that do; None: all. None of a whole model."""
    stages, named = stages_of(model), dict(model.named_parameters())
    return [] if stages is None else [(pair, [named[name] for name in names]) for pair, names in stages.shared]


def copies(model: nn.Module) -> set[nn.Parameter]:
    """The parameters of a process that the one with the first stage holds too, for which it answers."""
    stages = stages_of(model)
    if stages is None or 0 in stages.own:
        return set()
    return {parameter for _, parameters in shared_parameters(model) for parameter in parameters}


def _embeds(model: nn.Module, plan: ModelPlan) -> list[str]:
    """The modules of the first stage; those that stay float32 lie everywhere, since autocast is off in them.

    Raises UserError for one that shares a weight with a module of other stages.
    """
    weights = list(model.named_parameters(remove_duplicate=False))
    for name in plan.embeds:
        own = set(model.get_submodule(name).parameters())
        others = [other for other, weight in weights if weight in own and not is_within(other, plan.embeds)]
        if others and name not in plan.after:
            raise UserError(
                f"plan, embeds: {name} shares a weight with {others[0]}, which other stages need: name it in `after`, too"
            )
    return [
        name
        for name in plan.embeds
        if not any(stays_float32(model, f"{name}.{own}") for own, _ in model.get_submodule(name).named_parameters())
    ]


def _outlined(plan: ModelPlan, names: Sequence[str]) -> ModelPlan:
    """The plan of a model in which some modules give shapes alone: they get the tokens that they would give, and exchange nothing."""

    def splits(of: Mapping[str, Mapping[Any, Any]]) -> dict[str, dict[Any, Any]]:
        return {
            name: {key: replace(what, level="own") for key, what in entry.items() if isinstance(what, Split)}
            if is_within(name, names)
            else dict(entry)
            for name, entry in of.items()
        }

    linears = {name: role for name, role in plan.linears.items() if not is_within(name, names)}
    return replace(plan, inputs=splits(plan.inputs), outputs=splits(plan.outputs), linears=linears)


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
