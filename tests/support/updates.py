"""Two character models: that learn from each other, a step of two updates, or of which one is the reference of the other.

Legend: I packs of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from torch import nn
from torch.nn.functional import mse_loss

from mmspeed.initialize import init_weights
from mmspeed.pipelines import TrainPipeline
from mmspeed.pipelines.domains.listed.domain import ListedSample
from mmspeed.pipelines.methods.base import MethodDefaults
from mmspeed.pipelines.methods.finetune import Finetune
from mmspeed.pipelines.tasks import Task
from mmspeed.protocols import (
    Ask,
    Batch,
    Data,
    Divisors,
    Domain,
    FrozenCopy,
    Method,
    Models,
    OptimizerSetting,
    RunPlace,
    Tensors,
    Terms,
    Update,
    Values,
)
from tests.support.character_runs import character_config
from tests.support.characters import CharacterConfig, CharacterDomain, CharacterModel
from tests.support.pairs import PairedPreferences

NEAR = 0.1  # weight of the distance between both models
SLOW = OptimizerSetting(lr_factor=0.25, betas=(0.0, 0.999), weight_decay=0.1)


class TwoModels(CharacterDomain):
    """A further model that comes with weights of another start."""

    further: ClassVar[str] = "critic"

    def build(self) -> dict[str, nn.Module]:
        further = CharacterModel(self.config.width, self.config.depth)
        init_weights(further, 7)
        return {**super().build(), self.further: further}

    def validation(self, models: Models, data: Data, place: RunPlace) -> None:
        return None


class PartlyFrozen(TwoModels):
    """Of the model's blocks all but the last are frozen."""

    def build(self) -> dict[str, nn.Module]:
        models = super().build()
        model = CharacterModel(self.config.width, self.config.depth)
        init_weights(model, self.config.seed)
        model.blocks[:-1].requires_grad_(False)
        return {**models, "model": model}


class Pairs(TwoModels):
    """The further model is the reference of preferences."""

    further = "reference model"


class LatePairs(Pairs):
    """The same, with a divisor that is known only afterwards."""

    def divisors(self, samples: Sequence[ListedSample]) -> Divisors:
        return {**super().divisors(samples), "units": None}


@dataclass(frozen=True)
class Mutual(MethodDefaults):
    """The model learns by the domain's loss and by its distance from the critic's prediction, the critic by that from the model's.

    Args:
        setting, every: of the model's update.
        both: the critic learns too.
    """

    setting: OptimizerSetting | None = None
    every: int = 1
    both: bool = True
    name = "mutual"
    needs, asks = ("prediction",), True

    def updates(self, domain: Domain) -> Sequence[Update]:
        (part,) = domain.parts()
        updates = Update(part, optimizer=self.setting, every=self.every), Update(part, "critic", "critic")
        return updates if self.both else updates[:1]

    def before(self, ask: Ask, batch: Batch, update: Update) -> Tensors:
        other = "model" if update.role == "critic" else "critic"
        return {"other": ask(other, ask.inputs(batch, update), batch).prediction()}

    def terms(self, values: Sequence[Values], before: Tensors, ask: Ask, batch: Batch, update: Update) -> Terms:
        term = values[0].loss
        distance_I = mse_loss(values[0].prediction(), before["other"], reduction="none").sum((1, 2))
        return {"loss": replace(term, loss_I=term.loss_I + NEAR * distance_I)}


class AgainstAnother(PairedPreferences):
    """Each text is preferred to the text backwards; the reference is the domain's."""

    def roles(self, domain: Domain) -> Mapping[str, FrozenCopy]:
        return {}


class Twice(Finetune):
    """Two updates a step, by the same loss: the second sees what the first has changed."""

    def updates(self, domain: Domain) -> Sequence[Update]:
        return Update(), Update(name="again")


TASKS: dict[str, tuple[type[CharacterDomain], Method]] = {
    "mutual": (TwoModels, Mutual()),
    "frozen-critic": (TwoModels, Mutual(both=False)),
    "partly-frozen": (PartlyFrozen, Mutual(SLOW)),
    "slow": (TwoModels, Mutual(SLOW, every=2)),
    "pairs": (Pairs, AgainstAnother()),
    "late": (LatePairs, AgainstAnother()),
    "twice": (CharacterDomain, Twice()),
}


def task_of(kind: str, config: CharacterConfig) -> Task:
    """A task of `TASKS`."""
    domain, method = TASKS[kind]
    return Task(domain(config), method)


def train_updates(folder: str, kind: str, overrides: tuple[str, ...] = ()) -> None:
    """Train a task of `TASKS`, on however many ranks call this."""
    config = character_config(Path(folder), *overrides)
    TrainPipeline(config, task=task_of(kind, config)).run()


def train_whole_and_in_parts(folder: str, kind: str, name: str, overrides: tuple[str, ...] = ()) -> None:
    """The run `name`, and the run `name`-parts, which is stopped after three steps and goes on."""
    train_updates(folder, kind, (f"name={name}", *overrides))
    for stop in ("train.steps=3", "train.steps=6"):
        train_updates(folder, kind, (f"name={name}-parts", *overrides, stop))
