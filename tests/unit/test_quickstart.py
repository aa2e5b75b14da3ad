"""The commands of README and docs/quickstart.md, typed one after another, print lines of the shape that the pages show."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mmspeed.__main__ import main
from tests.support.pages import ROOT, blocks, words_of
from tests.support.runs import CLIPS
from tests.support.tiny_repositories import save_wan

FEWER_STEPS = {"train.steps=100": "train.steps=4", "train.steps=110": "train.steps=5"}
SECONDS = re.compile(r"(\d+ h )?(\d+ min )?\d[\d.]* s\b")


def shape(line: str) -> str:
    """A line with its numbers taken out, and without the clock of a log before it."""
    return re.sub(r"\d[\d.,:]*", "#", SECONDS.sub("# s", re.sub(r"^\d\d:\d\d:\d\d ", "", line))).strip()


def sessions(page: Path) -> list[tuple[str, list[str]]]:
    """(command, lines that it prints) of a page's consoles, in order."""
    typed: list[tuple[str, list[str]]] = []
    for block in blocks(page):
        for line in block.text.splitlines() if block.language == "console" else ():
            if line.startswith("$ "):
                typed.append((line[2:], []))
            else:
                typed[-1][1].append(line)
    return typed


@pytest.mark.slow
@pytest.mark.parametrize("name", ["README.md", "docs/quickstart.md"])
def test_the_commands_print_what_the_page_shows(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    typed = sessions(ROOT / name)
    assert len(typed) >= 4
    for command, shown in typed:
        arguments = [FEWER_STEPS.get(word, word) for word in words_of(command)[1:]]
        assert main(arguments) == 0, capsys.readouterr().err
        captured = capsys.readouterr()
        said = {shape(line) for line in (captured.out + captured.err).replace(f"{tmp_path}/", "").splitlines()}
        missing = [line for line in shown if line != "..." and shape(line) not in said]
        assert not missing, f"{command}: {missing}\n" + "\n".join(sorted(said))
    assert (tmp_path / "rabbit.mp4").stat().st_size > 500


@pytest.mark.slow
def test_the_five_commands_of_fine_tuning_end_in_a_model_of_diffusers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from diffusers import WanPipeline

    monkeypatch.chdir(tmp_path)
    save_wan(tmp_path / "tiny-wan")
    (tmp_path / "my-videos").symlink_to(CLIPS.parent)
    fewer = {
        "check": ["data.limit=3"],
        "train": ["data.limit=3", "train.steps=1", "sample.steps=1"],
        "sample": ["--steps", "1"],
    }
    typed = blocks(ROOT / "docs" / "fine-tuning.md")[0].text.replace("wan2.1-1.3b", "./tiny-wan").splitlines()
    assert len(typed) == 5
    for line in typed:
        words = words_of(line)[1:]
        assert main([*words, *fewer.get(words[0], [])]) == 0
    assert (tmp_path / "rabbit.mp4").stat().st_size > 500 and (tmp_path / "runs/my-wan/report.html").exists()
    assert WanPipeline.from_pretrained("my-wan-repository").transformer.config.num_layers == 2
