"""Guards that the system keeps for a process: its end with the one that started it, limits of memory, and of code that may not end."""

from __future__ import annotations

import ctypes
import resource
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType

from mmspeed.errors import UserError

_PR_SET_PDEATHSIG = 1
_TEMPLATE = 30.0  # seconds


def end_with_parent(number: int = signal.SIGKILL) -> None:
    """Have the system send this process a signal when the thread that started it ends: a stopped process cannot see that itself."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def limit_memory(size: int) -> None:
    """Limit the memory of this process, which reads a file of a stranger's, to `size` bytes; no core file where it dies of that."""
    resource.setrlimit(resource.RLIMIT_DATA, (size, size))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def template_limit() -> AbstractContextManager[None]:
    """The limit of a chat template, which takes milliseconds of CPU time where it ends. Raises UserError."""
    return time_limit(_TEMPLATE, f"the tokenizer's chat template does not end within {_TEMPLATE:g} s of one chat")


@contextmanager
def time_limit(seconds: float, words: str) -> Iterator[None]:
    """Raise UserError with `words` inside a block that computes for longer; seconds are CPU time of this thread.

    The system's timer interrupts the main thread alone, and no single call of compiled code.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    end = time.thread_time() + seconds

    def late(number: int, frame: FrameType | None) -> None:
        if (left := end - time.thread_time()) <= 0:
            raise UserError(words)
        signal.setitimer(signal.ITIMER_VIRTUAL, left)  # other threads have computed

    before = signal.signal(signal.SIGVTALRM, late)
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
