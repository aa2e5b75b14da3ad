"""A task that is no diffusion, from `tests/support/characters.py` and one line: everything that a run has works for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

from mmspeed.config import dump_config
from mmspeed.errors import UserError
from mmspeed.initialize import init_weights
from mmspeed.pipelines.domains.listed.domain import ListedSample
from tests.support.character_runs import (
    ALONE,
    character_config,
    command_characters,
    losses,
    rows,
    step_packs,
    train_characters,
)
from tests.support.characters import VOCABULARY, CharacterConfig, CharacterDomain, CharacterModel
from tests.support.checkpoints import differing, whole_checkpoint
from tests.support.spawn import run_apart


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run `small`, which was never stopped."""
    folder = tmp_path_factory.mktemp("characters")
    train_characters(str(folder))
    return folder


def plain_loss(model: CharacterModel, packs: list[ListedSample]) -> float:
    """The mean loss of a character, pack by pack and without padding."""
    total, count = 0.0, 0
    for pack in packs:
        ids_N = pack.tensors["ids"][: pack.tokens + 1]
        with torch.no_grad():
            loss_N = cross_entropy(model(ids_N[None, :-1])[0], ids_N[1:], reduction="none")
        total, count = total + loss_N.double().sum().item(), count + len(loss_N)
    return total / count


def model_of(config: CharacterConfig, weights: dict[str, torch.Tensor] | None = None) -> CharacterModel:
    """The model with the weights of the config's seed, or with others."""
    model = CharacterModel(config.width, config.depth)
    init_weights(model, config.seed)
    if weights is not None:
        model.load_state_dict(weights)
    return model


def test_a_run_learns_and_its_numbers_are_those_made_by_hand(home: Path) -> None:
    config = character_config(home)
    task, steps = CharacterDomain(config), rows(config)
    packs = [step_packs(task, step) for step in range(6)]
    # the order of sums is another: a few eps (1.2e-7)
    assert steps[0]["loss"] == pytest.approx(plain_loss(model_of(config), packs[0]), rel=1e-6)
    held_out = [row["loss"] for row in rows(config, "validation")]
    assert held_out[1] < held_out[0]
    for row, drawn in zip(steps, packs, strict=True):
        real = sum(int((pack.tensors["ids"][1:] != 0).sum()) for pack in drawn)
        assert row["tokens"] == real < len(drawn) * config.pack and row["samples"] == len(drawn)
        assert row["tokens_per_s"] / row["samples_per_s"] == pytest.approx(real / len(drawn))
        assert row["terms"].keys() == {"loss", "right"} and 0 <= row["terms"]["right"] <= 1
    assert [row["epoch"] for row in steps] == [0, 0, 0, 0, 1, 1]
    assert json.loads((config.run_dir / "run.json").read_text())["vocabulary"] == "".join(VOCABULARY)


def test_a_validation_is_the_mean_by_the_averaged_weights(home: Path) -> None:
    config = character_config(home)
    state = whole_checkpoint(config.run_dir)
    averages = {name.removeprefix("ema."): value for name, value in state.items() if name.startswith("ema.")}
    weights = {name.removeprefix("model."): value for name, value in state.items() if name.startswith("model.")}
    assert differing(averages, weights)
    held_out = CharacterDomain(config).held_out
    actual = rows(config, "validation")[-1]
    assert actual["step"] == 6 and actual["samples"] == len(held_out) == 4
    assert actual["loss"] == pytest.approx(plain_loss(model_of(config, averages), held_out), rel=1e-6)
    assert actual["loss"] != pytest.approx(plain_loss(model_of(config, weights), held_out), rel=1e-6)


def test_counted_work_is_that_of_the_forward_pass(home: Path) -> None:
    config = character_config(home)
    task = CharacterDomain(config)
    [shape] = task.shapes()
    batch = task.synthetic_batch(shape, 5, ALONE)
    with FlopCounterMode(display=False) as counter:
        model_of(config)(batch["ids"][:, :-1])
    assert counter.get_total_flops() == 5 * task.work(shape).matmul
    for row in rows(config):
        seconds = row["samples"] / row["samples_per_s"]
        counted = 3 * row["samples"] / 5 * counter.get_total_flops()
        assert row["mfu"] * seconds * 0.1e12 == pytest.approx(counted)


def test_a_run_that_was_stopped_goes_on_bitwise(home: Path) -> None:
    name = "name=stopped"
    train_characters(str(home), (name, "train.steps=4"))
    train_characters(str(home), (name,))
    parts, whole = character_config(home, name), character_config(home)
    assert losses(parts) == losses(whole)
    state = whole_checkpoint(whole.run_dir)
    assert differing(whole_checkpoint(parts.run_dir), state) == []
    assert {name.split(".")[0] for name in state} == {"model", "ema", "optimizer"}


def test_another_size_of_steps_is_reported_when_a_run_goes_on(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    train_characters(str(home), ("name=resized", "train.steps=2"))
    with caplog.at_level("WARNING", logger="mmspeed"):
        train_characters(str(home), ("name=resized", "train.batch_size=5", "train.steps=3"))
    message = "step 2: batches or stages differ from those before the checkpoint: the 8 of 20 uses"
    assert message in caplog.text


def test_a_run_of_another_width_is_refused(home: Path) -> None:
    with pytest.raises(UserError, match="was started with another width"):
        train_characters(str(home), ("width=8",))


def test_the_command_line_trains_it(home: Path) -> None:
    file = home / "run.yaml"
    file.write_text(dump_config(character_config(home, "name=commanded")), encoding="utf-8")
    code, said = run_apart(home, command_characters, "train", str(file), "train.steps=2")
    assert code == 0, said
    config = character_config(home, "name=commanded")
    assert losses(config) == losses(character_config(home))[:2]
    assert "20 samples to train on, 4 held out" in said
