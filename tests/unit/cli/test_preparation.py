"""The seam before training: a table by task, which the commands init, check, preprocess and train go through."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Literal

import pytest
import yaml
from pydantic import Field

from mmspeed.cli import preparations
from mmspeed.cli.app import ray_workers, run
from mmspeed.cli.init import template, write_config
from mmspeed.config import RunConfig, load_config, make_config, video_config
from mmspeed.config.inputs import Section
from mmspeed.config.tasks import TASKS, TaskEntry
from mmspeed.errors import UserError
from mmspeed.pipelines.tasks import maker_of
from mmspeed.preprocess import OnlineBuilder
from mmspeed.preprocess.build.ray import import_ray
from mmspeed.preprocess.preparation import VideoPreparation
from tests.support.runs import small_config, small_tree


class CorpusConfig(Section):
    """A text."""

    path: str = Field(description="The file.")
    length: int = Field(8, description="Characters of an item.")


class ToyConfig(RunConfig):
    """A run of a task that is no video task."""

    order: ClassVar[tuple[str, ...]] = ("task", "name", "corpus")
    task: Literal["toy"] = Field("toy", description="What is trained.")
    corpus: CorpusConfig = Field(description="What is trained on.")


class ToyReport:
    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = problems

    def lines(self) -> list[str]:
        return ["toy check"]


class ToyPreparation:
    """A preparation that records its calls."""

    asked: ClassVar[list[Any]] = []
    problems: ClassVar[list[str]] = []

    def __init__(self, config: RunConfig) -> None:
        assert isinstance(config, ToyConfig)
        self.config = config

    @classmethod
    def starting_values(cls, name: str, videos: str | None, model: str | None = None) -> Mapping[str, Any]:
        return {"corpus": {"path": videos or f"{name}.txt"}}

    @classmethod
    def fitted_values(
        cls, name: str, videos: str | None, folder: Path, model: str | None = None
    ) -> tuple[Mapping[str, Any], Sequence[str]]:
        length = len((folder / videos).read_text(encoding="utf-8"))
        return {"corpus": {"path": videos, "length": length}}, [f"toy: {length} characters"]

    def check(
        self, page: Path | None = None, suggest_buckets: int | None = None, ranks: Sequence[int] | None = None
    ) -> ToyReport:
        self.asked.append(("check", page, suggest_buckets, ranks))
        return ToyReport(self.problems)

    def build(self, shard: str | None = None) -> list[str]:
        self.asked.append(("build", shard))
        return ["toy built"]

    def build_on_ray(self, workers: int | None = None) -> list[str]:
        self.asked.append(("ray", workers))
        return ["toy built on Ray"]

    def maker(self) -> Any:
        self.asked.append("maker")
        return "toy maker"


class NoTask:
    """A domain without models."""

    def __init__(self, config: Any, maker: Any = None) -> None:
        self.config = config

    def outlines(self) -> dict[str, Any]:
        return {}

    def parts(self) -> list[Any]:
        return []

    def exchange_lines(self) -> list[str]:
        return []


def toy_entry(preparation: str | None = None) -> TaskEntry:
    return TaskEntry(f"{__name__}:NoTask", f"{__name__}:ToyConfig", preparation, origin="a test")


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task whose config is known, without a preparation."""
    monkeypatch.setitem(TASKS, "toy", toy_entry())


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch, toy: None) -> list[Any]:
    """The task with a preparation, and the list of its calls."""
    monkeypatch.setitem(TASKS, "toy", toy_entry(f"{__name__}:ToyPreparation"))
    monkeypatch.setattr(ToyPreparation, "asked", [])
    monkeypatch.setattr(ToyPreparation, "problems", [])
    return ToyPreparation.asked


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "toy.yaml"
    path.write_text(yaml.safe_dump({"task": "toy", "corpus": {"path": "a.txt"}}), encoding="utf-8")
    return path


class FakePipeline:
    """A stand-in for the trainer, which records its arguments."""

    calls: ClassVar[list[Any]] = []

    def __init__(self, config: RunConfig, maker: Any = None) -> None:
        self.calls.append((config.task, maker))

    def run(self) -> SimpleNamespace:
        return SimpleNamespace(lines=lambda: ["trained"], finished=True, run="runs/toy")


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    monkeypatch.setattr("mmspeed.pipelines.TrainPipeline", FakePipeline)
    monkeypatch.setattr(FakePipeline, "calls", [])
    return FakePipeline.calls


def test_the_commands_go_through_the_table(
    prepared: list[Any], trained: list[Any], file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["preprocess", str(file), "--shard", "1/2"]) == 0
    assert run(["preprocess", str(file), "--ray", "3"]) == 0
    assert run(["check", str(file), "--ranks", "4,2", "--suggest-buckets", "3", "--report", "page.html"]) == 0
    assert run(["train", str(file)]) == 0
    assert prepared == [("build", "1/2"), ("ray", 3), ("check", Path("page.html"), 3, [2, 4]), "maker"]
    assert trained == [("toy", "toy maker")]
    assert capsys.readouterr().out.splitlines() == ["toy built", "toy built on Ray", "toy check", "trained"]


