"""Count what each block of a model, and what is outside of blocks, computes and sends for a micro-batch: from shapes alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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
class PassWork:
    """The operations of a micro-batch's passes, and the bytes sent in its forward and its backward pass.

    input: of gradients of inputs, with what is computed again. weight: of gradients of weights.
    """

    forward: float = 0.0
    input: float = 0.0
    weight: float = 0.0
    sent: Sent = field(default_factory=dict)
    sent_back: Sent = field(default_factory=dict)

    def __add__(self, other: PassWork) -> PassWork:
        operations = (self.forward + other.forward, self.input + other.input, self.weight + other.weight)
        sent = (Counter(self.sent) + Counter(other.sent), Counter(self.sent_back) + Counter(other.sent_back))
        return PassWork(*operations, *sent)

    @property
    def operations(self) -> float:
        """Those of all passes."""
        return self.forward + self.input + self.weight


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
        ends = self.everywhere + self.last if blocks.stop == len(self.blocks) else self.everywhere
        return sum((self.blocks[place] for place in blocks), ends)


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

    def section(work: Any) -> tuple[float, Sent]:
        before, sent = count.flops, outline.sent.copy()
        with count:
            work()
        more = Counter[str]()
        for (_, axis), nbytes in outline.sent.since(sent).bytes.items():
            more[axis] += nbytes
        return count.flops - before, more

    x = call.first.detach().requires_grad_()
    given = [
        x,
        *(each for each in (*call.args, *call.kwargs.values()) if isinstance(each, Tensor) and each is not call.first),
    ]
    inputs, left = [each for each in given if each.requires_grad], list[Tensor]()
    forward, sent = section(lambda: left.extend(call.run(x)))
    whole, sent_back = section(lambda: torch.autograd.backward(left, [torch.empty_like(out) for out in left]))
    left = list(call.run(x))
    gradients = [torch.empty_like(out) for out in left]
    of_inputs, _ = section(lambda: torch.autograd.grad(left, inputs, gradients, allow_unused=True))
    call.clear()
    return PassWork(forward, of_inputs, whole - of_inputs, sent, sent_back)


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
    first_part, last_part = (PassWork(forward * share, backward * share / 2, backward * share / 2) for share in shares)
    return first_part, last_part


def _travelling(outline: OutlinedStep, call: BlockCall) -> int:
    """Bytes of what a block gets from the one before it."""
    plan = plan_of(outline.model)
    names = BlockPlace.of(0, base_of_adapters(call.block)).arguments
    given = dict(zip(names, call.args, strict=False)) | call.kwargs
    return sum(given[name].nbytes for name in (() if plan is None else plan.carried))
