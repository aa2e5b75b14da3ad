"""What the ranks of tests are forked from."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mmspeed.data.loading.prefetch import STOPS

SCRIPT = """
from multiprocessing import forkserver
from tests.support.spawn import start_server

if __name__ == "__main__":
    start_server()
    lines = open(f"/proc/{forkserver._forkserver._forkserver_pid}/status", encoding="ascii").read().splitlines()
    print(next(line.split()[1] for line in lines if line.startswith("SigBlk")))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the mask of another process is read in /proc")
def test_the_server_blocks_what_workers_of_the_loader_must_outlive(tmp_path: Path, root: Path) -> None:
    """In a process of its own: multiprocessing's first helper process opens the mask while it starts."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        check=True,
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root)},
        timeout=60,
    )
    blocked = int(done.stdout, 16)
    assert all(blocked >> (number - 1) & 1 for number in STOPS)