def test_problems_of_a_check_are_its_exit_code(prepared: list[Any], file: Path) -> None:
    ToyPreparation.problems.append("no text")
    assert run(["check", str(file)]) == 1


def test_init_writes_the_tasks_own_sections(
    prepared: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "b.txt").write_text("abc")
    words = ["init", str(tmp_path / "new"), "--task", "toy", "--videos", str(tmp_path / "b.txt")]
    assert run(words) == 0
    assert "\ntoy: 3 characters\n" in capsys.readouterr().out
    short = (tmp_path / "new.yaml").read_text(encoding="utf-8")
    assert run([*words, "--full", "--force"]) == 0
    text = (tmp_path / "new.yaml").read_text(encoding="utf-8")
    config = load_config(tmp_path / "new.yaml")
    assert isinstance(config, ToyConfig) and config.corpus.path == "b.txt" and config.name == "new"
    assert config.corpus.length == 3 and config == make_config(yaml.safe_load(short), base=tmp_path)
    assert config.memory == RunConfig().memory and "# Characters of an item." in text and "vae" not in text
    assert [line.split(":")[0] for line in text.splitlines() if line[:1].isalpha()][:3] == ["task", "name", "corpus"]
    assert yaml.safe_load(template("a", None, "toy"))["corpus"] == {"path": "a.txt"}


def test_a_command_that_a_task_does_not_have_says_so_in_one_line(
    toy: None, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command, *words in (["preprocess"], ["check --report", "page.html"], ["check --suggest-buckets", "2"]):
        name, *option = command.split()
        assert run([name, str(file), *option, *words]) == 1
        error = capsys.readouterr().err.strip()
        assert (
            error.count("mmspeed: error: ") == 1
            and f"`mmspeed {command}` does not support the task toy (only: video, language)" in error
        )


def test_init_of_such_a_task_takes_no_media(toy: None, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="`mmspeed init --videos` does not support the task toy"):
        write_config(tmp_path / "new.yaml", videos=tmp_path, task="toy")
    assert not (tmp_path / "new.yaml").exists()


def test_a_task_without_preparation_is_trained_without_a_maker(toy: None, trained: list[Any], file: Path) -> None:
    assert run(["train", str(file)]) == 0
    assert trained == [("toy", None)]


def test_an_unknown_task_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("task: vidoe\n", encoding="utf-8")
    for words in (["train"], ["check"], ["preprocess"]):
        assert run([*words, str(path)]) == 1
        assert "task 'vidoe' is not known; did you mean 'video'?" in capsys.readouterr().err
    assert run(["init", str(tmp_path / "new"), "--task", "speech"]) == 1
    assert "--task: task 'speech' is not known" in capsys.readouterr().err and not (tmp_path / "new.yaml").exists()
    for task in (None, 3, ["video"]):
        with pytest.raises(UserError, match="is not known"):
            make_config({"task": task})


def test_keys_of_another_task_are_named(toy: None, file: Path) -> None:
    with pytest.raises(UserError, match="'vae', which is a section of the task video; this config is of the task toy"):
        load_config(file, ["vae.kind=linear"])
    with pytest.raises(
        UserError, match="'corpus', which is a section of the task toy; this config is of the task video"
    ):
        make_config({"data": {"sources": [{"path": "a"}], "buckets": [BUCKET]}, "corpus": {"path": "a"}})
    with pytest.raises(UserError, match="this is for the video task, and the config is of the task toy"):
        video_config(load_config(file), "config")


BUCKET = {"frames": 5, "height": 32, "width": 48}


def test_a_config_without_a_task_is_of_videos(tmp_path: Path) -> None:
    tree = small_tree(tmp_path)
    assert "task" not in tree and make_config(tree).task == "video"
    assert isinstance(preparations.preparation(make_config(tree)), VideoPreparation)


@pytest.mark.parametrize(
    ("overrides", "online"),
    [((), True), (("preprocess.online=false",), False), (("data.cache=https://example.org/cache",), False)],
)
def test_missing_videos_are_encoded_in_the_first_epoch_where_they_can_be(
    tmp_path: Path, overrides: tuple[str, ...], online: bool
) -> None:
    maker = maker_of(small_config(tmp_path, *overrides))
    assert isinstance(maker, OnlineBuilder) if online else maker is None


def test_number_of_ray_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ray_workers(None, alone=False) is None and ray_workers("auto", alone=True) is None
    assert ray_workers("3", alone=True) == 3
    for number in ("0", "-1", "two", ""):
        with pytest.raises(UserError, match="number of workers, or auto"):
            ray_workers(number, alone=True)
    with pytest.raises(UserError, match="not with --shard"):
        ray_workers("3", alone=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"pip install 'ray\[data\]'"):
        import_ray()
