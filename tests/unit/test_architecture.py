"""A step of training runs through the files that docs/architecture.md names, in their order; the number of all is a hint, printed."""

from __future__ import annotations

import re
import shutil
import sys
import threading
from collections.abc import Generator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from mmspeed.pipelines.domains.video.data import VideoData
from mmspeed.pipelines.domains.video.domain import VideoDomain
from mmspeed.pipelines.training.trainer import TrainPipeline
from mmspeed.protocols import RunPlace, StepData
from tests.support.runs import small_config

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDERS = {"mmspeed", "models", "pipelines", "preprocess"}
MATTER = 10  # files that the page names
TRACED = 1  # steps counted from 0: the first one also makes what lasts, such as compiled tables


class FileRecorder:
    """The project's files in which a function is called while it is on, in order of first call."""

    def __init__(self) -> None:
        self.names: dict[str, None] = {}
        self._names: dict[str, str | None] = {}

    def start(self) -> None:
        """Begin to record, in this thread and in threads that are started from now on."""
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def stop(self) -> None:
        """Record no more."""
        sys.setprofile(None)
        threading.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or code.co_name == "<module>":  # an import is no call
            return
        if code.co_filename not in self._names:
            self._names[code.co_filename] = project_file(code.co_filename)
        name = self._names[code.co_filename]
        if name is not None:
            self.names.setdefault(name)


class TracedTask(VideoDomain):
    """The video task, recording the files from the request for one step's data to the request for the next one's."""

    recorder: FileRecorder

    def data(self, place: RunPlace) -> VideoData:
        data = super().data(place)
        recorder, steps = self.recorder, data.steps

        def traced(first: int, last: int) -> Generator[StepData, None, None]:
            inner = steps(first, last)
            for number in range(first, last):
                if number == TRACED:
                    recorder.start()
                step = next(inner)
                yield step
                recorder.stop()

        data.steps = traced  # type: ignore[assignment, method-assign]
        return data


def project_file(path: str) -> str | None:
    """The name of a file of the project, from the root of the repository; None for any other file."""
    real = Path(path).resolve()
    if not real.is_relative_to(ROOT):
        return None
    name = real.relative_to(ROOT)
    return name.as_posix() if name.parts[0] in FOLDERS else None


def named_files() -> list[str]:
    """The files that the page names: one on each line, and what it does."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = page.split("\n## A batch's way\n")[1].split("\n## ")[0]
    return re.findall(r"^    (\S+\.py) +\S.*$", section, re.MULTILINE)


@pytest.fixture(scope="module")
def traced_files(small_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The files of one step of training, in order of first call."""
    off = ["validate.every=100", "train.prefetch=0", "train.loader_workers=0"]
    home = Path(shutil.copytree(small_cache, tmp_path_factory.mktemp("run") / "home"))
    config = small_config(home, "train.steps=3", *off)
    task = TracedTask(config)
    task.recorder = FileRecorder()
    try:
        result = TrainPipeline(config, task=task).run()
    finally:
        task.recorder.stop()
    assert result.step == 3
    return list(task.recorder.names)


def test_a_step_runs_through_the_files_that_the_page_names(
    traced_files: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with capsys.disabled():
        print(f"a step runs through {len(traced_files)} files; {MATTER} of them matter: ", end="")
    named = named_files()
    assert len(named) == MATTER
    assert [name for name in traced_files if name in named] == named
