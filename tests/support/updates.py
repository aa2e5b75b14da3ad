"""Tasks with unlike updates: roles that learn together by one loss, and a model that learns at every second step only.

Legend: I packs of a micro-batch, N characters that are predicted in a pack, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import nn
from torch.nn.functional import cross_entropy

from mmspeed.initialize import init_weights
from mmspeed.pipelines import TrainPipeline
from mmspeed.protocols import Batch, Data, Models, OptimizerSetting, RunPlace, Term, Terms, Update
from tests.support.character_runs import character_config
from tests.support.characters import CharacterDomain, CharacterModel
from tests.support.distillation import DistillationTask, critic_loss, student_loss

SLOW = OptimizerSetting(lr_factor=0.25, betas=(0.0, 0.999), weight_decay=0.1)


def joint_loss(models: Models, batch: Batch) -> Terms:
    """The cross-entropy of the sum of both models' logits."""
    ids_IN, targets_IN = batch["ids"][:, :-1], batch["ids"][:, 1:]
    logits_INV = models["model"](ids_IN).float() + models["head"](ids_IN).float()
    loss_IN = cross_entropy(logits_INV.transpose(1, 2), targets_IN, ignore_index=0, reduction="none")
    return {"loss": Term(loss_IN.sum(1), batch.weights_I, "tokens")}


class JointTask(CharacterDomain):
    """A model of which the blocks but the last are frozen, and a head beside it: one loss, one norm."""

    def build(self) -> dict[str, nn.Module]:
        model, head = CharacterModel(self.config.width, self.config.depth), CharacterModel(self.config.width, 1)
        init_weights(model, self.config.seed)
        init_weights(head, 7)
        model.blocks[:-1].requires_grad_(False)
        return {"model": model, "head": head}

    def updates(self) -> Sequence[Update]:
        return (Update(joint_loss, ("model", "head"), "both", SLOW),)

    def validation(self, models: Models, data: Data, place: RunPlace) -> None:
        return None


class SlowStudentTask(DistillationTask):
    """The model learns at every second step with an optimizer of its own, the critic at each."""

    def updates(self) -> Sequence[Update]:
        return (
            Update(student_loss, optimizer=SLOW, every=2),
            Update(critic_loss, ("critic",), "critic"),
        )


TASKS: dict[str, type[CharacterDomain]] = {"joint": JointTask, "slow": SlowStudentTask}


def train_updates(folder: str, kind: str, overrides: tuple[str, ...] = ()) -> None:
    """Train a task of `TASKS`, on however many ranks call this."""
    config = character_config(Path(folder), *overrides)
    TrainPipeline(config, task=TASKS[kind](config)).run()


def train_whole_and_in_parts(folder: str, kind: str, name: str, overrides: tuple[str, ...] = ()) -> None:
    """The run `name`, and the run `name`-parts, which is stopped after three steps and goes on."""
    train_updates(folder, kind, (f"name={name}", *overrides))
    for stop in ("train.steps=3", "train.steps=6"):
        train_updates(folder, kind, (f"name={name}-parts", *overrides, stop))
