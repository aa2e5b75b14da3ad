"""Run a step of a pipeline: the stages of this process of a table, on torch's runtime, behind the interface of every runner.

Micro-batches may have shapes of their own, and any number of them makes a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmspeed import comm
from mmspeed.data.cache.files import write_whole
from mmspeed.device import Device
from mmspeed.errors import UserError
from mmspeed.parallel import Strategy
from mmspeed.parallel.stages import Stages, everywhere, stages_of
from mmspeed.parallel.tensor import local, sum_together
from mmspeed.parallel.turns import Turns
from mmspeed.parallel.wgrad import keep_gradients, let_weights_wait, sum_gradients
from mmspeed.plan.measured_pipeline import Pass, measured_step
from mmspeed.plan.schedules import Kind
from mmspeed.plan.simulate import reckoned
from mmspeed.protocols import Batch, Divisors, MicroBatches, blocks_of
from mmspeed.torch_internals import PipelineActions, hold_whole, is_fully_sharded, sum_over_shards

from .callbacks import BaseCallback
from .runner import Call, Runner, RunRecord, SequentialRunner, TermsOf, noted
from .watch.marks import Marks
from .watch.passes import Passes


class PipelineRunner:
    """The runner of a model in stages."""

    def __init__(self, model: nn.Module, stages: Stages, device: torch.device) -> None:
        self.model, self.stages, self.device, self.group = model, stages, device, stages.group
        pipeline = stages.pipeline
        self.gradients = let_weights_wait(model) if pipeline.splits or pipeline.overlaps else None
        self.turns = Turns(stages.axis.ledger, device, self._fill) if pipeline.overlaps else None
        self._filled = False  # an exchange of this backward pass hid gradients of weights
        self.batches = 0  # micro-batches of the last step
        self.short_steps = 0  # steps of fewer micro-batches than fill the schedule
        self.mark: Marks | None = None  # with which passes are timed; None: they are not
        self.passes: Passes | None = None  # of the last step
        self._known: dict[int, PipelineActions] = {}  # by the number of micro-batches

    def run(
        self, call: Call, terms: TermsOf, batches: MicroBatches, divisors: Divisors, weight: float = 1.0
    ) -> RunRecord:
        record, window = RunRecord(), _Window(batches, len(self.stages.own))
        passes = self.passes = None if self.mark is None else Passes(self.mark)

        def around(kind: Kind, stage: int, number: int) -> AbstractContextManager[object]:
            return nullcontext() if passes is None else passes.timing(kind, stage, number)

        def forward(stage: int, number: int, came: tuple[Tensor, ...]) -> Any:
            with nullcontext() if passes is None else passes.own():
                batch = window.take(number)
            with around("forward", stage, number):
                out = self.stages.run_stage(stage, came, lambda: call(batch))
                if stage < self.stages.count - 1:
                    return out
                return noted(record, batch, terms(out), divisors, weight)

        def like(stage: int, number: int) -> list[Tensor]:
            with nullcontext() if passes is None else passes.own():
                return self.stages.shapes(stage, lambda: call(window.look(number)))

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
        self.short_steps += len(batches) < self.stages.pipeline.least
        try:
            if self.turns is not None and not self.stages.pipeline.splits:
                self.stages.axis.ledger.gives_way = self._fill
            actions.run(
                forward,
                like,
                before_last,
                after_weights,
                None if self.turns is None else self.turns.both,
                around,
                self.stages.count_sent,
            )
        except RuntimeError as error:
            if isinstance(error.__cause__, UserError):  # torch tells of each error by one of its own
                raise error.__cause__ from None
            raise
        finally:
            self.stages.axis.ledger.gives_way = None
        if self.gradients is not None:
            assert not self.gradients.left
            if is_fully_sharded(self.model):
                sum_over_shards(self.model, root=True)
        self._sum_everywhere()
        if passes is not None:
            passes.finish()
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
        axis = self.stages.axis
        for sent in sum_together([local(p.grad) for p in shared if p.grad is not None], self.group):
            axis.count("all_reduce", 2 * sent * (axis.size - 1) // axis.size)  # as in a ring algorithm


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
    """Tells of the last step's pipeline, and writes when its passes began and ended into a file: of the stages of rank 0.

    `due`: whether a row is to come after a step, whose number, from 1, is given: passes are timed in such steps alone.
    """

    def __init__(self, runner: PipelineRunner, device: Device, due: Callable[[int], bool], file: Path | None) -> None:
        self.runner, self.due, self.file = runner, due, file
        self._mark = Marks(device)

    def before_step(self, step: int) -> None:
        self.runner.mark, self.runner.passes = self._mark if self.due(step + 1) else None, None

    def row(self) -> dict[str, Any]:
        """The micro-batches of the step, the share of it for which the busiest process stands still, and the waits of each process.

        `reckoned_bubble`: that share of equal stages, whose passes for the gradients of input and weights take as long as the forward
        ones. `exposed`: the share that exchanges between stages add. `short_steps`: those since the last row that had fewer micro-batches
        than fill the schedule. A collective call.
        """
        runner, pipeline = self.runner, self.runner.stages.pipeline
        if not runner.batches:
            return {}
        ranks = None if runner.passes is None else comm.all_gather_objects(runner.passes.read(), runner.group)
        if self.file is None:
            return {}
        short, runner.short_steps = runner.short_steps, 0
        fields: dict[str, Any] = {
            "micro_batches": runner.batches,
            **({"short_steps": short} if short else {}),
            "reckoned_bubble": round(reckoned(pipeline, runner.batches).idle, 4),
        }
        if ranks is not None:
            own = [([Pass(*each) for each in passes], length) for passes, length in ranks]
            found = measured_step(own, pipeline, runner.batches)
            step = found.step
            waits = {kind: [round(value, 6) for value in of_ranks] for kind, of_ranks in found.waits.items()}
            fields |= {
                "bubble": round(step.idle, 4),
                "exposed": round(found.exposed / step.step, 4),
                "seconds": round(step.step, 6),
                "compute": [round(value, 6) for value in step.busy],
                "waits": waits,
            }
            write_whole(self.file, found.to_json().encode())
        return {"pipeline": fields}


def runner_of(model: nn.Module, strategy: Strategy, device: torch.device) -> Runner:
    """The runner of a model's micro-batches: one after another, or through its stages."""
    stages = stages_of(model)
    return SequentialRunner(model, strategy) if stages is None else PipelineRunner(model, stages, device)
