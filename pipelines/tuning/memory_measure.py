"""Measurement of a step's memory and time: one block of each kind in each way, and the parts outside of blocks.

Blocks are measured with their inputs in the model, under the same autocast and parallel layout, one at a time: so even a model of which
no plain step fits can be measured.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias, TypeVar, cast

import torch
from torch import Tensor, nn

from mmspeed import comm
from mmspeed.comm import Ledger
from mmspeed.compute.sparse.module import clustered_layers
from mmspeed.compute.wgrad import WeightGradients
from mmspeed.config.memory import MemoryConfig, parse_bytes
from mmspeed.device import Device
from mmspeed.memory import ActivationPolicies, set_policies
from mmspeed.memory.offload.offloader import Offloader
from mmspeed.memory.planning.knapsack import Option
from mmspeed.memory.planning.measure import Profiler, Work
from mmspeed.memory.planning.options import (
    StepFigures,
    combinations,
    front,
    least_bytes,
    offloads,
    single_policies,
    static_bytes,
)
from mmspeed.memory.recompute.regions import regions_of
from mmspeed.mixin import mix_in
from mmspeed.parallel.boundaries.boundary import Bounded, boundary_of
from mmspeed.parallel.boundaries.record import ForwardRecord, current_record, resumed
from mmspeed.parallel.tensor import local
from mmspeed.pipelines.tuning.blocks import other_blocks
from mmspeed.protocols.plan import blocks_of, parts_of
from mmspeed.torch_internals import tree_map_only

BatchT = TypeVar("BatchT")

MOST_OPTIONS = 16  # of a kind whose bytes are measured
ROUNDS = 3  # timed runs of each single way
LEAST_ADDED = 0.005  # share of a block's time


class _PassFirst(torch.autograd.Function):
    """The identity of its first argument. All others get gradients, so that their producers keep the tensors for their backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *others: Any) -> Tensor:
        ctx.like = [(o.shape, o.dtype) if isinstance(o, Tensor) and o.is_floating_point() else None for o in others]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        gradients = [
            torch.zeros(like[0], dtype=like[1], device=grad.device) if like is not None and needed else None
            for like, needed in zip(ctx.like, ctx.needs_input_grad[1:], strict=True)
        ]
        return grad, *gradients


Outputs: TypeAlias = "tuple[torch.Size | None, ...] | None"


class IdentityBlock(nn.Module):
    """A block that does nothing.

    outputs: the shapes of the tensors that the block returns, None where it returns none; None: one tensor, and no tuple. Tensors behind
    the first are the arguments at their places where these are alike, and else zeros. trains: the block has parameters that train, so
    that its output has a gradient even where nothing before it trains, as under adapters.
    """

    def __init__(self, outputs: Outputs = None, trains: bool = False) -> None:
        super().__init__()
        self.outputs, self.trains = outputs, trains

    def forward(self, *args: Any, **named: Any) -> Any:
        x, *others = (*args, *named.values())
        passed = _PassFirst.apply(x, *others)
        if self.trains and torch.is_grad_enabled() and not passed.requires_grad:
            passed.requires_grad_()
        if self.outputs is None:
            return passed
        behind = self.outputs[1:]
        others += [None] * len(behind)
        return passed, *(_like(shape, other, x) for shape, other in zip(behind, others, strict=False))


def _like(shape: torch.Size | None, argument: object, x: Tensor) -> Tensor | None:
    """A tensor for an output of a shape: the argument at its place, or zeros."""
    if shape is None:
        return None
    if isinstance(argument, Tensor) and argument.is_floating_point() and argument.dim() == len(shape):
        return argument.view_as(argument)
    return x.new_zeros(shape)


class _PreviousLayer(torch.autograd.Function):
    """The output of an earlier layer: a new tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


class NextLayer(torch.autograd.Function):
    """A stand-in for a later layer: takes a tensor without keeping it, and returns a gradient of its size."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape, ctx.dtype = x.shape, x.dtype
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return torch.full(ctx.shape, 1e-3, dtype=ctx.dtype, device=grad.device)


