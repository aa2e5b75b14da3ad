"""`mmspeed demo`: everything at once, on what ships with the package."""

from __future__ import annotations

import shlex
import signal
from enum import Enum
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer

from mmspeed import log
from mmspeed.errors import UserError

from . import spoken

ADAPTER_NEXT = "init my-lora --model wan2.1-1.3b --adapter lora --videos FOLDER"


class DemoTask(str, Enum):
    """The task of a demo."""

    video = "video"
    language = "language"


def demo(
    short: Annotated[bool, typer.Option("--short", help="A few steps only: shows that everything works.")] = False,
    output: Annotated[Path, typer.Option(help="Folder that the demo writes to.")] = Path("mmspeed-demo"),
    task: Annotated[DemoTask, typer.Option(help="What is trained: videos, or texts.")] = DemoTask.video,
    parallel: Annotated[
        str | None,
        typer.Option(
            metavar="ep=2,...",
            help="Of --task language: train on one process and on those of this layout, and compare losses, bytes and loads.",
        ),
    ] = None,
    schedule: Annotated[
        str | None, typer.Option(help="With pp in --parallel: the order in which stages compute, such as overlap.")
    ] = None,
    adapter: Annotated[
        bool,
        typer.Option(
            "--adapter", help="Train a small Wan of diffusers, then a LoRA on other clips; diffusers reads its file."
        ),
    ] = False,
) -> None:
    """Preprocess, train, sample and report on the clips or texts that ship with the package. Works offline."""
    spoken.begin("demo")
    with spoken.loading():
        from .demo import run_demo
        from .demo_adapter import run_adapter_demo
        from .demo_language import run_language_demo
        from .demo_layout import run_layout_demo

    if adapter and task is not DemoTask.video:
        raise UserError("--adapter is of the task video: leave --task out")
    runs = {
        DemoTask.video: (run_adapter_demo, ADAPTER_NEXT) if adapter else (run_demo, "init my-run --videos FOLDER"),
        DemoTask.language: (run_language_demo, "init my-lm --texts FOLDER"),
    }
    run, following = runs[task]
    if schedule is not None:
        if parallel is None:
            raise UserError("--schedule goes with pp in --parallel, such as pp=2,virtual=2,ep=2")
        parallel = f"{parallel},schedule={schedule}"
    if parallel is not None:
        if task is not DemoTask.language:
            raise UserError("--parallel goes with --task language")
        run = partial(run_layout_demo, layout=parallel)
        following = f"check YOUR-CONFIG.yaml --parallel {shlex.quote(parallel)}"
    flags = [
        *["--short"] * short,
        *["--adapter"] * adapter,
        *(["--parallel", parallel] if parallel is not None else []),
    ]
    again = shlex.join(["demo", *flags, "--task", task.value, "--output", str(output)])
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
    spoken.then(following)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    """End the process by a signal, as Ctrl-C does; training handles its own."""
    raise SystemExit(128 + number)


def _tell_of_rest(command: str) -> None:
    log.get_logger("demo").info("the demo has not ended: the same command goes on where it stopped")
    spoken.then(command)
