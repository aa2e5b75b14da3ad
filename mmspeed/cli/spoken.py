"""Lines of every command beside its results, on standard error: what it does, at once, and at its end what to run next."""

from __future__ import annotations

import os
import sys

import typer

from mmspeed import log
from mmspeed.errors import LAUNCHED
from mmspeed.version import __version__


def begin(command: str, *words: object) -> None:
    """Say what this command does, before anything is loaded; processes that `--nproc` started leave it to the one that started them."""
    if LAUNCHED not in os.environ:
        log.get_logger("cli").info(f"mmspeed {__version__}: {' '.join(map(str, (command, *words)))}")


def begin_group(context: typer.Context, working: bool) -> None:
    """Begin a command of a group (`mmspeed cache stat`), unless only its help is asked for.

    `working`: until its end it has a line in every silence; for commands without progress of their own.
    """
    if context.invoked_subcommand is None or {"--help", "-h"} & set((context.obj or {}).get("arguments", ())):
        return
    begin(str(context.info_name), context.invoked_subcommand)
    if working:
        context.with_resource(log.Working(f"{context.info_name} {context.invoked_subcommand}", tell=False))


def loading() -> log.Working:
    """A context manager for the import of libraries, which can take seconds."""
    return log.Working("loading libraries", tell=False)


def then(*commands: str) -> None:
    """Say what to run next."""
    sys.stdout.flush()
    log.get_logger("cli").info(f"next: {', or '.join(f'`mmspeed {command}`' for command in commands)}")