@dataclass
class BlockCall:
    """The call of a block: arguments by position, or all by name."""

    block: nn.Module
    args: tuple[Any, ...]  # detached
    kwargs: dict[str, Any]
    autocast: torch.dtype | None
    record: ForwardRecord | None = None  # of the forward around it, where tokens lie on several processes
    outputs: Outputs = None  # shapes of the tensors that it returned; None: one, and no tuple

    @property
    def first(self) -> Tensor:
        """The first argument, the running tokens."""
        return cast(Tensor, self.args[0] if self.args else next(iter(self.kwargs.values())))

    def run(self, x: Tensor) -> tuple[Tensor, ...]:
        """The block's tensors with a gradient for a first argument `x`; the others are those of the call."""
        kind, args, named = x.device.type, (x, *self.args[1:]), self.kwargs
        if not self.args:
            args, named = (), {**named, next(iter(named)): x}
        dtype = self.autocast or torch.bfloat16
        with resumed(self.record), torch.autocast(kind, dtype, enabled=self.autocast is not None):
            out = self.block(*args, **named)
        outs = out if isinstance(out, tuple) else (out,)
        return tuple(one for one in outs if isinstance(one, Tensor) and one.requires_grad)

    def clear(self) -> None:
        """Free all gradients."""
        self.block.zero_grad(set_to_none=True)
        for value in (*self.args, *self.kwargs.values()):
            if isinstance(value, Tensor):
                value.grad = None


def capture(forward: Work, blocks: Sequence[nn.Module]) -> list[BlockCall]:
    """The calls of blocks in a forward pass that records no gradient, so that all arguments are taken to need theirs."""
    calls: dict[int, BlockCall] = {}

    def leaf(tensor: Tensor) -> Tensor:
        # a copy, since backward must not reach the model's own tensors
        return tensor.detach().clone().requires_grad_() if tensor.is_floating_point() else tensor

    def taken(value: Any) -> Any:
        if isinstance(value, Tensor):
            return leaf(value)
        return tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), value)  # of tables, such as rotary ones

    def take(block: nn.Module, args: Any, kwargs: Any) -> None:
        kind = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)).device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        with torch.enable_grad():
            args, kwargs = tuple(map(taken, args)), {name: taken(value) for name, value in kwargs.items()}
        calls[id(block)] = BlockCall(block, args, kwargs, dtype, current_record())

    def count(block: nn.Module, args: Any, out: Any) -> None:
        call = calls[id(block)]
        if isinstance(out, tuple):
            call.outputs = tuple(one.shape if isinstance(one, Tensor) else None for one in out)

    handles = [block.register_forward_pre_hook(take, with_kwargs=True) for block in blocks]
    handles += [block.register_forward_hook(count) for block in blocks]
    try:
        with torch.no_grad():
            forward()
    finally:
        for handle in handles:
            handle.remove()
    return [calls[id(block)] for block in blocks]


