"""Tasks: a domain and the method by which it is trained.

`mmspeed/config/tasks.py` is the table of domains, `mmspeed/config/methods.py` that of methods.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mmspeed.config import RunConfig
from mmspeed.config.methods import METHODS, make_method
from mmspeed.config.parallel import ParallelConfig
from mmspeed.config.tasks import TASKS, TaskEntry, preparation_class, task_class
from mmspeed.errors import UserError
from mmspeed.loop.optimizers.make_optimizer import AnyOptimizer
from mmspeed.loop.pipeline import runner_of
from mmspeed.loop.step import Learner
from mmspeed.parallel import Strategy
from mmspeed.parallel.stages import Stages, cut_into_stages
from mmspeed.plan.schedules import Pipeline
from mmspeed.protocols import (
    Ask,
    Batch,
    CountsBlocks,
    Data,
    Domain,
    Inputs,
    Method,
    Models,
    RunPlace,
    ShapeClass,
    Terms,
    Update,
    require_entry,
)
from mmspeed.torch_internals import tree_map_only


def register(name: str, task: str, config: str | None = None, preparation: str | None = None) -> None:
    """Register a domain in this process, under its name in configs. Call it before the first config of the domain is read.

    The other arguments are "module:class", as in `TaskEntry`. Processes that the command line starts (`--nproc`) do not know the domain:
    for these an installed package declares it, as an entry point of the group `mmspeed.tasks`.
    """
    TASKS[name] = TaskEntry(task, config, preparation, origin="this program")


def register_method(name: str, method: str) -> None:
    """Register a method ("module:class") in this process, under its name in configs."""
    METHODS[name] = method


def make_task(config: RunConfig, maker: Any = None) -> Task:
    """The task that a config names. Raises UserError for a domain or a method that is not known, or one that does not serve the other."""
    return as_task(task_class(config.task)(config, maker), config)


def as_task(task: Domain | Task, config: RunConfig) -> Task:
    """The task of a domain, by the config's method; a task as it is. Raises UserError as `make_task`."""
    return task if isinstance(task, Task) else Task(task, make_method(config.method))


def maker_of(config: RunConfig) -> Any:
    """The encoder that completes a config's data in the first epoch; None where its domain has none.

    Raises UserError for a domain that is not known or cannot be imported.
    """
    kind = preparation_class(config.task)
    return None if kind is None else kind(config).maker()


@dataclass(frozen=True)
class Passed:
    """A micro-batch on its device, with the inputs and outputs of its forward passes."""

    batch: Batch
    calls: Sequence[Inputs]
    outputs: Sequence[Any]


@dataclass(frozen=True)
class _Forward:
    """The forward passes of an update. `ask` alone holds the models, so that they are freed with the learners."""

    method: Method
    ask: Ask
    update: Update
    device: torch.device

    def before(self, batch: Batch) -> Batch:
        batch = batch.to(self.device, torch.float32)
        return replace(batch, before=self.method.before(self.ask, batch, self.update))

    def call(self, batch: Batch) -> Passed:
        batch = batch.to(self.device, torch.float32)
        calls = self.method.calls(self.ask, batch, self.update)
        model = self.ask.models[self.update.role]
        return Passed(batch, calls, [inputs.call(model) for inputs in calls])

    def terms(self, passed: Passed) -> Terms:
        values = [
            self.ask.domain.values(output, inputs, passed.batch)
            for output, inputs in zip(passed.outputs, passed.calls, strict=True)
        ]
        return self.method.terms(values, passed.batch.before, self.ask, passed.batch, self.update)


