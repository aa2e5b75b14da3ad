"""`mmspeed demo`: everything at once, on what ships with the package."""

from __future__ import annotations

import shlex
import signal
from enum import Enum
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer

from mmspeed import log

from . import spoken


class DemoTask(str, Enum):
    """The task of a demo."""

    video = "video"
    language = "language"


def demo(
    short: Annotated[bool, typer.Option("--short", help="A few steps only: shows that everything works.")] = False,
    output: Annotated[Path, typer.Option(help="Folder that the demo writes to.")] = Path("mmspeed-demo"),
    task: Annotated[DemoTask, typer.Option(help="What is trained: videos, or texts.")] = DemoTask.video,
) -> None:
    """Preprocess, train, sample and report on the clips or texts that ship with the package. Works offline."""
    spoken.begin("demo")
    with spoken.loading():
        from .demo import run_demo
        from .demo_language import run_language_demo

    run = run_language_demo if task is DemoTask.language else run_demo
    again = shlex.join(["demo", *["--short"] * short, "--task", task.value, "--output", str(output)])
    before = signal.signal(signal.SIGTERM, _end)
    try:
        with log.Working("running the demo", tell=False):
            paths = run(output, short)
    except (KeyboardInterrupt, SystemExit):
        _tell_of_rest(again)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
    if paths is None:
        _tell_of_rest(again)
        return
    for path in paths:
        print(path)
    spoken.then("init my-lm --texts FOLDER" if task is DemoTask.language else "init my-run --videos FOLDER")


def _end(number: int, frame: FrameType | None) -> NoReturn:
    """End the process by a signal, as Ctrl-C does; training handles its own."""
    raise SystemExit(128 + number)


def _tell_of_rest(command: str) -> None:
    log.get_logger("demo").info("the demo has not ended: the same command goes on where it stopped")
    spoken.then(command)
