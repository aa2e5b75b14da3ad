"""Turn an exception into one readable line and an exit code (law 7).

In a process that `mmspeed --nproc` started, the line goes to the error file of torch's elastic launcher instead of the
terminal, so that a mistake common to all ranks is shown once, by the parent.
"""

from __future__ import annotations

import errno
import os
import sys
import traceback
from dataclasses import dataclass

from mmspeed.errors import Kind, UserError, tell_launcher
from mmspeed.redaction import redacted

_OS_ERRORS = {
    errno.ENOSPC: "no space left on the disk; free some and run the same command again, it continues where it stopped",
    errno.EDQUOT: "the disk quota is used up; free some and run the same command again, it continues where it stopped",
    errno.EMFILE: "too many open files; raise the limit with `ulimit -n 65536` and run the same command again",
    errno.ENFILE: "the machine has too many open files; close some and run the same command again",
    errno.EROFS: "the disk can only be read; name another folder",
}


@dataclass(frozen=True)
class Failure:
    """The report of an exception: the text after `mmspeed:`, exit code, `known`, true if the user can correct the cause, and kind."""

    text: str
    code: int = 1
    known: bool = True
    kind: Kind = "input"

    def line(self) -> str:
        """The line to print, without secrets."""
        return redacted(f"mmspeed: {self.text}")


def describe(error: BaseException) -> Failure:
    """The line and exit code of an exception."""
    if isinstance(error, UserError):
        return Failure(f"error: {error}")
    if isinstance(error, KeyboardInterrupt):
        return Failure("interrupted", 130)
    if _out_of_memory(error):
        return Failure(
            "error: out of memory; lower train.micro_batch_size, set memory.fraction: 0.9 (tensors for backward are then recomputed or "
            "offloaded as far as necessary) or memory.states: host, or use smaller items; for sampling videos set vae.tiling: true"
            f"\n  {_first_line(error)}",
            kind="memory",
        )
    if _lost_connection(error):
        return Failure(
            "error: lost the connection to another rank, which has ended, or whose node or network is gone; "
            f"the line of that rank or of its launcher says why\n  {_first_line(error)}",
            known=False,
            kind="connection",
        )
    if isinstance(error, ModuleNotFoundError) and error.name and not error.name.startswith("mmspeed"):
        return Failure(f"error: this needs the Python package {error.name!r}, which is missing; see `mmspeed doctor`")
    if isinstance(error, OSError) and (error.errno in _OS_ERRORS or error.filename is not None):
        where = f"{error.filename}: " if error.filename is not None else ""
        return Failure(f"error: {where}{_OS_ERRORS.get(error.errno or 0, error.strerror)}")
    return Failure(
        f"internal error: {type(error).__name__}: {_first_line(error)} "
        "(run again with --debug for the traceback, and please report it)",
        known=False,
        kind="program",
    )


def report(error: BaseException, debug: bool) -> int:
    """Print an exception (with its traceback if `debug`) and return the exit code."""
    failure = describe(error)
    if debug:
        print(redacted("".join(traceback.format_exception(error))), end="", file=sys.stderr)
    if not tell_launcher(failure.line(), failure.code, failure.known, failure.kind):
        rank = os.environ.get("RANK", "0")
        print(failure.line() if rank == "0" else f"[rank {rank}] {failure.line()}", file=sys.stderr, flush=True)
    return failure.code


def _out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or not isinstance(error, RuntimeError):
        return isinstance(error, MemoryError)
    from mmspeed.device import is_out_of_memory  # imports torch, which raised the error

    return is_out_of_memory(error)


def _lost_connection(error: BaseException) -> bool:
    if not isinstance(error, RuntimeError) or "torch.distributed" not in sys.modules:
        return False
    from mmspeed.rendezvous import is_lost_connection  # imports torch, which raised the error

    return is_lost_connection(error)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else "no message"
