"""Two character models that learn from each other: a step of two updates, each of a role of its own.

The loss of each reaches the other's weights too, where nothing may be left of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from mmspeed.initialize import init_weights
from mmspeed.protocols import Batch, Data, Models, RunPlace, Term, Terms, Update
from tests.support.characters import CharacterDomain, CharacterModel

NEAR = 0.1  # weight of the distance between both models


def losses_of(model: nn.Module, other: nn.Module, batch: Batch) -> Tensor:
    """Each pack's cross-entropy by `model`, and how far it is from `other` (I,)."""
    ids_IN, targets_IN = batch["ids"][:, :-1], batch["ids"][:, 1:]
    logits_INV, other_INV = model(ids_IN).float(), other(ids_IN).float()
    loss_IN = cross_entropy(logits_INV.transpose(1, 2), targets_IN, ignore_index=0, reduction="none")
    return loss_IN.sum(1) + NEAR * mse_loss(logits_INV, other_INV, reduction="none").sum((1, 2))


def student_loss(models: Models, batch: Batch) -> Terms:
    """What the model learns by."""
    return {"loss": Term(losses_of(models["model"], models["critic"], batch), batch.weights_I, "tokens")}


def critic_loss(models: Models, batch: Batch) -> Terms:
    """What the critic learns by."""
    return {"loss": Term(losses_of(models["critic"], models["model"], batch), batch.weights_I, "tokens")}


class DistillationTask(CharacterDomain):
    """A model and a critic of another start."""

    def build(self) -> dict[str, nn.Module]:
        critic = CharacterModel(self.config.width, self.config.depth)
        init_weights(critic, 7)
        return {**super().build(), "critic": critic}

    def updates(self) -> Sequence[Update]:
        return Update(student_loss), Update(critic_loss, ("critic",), "critic")

    def validation(self, models: Models, data: Data, place: RunPlace) -> None:
        return None
