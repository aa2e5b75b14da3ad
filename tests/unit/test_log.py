"""Lines and bars: nothing is silent for long, neither in a log nor on a terminal."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import time

import pytest

from mmspeed import log
from mmspeed.log import Working

PROGRAM = """
import os
import time
from mmspeed import log
log.setup()
log.SILENCE_SECONDS = float(os.environ.get("SILENCE", log.SILENCE_SECONDS))
with log.ProgressLine("train", 4, "step") as line:
    for step in range(4):
        log.get_logger("x").info(f"said at {step}")
        line.advance(note=f"loss {step}.5")
    with log.Working("saving", tell=False):
        time.sleep(float(os.environ.get("SLEEP", "2.5")))
print("the result")
"""


def run(tty: bool, **environment: str) -> tuple[str, str]:
    """(stdout, stderr) of the program, whose stderr is a terminal or a pipe."""
    reader, writer = pty.openpty() if tty else os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdout=subprocess.PIPE,
        stderr=writer,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100", **environment},
    )
    os.close(writer)
    pieces = []
    while True:
        try:
            piece = os.read(reader, 65536)
        except OSError:  # the terminal's other end is closed
            break
        if not piece:
            break
        pieces.append(piece)
    assert process.stdout is not None
    out = process.stdout.read().decode()
    assert process.wait() == 0
    os.close(reader)
    return out, b"".join(pieces).decode()


def test_a_log_has_plain_lines_and_one_for_each_silence() -> None:
    out, err = run(tty=False, SILENCE="1")
    assert out == "the result\n" and "\x1b" not in err
    lines = [re.sub(r"^\d\d:\d\d:\d\d ", "", line) for line in err.splitlines()]
    assert lines[:4] == [f"said at {step}" for step in range(4)]
    assert [line.partition(":")[0] for line in lines[4:-1]] == ["saving", "saving"]  # after 1 s and 2 s
    assert re.fullmatch(r"train: 4/4 step, [\d.]+ step/s  loss 3\.5", lines[-1])


def test_on_a_terminal_lines_stand_above_a_bar_that_moves() -> None:
    out, err = run(tty=True)
    assert out == "the result\n"  # a pipe beside the terminal gets what is printed
    assert err.count("said at 2") == 1 and "loss 3.5" in err and "4/4 step" in err
    assert len(set(re.findall(r"0:00:0\d", err))) >= 3  # the seconds move


def test_other_ranks_are_silent() -> None:
    assert run(tty=False, RANK="1", SLEEP="0.1") == ("the result\n", "")


def test_ten_seconds_are_no_silence() -> None:
    assert "saving" not in run(tty=False)[1] and log.SILENCE_SECONDS == 10


def test_work_that_fails_is_shown_no_longer(capsys: pytest.CaptureFixture[str]) -> None:
    log.setup()
    with pytest.raises(ValueError), Working("failing", tell=True):
        raise ValueError
    time.sleep(0.3)
    before = capsys.readouterr().err
    assert before.endswith("failing\n")
    time.sleep(1.2)
    assert capsys.readouterr().err == ""


def test_numbers_that_are_not_finite_are_null_in_parts_too() -> None:
    assert log._strict({"a": float("nan"), "b": {"c": [1.0, float("inf")]}}) == {"a": None, "b": {"c": [1.0, None]}}
