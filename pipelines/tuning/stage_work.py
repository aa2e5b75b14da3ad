"""Count what each block of a model, and what is outside of blocks, computes and sends for a micro-batch: from shapes alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from mmspeed.config import RunConfig
from mmspeed.config.memory import parse_bytes
from mmspeed.device import Device
from mmspeed.memory import set_policies
from mmspeed.memory.planning.measure import Roofline
from mmspeed.parallel.stages import BlockPlace
from mmspeed.pipelines.tasks import Task
from mmspeed.pipelines.tuning.memory_estimate import FakeOffloader, OutlinedStep, outlined_step
from mmspeed.pipelines.tuning.memory_measure import BlockCall, capture, without_blocks
from mmspeed.protocols import MicroBatchSize, blocks_of, plan_of
from mmspeed.protocols.plan import base_of_adapters

Sent = Mapping[str, int]  # bytes by axis


@dataclass(frozen=True)
class NodeWork:
    """What a pass computes up to an exchange or its end: operations, those of gradients of weights, and the bytes of the exchange by axis.

    Recomputation is in the nodes of backward passes.
    """

    operations: float = 0.0
    weights: float = 0.0
    sent: Sent = field(default_factory=dict)


@dataclass(frozen=True)
class PassWork:
    """The nodes of a micro-batch's forward pass, and of its backward pass, in the order in which they run."""

    forward: tuple[NodeWork, ...] = ()
    backward: tuple[NodeWork, ...] = ()

    def __add__(self, behind: PassWork) -> PassWork:
        return PassWork(_joined(*self.forward, *behind.forward), _joined(*behind.backward, *self.backward))

    @property
    def operations(self) -> float:
        """Those of all passes."""
        return sum(node.operations + node.weights for node in (*self.forward, *self.backward))


def _joined(*nodes: NodeWork) -> tuple[NodeWork, ...]:
    """Nodes in a row, of which those without an exchange go on in the next one."""
    found: list[NodeWork] = []
    for node in nodes:
        before = found.pop() if found and not found[-1].sent else NodeWork()
        found.append(NodeWork(before.operations + node.operations, before.weights + node.weights, node.sent))
    return tuple(found)


@dataclass(frozen=True)
class MicroBatchWork:
    """The work of a micro-batch on a device that computes all of it, with the experts of one process.

    blocks: of each block of the model. everywhere: of what each stage computes for itself. last: of what is behind the blocks.
    travels: bytes of what one stage hands over to the next.
    """

    blocks: tuple[PassWork, ...]
    everywhere: PassWork
    last: PassWork
    travels: int

    def stage(self, blocks: range) -> PassWork:
        """The work of a stage of these blocks."""
        work = sum((self.blocks[place] for place in blocks), self.everywhere)
        return work + self.last if blocks.stop == len(self.blocks) else work


def micro_batch_work(config: RunConfig, task: Task, step: MicroBatchSize) -> MicroBatchWork:
    """The work of a micro-batch, under the config's policies. Raises UserError for a model that computes by the values of tensors."""
    memory, count = config.memory, Roofline(1.0, 1.0)
    with outlined_step(config, task, step) as outline:
        named = blocks_of(outline.model)
        calls = capture(lambda: outline.loss(outline.batch()), [block for _, block in named])
        travels = _travelling(outline, calls[0])  # before policies hide the names of arguments
        swap = FakeOffloader(Device("cpu", 0), parse_bytes(memory.offload_from))
        for _, block in named:
            set_policies(block, memory.activation_policy, swap.group, exchange_again=memory.exchange_again)
        kinds = [_work_of_block(calls[place], outline, count) for place in outline.places]
        everywhere, last = _work_of_ends(outline, calls, count)
    return MicroBatchWork(tuple(kinds[kind] for kind in outline.kinds), everywhere, last, travels)


def _work_of_block(call: BlockCall, outline: OutlinedStep, count: Roofline) -> PassWork:
    """The work of a block's call."""
    x = call.first.detach().requires_grad_()
    given = [
        x,
        *(each for each in (*call.args, *call.kwargs.values()) if isinstance(each, Tensor) and each is not call.first),
    ]
    inputs, left = [each for each in given if each.requires_grad], list[Tensor]()

    def gradients() -> list[Tensor]:
        return [torch.empty_like(out) for out in left]

    forward = _nodes(lambda: left.extend(call.run(x)), outline, count)
    whole = _nodes(lambda: torch.autograd.backward(left, gradients()), outline, count)
    left = list(call.run(x))
    of_inputs = _nodes(lambda: torch.autograd.grad(left, inputs, gradients(), allow_unused=True), outline, count)
    call.clear()
    both = zip(of_inputs, whole, strict=True)
    return PassWork(forward, tuple(replace(own, weights=node.operations - own.operations) for own, node in both))


def _nodes(work: Callable[[], object], outline: OutlinedStep, count: Roofline) -> tuple[NodeWork, ...]:
    """The nodes of a pass, each of which ends where it would wait for an exchange."""
    nodes, ledger, flops, sent = list[NodeWork](), outline.sent, count.flops, outline.sent.copy()

    def ends(place: str | None = None, wait: Callable[[], None] = lambda: None) -> None:
        nonlocal flops, sent
        more = Counter[str]()
        for (_, axis), nbytes in ledger.since(sent).bytes.items():
            more[axis] += nbytes
        nodes.append(NodeWork(count.flops - flops, 0.0, more))
        flops, sent = count.flops, ledger.copy()
        wait()

    ledger.gives_way = ends
    try:
        with count:
            work()
        ends()
    finally:
        ledger.gives_way = None
    return tuple(nodes)


def _work_of_ends(outline: OutlinedStep, calls: Sequence[BlockCall], count: Roofline) -> tuple[PassWork, PassWork]:
    """The work before the first block, and that behind it, without blocks."""
    begun: list[float] = []
    with without_blocks(outline.model, [call.outputs for call in calls]):
        (_, first), *_ = blocks_of(outline.model)
        first.register_forward_pre_hook(lambda *_: begun.append(count.flops))
        start = count.flops
        with count:
            loss = outline.loss(outline.batch())
        forward = count.flops - start
        with count:
            loss.backward()
        backward = count.flops - start - forward
    outline.model.zero_grad(set_to_none=True)
    before = begun[0] - start
    shares = (before / forward, 1 - before / forward) if forward else (0.0, 0.0)
    # half of a product's backward is for its input
    first_part, last_part = (
        PassWork((NodeWork(forward * share),), (NodeWork(backward * share / 2, backward * share / 2),))
        for share in shares
    )
    return first_part, last_part


def _travelling(outline: OutlinedStep, call: BlockCall) -> int:
    """Bytes of what a block gets from the one before it."""
    plan = plan_of(outline.model)
    names = BlockPlace.of(0, base_of_adapters(call.block)).arguments
    given = dict(zip(names, call.args, strict=False)) | call.kwargs
    return sum(given[name].nbytes for name in (() if plan is None else plan.carried))
