"""Training by the domain's own loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mmspeed.pipelines.methods.base import MethodDefaults, own_terms
from mmspeed.protocols import Ask, Batch, Tensors, Terms, Update, Values


@dataclass(frozen=True)
class Finetune(MethodDefaults):
    """Every part of the domain learns by the domain's loss, and by the terms that belong to the model."""

    name = "finetune"

    def terms(self, values: Sequence[Values], before: Tensors, ask: Ask, batch: Batch, update: Update) -> Terms:
        """The loss, and the model's own terms."""
        return {"loss": values[0].loss, **own_terms(values)}
