"""Run a step of a pipeline: the stages of this process of a table, on torch's runtime, behind the interface of every runner.

Micro-batches may have shapes of their own, and any number of them makes a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mmspeed import comm
from mmspeed.data.cache.files import write_whole
from mmspeed.device import Device
from mmspeed.parallel import Strategy
from mmspeed.parallel.stage_weights import StageWeights, let_weights_wait
from mmspeed.parallel.stages import Stages, stages_of
from mmspeed.parallel.turns import Turns
from mmspeed.plan.measured_pipeline import Pass, measured_nodes, measured_step
from mmspeed.plan.overlap import BACKWARD, Order, PairOrder, StageNodes, drifted, orders
from mmspeed.plan.schedules import Kind
from mmspeed.plan.simulate import reckoned
from mmspeed.protocols import Batch, Divisors, MicroBatches
from mmspeed.torch_internals import PipelineActions

from .callbacks import BaseCallback
from .runner import Call, Runner, RunRecord, SequentialRunner, TermsOf, noted
from .watch.marks import Marks
from .watch.passes import Passes


class PipelineRunner:
    """The runner of a model in stages."""

    def __init__(self, model: nn.Module, stages: Stages, device: torch.device) -> None:
        self.model, self.stages, self.device, self.group = model, stages, device, stages.group
        pipeline = stages.pipeline
        self.gradients = let_weights_wait(model) if pipeline.weights_wait else None
        self.weights = StageWeights(model, stages)
        self.turns = Turns(device) if pipeline.overlaps else None
        self.orders: dict[tuple[int, int], Order] = {}  # of pairs of stages (forward, backward); others alternate
        self.batches = 0  # micro-batches of the last step
        self.short_steps = 0  # steps of fewer micro-batches than fill the schedule
        self.mark: Marks | None = None  # with which passes are timed; None: they are not
        self.passes: Passes | None = None  # of the last step
        self._filled = False  # an exchange of this backward pass hid gradients of weights
        self._known: dict[int, tuple[PipelineActions, list[bool]]] = {}  # by the number of micro-batches

    def run(
        self, call: Call, terms: TermsOf, batches: MicroBatches, divisors: Divisors, weight: float = 1.0
    ) -> RunRecord:
        record, weights, ledger = RunRecord(), self.weights, self.stages.axis.ledger
        self.passes = None if self.mark is None else Passes(self.mark)
        actions, stays = self._actions(len(batches))
        self.batches = len(batches)
        self.short_steps += len(batches) < self.stages.pipeline.least
        window = _Window(batches, len(self.stages.own))

        def ends(batch: Batch, out: Any) -> Tensor:
            return noted(record, batch, terms(out), divisors, weight)

        weights.keep_apart()
        if self.turns is not None:
            weights.hold()
        weights.stay_whole(None, self._neighbours_share)
        try:
            if self.turns is not None or self.passes is not None:
                ledger.gives_way = self._exchange
            actions.run(_Step(self, call, ends, record, window, iter(stays)))
            if self.gradients is not None:
                assert not self.gradients.left
                weights.sum_rest()
        except RuntimeError as error:
            if error.__cause__ is None:
                raise
            raise error.__cause__ from None  # torch tells of each error of a pass by one of its own
        finally:
            ledger.gives_way = None
            if self.gradients is not None:
                self.gradients.take()  # of a step that an error ended
            weights.release()
        weights.sum_shared()
        if self.passes is not None:
            self.passes.finish()
        return record

    def fill(self) -> None:
        """Compute the gradients of weights that backward passes have left so far, while an exchange is on the way."""
        assert self.gradients is not None
        if self.gradients.left:
            self.gradients.take()()
            self.weights.keep()
        self._filled = True

    def _exchange(self, place: str | None, wait: Callable[[], None]) -> None:
        """Wait for an exchange of a pass, behind what can be computed meanwhile: first the other pass of its pair, then gradients of weights."""
        passes = self.passes
        marks = [] if passes is None else [passes.now()]
        side = None if self.turns is None else self.turns.give()
        marks += [] if passes is None else [passes.now()]
        if side == BACKWARD or (side is None and self.stages.pipeline.carries):
            self.fill()
        if passes is None:
            wait()
        else:
            marks.append(passes.now())
            wait()
            passes.exchanged(place, [*marks, passes.now()])

    def _take(self) -> Callable[[], None]:
        """A function for the gradients that a backward pass left. Those behind its last exchange go into the first one of the next pass."""
        assert self.gradients is not None
        filled, self._filled = self._filled, False
        return (lambda: None) if filled and self.stages.pipeline.carries else self.gradients.take()

    @property
    def _neighbours_share(self) -> bool:
        """True where weights stay gathered between neighbouring passes of a stage; with turns, all are whole for the whole step."""
        return self.turns is None and not self.stages.gathers_again

    def _actions(self, count: int) -> tuple[PipelineActions, list[bool]]:
        """The actions of a step, and for each pass with weights whether they stay gathered behind it: the next one is of the same stage."""
        if count not in self._known:
            table = self.stages.pipeline.table(count)
            assert self.group is not None
            parts = [part for entry in table[dist.get_rank(self.group)] for part in entry.parts]
            passes = [part.stage for part in parts if part.kind != "weight"]
            stays = [stage == after and self._neighbours_share for stage, after in pairwise([*passes, None])]
            take = None if self.gradients is None else self._take
            travels = len(self.stages.carries.arguments) + (self.stages.carries.summed is not None)
            actions = PipelineActions(
                table, self.stages.own, self.stages.count, count, travels, self.device, self.group, take
            )
            self._known[count] = actions, stays
        return self._known[count]


class _Step:
    """What torch's runtime calls in one step (`PipelineCalls`). ends: notes a micro-batch by the output of its last stage, and gives its loss.

    record: the step's. stays: for each pass with weights, in order, whether they stay gathered behind it.
    """

    def __init__(
        self,
        runner: PipelineRunner,
        call: Call,
        ends: Callable[[Batch, Any], Tensor],
        record: RunRecord,
        window: _Window,
        stays: Iterator[bool],
    ) -> None:
        self.runner, self.stages, self.weights = runner, runner.stages, runner.weights
        self.call, self.ends, self.record, self.window, self.stays = call, ends, record, window, stays
        self.left = len(runner.stages.own)  # stages whose last backward pass is to come

    def like(self, stage: int, number: int) -> list[Tensor]:
        with self._reading():
            return self.stages.shapes(stage, lambda: self.call(self.window.look(number)))

    def forward(self, stage: int, number: int, came: tuple[Tensor, ...]) -> Any:
        self.weights.stay_whole(stage, next(self.stays))
        with self._reading():
            batch = self.window.take(number)
        with self.around("forward", stage, number):
            out = self.stages.run_stage(stage, came, lambda: self.call(batch))
            if stage == self.stages.count - 1:
                return self.ends(batch, out)
            self.record.handed_over.append((stage, torch.linalg.vector_norm(out[0].detach(), math.inf)))
            return out

    def before_backward(self, stage: int, last: bool) -> None:
        self.weights.stay_whole(stage, next(self.stays))
        self.weights.come_next(stage)
        self.left -= last
        if last and self.runner.gradients is None:
            self.weights.synchronize(stage, True)
            if not self.left:
                self.weights.synchronize(None, True)

    def after_weights(self, stage: int, last: bool) -> None:
        if last and self.runner.turns is not None:
            self.runner.fill()
        self.weights.keep()
        if last:
            self.weights.sum_over_shards(stage)

    def together(self, ahead: int, behind: int, forward: Callable[[], None], backward: Callable[[], None]) -> None:
        turns = self.runner.turns
        assert turns is not None
        turns.both(forward, backward, self.runner.orders.get((ahead, behind)))

    def around(self, kind: Kind, stage: int, number: int) -> AbstractContextManager[object]:
        passes = self.runner.passes
        return nullcontext() if passes is None else passes.timing(kind, stage, number)

    def sent(self, what: str, to: int, tensors: Sequence[Tensor]) -> None:
        self.stages.count_sent(what, to, tensors)

    def _reading(self) -> AbstractContextManager[object]:
        passes = self.runner.passes
        return nullcontext() if passes is None else passes.own()


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
        self._orders: list[PairOrder] = []
        self._nodes: dict[int, StageNodes] = {}  # for which orders were searched

    def before_step(self, step: int) -> None:
        self.runner.mark, self.runner.passes = self._mark if self.due(step + 1) else None, None

    def row(self) -> dict[str, Any]:
        """The micro-batches of the step, the share of it for which the busiest process stands still, and the waits of each process.

        `reckoned_bubble`: that share of equal stages, whose passes for the gradients of input and weights take as long as the forward
        ones. `exposed`: the seconds that messages between stages and exchanges add. `short_steps`: those since the last row that had fewer micro-batches
        than fill the schedule. A collective call.
        """
        runner, pipeline = self.runner, self.runner.stages.pipeline
        if not runner.batches:
            return {}
        ranks = None if runner.passes is None else comm.all_gather_objects(runner.passes.read(), runner.group)
        passes = [] if ranks is None else [[Pass.of(each) for each in of_rank] for of_rank, _ in ranks]
        if runner.turns is not None and ranks is not None:
            self._set_orders([each for of_rank in passes for each in of_rank])
        if self.file is None:
            return {}
        short, runner.short_steps = runner.short_steps, 0
        fields: dict[str, Any] = {
            "micro_batches": runner.batches,
            **({"short_steps": short} if short else {}),
            "reckoned_bubble": round(reckoned(pipeline, runner.batches).idle, 4),
        }
        if ranks is not None:
            own = [(of_rank, length) for of_rank, (_, length) in zip(passes, ranks, strict=True)]
            found = measured_step(own, pipeline, runner.batches)
            step = found.step
            waits = {kind: [round(value, 6) for value in of_ranks] for kind, of_ranks in found.waits.items()}
            fields |= {
                "bubble": round(step.idle, 4),
                "exposed": {kind: round(seconds, 6) for kind, seconds in found.exposed.items()},
                "seconds": round(step.step, 6),
                "compute": [round(value, 6) for value in step.busy],
                "waits": waits,
            }
            write_whole(self.file, found.to_json(self._orders).encode())
        return {"pipeline": fields}

    def _set_orders(self, passes: list[Pass]) -> None:
        """Have pairs run in the orders that are best by the passes of the first process's pipeline, the same everywhere.

        They are searched again once durations have drifted. They change no sums, so a resumed run need not know them.
        """
        table = self.runner.stages.pipeline.table(self.runner.batches)
        if self.file is not None and drifted(self._nodes, nodes := measured_nodes(passes, table)):
            self._nodes, self._orders = nodes, orders(table, nodes, self.runner.stages.pipeline.carries)
        known = [PairOrder(*each) for each in comm.broadcast_object([tuple(each) for each in self._orders])]
        self.runner.orders = {(each.forward, each.backward): each.order for each in known}


def runner_of(model: nn.Module, strategy: Strategy, device: torch.device) -> Runner:
    """The runner of a model's micro-batches: one after another, or through its stages."""
    stages = stages_of(model)
    return SequentialRunner(model, strategy) if stages is None else PipelineRunner(model, stages, device)
