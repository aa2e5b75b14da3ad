"""Entry point of the `mmspeed` command, of `python -m mmspeed` and of `torchrun -m mmspeed`."""

from __future__ import annotations

import sys


def main(argv: list[str] | None = None) -> int:
    """Run one command line (default: this process's own) and return the exit code."""
    from .cli.app import run

    return run(sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
