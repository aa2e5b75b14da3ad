"""Entry point of the `mmspeed` command, of `python -m mmspeed` and of `torchrun -m mmspeed`."""

from __future__ import annotations

import atexit
import sys
import threading
from typing import NoReturn


def main(argv: list[str] | None = None) -> int:
    """Run one command line (default: this process's own) and return the exit code."""
    if reason := unsupported(sys.platform):
        print(f"mmspeed: error: {reason}", file=sys.stderr)
        return 1
    from .cli.app import run

    return run(sys.argv[1:] if argv is None else argv)


def unsupported(system: str) -> str:
    """The reason that mmspeed does not run on a system (a name of `sys.platform`); empty if it does."""
    if system in ("win32", "cygwin"):
        return "Windows is not supported: use Linux or macOS, or Linux in Windows by WSL 2 (`wsl --install`)"
    return ""


def leave(code: int) -> NoReturn:
    """End this process with an exit code and its exit hooks, without taking the interpreter down.

    Threads of a process group that meet a half gone interpreter abort a process that has done all of its work.
    In a process by itself the last search for cycles through all imported libraries took 0.9 s.
    """
    from .cli import launch

    if not launch.one_of_several():
        threading._shutdown()  # type: ignore[attr-defined] # waits for threads, as the interpreter does first at its end
    atexit._run_exitfuncs()
    launch.end_now(code)


def entry() -> NoReturn:
    """Run this process's own command line and end: the installed command `mmspeed`."""
    leave(main())


if __name__ == "__main__":
    entry()