class Task:
    """A domain that is trained by a method. Raises UserError where the domain does not give what the method needs."""

    def __init__(self, domain: Domain, method: Method) -> None:
        self.domain, self.method, self.ask = domain, method, Ask(domain)
        for need in method.needs:
            if need not in domain.gives:
                gives = " and ".join(domain.gives) or "no more than its loss"
                raise UserError(
                    f"method.kind: {method.name} needs the {need} of a model, and {domain.name} gives {gives}"
                )

    @property
    def name(self) -> str:
        """The domain's name."""
        return self.domain.name

    def cut(
        self, model: nn.Module, parallel: ParallelConfig, group: dist.ProcessGroup | None, rank: int | None = None
    ) -> Stages:
        """Leave a process its stages of the model that learns, in place, divided as configured or by work; as `cut_into_stages`."""
        work = self.domain.block_work() if isinstance(self.domain, CountsBlocks) else None
        return cut_into_stages(model, group, Pipeline.of(parallel), rank, parallel.stages, work)

    def build(self) -> dict[str, nn.Module]:
        """The models by role: those of the domain, then the method's, each built as the part that it copies."""
        models, further = dict(self.domain.build()), dict[str, nn.Module]()
        for role, copied in self.copies().items():
            if copied not in further:  # else left by the build for the copy before
                further = dict(self.domain.build())
            models[role] = further.pop(copied)
        return models

    def copies(self) -> Mapping[str, str]:
        """The roles of the method's further models, each with the role that it copies."""
        return {role: copy.part.role for role, copy in self.method.roles(self.domain).items()}

    def updates(self) -> Sequence[Update]:
        """The updates of a step, in order."""
        return self.method.updates(self.domain)

    def data(self, place: RunPlace) -> Data:
        """The order of the run's steps, and this rank's share of them. Raises UserError where the samples lack an entry that the method takes."""
        data = self.method.data(self.domain, place, self.ask)
        for shape in data.shapes(0) if self.method.entries else ():
            for entry in self.method.entries:
                require_entry(entry, shape.tensors)
        return data

    def prepare(self, models: Models, place: RunPlace) -> None:
        """Try out the operators of the models, which have their weights now, and let the method's data ask them."""
        self.ask.models = models
        self.domain.prepare(models, place)

    def learners(
        self,
        updates: Sequence[Update],
        models: Models,
        strategy: Strategy,
        optimizers: Mapping[str, AnyOptimizer],
        device: torch.device,
        staged: bool = False,
    ) -> list[Learner]:
        """The learners of updates. `models`, `optimizers`: by role. Raises UserError for stages of a pipeline and a method that asks."""
        if staged and self.method.asks:
            raise UserError(
                f"parallel.pp: {self.method.name} asks whole models for values, and a stage of a pipeline has a part of one: leave pp at 1"
            )
        forwards = [_Forward(self.method, Ask(self.domain, models), update, device) for update in updates]
        return [
            Learner(
                each.update,
                runner_of(models[each.update.role], strategy, device),
                optimizers[each.update.role],
                each.call,
                each.terms,
                each.before if self.method.asks else None,
                device,
            )
            for each in forwards
        ]

    # -- measuring ------------------------------------------------------------------------------------------------------

    def synthetic_batch(self, shape: ShapeClass, items: int, place: RunPlace, tokens: int | None = None) -> Batch:
        """A synthetic batch of the domain with all entries that the method takes."""
        batch = self.domain.synthetic_batch(shape, items, place, tokens)
        return batch.with_entries(self.method.entries)

    def loss(self, models: Models, batch: Batch) -> Tensor:
        """The sum of the losses of a batch that train, by the first update and models without the wrappers of engines."""
        update, device = self.updates()[0], batch.weights_I.device
        forward = _Forward(self.method, Ask(self.domain, models), update, device)
        terms = forward.terms(forward.call(forward.before(batch) if self.method.asks else batch))
        sums = [term.loss_I.sum() for term in terms.values() if term.trains]
        return sums[0] if len(sums) == 1 else torch.stack(sums).sum()

    def sketch(
        self, model: nn.Module, shape: ShapeClass, items: int
    ) -> tuple[Callable[[], Inputs], Callable[[Inputs], Tensor]]:
        """(a function that makes empty inputs of a batch, their loss by `model`), for fake tensors. Raises UserError for several models."""
        if further := self.copies():
            raise UserError(f"memory is planned for one model, and {self.method.name} has {', '.join(further)} too")
        domain, batch = self.domain, self.domain.outline_batch(shape, items)
        real = domain.inputs(model, batch, self.updates()[0].part)

        def inputs() -> Inputs:
            made: dict[int, Tensor] = {}
            arguments, tensors, positional = _empty((real.arguments, real.tensors, real.positional), made)
            return Inputs(arguments, tensors, positional, real.part)

        def loss(given: Inputs) -> Tensor:
            values = domain.values(given.call(model), given, replace(batch, weights_I=torch.ones(items)))
            terms = {"loss": values.loss, **values.own()}
            return torch.stack([term.total() for term in terms.values() if term.trains]).sum()

        return inputs, loss


def _empty(tree: Any, made: dict[int, Tensor]) -> Any:
    """A tree with an empty tensor of the same size in the place of each, which `made` keeps by the identity of the real one."""

    def empty(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = torch.empty(tensor.shape, dtype=tensor.dtype)
        return made[id(tensor)]

    return tree_map_only(Tensor, empty, tree)
