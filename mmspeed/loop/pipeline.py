"""Run a step of a pipeline: the stages of this process of a table, on torch's runtime, behind the interface of every runner.

Micro-batches may have shapes of their own, and any number of them makes a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from mmspeed.parallel import Strategy
from mmspeed.parallel.stages import Stages, everywhere, stages_of
from mmspeed.parallel.tensor import local, sum_together
from mmspeed.parallel.turns import Turns
from mmspeed.parallel.wgrad import keep_gradients, let_weights_wait, sum_gradients
from mmspeed.plan.simulate import reckoned
from mmspeed.protocols import Batch, Divisors, MicroBatches, blocks_of
from mmspeed.torch_internals import PipelineActions, hold_whole, is_fully_sharded, sum_over_shards

from .callbacks import BaseCallback
from .runner import Call, Runner, RunRecord, SequentialRunner, TermsOf, noted


class PipelineRunner:
    """The runner of a model in stages."""

    def __init__(self, model: nn.Module, stages: Stages, device: torch.device) -> None:
        self.model, self.stages, self.device, self.group = model, stages, device, stages.group
        pipeline = stages.pipeline
        self.gradients = let_weights_wait(model) if pipeline.splits or pipeline.overlaps else None
        self.turns = Turns(stages.ledger, device, self._fill) if pipeline.overlaps else None
        self._filled = False  # an exchange of this backward pass hid gradients of weights
        self.batches = 0  # micro-batches of the last step
        self._known: dict[int, PipelineActions] = {}  # by the number of micro-batches

    def run(
        self, call: Call, terms: TermsOf, batches: MicroBatches, divisors: Divisors, weight: float = 1.0
    ) -> RunRecord:
        record, window = RunRecord(), _Window(batches, len(self.stages.own))

        def forward(stage: int, number: int, came: tuple[Tensor, ...]) -> Any:
            batch = window.take(number)
            out = self.stages.run_stage(stage, came, lambda: call(batch))
            if stage < self.stages.count - 1:
                record.handed_over.append((stage, torch.linalg.vector_norm(out[0].detach(), math.inf)))
                return out
            return noted(record, batch, terms(out), divisors, weight)

        if self.gradients is not None:
            self.gradients.take()  # of a step that an error ended
        self._synchronize(False)
        if self.turns is not None and is_fully_sharded(self.model):
            hold_whole(self.model)  # a pass must not free the weights that the other one of its pair uses
        left = [len(self.stages.own)]

        def before_last(stage: int) -> None:
            left[0] -= 1
            if self.gradients is None:
                self._synchronize(True, stage, whole=left[0] == 0)

        def after_weights(stage: int, last: bool) -> None:
            if last and self.turns is not None:
                self._fill()
            (sum_gradients if last else keep_gradients)(self._blocks[stage])

        actions, self.batches = self._actions(len(batches)), len(batches)
        try:
            if self.turns is not None and not self.stages.pipeline.splits:
                self.stages.ledger.gives_way = self._fill
            actions.run(
                forward,
                lambda stage, number: self.stages.shapes(stage, lambda: call(window.look(number))),
                before_last,
                after_weights,
                None if self.turns is None else self.turns.both,
            )
        except RuntimeError as error:
            if error.__cause__ is None:
                raise
            raise error.__cause__ from None  # torch tells of each error of a forward pass by one of its own
        finally:
            self.stages.ledger.gives_way = None
        if self.gradients is not None:
            assert not self.gradients.left
            if is_fully_sharded(self.model):
                sum_over_shards(self.model, root=True)
        self._sum_everywhere()
        return record

    def _fill(self) -> None:
        """Compute the gradients of weights that backward passes have left so far, while an exchange is on the way."""
        assert self.gradients is not None
        if self.gradients.left:
            self.gradients.take()()
            for blocks in self._blocks.values():
                keep_gradients(blocks)
        self._filled = True

    def _take(self) -> Callable[[], None]:
        """A function for the gradients that a backward pass left. Those behind its last exchange go into the first one of the next pass."""
        assert self.gradients is not None
        filled, self._filled = self._filled, False
        return (lambda: None) if filled and not self.stages.pipeline.splits else self.gradients.take()

    def _actions(self, count: int) -> PipelineActions:
        if count not in self._known:
            table = self.stages.pipeline.table(count)
            assert self.group is not None
            take = None if self.gradients is None else self._take
            travels = len(self.stages.carries.arguments) + (self.stages.carries.summed is not None)
            self._known[count] = PipelineActions(
                table, self.stages.own, self.stages.count, count, travels, self.device, self.group, take
            )
        return self._known[count]

    @cached_property
    def _blocks(self) -> dict[int, list[nn.Module]]:
        """The blocks of each stage of this process."""
        held = iter(block for _, block in blocks_of(self.model))
        return {stage: [next(held) for _ in self.stages.bounds[stage]] for stage in self.stages.own}

    def _synchronize(self, on: bool, stage: int | None = None, whole: bool = True) -> None:
        """Let gradients be summed over shards in the backward passes to come: of the blocks of a stage, and of what is outside of blocks."""
        for number, blocks in self._blocks.items():
            for block in blocks if stage in (None, number) else ():
                if is_fully_sharded(block):
                    block.set_requires_gradient_sync(on)
        if whole and is_fully_sharded(self.model):
            self.model.set_requires_gradient_sync(on, recurse=False)

    def _sum_everywhere(self) -> None:
        """Sum, over stages, the gradients of parameters that all of them hold."""
        shared = [p for _, p in sorted(everywhere(self.model), key=lambda pair: pair[0]) if p.requires_grad]
        for parameter in shared:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        sum_together([local(p.grad) for p in shared if p.grad is not None], self.group)


class _Window:
    """The micro-batches of a step, read as they are needed and dropped after their last stage here."""

    def __init__(self, batches: MicroBatches, stages: int) -> None:
        self._coming: Iterator[Batch] = iter(batches)
        self._read = 0
        self._held: dict[int, list[Any]] = {}  # (batch, stages left)
        self._stages = stages

    def look(self, number: int) -> Batch:
        """A micro-batch that is still to be computed."""
        while self._read <= number:
            self._held[self._read] = [next(self._coming), self._stages]
            self._read += 1
        batch: Batch = self._held[number][0]
        return batch

    def take(self, number: int) -> Batch:
        """A micro-batch, for one stage."""
        batch = self.look(number)
        self._held[number][1] -= 1
        if not self._held[number][1]:
            del self._held[number]
        return batch


class PipelineRows(BaseCallback):
    """Tells of the last step's pipeline: its micro-batches, and the share of the step for which the busiest process stands still.

    The share is reckoned: of equal stages, whose passes for the gradients of input and weights take as long as the forward ones.
    """

    def __init__(self, runner: PipelineRunner) -> None:
        self.runner = runner

    def row(self) -> dict[str, Any]:
        runner = self.runner
        if not runner.batches:
            return {}
        step = reckoned(runner.stages.pipeline, runner.batches)
        return {"pipeline": {"micro_batches": runner.batches, "bubble": round(step.idle, 4)}}


def runner_of(model: nn.Module, strategy: Strategy, device: torch.device) -> Runner:
    """The runner of a model's micro-batches: one after another, or through its stages."""
    stages = stages_of(model)
    return SequentialRunner(model, strategy) if stages is None else PipelineRunner(model, stages, device)
