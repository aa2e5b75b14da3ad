"""Defaults of a method: every part of the domain learns by one pass over each micro-batch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from mmspeed.protocols import (
    Ask,
    Batch,
    Data,
    Domain,
    FrozenCopy,
    Inputs,
    RunPlace,
    Tensors,
    Terms,
    Update,
    Values,
)


class MethodDefaults:
    """Defaults for all of `mmspeed.protocols.Method` but `name` and `terms`. A subclass is a dataclass: its fields are its options."""

    needs: ClassVar[Collection[str]] = ()
    asks: ClassVar[bool] = False
    entries: ClassVar[Collection[str]] = ()

    def roles(self, domain: Domain) -> Mapping[str, FrozenCopy]:
        """Empty: no further models."""
        return {}

    def updates(self, domain: Domain) -> Sequence[Update]:
        """An update of each part."""
        return [Update.of(part) for part in domain.parts()]

    def data(self, domain: Domain, place: RunPlace, ask: Ask) -> Data:
        """The domain's data."""
        return domain.data(place)

    def before(self, ask: Ask, batch: Batch, update: Update) -> Tensors:
        """Empty: nothing is asked."""
        return {}

    def calls(self, ask: Ask, batch: Batch, update: Update) -> Sequence[Inputs]:
        """One pass over the samples."""
        return [ask.inputs(batch, update)]


def own_terms(values: Sequence[Values], mtp: bool = True) -> Terms:
    """The terms that belong to the model, such as the balance of experts: their mean over several passes."""
    first, *others = [each.own(mtp) for each in values]
    if not others:
        return first
    return {
        name: replace(term, loss_I=sum((own[name].loss_I for own in others), term.loss_I) / len(values))
        for name, term in first.items()
    }
