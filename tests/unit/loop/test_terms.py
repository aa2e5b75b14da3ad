"""Terms of a step that are no plain mean: a logged one without items, late divisors, and updates that are not finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from mmspeed.errors import UserError
from mmspeed.pipelines import TrainPipeline
from mmspeed.pipelines.domains.listed.domain import ListedSample
from mmspeed.pipelines.methods.finetune import Finetune
from mmspeed.pipelines.tasks import Task
from mmspeed.protocols import Ask, Batch, Data, Divisors, Models, RunPlace, Tensors, Term, Terms, Update, Values
from tests.support.character_runs import character_config, rows
from tests.support.characters import CharacterConfig, CharacterDomain
from tests.support.checkpoints import whole_checkpoint
from tests.support.updates import Mutual, TwoModels

Extra = Callable[[Terms, Batch], dict[str, Term]]


@dataclass(frozen=True)
class Further(Finetune):
    """Further terms, of the domain's own."""

    extra: Extra

    def terms(self, values: Sequence[Values], before: Tensors, ask: Ask, batch: Batch, update: Update) -> Terms:
        own = super().terms(values, before, ask, batch, update)
        return {**own, **self.extra(own, batch)}


def task_with(config: CharacterConfig, divisors: Divisors, extra: Extra) -> Task:
    """The character task with further divisors and terms."""

    class Changed(CharacterDomain):
        def divisors(self, samples: Sequence[ListedSample]) -> Divisors:
            return {**super().divisors(samples), **divisors}

        def validation(self, models: Models, data: Data, place: RunPlace) -> None:
            return None

    return Task(Changed(config), Further(extra))


def test_a_logged_term_without_items_is_left_out(tmp_path: Path) -> None:
    config = character_config(tmp_path, "train.steps=2")

    def images(terms: Terms, batch: Batch) -> dict[str, Term]:
        return {"images": Term(terms["loss"].loss_I.detach(), batch.weights_I * 0, "images", trains=False)}

    TrainPipeline(config, task=task_with(config, {"images": 0.0}, images)).run()
    assert [sorted(row["terms"]) for row in rows(config)] == [["loss", "right"]] * 2


def test_terms_of_one_late_divisor_have_one_weight(tmp_path: Path) -> None:
    config = character_config(tmp_path, "train.steps=2")

    def halved(terms: Terms, batch: Batch) -> dict[str, Term]:
        return {"half": Term(terms["loss"].loss_I.detach(), batch.weights_I / 2, "tokens", trains=False)}

    with pytest.raises(UserError, match="the divisor tokens is the sum of its terms' weights, and its terms have"):
        TrainPipeline(config, task=task_with(config, {"tokens": None}, halved)).run()


@dataclass(frozen=True)
class Spoiled(Mutual):
    """Two models that learn from each other, where the loss of `role` is not finite."""

    role: str = ""

    def terms(self, values: Sequence[Values], before: Tensors, ask: Ask, batch: Batch, update: Update) -> Terms:
        terms = super().terms(values, before, ask, batch, update)
        factor = math.nan if update.role == self.role else 1.0
        return {name: replace(term, loss_I=term.loss_I * factor) for name, term in terms.items()}


def changed(tmp_path: Path, role: str, skip: int) -> dict[str, bool]:
    """True where the weights and the averages of both roles differ after two steps from the start. `role`: whose loss is not finite."""
    overrides = ("train.ema_decay=0.5", f"train.skip_non_finite={skip}", "checkpoint.every=1")
    names, results = ("start", "end"), {}
    for name, steps in zip(names, (1, 2), strict=True):
        config = character_config(tmp_path, f"name={name}", f"train.steps={steps}", *overrides)
        TrainPipeline(config, task=Task(TwoModels(config), Spoiled(role=role))).run()
        results[name] = whole_checkpoint(config.run_dir)
    one, two = results["start"], results["end"]
    kinds = {"model": "model.", "ema": "ema.", "critic": "critic:model.", "critic ema": "critic:ema."}
    return {
        kind: any((one[name] != two[name]).any() for name in one if name.startswith(prefix))
        for kind, prefix in kinds.items()
    }


def test_a_broken_first_update_ends_the_step(tmp_path: Path) -> None:
    assert set(changed(tmp_path, "model", skip=5).values()) == {False}


def test_a_broken_second_update_leaves_the_first(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert changed(tmp_path, "critic", skip=5) == {"model": True, "ema": True, "critic": False, "critic ema": False}


def test_the_message_names_what_was_updated(tmp_path: Path) -> None:
    words = "Update 'critic' is not finite and ended the step; of this step model was updated"
    with pytest.raises(UserError, match=words):
        changed(tmp_path, "critic", skip=0)


def test_a_logged_term_that_is_not_finite_is_rolled_back_as_a_loss(tmp_path: Path) -> None:
    config = character_config(tmp_path, "train.steps=2", "train.divergence.action=roll_back")

    def logged(terms: Terms, batch: Batch) -> dict[str, Term]:
        return {
            "logged": Term(terms["loss"].loss_I.detach() * math.nan, terms["loss"].weight_I, "tokens", trains=False)
        }

    with pytest.raises(UserError, match=r"^step 1: loss .*there is none to return to"):
        TrainPipeline(config, task=task_with(config, {}, logged)).run()
