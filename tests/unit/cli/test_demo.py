"""The demo, ended by a signal: it stops, and says that it goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "file", "code"),
    [
        (signal.SIGTERM, "clips.jsonl", 143),
        (signal.SIGINT, "clips.jsonl", 130),
        (signal.SIGTERM, "runs/short/metrics.jsonl", 0),
    ],
)
def test_a_signal_ends_the_demo(tmp_path: Path, number: signal.Signals, file: str, code: int) -> None:
    command = [sys.executable, "-m", "mmspeed", "demo", "--short", "--output", str(tmp_path)]
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True)
    while not ((tmp_path / file).exists() and (tmp_path / file).stat().st_size) and process.poll() is None:
        time.sleep(0.1)
    os.killpg(process.pid, number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == code, said
    assert "the same command goes on where it stopped" in said and "3/4" not in said
    assert f"next: `mmspeed demo --short --task video --output {tmp_path}`" in said
