"""The demo, ended by a signal: it stops at once, and says that it goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "line", "code"),
    [(signal.SIGTERM, "1/4", 143), (signal.SIGINT, "1/4", 130), (signal.SIGTERM, "model:", 0)],
)
def test_a_signal_ends_the_demo(tmp_path: Path, number: signal.Signals, line: str, code: int) -> None:
    command = [sys.executable, "-m", "mmspeed", "demo", "--short", "--output", str(tmp_path)]
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True)
    assert process.stderr is not None
    said = next(text for text in process.stderr if line in text)
    os.killpg(process.pid, number)
    said += process.stderr.read()
    assert process.wait(timeout=60) == code, said
    assert "the same command goes on where it stopped" in said and "3/4" not in said
    assert f"next: `mmspeed demo --short --task video --output {tmp_path}`" in said
