"""Tasks of installed packages: one line in a package's pyproject.toml, which every process knows; and what may be wrong with it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mmspeed.cli.app import run
from mmspeed.config import make_config
from mmspeed.config.tasks import TASKS, config_class, known_tasks, preparation_class, task_class, task_entry
from mmspeed.errors import UserError
from mmspeed.pipelines.domains.video.domain import VideoDomain
from mmspeed.pipelines.tasks import make_task, register
from tests.support.packages import install
from tests.support.runs import small_tree

POEMS = """
    from typing import Literal

    from mmspeed.config import RunConfig


    class PoemConfig(RunConfig):
        task: Literal["poems"] = "poems"
        lines: int = 4


    class PoemTask:
        name = "poems"
        config_class = PoemConfig

        def __init__(self, config, maker=None):
            self.config, self.maker = config, maker


    class Bare:
        def __init__(self, config, maker=None):
            raise AssertionError


    def function(config, maker=None):
        raise AssertionError
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that packages are found in."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(TASKS, "characters", raising=False)  # other tests may have registered it
    yield folder
    sys.modules.pop("poems_pack", None)


def test_an_installed_package_makes_a_task_known(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(site, "poems-pack", {"poems": "poems_pack:PoemTask"}, {"poems_pack": POEMS})
    assert "poems" in known_tasks() and "poems_pack" not in sys.modules  # nothing is imported before it is asked for
    config = make_config({"task": "poems", "lines": 7})
    assert type(config) is config_class("poems") and config.model_dump()["lines"] == 7
    domain = make_task(config, "maker").domain
    assert type(domain) is task_class("poems") and vars(domain) == {"config": config, "maker": "maker"}
    assert preparation_class("poems") is None
    monkeypatch.setattr(task_class("poems"), "preparation_class", int, raising=False)
    assert preparation_class("poems") is int
    assert isinstance(make_task(make_config(small_tree(site))).domain, VideoDomain)  # which nothing has changed


def test_an_installed_package_makes_a_method_known(site: Path) -> None:
    code = """
        from dataclasses import dataclass

        from mmspeed.pipelines.methods.finetune import Finetune


        @dataclass(frozen=True)
        class Gentle(Finetune):
            weight: float = 0.5
            name = "gentle"
    """
    install(site, "gentle-pack", {"gentle": "gentle_pack:Gentle"}, {"gentle_pack": code}, group="mmspeed.methods")
    config = make_config(small_tree(site), ["method={kind: gentle, weight: 2}"])
    assert vars(make_task(config).method) == {"weight": 2.0}
    with pytest.raises(UserError, match=r"method\.weigth: gentle has no such option; did you mean 'weight'"):
        make_config(small_tree(site), ["method={kind: gentle, weigth: 2}"])


def test_an_unknown_task_is_reported_with_those_of_packages(site: Path) -> None:
    install(site, "poems-pack", {"poems": "poems_pack:PoemTask"}, {"poems_pack": POEMS})
    with pytest.raises(
        UserError, match=r"test: task 'poem' is not known; did you mean 'poems'\? \(known: video.*poems\)"
    ):
        make_config({"task": "poem"}, origin="test")


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("not_there:Task", "ModuleNotFoundError: No module named 'not_there'"),
        ("poems_pack", "ValueError: write module:class"),
        ("fails_at_once:Task", "ZeroDivisionError: division by zero"),
    ],
)
def test_a_broken_package_is_named_when_its_task_is_asked_for(
    site: Path, value: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install(site, "broken-pack", {"broken": value}, {"poems_pack": POEMS, "fails_at_once": "1 / 0"}, version="2.1")
    assert make_config(small_tree(tmp_path)).task == "video"
    path = tmp_path / "run.yaml"
    path.write_text("task: broken\n", encoding="utf-8")
    for words in (["train", str(path)], ["check", str(path)], ["init", str(tmp_path / "new"), "--task", "broken"]):
        assert run(words) == 1
        error = capsys.readouterr().err.strip()
        start = "mmspeed: error: the task broken is of the installed package broken-pack 2.1, and "
        assert error == f"{start}{value!r} cannot be imported: {reason}"


def test_a_class_without_a_config_is_reported(site: Path) -> None:
    install(site, "poems-pack", {"poems": "poems_pack:Bare", "f": "poems_pack:function"}, {"poems_pack": POEMS})
    with pytest.raises(UserError, match=r"of the installed package poems-pack 1.0.*Bare needs the class attribute"):
        config_class("poems")
    with pytest.raises(UserError, match=r"'poems_pack:function' is not a class"):
        config_class("f")


def test_two_packages_with_one_name_are_reported(site: Path) -> None:
    install(site, "poems-pack", {"poems": "poems_pack:PoemTask"}, {"poems_pack": POEMS})
    install(site, "verse-pack", {"poems": "poems_pack:Bare"})
    with pytest.raises(UserError, match=r"the task poems is declared by .*; uninstall all but one") as error:
        make_config({"task": "poems"})
    assert "poems-pack 1.0" in str(error.value) and "verse-pack 1.0" in str(error.value)
    assert known_tasks().count("poems") == 1
    assert make_config(small_tree(site)).task == "video"


def test_a_package_does_not_take_the_place_of_video(site: Path) -> None:
    install(site, "grab-pack", {"video": "poems_pack:PoemTask"}, {"poems_pack": POEMS})
    with pytest.raises(UserError, match=r"the task video is declared by mmspeed itself and by grab-pack 1\.0"):
        make_config(small_tree(site))


def test_a_program_may_say_which_of_several_it_means(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(site, "poems-pack", {"poems": "poems_pack:Bare"}, {"poems_pack": POEMS})
    monkeypatch.setitem(TASKS, "poems", TASKS["video"])  # as it was before, when this test ends
    register("poems", "poems_pack:PoemTask")
    assert task_entry("poems").origin == "this program"
    assert make_config({"task": "poems"}).task == "poems"
