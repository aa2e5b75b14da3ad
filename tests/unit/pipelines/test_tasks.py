"""Bad input about tasks: one line says what is wrong, where, and what to do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from mmspeed.config import make_config
from mmspeed.config.tasks import TASKS, TaskEntry
from mmspeed.errors import UserError
from mmspeed.pipelines import TrainPipeline
from mmspeed.pipelines.domains.video.domain import VideoDomain
from mmspeed.pipelines.run.run_folder import RunFolder
from mmspeed.pipelines.tasks import make_task, register
from mmspeed.protocols import RunPlace
from mmspeed.rng import VERSION
from tests.support.character_runs import ALONE, character_config, character_tree, register_characters
from tests.support.characters import CharacterDomain
from tests.support.runs import small_config, small_tree
from tests.support.toy import ToyDiT
from tests.support.toy_runs import toy_config, train_toy, write_toy_cache


class Without(nn.Module):
    """The toy task without the named member."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        toy = ToyDiT()
        for name in {"blocks", "tokens", "flops"} - {*names}:
            setattr(self, name, getattr(toy, name))

    def forward(self, x_BCThw: Tensor, t: Tensor, text_BLD: Tensor, text_mask_BL: Tensor) -> Tensor:
        return x_BCThw


def test_an_unknown_task_is_reported_with_the_nearest_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"test: task 'vidoe' is not known; did you mean 'video'\? \(known: video"):
        make_config({**small_tree(tmp_path), "task": "vidoe"}, origin="test")
    with pytest.raises(UserError, match="task 3 is not known"):
        make_config({**small_tree(tmp_path), "task": 3}, origin="test")
    register_characters()
    with pytest.raises(UserError, match=r"task 'character' is not known; did you mean 'characters'\?"):
        make_task(character_config(tmp_path).model_copy(update={"task": "character"}))


def test_a_task_is_known_by_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(TASKS, "letters", TaskEntry("a:B"))  # as it was before, when this test ends
    names = "tests.support.characters:CharacterDomain", "tests.support.characters:CharacterConfig"
    register("letters", *names)
    assert TASKS["letters"] == TaskEntry(*names, origin="this program")
    config = character_config(tmp_path)
    assert isinstance(make_task(config.model_copy(update={"task": "letters"})).domain, CharacterDomain)


def test_keys_of_another_task_are_reported_with_their_task(tmp_path: Path) -> None:
    register_characters()
    ours, video = character_tree(tmp_path), small_tree(tmp_path)
    for tree, message in (
        ({**ours, "sample": {"steps": 3}}, "unknown key 'sample', which is a section of the task video; this config is of the task characters"),
        ({**ours, "objective": {"kind": "flow"}}, r"unknown key 'objective\.kind', which is a key of the task video; this config is of the task characters"),
        ({**video, "pack": 8}, "unknown key 'pack', which is a section of the task characters; this config is of the task video"),
        ({**ours, "train": {"setps": 3}}, r"unknown key 'train\.setps'; did you mean 'train\.steps'\?"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=message):
            make_config(tree, origin="test")
    timed = CharacterDomain(character_config(tmp_path, "batching.by=time", "train.batch_size=null"))
    with pytest.raises(
        UserError, match=r"batching\.by: time is not available for the task characters: use samples, tokens"
    ):
        timed.data(ALONE)


def test_a_run_of_another_task_is_reported(tmp_path: Path) -> None:
    config = character_config(tmp_path, "name=taken")
    RunFolder(config.run_dir).write_start(small_config(tmp_path), {"versions": {"generator": VERSION}}, {})
    message = "taken is a run of the task video, and this config is of the task characters: choose another `name`"
    with pytest.raises(UserError, match=message):
        TrainPipeline(config).run()


def test_weights_of_another_task_are_reported(tmp_path: Path) -> None:
    other = toy_config(tmp_path)
    write_toy_cache(other)
    train_toy(str(tmp_path))
    config = character_config(tmp_path, "name=own", f"train.start_from={other.run_dir}")
    with pytest.raises(UserError, match=r"step-00000006 .*(embed|blocks|head)"):
        TrainPipeline(config).run()


def test_a_divisor_of_0_is_reported_with_its_step(tmp_path: Path) -> None:
    class Empty(CharacterDomain):
        def data(self, place: RunPlace) -> Any:
            data = super().data(place)
            plain = data.steps
            data.steps = lambda start, stop: (replace(step, divisors={"tokens": 0.0}) for step in plain(start, stop))
            return data

    config = character_config(tmp_path)
    with pytest.raises(UserError, match=r"step 1: the step's divisor 'tokens' is 0: it has no item that counts"):
        TrainPipeline(config, task=Empty(config)).run()


@pytest.mark.parametrize("lacking", [("tokens",), ("blocks", "flops")])
def test_a_model_that_lacks_part_of_the_protocol_is_refused_with_what_it_lacks(
    tmp_path: Path, lacking: tuple[str, ...]
) -> None:
    config = toy_config(tmp_path)
    write_toy_cache(config)
    task = VideoDomain(config, build=lambda *_: Without(*lacking))
    with pytest.raises(UserError, match=f"Without cannot be trained by the task video: it lacks {', '.join(lacking)} "):
        TrainPipeline(config, task=task).run()
