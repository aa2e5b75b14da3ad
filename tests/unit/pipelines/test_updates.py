"""Updates that cannot be made are refused in one line; an update's own optimizer settings are the config's, changed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from torch import nn

from mmspeed.config.training import TrainConfig
from mmspeed.errors import UserError
from mmspeed.loop.optimizers.learning_rate import learning_rate
from mmspeed.pipelines import TrainPipeline
from mmspeed.pipelines.run.updates import learning_roles, own_train
from mmspeed.protocols import OptimizerSetting, Update
from tests.support.character_runs import character_config
from tests.support.updates import task_of


def models() -> dict[str, nn.Module]:
    return {role: nn.Linear(2, 2) for role in ("model", "critic", "reference")}


CASES: list[tuple[Sequence[Update], str]] = [
    ([Update(role="teacher")], "update model trains teacher; an update trains one of the roles model, critic"),
    ([Update(every=0)], "update model is made at every 0-th step: `every` is 1 or more"),
    ([Update(every=2), Update(every=3, name="b")], "has no update that is made at every step: model, b"),
    ([Update(), Update(role="critic")], "has updates of one name, model, model"),
    (
        [Update(), Update(name="b", optimizer=OptimizerSetting(0.5))],
        "update b has another optimizer setting for the role model than an update before it",
    ),
]


@pytest.mark.parametrize(("updates", "message"), CASES, ids=[message for _, message in CASES])
def test_updates_that_cannot_be_made_are_refused(updates: Sequence[Update], message: str) -> None:
    with pytest.raises(UserError, match=message):
        learning_roles("any", updates, models())


def test_roles_come_in_the_order_of_their_updates_with_their_settings() -> None:
    slow = OptimizerSetting(0.5)
    updates = [Update(role="critic", name="a"), Update(name="b", optimizer=slow, every=3)]
    assert list(learning_roles("any", updates, models()).items()) == [("critic", None), ("model", slow)]


@pytest.mark.parametrize("other", ["critic"])
def test_roles_that_share_what_trains_are_refused(other: str) -> None:
    """With a role that learns too, and with one that would freeze it; a frozen base may be shared."""
    built, updates = models(), [Update(), Update(role="critic", name="critic")]
    built[other].weight = built["model"].weight
    with pytest.raises(UserError, match=f"the roles model and {other} share `weight`, which trains"):
        learning_roles("any", updates, built)
    built["model"].weight.requires_grad_(False)
    assert list(learning_roles("any", updates, built)) == ["model", "critic"]


def test_an_optimizer_setting_changes_what_it_names_alone() -> None:
    train = TrainConfig(lr=1e-3, warmup_steps=3, schedule="cosine", steps=9, weight_decay=0.2)
    assert own_train(train, None) is train
    own = own_train(train, OptimizerSetting(0.5, betas=(0.0, 0.999), weight_decay=0.0))
    assert own == train.model_copy(update={"betas": (0.0, 0.999), "weight_decay": 0.0})
    assert [learning_rate(step, own) for step in range(9)] == [learning_rate(step, train) for step in range(9)]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (OptimizerSetting(0.0), "an update's lr_factor is 0: it is above 0"),
        (OptimizerSetting(betas=(0.9, 1.0)), r"an update's optimizer setting: betas\.1: Input should be less than 1"),
    ],
)
def test_an_optimizer_setting_is_checked_as_the_config(setting: OptimizerSetting, message: str) -> None:
    with pytest.raises(UserError, match=message):
        own_train(TrainConfig(), setting)


def test_a_budget_of_memory_is_refused_with_two_roles_that_learn(tmp_path: Path) -> None:
    config = character_config(tmp_path, "memory.budget=1GiB")
    with pytest.raises(
        UserError, match=r"memory\.budget chooses for one model, and the task characters trains model, critic"
    ):
        TrainPipeline(config, task=task_of("mutual", config)).run()


def test_skipping_is_refused_with_several_updates(tmp_path: Path) -> None:
    config = character_config(tmp_path, "train.divergence.action=skip")
    with pytest.raises(UserError, match="skip is for one update a step, and the task characters makes model, critic"):
        TrainPipeline(config, task=task_of("mutual", config)).run()
