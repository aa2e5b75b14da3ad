"""Scores by a user's command, such as a benchmark in an environment of its own, over a folder of videos."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

from mmspeed.errors import UserError

FOLDER = "{folder}"


def check_command(command: str) -> list[str]:
    """The words of a command, as a shell splits them. Raises UserError for one that cannot be split, or that names no `{folder}`."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UserError(f"--score {command!r}: cannot be split into words: {error}") from None
    if not any(FOLDER in word for word in words):
        raise UserError(f"--score {command!r}: write {FOLDER} where the command takes the folder of videos")
    return words


def scores_of(command: str, folder: Path) -> dict[str, float]:
    """The numbers of the JSON object that a command prints, by dotted key. No shell reads the command.

    Raises UserError for a command that cannot be started or fails, and for output that is no JSON object with a number.
    """
    words = [word.replace(FOLDER, str(folder)) for word in check_command(command)]
    try:
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    except (OSError, ValueError) as error:
        raise UserError(f"--score {command!r}: cannot be started: {error}") from None
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["it wrote no message"]
        raise UserError(f"--score {command!r}: ended with exit code {done.returncode}: {said[-1]}")
    try:
        numbers = _numbers(json.loads(done.stdout, parse_constant=_refuse))
    except ValueError as error:
        raise UserError(
            f"--score {command!r}: printed no JSON: {error}; write the object alone to standard output, all else to standard error"
        ) from None
    if not numbers:
        raise UserError(
            f'--score {command!r}: printed JSON without a named number: print an object such as {{"quality": 0.8}}'
        )
    return numbers


def _refuse(name: str) -> float:
    """Raises ValueError for NaN and infinity, which Python's reader would take."""
    raise ValueError(f"{name} is no number of JSON")


def _numbers(tree: Any, name: str = "") -> dict[str, float]:
    """The numbers in a tree of objects, by dotted key; other values are passed over."""
    if isinstance(tree, dict):
        return {
            key: value
            for part, own in tree.items()
            for key, value in _numbers(own, f"{name}.{part}".strip(".")).items()
        }
    if name and isinstance(tree, int | float) and not isinstance(tree, bool):
        return {name: float(tree)}
    return {}
