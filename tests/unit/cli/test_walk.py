"""A new user's walk: five commands over a folder of clips and pictures, each of which speaks soon and is never silent for long."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.claims.walk import walk


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
    [
        "init new --videos videos",
        "check run.yaml",
        "train run.yaml",
        "sample runs/my -p rabbit",
        "doctor",
        "cache stat cache",
        "bench comm",
    ],
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
