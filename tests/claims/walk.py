"""A new user's walk, timed: `init`, `check`, `train`, `sample` and `report` over 12 clips and 3 pictures.

Run `python -m tests.claims.walk`; it prints a table and ends with exit code 1 where something falls short. Seconds are those of the
clock, which mean something on a quiet machine only: the load is printed, and the processor seconds stand beside them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import av

from tests.support.runs import CLIPS
from tests.support.stamps import Stamped, stamped

FIRST, SILENT, CONFIG_LINES = (
    2.0,
    10.5,  # a file, as this claim reads, gets a line every 10 s; a terminal one a second
    40,
)  # seconds before the first line, seconds of silence, lines of the config: at most
CLIPS_MADE, PICTURES_MADE = 12, 3
STEPS = 20  # of training


@dataclass(frozen=True)
class Command:
    """A command of the walk: its arguments, and the command that it is to name as the next one."""

    name: str
    arguments: Sequence[str]
    following: str


COMMANDS = (
    Command("init", ("init", "my", "--videos", "videos"), "mmspeed check my.yaml"),
    Command("check", ("check", "my.yaml"), "mmspeed train my.yaml"),
    Command("train", ("train", "my.yaml", f"train.steps={STEPS}"), "mmspeed sample"),
    Command("sample", ("sample", "runs/my", "-p", "a rabbit in a meadow", "--steps", "4"), "mmspeed report runs/my"),
    Command("report", ("report", "runs/my"), "mmspeed sample runs/my"),
)


@dataclass(frozen=True)
class Walk:
    """The outputs of the commands that ran, the lines of the config, and the sources that `init` called usable and that were encoded."""

    outputs: Sequence[tuple[Command, Stamped]]
    config_lines: int
    usable: int
    encoded: int
    load: float  # processes that waited for a processor on the whole machine, the minute's mean at the end

    def shortfalls(self, busy: bool = False) -> list[str]:
        """All that falls short, a line each; by processor seconds instead of those of the clock if `busy`."""
        return [
            *(line for command, output in self.outputs for line in shortfalls(command, output, busy)),
            *_over("lines of the config", self.config_lines, CONFIG_LINES),
            *([] if self.usable == self.encoded else [f"init: {self.usable} usable, but {self.encoded} encoded"]),
        ]

    def lines(self) -> list[str]:
        """The table."""
        rows = [
            "command   first line s   longest silence s   whole s   (processor s: first line, silence)   before the silence"
        ]
        for command, output in self.outputs:
            silence, said = output.longest_silence
            last = said.strip().splitlines()[-1][-60:] if said.strip() else ""
            rows.append(
                f"{command.name:8}  {output.first:12.2f}   {silence:17.2f}   {output.seconds:7.1f}"
                f"   ({output.first_busy:.2f}, {output.longest_busy_silence[0]:.2f})   {last}"
            )
        return [
            *rows,
            f"{len(self.outputs)} commands, {self.config_lines} lines of config",
            f"sources: {self.usable} of {CLIPS_MADE + PICTURES_MADE} usable by init, {self.encoded} encoded",
            f"load of the machine: {self.load:.1f} on {os.cpu_count()} processors",
        ]


def shortfalls(command: Command, output: Stamped, busy: bool = False) -> list[str]:
    """What falls short in one command."""
    first = output.first_busy if busy else output.first
    silence, said = output.longest_busy_silence if busy else output.longest_silence
    short = [f"exit code {output.code}: {output.text[-300:]}"] if output.code else []
    short += _over("s before the first line", first, FIRST)
    short += [f"{line}, after {said[-60:]!r}" for line in _over("s of silence", silence, SILENT)]
    if not output.code and command.following not in " ".join(output.text.split()[-30:]):
        short.append(f"its end does not name `{command.following}`")
    return [f"{command.name}: {line}" for line in short]


def _over(name: str, value: float, most: float) -> list[str]:
    return [f"{value:.3g} {name}, at most {most:g}"] if value > most else []


def make_folder(folder: Path) -> None:
    """Fill a new folder with packaged clips and first frames of others, each with its caption in a file beside it."""
    folder.mkdir(parents=True)
    rows = [json.loads(line) for line in CLIPS.read_text(encoding="utf-8").splitlines()]
    for number, row in enumerate(rows[: CLIPS_MADE + PICTURES_MADE]):
        video = CLIPS.parent / row["video"]
        if number < CLIPS_MADE:
            shutil.copy(video, folder)
        else:
            with av.open(str(video)) as container:
                next(container.decode(video=0)).to_image().save(folder / f"{video.stem}.png")
        (folder / f"{video.stem}.txt").write_text(row["caption"], encoding="utf-8")


def walk(folder: Path, tty: bool, timeout: float = 1200.0) -> Walk:
    """Walk through all commands in a folder, up to the first that fails, on a terminal or through a pipe."""
    from mmspeed.config import load_config, video_config
    from mmspeed.data import DatasetCache

    make_folder(folder / "videos")
    outputs = []
    for command in COMMANDS:
        outputs.append((command, stamped(command.arguments, folder, tty, timeout)))
        if outputs[-1][1].code:
            break
    config, said = folder / "my.yaml", outputs[0][1].text
    usable = re.search(r"(\d+) of \d+ usable", said)
    cache = video_config(load_config(config), str(config)).cache_dir if config.exists() else folder
    encoded = len(DatasetCache(cache).samples) if (cache / "cache.json").exists() else 0
    lines = len(config.read_text(encoding="utf-8").splitlines()) if config.exists() else 0
    return Walk(outputs, lines, int(usable[1]) if usable else -1, encoded, os.getloadavg()[0])


def main() -> int:
    """Walk, print the table and what falls short; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.claims.walk", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--terminal", action="store_true", help="on a terminal with bars, instead of through a pipe")
    parser.add_argument("--busy", action="store_true", help="judge by processor seconds, for a machine with other work")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="a new folder for the walk, which stays")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        result = walk(arguments.keep or Path(temporary), arguments.terminal)
    print("\n".join(result.lines()))
    short = result.shortfalls(arguments.busy)
    print("\n".join(["FAIL", *(f"  {line}" for line in short)]) if short else "PASS")
    return 1 if short else 0


if __name__ == "__main__":
    raise SystemExit(main())
