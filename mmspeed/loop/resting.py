"""Rest the roles whose updates are not made in a step in the host's memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from mmspeed.memory.offload.resting import HostRest
from mmspeed.memory.optimizer.states import plain_tensors
from mmspeed.memory.optimizer.tiered_optimizer import TieredOptimizer
from mmspeed.parallel.tensor import local

from .averages import EMA
from .callbacks import BaseCallback
from .optimizers.make_optimizer import AnyOptimizer
from .step import Learner


class Rests(BaseCallback):
    """Rests the roles of updates with `rests` at the steps that do not make them, and wakes them before those that do.

    `device`: that whose memory they leave. All ranks rest the same roles, and nothing is exchanged.
    """

    def __init__(
        self,
        learners: Sequence[Learner],
        models: Mapping[str, nn.Module],
        averages: Mapping[str, EMA],
        device: torch.device,
    ) -> None:
        self.learners = [learner for learner in learners if learner.update.rests]
        self._rests = {
            role: HostRest(device, partial(held, models[role], learner.optimizer, averages.get(role)))
            for learner in self.learners
            for role in (learner.update.role,)
        }

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes that rest now, by role."""
        return {role: rest.nbytes for role, rest in self._rests.items()}

    def before_step(self, step: int) -> None:
        due = {learner.update.role for learner in self.learners if learner.update.due(step)}
        for role, rest in self._rests.items():  # first those that make room
            if role not in due:
                rest.rest()
        for role in due:
            self._rests[role].wake()

    def wake(self) -> None:
        """Wake all roles: checkpoints and validations read them."""
        for rest in self._rests.values():
            rest.wake()


def held(model: nn.Module, optimizer: AnyOptimizer, average: EMA | None) -> Iterator[Tensor]:
    """The tensors of a role, this process's parts: parameters, what its optimizer holds on the device, and averages."""
    yield from (local(parameter.detach()) for parameter in model.parameters())
    if isinstance(optimizer, TieredOptimizer):
        optimizer.finish()
        optimizer = optimizer.inner
    yield from plain_tensors([list(group["params"]) for group in optimizer.param_groups])
    yield from plain_tensors(list(optimizer.state.values()))
    if average is not None and not average.on_host:
        yield from (local(tensor) for tensor in average.tensors.values())
