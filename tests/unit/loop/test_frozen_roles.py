"""Models that no update trains: their record in a run, and the checks when it resumes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mmspeed.errors import UserError
from mmspeed.loop.checkpoint.load import latest
from mmspeed.loop.checkpoint.storage import META, SEAL, write_json, write_sealed
from mmspeed.loop.frozen import frozen_fingerprint
from mmspeed.pipelines import TrainPipeline
from mmspeed.pipelines.tasks import Task
from tests.support.character_runs import character_config, losses
from tests.support.characters import CharacterConfig
from tests.support.checkpoints import differing, whole_checkpoint
from tests.support.spawn import run_ranks
from tests.support.updates import TASKS, Pairs, task_of, train_updates


class OtherReference(Pairs):
    """The reference with one number changed by its last bit."""

    def build(self) -> dict[str, nn.Module]:
        models = super().build()
        weight = next(models[self.further].parameters()).data.view(-1)
        weight[3] = torch.nextafter(weight[3], torch.tensor(1e9))
        return models


def train(folder: Path, kind: str, *overrides: str) -> CharacterConfig:
    train_updates(str(folder), kind, overrides)
    return character_config(folder, *overrides)


def meta_of(config: CharacterConfig) -> Path:
    newest = latest(config.run_dir / "checkpoints")
    assert newest is not None
    return newest / META


def recorded(config: CharacterConfig) -> dict[str, Any]:
    roles: dict[str, Any] = json.loads(meta_of(config).read_text())["roles"]
    return roles


def test_the_record_of_a_run_and_its_checkpoints_name_the_reference(tmp_path: Path) -> None:
    config = train(tmp_path, "pairs", "train.steps=2")
    reference = task_of("pairs", config).build()["reference model"].requires_grad_(False)
    expected = {"reference model": {"frozen": frozen_fingerprint(reference)}}
    assert recorded(config) == expected
    assert json.loads((config.run_dir / "run.json").read_text())["roles"] == expected
    assert not any(name.startswith("reference") for name in whole_checkpoint(config.run_dir))


def test_a_run_does_not_go_on_beside_another_reference(tmp_path: Path) -> None:
    config = train(tmp_path, "pairs", "train.steps=2")
    before = meta_of(config).read_bytes()
    further = character_config(tmp_path)
    with pytest.raises(
        UserError, match="step-00000002 was trained beside another reference model: that role's weights"
    ):
        TrainPipeline(further, task=Task(OtherReference(further), TASKS["pairs"][1])).run()
    assert meta_of(config).read_bytes() == before
    train(tmp_path, "pairs")
    whole = train(tmp_path, "pairs", "name=whole")
    assert losses(config) == losses(whole)
    assert differing(whole_checkpoint(config.run_dir), whole_checkpoint(whole.run_dir)) == []


def test_a_checkpoint_without_the_role_is_refused(tmp_path: Path) -> None:
    config = train(tmp_path, "pairs", "train.steps=2")
    checkpoint = meta_of(config).parent
    meta, seal = (json.loads((checkpoint / name).read_text()) for name in (META, SEAL))
    del meta["roles"], seal["hash"]
    write_sealed(checkpoint / SEAL, {**seal, "meta": write_json(checkpoint / META, meta)})
    with pytest.raises(UserError, match="step-00000002 was trained without the role reference model: begin a new run"):
        train(tmp_path, "pairs")


def test_a_role_cannot_begin_or_cease_to_learn_in_a_run(tmp_path: Path) -> None:
    train(tmp_path, "mutual", "train.steps=2")
    with pytest.raises(UserError, match="holds learned weights of the role critic, which does not learn here"):
        train(tmp_path, "frozen-critic")
    train(tmp_path, "frozen-critic", "name=frozen", "train.steps=2")
    with pytest.raises(UserError, match="holds no state of the role critic: begin a new run"):
        train(tmp_path, "mutual", "name=frozen")


@pytest.mark.parametrize("strategy", ["fsdp"])
def test_the_record_is_the_same_in_every_layout(tmp_path: Path, strategy: str) -> None:
    config = train(tmp_path, "pairs", "train.steps=2")
    overrides = (f"name={strategy}", f"parallel.strategy={strategy}", "train.steps=2")
    run_ranks(train_updates, 2, str(tmp_path), "pairs", overrides)
    assert recorded(character_config(tmp_path, *overrides)) == recorded(config)
    train(tmp_path, "pairs", f"name={strategy}", "train.steps=3")  # on one process
