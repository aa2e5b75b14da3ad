"""Every command that takes a config or a run, for a task that knows no video: it works, or says in one line that it is not there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from torch import nn

from mmspeed.cli.app import run
from mmspeed.config.tasks import TASKS, TaskEntry
from mmspeed.device import Device
from mmspeed.log import format_bytes
from mmspeed.pipelines.tuning.memory_estimate import plan_memory
from mmspeed.protocols import RunPlace
from tests.support.character_runs import character_config, character_tree, register_characters, train_characters
from tests.support.characters import CharacterDomain

DOMAIN = re.compile(r"video|caption|clip|bucket|pixel|frame|latent", re.IGNORECASE)  # words of another task


class Blockless(CharacterDomain):
    """A task whose model lacks part of its protocol."""

    def build(self) -> dict[str, nn.Module]:
        return {"model": nn.Linear(2, 2)}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a config, `run.yaml`, and its run, which was stopped after four steps of six."""
    folder = tmp_path_factory.mktemp("commands")
    (folder / "run.yaml").write_text(yaml.safe_dump(character_tree(folder)), encoding="utf-8")
    train_characters(str(folder), ("train.steps=4",))
    return folder


@pytest.fixture
def output(home: Path, capsys: pytest.CaptureFixture[str]):  # type: ignore[no-untyped-def]
    """Exit code, output and errors of a command. `RUN` and `CONFIG` in it stand for the home's."""
    register_characters()
    places = {"CONFIG": str(home / "run.yaml"), "RUN": str(home / "runs" / "small")}

    def call(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = run([places.get(word, word) for word in words])
        shown = capsys.readouterr()
        assert "Traceback" not in shown.out + shown.err and "internal error" not in shown.err
        return code, shown.out, shown.err

    return call


def test_check_tells_what_a_config_will_train(home: Path, output) -> None:  # type: ignore[no-untyped-def]
    code, text, _ = output("check", "CONFIG")
    config = character_config(home)
    task = CharacterDomain(config)
    numbers = sum(parameter.numel() for parameter in task.build()["model"].parameters())
    first = next(task.data(RunPlace(Device("cpu", 0))).steps(0, 1))
    assert code == 0 and not DOMAIN.search(text)
    assert f"model: CharacterModel, {config.depth} blocks, {numbers:,} parameters, all of which train" in text
    assert f"the first has {len(first.items)} items of {task.usage(first).tokens:,} tokens" in text
    assert "steps: 6, over 2 epochs" in text
    assert "the samples are of one shape class, which has all of them" in text
    plan = plan_memory(config, with_swap=False)
    assert f"{format_bytes(plan.figures.plain_peak())} with all saved" in text
    assert f"{config.run_dir} goes on at step 4; changed since it was saved: train." in text


def test_check_tells_micro_batches_by_devices(home: Path, output) -> None:  # type: ignore[no-untyped-def]
    words = ("check", "CONFIG", "--ranks", "3,2", "train.batch_size=5", "train.micro_batch_size=2", "name=other")
    code, text, _ = output(*words)
    name = CharacterDomain(character_config(home)).shapes()[0].name
    assert code == 0 and f"on 2 devices: a device takes 2 x {name}, 1 x {name} in the first step" in text
    assert f"on 3 devices: a device takes 2 x {name} in the first step" in text
    code, text, _ = output(*words, "parallel.ulysses=2")
    assert code == 1 and "problem: parallel: ulysses 2 does not divide the 3 processes of this run" in text
    assert "on 2 devices" in text


def test_check_tells_what_a_budget_chooses_once(output) -> None:  # type: ignore[no-untyped-def]
    code, text, _ = output("check", "CONFIG", "memory.budget=1GB")
    assert code == 0 and text.count("memory of a step of") == 1 and "budget 1.0 GB: 3 x save" in text


def test_check_finds_another_run_of_that_name(home: Path, output) -> None:  # type: ignore[no-untyped-def]
    code, text, _ = output("check", "CONFIG", "seed=5")
    assert code == 1 and "problem: " in text and "was started with another seed" in text


def test_check_names_what_a_model_lacks(output, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    names = (f"{__name__}:Blockless", "tests.support.characters:CharacterConfig")
    monkeypatch.setitem(TASKS, "characters", TaskEntry(*names, origin="a test"))
    code, _, error = output("check", "CONFIG")
    assert code == 1 and "Linear cannot be trained by the task characters: it lacks blocks" in error


def test_report_has_the_parts_that_are_there(home: Path, output) -> None:  # type: ignore[no-untyped-def]
    code, text, _ = output("report", "RUN")
    assert code == 0 and text.strip().endswith("report.html")
    page = Path(text.strip()).read_text(encoding="utf-8")
    assert "prefers-color-scheme:dark" in page and sum(
        plots.count("<img") for plots in re.findall('<figure class="plot"><div>((?:<img[^>]*>)+)</div>', page)
    ) == page.count("<img")
    shown, config = page.split("<h2>Config</h2>")
    assert "task characters" in shown and "pack: 24" in config
    assert re.findall("<h2>(.*?)</h2>", shown) == ["Loss", "Validation", "Throughput"]
    assert "The terms of the loss" in shown and ">right</td>" in shown
    assert not DOMAIN.search(re.sub(r"<style>.*?</style>|<[^>]*>", "", shown, flags=re.DOTALL))


@pytest.mark.parametrize("words", [("sample", "RUN", "--prompt", "x"), ("bench", "attention", "--run", "RUN")])
def test_what_is_for_videos_says_so_in_one_line(output, words: tuple[str, ...]) -> None:  # type: ignore[no-untyped-def]
    code, out, error = output(*words)
    assert code == 1 and not out and error.count("mmspeed: error: ") == 1 and "Traceback" not in error
    assert "this is for the video task, and the config is of the task characters" in error


def test_bench_memory_measures_its_step(home: Path, output, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    code, text, _ = output("bench", "memory", "CONFIG", "--output", str(tmp_path))
    name = CharacterDomain(character_config(home)).shapes()[0].name
    assert code == 0 and text.startswith(f"{name}, 6 a device on ") and "blocks.0 to blocks.2" in text
    report = json.loads((tmp_path / "memory.json").read_text(encoding="utf-8"))["report"]
    plan = plan_memory(character_config(home), with_swap=False)
    assert sum(report["categories"].values()) == report["peak"] == pytest.approx(plan.figures.plain_peak(), rel=0.1)
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")


def test_bench_buckets_measures_its_shape_classes(home: Path, output) -> None:  # type: ignore[no-untyped-def]
    words = ("--most", "2", "--repeats", "1", "--minutes", "0.1")
    code, text, error = output("bench", "buckets", "CONFIG", "name=measured", *words)
    name = CharacterDomain(character_config(home)).shapes()[0].name
    assert code == 0 and f"\n{name} " in text and "PackLength" not in text + error
    contents = json.loads((home / "runs" / "measured" / "buckets.json").read_text(encoding="utf-8"))
    assert [(row["bucket"], row["batch"]) for row in contents["rows"]][:2] == [(name, 1), (name, 2)]


def test_init_writes_a_config_that_trains(output, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    code, _, _ = output("init", str(tmp_path / "new"), "--task", "characters")
    text = (tmp_path / "new.yaml").read_text(encoding="utf-8")
    assert code == 0 and "\ntask: characters  # " in text and "\n#pack: 24\n" in text
    assert not re.search("video|preprocess", text.replace("captions of videos", ""))
    words = ("train.steps=1", "device.kind=cpu", "validate.samples=0")
    code, out, _ = output("train", str(tmp_path / "new.yaml"), *words)
    assert code == 0 and "new: finished at step 1" in out
    assert output("preprocess", str(tmp_path / "new.yaml"))[0] == 1
