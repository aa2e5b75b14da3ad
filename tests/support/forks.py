"""Real processes that start at once: forks of a test that has imported everything, for tests that need many of them."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def fork(function: Callable[[], Any], output: Path, environment: Mapping[str, str] | None = None) -> int:
    """Run `function` in a forked process that writes to `output`; its id. Exit code 1 when it raises."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        descriptor = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.environ.update(environment or {})
        function()
        code = 0
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)


def ended(pid: int) -> int | None:
    """The exit code of a forked process (minus the signal that killed it); None while it runs."""
    done, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if done else None


def wait(pid: int, seconds: float = 120.0) -> int | None:
    """The exit code once the process has ended; None, and the process is killed, when it has not after `seconds`."""
    deadline = time.monotonic() + seconds
    while (code := ended(pid)) is None:
        if time.monotonic() > deadline:
            kill(pid)
            return None
        time.sleep(0.005)
    return code


def kill(pid: int) -> None:
    """SIGKILL, and wait for the end."""
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def ranks(count: int) -> list[dict[str, str]]:
    """The environments of the processes of a launch."""
    return [{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)} for rank in range(count)]
