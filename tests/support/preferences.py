"""Learning from preferences on characters (after DPO: Rafailov et al., 2023): pairs of the text and the text backwards.

The likelihood of both, by the model and by a frozen reference, goes into one loss: two forward passes before one backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor, nn
from torch.nn.functional import cross_entropy, logsigmoid

from mmspeed.initialize import init_weights
from mmspeed.pipelines import TrainPipeline
from mmspeed.pipelines.domains.listed.domain import ListedSample
from mmspeed.protocols import Batch, Data, Divisors, Models, RunPlace, Term, Terms, Update
from tests.support.character_runs import character_config
from tests.support.characters import CharacterModel, CharacterTask

BETA = 0.5


def likelihood(model: nn.Module, ids_IN: Tensor) -> Tensor:
    """The logarithm of the probability of each row's characters (I,), without padding."""
    logits_INV: Tensor = model(ids_IN[:, :-1]).float()
    return -cross_entropy(logits_INV.transpose(1, 2), ids_IN[:, 1:], ignore_index=0, reduction="none").sum(1)


def preference(models: Models, batch: Batch) -> Terms:
    """The loss of each pair, and how often the text is preferred, which does not train."""
    chosen_IN, rejected_IN = batch["ids"], batch["ids"].flip(1)
    margins = [
        likelihood(models[role], chosen_IN) - likelihood(models[role], rejected_IN) for role in ("model", "reference")
    ]
    gain_I = BETA * (margins[0] - margins[1].detach())
    right_I = (gain_I.detach() > 0).float()
    return {
        "loss": Term(-logsigmoid(gain_I), batch.weights_I, "pairs"),
        "preferred": Term(right_I, batch.weights_I, "pairs", trains=False),
    }


class PreferenceTask(CharacterTask):
    """A model that learns, and a frozen reference that comes with weights of its own. `late`: pairs are counted after the step only."""

    late = False

    def build(self) -> dict[str, nn.Module]:
        reference = CharacterModel(self.config.width, self.config.depth)
        init_weights(reference, 7)
        return {**super().build(), "reference": reference}

    def updates(self) -> Sequence[Update]:
        return (Update(preference),)

    def divisors(self, samples: Sequence[ListedSample]) -> Divisors:
        return {"pairs": None if self.late else float(len(samples))}

    def validation(self, models: Models, data: Data, place: RunPlace) -> None:
        return None


class LatePreferenceTask(PreferenceTask):
    """The same, with a divisor that is known only afterwards."""

    late = True


class TwiceTask(CharacterTask):
    """Two updates a step, by the same loss: the second sees what the first has changed."""

    def updates(self) -> Sequence[Update]:
        return (Update(self.loss), Update(self.loss, name="again"))


TASKS: dict[str, type[CharacterTask]] = {"known": PreferenceTask, "late": LatePreferenceTask, "twice": TwiceTask}


def train_task(folder: str, kind: str, overrides: tuple[str, ...] = ()) -> None:
    """Train a task of `TASKS`, on however many ranks call this."""
    config = character_config(Path(folder), *overrides)
    TrainPipeline(config, task=TASKS[kind](config)).run()
