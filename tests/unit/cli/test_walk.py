"""A new user's walk: five commands over a folder of clips and pictures, each of which speaks soon and is never silent for long."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.claims.walk import COMMANDS, Walk, make_folder, shortfalls, walk
from tests.support.covers import every_second
from tests.support.stamps import Stamped

CHECK = COMMANDS[1]
END = f"next: `{CHECK.following}`\n"


# By processor seconds of the commands themselves, where a busy machine would make seconds of the clock mean nothing.
@pytest.mark.slow
@pytest.mark.parametrize("tty", [True, False], ids=["terminal", "pipe"])
def test_five_commands_speak_at_once_and_name_the_next(tty: bool, tmp_path: Path) -> None:
    walked = walk(tmp_path, tty)
    print("\n".join(walked.lines()))
    assert walked.shortfalls(busy=True) == []
    assert len(walked.outputs) == 5 and walked.usable == 15
    if not tty:
        assert not any("\x1b" in output.text for _, output in walked.outputs)
    text = (tmp_path / "runs" / "my" / "report.html").read_text(encoding="utf-8")
    assert "by quarter of the times" in text


def output_of(*pieces: tuple[float, str], seconds: float, code: int = 0, busy: float = 0.5) -> Stamped:
    """An output of which each piece and the end came after half as many processor seconds."""
    return Stamped(pieces, [*(when * busy for when, _ in pieces), seconds * busy], seconds, code, 0.0)


def test_silences_are_measured_from_the_start_between_pieces_and_to_the_end() -> None:
    between = output_of((0.5, "begin\n"), (1.0, "a"), (4.5, "b"), (5.0, END), seconds=6.0)
    assert (between.first, between.longest_silence) == (0.5, (3.5, "a"))
    assert (between.first_busy, between.longest_busy_silence) == (0.25, (1.75, "a"))
    assert output_of((4.0, "late"), seconds=5.0).longest_silence == (4.0, "(start)")
    assert output_of((1.0, END), seconds=9.0).longest_silence == (8.0, END)
    nothing = output_of(seconds=3.0)
    assert nothing.first == 3.0 and nothing.longest_silence == (3.0, "(start)")


def test_what_falls_short_is_named() -> None:
    well = output_of((0.5, "begin\n"), (2.0, END), seconds=2.5)
    assert shortfalls(CHECK, well) == []
    late = output_of((2.5, "begin\n"), (6.0, END), seconds=6.5)
    first, silence = shortfalls(CHECK, late)
    assert first == "check: 2.5 s before the first line, at most 2"
    assert silence == "check: 3.5 s of silence, at most 3, after 'begin\\n'"
    assert shortfalls(CHECK, late, busy=True) == []
    (code,) = shortfalls(CHECK, output_of((0.5, "begin\n"), (1.0, "error"), seconds=1.0, code=1))
    assert code.startswith("check: exit code 1: begin")
    (end,) = shortfalls(CHECK, output_of((0.5, "begin\n"), seconds=1.0))
    assert end == f"check: its end does not name `{CHECK.following}`"
    walked = Walk([(CHECK, well)], 41, 13, 12, 0.0)
    assert walked.shortfalls() == ["41 lines of the config, at most 40", "init: 13 usable, but 12 encoded"]


def test_the_folder_of_the_walk_holds_captioned_clips_and_pictures(tmp_path: Path) -> None:
    make_folder(tmp_path / "videos")
    names = [path.suffix for path in (tmp_path / "videos").iterdir()]
    assert [names.count(suffix) for suffix in (".mp4", ".png", ".txt")] == [12, 3, 15]


UNTIL_TORCH = """
import logging, os, sys
from mmspeed import log
from mmspeed.__main__ import main
class Watch:  # ends the process where torch is imported, and tells what a user sees then
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            handlers = [each for each in logging.getLogger("mmspeed").handlers if isinstance(each, log.WorkHandler)]
            shown = [work.label for each in handlers for work in each.shown._open]
            print("torch beside", *shown, flush=True)
            os._exit(0)
sys.meta_path.insert(0, Watch())
main(sys.argv[1:])
"""


@pytest.mark.parametrize(
    "words",
    every_second(
        [
            "init new --videos videos",
            "check run.yaml",
            "preprocess run.yaml",
            "train run.yaml",
            "sample runs/my -p rabbit",
            "report runs/my",
            "demo --short",
            "doctor",
            "qualify",
            "cache stat cache",
            "checkpoint list runs/my",
            "bench attention --run runs/my",
            "bench decode videos",
            "bench comm",
        ]
    ),
)
def test_libraries_are_loaded_behind_a_first_line_and_beside_work_that_speaks(words: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        "data: {sources: [{path: videos}], buckets: [{frames: 1, height: 32, width: 32}]}\n", encoding="utf-8"
    )
    for folder in ("videos", "runs/my", "cache"):
        (tmp_path / folder).mkdir(parents=True)
    command = [sys.executable, "-c", UNTIL_TORCH, *words.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    first, *_ = done.stderr.splitlines() or [""]
    assert "mmspeed" in first and words.split()[0] in first, done
    if words.split()[0] != "bench":  # whose measurements speak for themselves
        assert "torch beside" not in done.stdout or done.stdout.split("torch beside")[1].strip(), done


def test_a_command_ends_with_its_threads_and_hooks_and_without_taking_the_interpreter_down() -> None:
    program = """
import atexit, threading, time
from mmspeed.__main__ import leave
class Last:
    def __del__(self):
        print("interpreter taken down")
last = Last()
atexit.register(print, "hook")
threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
leave(3)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (3, "thread\nhook\n", "")
