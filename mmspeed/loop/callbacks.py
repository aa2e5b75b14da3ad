"""Callbacks: actions before and after each optimizer step, in the same order on all ranks.

A callback sees steps and numbers, no domain. `pipelines/training/callbacks.py` defines the order of a run's callbacks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mmspeed import comm
from mmspeed.comm import Ledger
from mmspeed.compute.sparse.controller import SparsityController
from mmspeed.config.training import TrainConfig
from mmspeed.protocols import Models, StepData

from .averages import EMA
from .counts import counting_modules, over_ranks, spread
from .optimizers.learning_rate import learning_rate, set_learning_rate
from .optimizers.make_optimizer import AnyOptimizer
from .step import StepResult

SumOverRanks = Callable[[list[float]], list[float]]


@dataclass(frozen=True)
class StepOutcome:
    """A step that is done: `step` counts from 1; `result` is None when every item of the step is lost."""

    step: int
    epoch: int
    data: StepData
    result: StepResult | None

    def updated(self, role: str) -> bool:
        """True where the weights of a role changed."""
        return self.result is not None and role in self.result.updated


class BaseCallback:
    """An action before and after each step, on all ranks; this one does nothing."""

    def before_step(self, step: int) -> None:
        """Called before optimizer step number `step`, from 0."""

    def after_step(self, outcome: StepOutcome) -> None:
        """Called after the step."""

    def row(self) -> dict[str, Any]:
        """Fields for the next row of metrics.jsonl. A collective call."""
        return {}


class LearningRate(BaseCallback):
    """Sets the learning rate of every optimizer before each step: the config's times the optimizer's factor."""

    def __init__(self, config: TrainConfig, optimizers: Sequence[tuple[AnyOptimizer, float]]) -> None:
        self.config, self.optimizers = config, optimizers
        self.rate = 0.0

    def before_step(self, step: int) -> None:
        self.rate = learning_rate(step, self.config)
        for optimizer, factor in self.optimizers:
            set_learning_rate(optimizer, self.rate * factor)

    def row(self) -> dict[str, Any]:
        return {"lr": self.rate}


class Sparsity(BaseCallback):
    """Controls the thresholds of sparse attention. `saved_flops` counts the operations left out since the last call."""

    def __init__(self, controller: SparsityController, sum_over_ranks: SumOverRanks, role: str = "model") -> None:
        self.controller, self.sum, self.role = controller, sum_over_ranks, role

    @classmethod
    def of(cls, model: nn.Module, sum_over_ranks: SumOverRanks, role: str = "model") -> list[Sparsity]:
        """The callback of a role's model with sparse attention; none for one whose attention is all dense."""
        controller = SparsityController.of(model)
        return [] if controller is None else [cls(controller, sum_over_ranks, role)]

    def before_step(self, step: int) -> None:
        self.controller.before_step(step)

    def after_step(self, outcome: StepOutcome) -> None:
        # a model that did not learn in the step has measured nothing
        self.controller.after_step(self.sum, finite=outcome.result is None or outcome.updated(self.role))

    def saved_flops(self) -> float:
        """Operations that attention left out since the last call, of all ranks. A collective call."""
        return self.controller.saved_flops(self.sum)

    def row(self) -> dict[str, Any]:
        return {"attention": [asdict(row) for row in self.controller.rows]}


class StepCounts(BaseCallback):
    """Sums of the counts of modules (`CountsSteps`) since the last row, and their spread in that row.

    ranks: processes that hold equal parts of the experts that are counted; the row says how loads lie over them.
    """

    def __init__(self, models: Models, ranks: int = 1, staged: bool = False) -> None:
        self.ranks, self.staged = ranks, staged
        self.names = {name: module.counted for name, module in counting_modules(models).items()}
        self.sums: dict[str, Tensor] = {}

    def after_step(self, outcome: StepOutcome) -> None:
        for name, counts in {} if outcome.result is None else outcome.result.counts.items():
            self.sums[name] = self.sums[name] + counts if name in self.sums else counts

    def row(self) -> dict[str, Any]:
        sums, self.sums = self.sums, {}
        kind_of = {name: self.names[name] for name in sums}
        if self.staged:  # each stage has counted in modules of its own
            own = {name: [kind_of[name], counts.tolist()] for name, counts in sums.items()}
            found = {name: entry for of_rank in comm.all_gather_objects(own) for name, entry in of_rank.items()}
            kind_of = {name: kind for name, (kind, _) in sorted(found.items(), key=lambda pair: _natural(pair[0]))}
            sums = {name: torch.tensor(found[name][1]) for name in kind_of}
        row: dict[str, Any] = {
            kind: spread({name: sums[name] for name in sums if kind_of[name] == kind})
            for kind in sorted(set(kind_of.values()))
        }
        return row | ({"rank_load": over_ranks(sums, self.ranks)} if self.ranks > 1 and sums else {})


def _natural(name: str) -> list[tuple[int, str]]:
    """A key that sorts blocks by their numbers."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


class SentBytes(BaseCallback):
    """Bytes that this process sent to others since the last row, by kind and axis; those of FSDP2 are not among them."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger, self.before = ledger, ledger.copy()

    def row(self) -> dict[str, Any]:
        sent, self.before = self.ledger.since(self.before), self.ledger.copy()
        return {"sent_bytes": {f"{kind} {axis}": count for (kind, axis), count in sorted(sent.bytes.items())}}


class Averages(BaseCallback):
    """Moves the averages of a role's weights after each step that changed them."""

    def __init__(self, ema: EMA, model: nn.Module, role: str = "model") -> None:
        self.ema, self.model, self.role = ema, model, role

    def after_step(self, outcome: StepOutcome) -> None:
        if outcome.updated(self.role):
            self.ema.update(self.model)
