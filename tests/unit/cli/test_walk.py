"""A new user's walk: five commands over a folder of clips and pictures, each of which speaks soon and is never silent for long."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import av
import pytest

from tests.support.runs import CLIPS
from tests.support.stamps import stamped


def make_folder(folder: Path) -> None:
    """12 clips and 3 pictures with their captions in files beside them."""
    folder.mkdir()
    rows = [json.loads(line) for line in CLIPS.read_text(encoding="utf-8").splitlines()][:15]
    for number, row in enumerate(rows):
        video = CLIPS.parent / row["video"]
        if number < 12:
            shutil.copy(video, folder)
        else:
            with av.open(str(video)) as container:
                next(container.decode(video=0)).to_image().save(folder / f"{video.stem}.png")
        (folder / f"{video.stem}.txt").write_text(row["caption"], encoding="utf-8")


# Processor seconds of the command itself, where a busy machine would make seconds of the clock mean nothing.
MOST_FIRST, MOST_SILENT = 2.0, 3.0


@pytest.mark.slow
@pytest.mark.parametrize("tty", [True, False], ids=["terminal", "pipe"])
def test_five_commands_speak_at_once_and_name_the_next(tty: bool, tmp_path: Path) -> None:
    make_folder(tmp_path / "videos")
    commands = {
        "init": (["init", "my", "--videos", "videos"], "mmspeed check my.yaml"),
        "check": (["check", "my.yaml"], "mmspeed train my.yaml"),
        "train": (["train", "my.yaml", "train.steps=20"], "mmspeed sample"),
        "sample": (["sample", "runs/my", "-p", "a rabbit in a meadow", "--steps", "4"], "mmspeed report runs/my"),
        "report": (["report", "runs/my"], "mmspeed sample runs/my"),
    }
    for name, (arguments, following) in commands.items():
        result = stamped(arguments, tmp_path, tty, timeout=1200)
        assert result.code == 0, result.text
        assert following in " ".join(result.text.split()[-30:]), name
        assert result.first_busy < MOST_FIRST, (name, result.first)
        assert result.longest_busy_silence[0] < MOST_SILENT, (name, result.longest_busy_silence)
        if not tty:
            assert "\x1b" not in result.text
    assert len((tmp_path / "my.yaml").read_text(encoding="utf-8").splitlines()) <= 40
    text = (tmp_path / "runs" / "my" / "report.html").read_text(encoding="utf-8")
    assert "by quarter of the times" in text
