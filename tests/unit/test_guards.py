"""Guards of the system: processes that are stopped end with the one that started them."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from mmspeed.errors import UserError
from mmspeed.guards import time_limit
from tests.support.launched import wait_for

LAUNCHED = """
import os, signal, subprocess, sys
child = "import time; from mmspeed.cli.launch import follow_launcher; follow_launcher(); print(1, flush=True); time.sleep(60)"
os.environ["MMSPEED_LAUNCHER"] = str(os.getpid())
process = subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE)
process.stdout.readline()
pid = process.pid
"""
TEXTS = """
import os, signal, sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from tests.unit.preprocess.test_texts import build, write
from mmspeed.preprocess.texts.encode import Worker
build(Path(sys.argv[1]), [{"path": str(write(Path(sys.argv[1]) / "a.jsonl", ["a"]))}])
pool = ProcessPoolExecutor(1, get_context("spawn"), initializer=Worker.begin, initargs=(sys.argv[1] + "/cache",))
pid = pool.submit(os.getpid).result()
"""
END = "os.kill(pid, signal.SIGSTOP); os.waitpid(pid, os.WUNTRACED); print(pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)"


def test_a_limit_of_time_is_of_its_own_thread() -> None:
    other = threading.Thread(target=hashlib.sha256, args=(bytes(1 << 30),))
    other.start()
    with time_limit(0.1, "late"):
        other.join()
    with pytest.raises(UserError, match="late"), time_limit(0.1, "late"):
        while True:
            pass


@pytest.mark.parametrize("script", [LAUNCHED, TEXTS], ids=["rank", "worker of texts"])
def test_a_stopped_process_ends_with_the_one_that_started_it(tmp_path: Path, script: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", script + END, str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    pid = int(done.stdout)
    wait_for(lambda: not psutil.pid_exists(pid), 20)
