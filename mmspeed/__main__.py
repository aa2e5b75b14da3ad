"""Entry point of the `mmspeed` command, of `python -m mmspeed` and of `torchrun -m mmspeed`."""

from __future__ import annotations

import atexit
import os
import sys
from typing import NoReturn


def main(argv: list[str] | None = None) -> int:
    """Run one command line (default: this process's own) and return the exit code."""
    from .cli.app import run

    return run(sys.argv[1:] if argv is None else argv)


def leave(code: int) -> NoReturn:
    """End this process with an exit code, and one of several without taking the interpreter down.

    Threads of a process group that meet a half gone interpreter abort a process that has done all of its work.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized() and distributed.get_world_size() > 1:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    leave(main())
