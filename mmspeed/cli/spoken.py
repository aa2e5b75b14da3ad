"""Lines of every command beside its results, on standard error: what it does, at once, and at its end what to run next."""

from __future__ import annotations

import os
import sys

from mmspeed import log
from mmspeed.errors import LAUNCHED
from mmspeed.version import __version__


def begin(command: str, *words: object) -> None:
    """Say what this command does, before anything is loaded; processes that `--nproc` started leave it to the one that started them."""
    if LAUNCHED not in os.environ:
        log.get_logger("cli").info(f"mmspeed {__version__}: {' '.join(map(str, (command, *words)))}")


def loading() -> log.Working:
    """A context manager for the import of libraries, which can take seconds."""
    return log.Working("loading libraries", tell=False)


def then(*commands: str) -> None:
    """Say what to run next."""
    sys.stdout.flush()
    log.get_logger("cli").info(f"next: {', or '.join(f'`mmspeed {command}`' for command in commands)}")
