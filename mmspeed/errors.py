"""The one exception that people are meant to read, and the way of a failure to the launcher."""

import json
import os
import time
from collections.abc import Sequence
from typing import Literal

LAUNCHED = "MMSPEED_LAUNCHER"  # set by `mmspeed --nproc` in the processes that it starts
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # set by torch's elastic launcher, one file for each process

# an error of the user's input or machine, too little memory, a peer that is gone, a phase without end, or a fault in a program
Kind = Literal["input", "memory", "connection", "hang", "program"]


def tell_launcher(line: str, code: int, known: bool, kind: Kind) -> bool:
    """Write the line about this process's failure into the error file of `mmspeed --nproc`, which prints one for all of its processes.

    `known`: the user can correct the cause. False where no such launcher started this process, or the file cannot be written.
    """
    if not os.environ.get(LAUNCHED) or not os.environ.get(ERROR_FILE):
        return False
    content = {"message": line, "timestamp": int(time.time()), "known": known, "code": code, "kind": kind}
    try:
        with open(os.environ[ERROR_FILE], "w", encoding="utf-8") as file:
            json.dump(content, file)
    except OSError:
        return False
    return True


class UserError(Exception):
    """An error that the user can fix: one or two lines that say what is wrong, where, and what to do.

    The command line prints it without a traceback (`--debug` shows one) and exits with 1.
    """


def nearest(word: str, choices: Sequence[str], least: float = 0.5) -> str:
    """`; did you mean 'x'?` with the nearest of `choices`, or an empty string when none is as near as `least`, from 0 to 1."""
    import difflib

    matches = difflib.get_close_matches(word, list(choices), n=1, cutoff=least)
    return f"; did you mean '{matches[0]}'?" if matches else ""


def misspelt(word: str, names: Sequence[str], before: str = "") -> str:
    """As `nearest`, for a name that `word` is likely to spell wrongly: every part between underscores is near, as in `min_` and `max_` none is.

    before: what stands before the nearest name, such as its section.
    """
    parts = word.split("_")
    near = [name for name in names if all(nearest(part, name.split("_"), 0.6) for part in parts)]
    return nearest(word, near, 0.75).replace("'", f"'{before}", 1)


def divisors(whole: int) -> str:
    """The whole numbers that divide one: `1, 2, 4`."""
    return ", ".join(str(number) for number in range(1, whole + 1) if whole % number == 0)


def first_names(names: Sequence[str], most: int = 8, count: int | None = None) -> str:
    """`a, b and 3 more`: the first `most` of some names, and the number of the others. `count`: of all, where only some are given."""
    left = (len(names) if count is None else count) - len(names[:most])
    return ", ".join(names[:most]) + (f" and {left} more" if left > 0 else "")
