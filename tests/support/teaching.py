"""Distillation by two further models, as a method: distribution matching (Yin et al., 2023).

A frozen teacher and a critic are asked about what the student has just made; the critic learns what the student makes.

Legend: I items of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmspeed import rng
from mmspeed.pipelines.methods.base import MethodDefaults, own_terms
from mmspeed.protocols import Ask, Batch, Domain, FrozenCopy, Given, Inputs, Tensors, Terms, Update, Values


@dataclass(frozen=True)
class Teaching(MethodDefaults):
    """The first part of the domain learns from a frozen copy of its start, and a critic beside it.

    Args:
        seed: of the noise on what the student makes.
        near: the weight of the distance to what the teacher asks for.
    """

    seed: int = 0
    near: float = 0.5
    name = "teaching"
    needs, asks = ("prediction",), True

    def roles(self, domain: Domain) -> Mapping[str, FrozenCopy]:
        part = domain.parts()[0]
        return {"teacher": FrozenCopy(part), "critic": FrozenCopy(part)}

    def updates(self, domain: Domain) -> Sequence[Update]:
        part = domain.parts()[0]
        return [Update(part, part.role, "student"), Update(part, "critic", "critic")]

    def made(self, values: Values, batch: Batch, purpose: str) -> Given | None:
        """What the student has made, with noise of our own, drawn by the names of items; None in a domain without times."""

        def noise(size: Sequence[int]) -> Tensor:
            return torch.stack(
                [rng.normal(tuple(size), self.seed, f"{self.name} {purpose}", *name) for name in batch.names]
            )

        quantiles = [rng.uniform(self.seed, f"{self.name} time of {purpose}", *name) for name in batch.names]
        return values.made(noise, torch.tensor(quantiles, dtype=torch.float64))

    def calls(self, ask: Ask, batch: Batch, update: Update) -> Sequence[Inputs]:
        if update.name == "student":
            return super().calls(ask, batch, update)
        student = self.updates(ask.domain)[0]
        made = self.made(ask(student.role, ask.inputs(batch, student), batch), batch, update.name)
        return [ask.inputs(batch, update, given=made)]

    def terms(self, values: Sequence[Values], before: Tensors, ask: Ask, batch: Batch, update: Update) -> Terms:
        (own,) = values
        if update.name == "critic":
            return {"loss": own.loss, **own_terms(values)}
        made = self.made(own, batch, update.name)
        inputs = ask.inputs(batch, update, given=made)
        pull = ask("teacher", inputs, batch).prediction() - ask("critic", inputs, batch).prediction()
        moved, pull = (own.prediction(), pull) if made is None else (made.x, -pull)  # noise is away from the data
        distance_I = (moved - (moved + self.near * pull).detach()).square().flatten(1).mean(1)
        return {"loss": own.term(distance_I.float()), **own_terms(values)}
