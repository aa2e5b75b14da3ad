"""Methods: how the models of a domain learn, by which further models, and by which terms.

Legend: I items of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from mmspeed.errors import UserError, nearest

from .batch import Batch, Terms
from .data import Data
from .task import Domain, Given, Inputs, LearningPart, Models, RunPlace, Update, Values

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class FrozenCopy:
    """A further model of a method, such as a reference, a teacher or a critic: it is built as a part is, and begins with its weights.

    It is frozen unless an update trains its role.
    """

    part: LearningPart


@dataclass
class Ask:
    """What a method may ask of a domain while an update is made. `models`: by role, once the run has them."""

    domain: Domain
    models: Models = field(default_factory=dict)

    def inputs(self, batch: Batch, update: Update, entry: str | None = None, given: Given | None = None) -> Inputs:
        """The inputs of the role that learns; `entry` and `given` as for `Domain.inputs`."""
        return self.domain.inputs(self._model(update.role), batch, update.part, entry, given)

    @torch.no_grad()
    def __call__(self, role: str, inputs: Inputs, batch: Batch) -> Values:
        """The values of a role's model, without gradients. Raises UserError for a role that there is not."""
        return self.domain.values(inputs.call(self._model(role)), inputs, batch)

    def _model(self, role: str) -> torch.nn.Module:
        if role not in self.models:
            raise UserError(
                f"the method asks the role {role}, and there are {', '.join(self.models)}{nearest(role, list(self.models))}"
            )
        return self.models[role]


class Method(Protocol):
    """The way in which a domain's models learn. `mmspeed.pipelines.methods.base.MethodDefaults` has defaults for all but `terms`."""

    name: str

    @property
    def needs(self) -> Collection[str]:
        """What it needs of a domain's values beside the loss; a domain without it is refused."""
        ...

    @property
    def asks(self) -> bool:
        """True for a method that asks whole models for values, which a pipeline's stages cannot give."""
        ...

    @property
    def entries(self) -> Collection[str]:
        """The entries of the samples that it takes, by role."""
        ...

    def roles(self, domain: Domain) -> Mapping[str, FrozenCopy]:
        """Further models by role."""
        ...

    def updates(self, domain: Domain) -> Sequence[Update]:
        """The updates of a step, in order; the same at every call."""
        ...

    def data(self, domain: Domain, place: RunPlace, ask: Ask) -> Data:
        """The order of the run's steps, and this rank's share of them. Rollouts wrap it, and ask when a step is taken."""
        ...

    def before(self, ask: Ask, batch: Batch, update: Update) -> Tensors:
        """Tensors from passes without gradients before the one that learns, such as those of a reference."""
        ...

    def calls(self, ask: Ask, batch: Batch, update: Update) -> Sequence[Inputs]:
        """The inputs of the passes that are differentiated, of the role that learns."""
        ...

    def terms(self, values: Sequence[Values], before: Tensors, ask: Ask, batch: Batch, update: Update) -> Terms:
        """The terms of the values of all calls. `before`: the tensors that the method's `before` gave."""
        ...