@dataclass
class BlockProfiler:
    """The measurement of blocks. `with_swap`: True where ways that offload are options."""

    gauge: Profiler
    offloader: Offloader
    with_swap: bool
    exchange_again: bool = False
    most: int = MOST_OPTIONS
    progress: Callable[[], None] = lambda: None  # called before each run
    # (bytes, seconds of a block) -> seconds that offloading these bytes adds, where that is not measured
    swap_seconds: Callable[[int, float], float] | None = None
    given: ActivationPolicies | None = None  # the only option of every block, where nothing is chosen
    greatest: Callable[[list[float]], list[float]] = comm.all_reduce_max  # of figures that processes measure apart
    stay: bool = False  # gradients of an earlier micro-batch exist
    waiting: WeightGradients | None = None  # those that the blocks leave
    filled: Ledger | None = None  # of the exchanges in which they are computed

    def tell(self, calls: Sequence[BlockCall], ways: Any) -> None:
        """Set the ways of blocks."""
        for call in calls:
            set_policies(call.block, ways, self.offloader.group, exchange_again=self.exchange_again)

    def weigh(self, call: BlockCall, ways: Any) -> Option:
        """The bytes of a block in some ways; `seconds` is not measured."""
        self.progress()
        self.tell([call], ways)
        left: list[Tensor] = []

        def forward() -> None:
            left.extend(NextLayer.apply(out) for out in call.run(_PreviousLayer.apply(call.first)))
            if self.with_swap:  # offloaded tensors may be freed
                self.offloader.device.synchronize()
                with self.offloader.lock:
                    self.offloader.tidy()

        def fill(_: str | None, wait: Callable[[], None]) -> None:
            assert self.waiting is not None
            self.waiting.take()()
            wait()

        def backward() -> None:
            if self.filled is not None:
                self.filled.gives_way = fill
            torch.autograd.backward(list(emptied(left)))
            if self.filled is not None:
                self.filled.gives_way = None

        if not self.stay:
            call.clear()
        before = self.offloader.pool.used
        kept, peak = self.gauge.section(forward)
        host = self.offloader.pool.used - before
        _, peak_back = self.gauge.section(backward)
        waits = 0 if self.waiting is None else -self.gauge.section(self.waiting.take)[0]
        bytes_ = self.greatest([*map(float, (kept, max(0, peak - kept), max(0, peak_back), host, waits))])
        kept, forward_, back, host, waits = map(int, bytes_)
        # while a block runs, the tensors that the block before it offloads leave in forward and come back in backward
        return Option(kept, forward_ + host, back + host, host, ways=ways, waits=waits)

    def clock(self, chain: Sequence[BlockCall], ways: Sequence[Any]) -> list[float]:
        """Seconds of forward and backward of one block in each of `ways`, measured over several blocks in a row to include prefetching."""

        def prepare(each: Any) -> None:
            self.progress()
            self.tell(chain, each)
            for call in chain:
                call.clear()

        def work() -> None:
            x, beside = _PreviousLayer.apply(chain[0].first), []
            for call in chain:
                outs = list(call.run(x))
                # the next block's running tokens; some blocks return those of a caption first
                x = outs.pop(next((at for at, out in enumerate(outs) if out.shape == x.shape), 0))
                beside += outs
            torch.autograd.backward([NextLayer.apply(out) for out in (x, *beside)])

        works: list[tuple[Work, Work]] = [(partial(prepare, each), work) for each in ways]
        times = self.gauge.seconds(works, ROUNDS)
        prepare({})
        return self.greatest([seconds / len(chain) for seconds in times])

    def options(self, chain: Sequence[BlockCall]) -> tuple[list[Option], float]:
        """The options of a kind of block, the first of which saves everything, and the seconds of that one.

        The chain are blocks of that kind. Time is the sum of each span's way alone; bytes are measured for each option.
        """
        if self.given is not None:
            self.weigh(chain[0], self.given)  # the first run makes what stays, such as tables
            only = self.weigh(chain[0], self.given)
            chain[0].clear()
            return [only], 0.0
        first = chain[0].block
        spans = regions_of(first)
        ways = single_policies(spans, self.with_swap)
        self.weigh(chain[0], {})  # the first run makes permanent allocations of libraries
        spent, singles = [self.gauge.spent], []
        for each in ways:
            singles.append(self.weigh(chain[0], each))
            spent.append(self.gauge.spent)
        spent_each = [after - before for before, after in pairwise(spent) if before is not None and after is not None]
        seconds = spent_each or self.clock(chain, ways)
        # no way is free, whatever the clock's error: tensors that fit are saved
        added = [0.0, *(max(LEAST_ADDED * seconds[0], each - seconds[0]) for each in seconds[1:])]
        if self.swap_seconds is not None:
            added = [s + self.swap_seconds(one.host, seconds[0]) for s, one in zip(added, singles, strict=True)]
        singles = [replace(one, seconds=s) for one, s in zip(singles, added, strict=True)]
        every = combinations(singles)
        wanted = front(every, self.most)
        if self.with_swap:  # the last block takes one of these
            wanted += front([one for one in every if not offloads(one.ways)], self.most // 2)
        for some in (every, [one for one in every if not offloads(one.ways)]):
            wanted += least_bytes(some)
        plain, known = singles[0], {tuple(one.ways.items()): one for one in singles}
        measured = {tuple(plain.ways.items()): plain}
        for one in wanted:
            key = tuple(one.ways.items())
            measured[key] = known.get(key) or replace(self.weigh(chain[0], one.ways), seconds=one.seconds)
        self.tell(chain, {})
        chain[0].clear()
        rest = [one for key, one in measured.items() if key]
        return [plain, *rest], seconds[0]

    def ends(
        self,
        model: nn.Module,
        batch: Callable[[], BatchT],
        loss: Callable[[BatchT], Tensor],
        calls: Sequence[BlockCall],
    ) -> tuple[int, int]:
        """(bytes kept outside of the blocks, bytes above them at the peak) of a forward and backward pass of a batch.

        Arguments of the blocks' calls that need no gradient there, such as tables and those of frozen layers, need none afterwards.
        """
        tensors: dict[str, Any] = {}

        def forward() -> None:
            tensors["batch"] = batch()
            tensors["loss"] = loss(tensors["batch"])

        with without_blocks(model, [call.outputs for call in calls]):
            for call, (_, stand_in) in zip(calls, blocks_of(model), strict=True):
                stand_in.register_forward_pre_hook(partial(_mark, call), with_kwargs=True)
            for _ in range(2):  # the first run makes permanent allocations of libraries
                kept, peak = self.gauge.section(forward)
                _, backward = self.gauge.section(lambda: tensors.pop("loss").backward())
                tensors.clear()
        model.zero_grad(set_to_none=True)
        largest = self.greatest([float(kept), float(max(0, peak - kept)), float(max(0, backward))])
        return int(largest[0]), int(max(largest[1:]))


def _mark(call: BlockCall, _: nn.Module, args: Any, kwargs: Any) -> None:
    """Let arguments of a call need gradients where those of another call of the block do; what the block returns too needs them."""
    pairs = zip((*call.args, *call.kwargs.values()), (*args, *kwargs.values()), strict=True)
    for own, given in [*pairs][1 if call.outputs is None else len(call.outputs) :]:
        if isinstance(own, Tensor) and not given.requires_grad:
            own.requires_grad_(False)


def identity(block: nn.Module, outputs: Outputs = None) -> nn.Module:
    """A stand-in for a block that returns `outputs` (`IdentityBlock`): it only re-shards tokens as the block would.

    In many plans the first block's boundary splits the tokens, and the layers after the blocks need this process's part.
    """
    stand_in = IdentityBlock(outputs, any(parameter.requires_grad for parameter in block.parameters()))
    boundary = boundary_of(block)
    if boundary is not None:
        mix_in(stand_in, Bounded)._boundary = replace(boundary, outputs={})
    return stand_in


@contextmanager
def without_blocks(model: nn.Module, outputs: Sequence[Outputs] = ()) -> Iterator[None]:
    """Replace a model's blocks by ones that do nothing, inside."""
    blocks = [block for _, block in blocks_of(model)]
    shapes = dict(zip(map(id, blocks), outputs, strict=False))
    with other_blocks(model, lambda block: identity(block, shapes.get(id(block)))):
        yield


def emptied(tensors: list[Tensor]) -> Iterator[Tensor]:
    """The tensors, each removed from the list as it is yielded."""
    while tensors:
        yield tensors.pop()


def step_figures(
    bench: BlockProfiler,
    model: nn.Module,
    batch: Callable[[], BatchT],
    loss: Callable[[BatchT], Tensor],
    kinds: tuple[int, ...],
    chosen: Sequence[Sequence[int]],
    **settings: Any,
) -> StepFigures:
    """The figures of a step of a model, from a model with only some of its blocks.

    Args:
        model: with representative blocks of each kind, in the order of the kinds.
        kinds: the kind of each block of the whole model.
        chosen: for each kind, the places of its blocks in `model`.
        given: `memory`, `average`, `optimizer`, for `static_bytes`; `gradients_stay`, `keep_last`.
    """
    blocks = [block for _, block in blocks_of(model)]
    calls = capture(lambda: loss(batch()), blocks)
    ends, tail = bench.ends(model, batch, loss, calls)
    options_of_kinds = [bench.options([calls[place] for place in places]) for places in chosen]
    carried = max(
        sum(
            value.nbytes
            for value in (*call.args, *call.kwargs.values())
            if isinstance(value, Tensor) and value.requires_grad and value is not call.first
        )
        for call in calls
    )
    of_blocks = [weights_of(block) for block in blocks]
    each, frozen_each = (list(own) for own in zip(*(of_blocks[places[0]] for places in chosen), strict=True))
    numbers, frozen = (
        whole - sum(own) + sum(own_of_kind[kind] for kind in kinds)
        for whole, own, own_of_kind in zip(
            weights_of(model), zip(*of_blocks, strict=True), (each, frozen_each), strict=True
        )
    )
    # shards of one parameter may be of unequal size, and processes whose figures differ would choose apart
    largest, count = max(map(numbers_of, _trained(model))), len(each)
    figures = bench.greatest([numbers, frozen, largest, carried, *each, *frozen_each])
    numbers, frozen, largest, carried, *each = map(int, figures)
    each, frozen_each = each[:count], each[count:]
    stay, keep_last = settings.pop("gradients_stay"), settings.pop("keep_last")
    return StepFigures(
        static=static_bytes(numbers, largest=largest, frozen=frozen, **settings),
        ends=ends,
        tail=tail,
        kinds=kinds,
        options=tuple(tuple(options) for options, _ in options_of_kinds),
        gradients=tuple(4 * each[kind] for kind in kinds),
        frozen=tuple(frozen_each[kind] for kind in kinds),
        gradients_stay=stay,
        keep_last=keep_last,
        carried=carried,
        plain_seconds=tuple(seconds for _, seconds in options_of_kinds),
    )


def _trained(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that train."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def weights_of(module: nn.Module) -> tuple[int, int]:
    """(numbers that train, bytes of those that do not) in the parameters of a module, those of this device."""
    frozen = [parameter for parameter in module.parameters() if not parameter.requires_grad]
    return (
        sum(map(numbers_of, _trained(module))),
        sum(numbers_of(parameter) * parameter.element_size() for parameter in frozen),
    )


def numbers_of(parameter: Tensor) -> int:
    """Numbers in a parameter; in a split one, those of this device."""
    return local(parameter).numel()


def key_of(block: nn.Module) -> tuple[object, ...]:
    """The kind of a block; blocks of one kind take the same memory and time: class, span, kinds of attention, number of parameters."""
    attention = tuple(sorted({type(layer).__name__ for layer in clustered_layers(block).values()}))
    numbers = sum(parameter.numel() for parameter in block.parameters())
    return type(block).__name__, parts_of(block).attends, attention, numbers


def budget_bytes(memory: MemoryConfig, device: Device) -> int:
    """Bytes of one device that training may take, the least over processes. A collective call.

    A fraction is one of the device's memory, on a CPU of the free memory, which the processes of a host share.
    """
    if memory.budget is not None:
        nbytes = parse_bytes(memory.budget)
    else:
        assert memory.fraction is not None
        on_cpu = device.kind == "cpu"
        whole = device.free_memory_bytes() if on_cpu else device.total_memory_bytes()
        nbytes = int(memory.fraction * whole / (int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if on_cpu else 1))
    return -int(comm.all_reduce_max([-float(nbytes)])[0])
