"""Inject faults into real builds and runs, and say in a table which were survived: `make faults`, or `python -m tests.faults.campaign`.

Without options a draw by a seed, of at most 10 minutes on two cores; `--full` is all of it; `--soak HOURS` trains for hours and measures
how memory, files and threads grow. The exit code is 1 when a case falls short.
"""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

# before torch is imported: processes that compute the same sums in the same order
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from tests.faults import cases as folder_of_cases
from tests.faults import table
from tests.faults.case import Case, Scene
from tests.faults.processes import RunningCase, adopt_orphans

ROOT = Path(__file__).resolve().parents[2]
OUTPUT = ROOT / "dist" / "faults"
MINUTES = 10.0  # of a draw


def all_cases() -> list[Case]:
    """The cases of all files of `tests/faults/cases`, in the order of the files and of their lines."""
    names = sorted(module.name for module in pkgutil.iter_modules(folder_of_cases.__path__))
    modules = [importlib.import_module(f"{folder_of_cases.__name__}.{name}") for name in names]
    return [value for module in modules for value in vars(module).values() if isinstance(value, Case)]


class Campaign:
    """The cases of a campaign, `jobs` at a time. `limit_seconds`: no case starts after that."""

    def __init__(self, seed: int, full: bool, jobs: int, limit_seconds: float, scratch: Path) -> None:
        self.seed, self.full, self.jobs, self.scratch = seed, full, jobs, scratch
        self.rows: list[table.Row] = []
        self.left_out: list[str] = []
        self._end = time.monotonic() + limit_seconds
        self._running: list[RunningCase] = []

    def run(self, cases: Sequence[Case]) -> None:
        """Run cases in order and print each result."""
        waiting = list(cases)
        try:
            while waiting or self._running:
                while waiting and len(self._running) < self.jobs:
                    self._start(waiting.pop(0))
                self._collect()
                time.sleep(0.02)
        finally:
            for running in self._running:
                running.end()

    def _start(self, case: Case) -> None:
        if time.monotonic() >= self._end:
            self.left_out.append(case.name)
            return
        folder = self.scratch / case.name.replace(" ", "-").replace(",", "")
        scene = Scene(folder / "scene", random.Random(f"{self.seed} {case.name}"), self.full)
        self._running.append(RunningCase(case, folder, scene))

    def _collect(self) -> None:
        for running in list(self._running):
            if (outcome := running.outcome()) is None:
                continue
            self._running.remove(running)
            row = table.Row(running.case.name, *outcome, round(running.seconds, 1))
            self.rows.append(row)
            print(f"{'ok  ' if row.passed else 'FAIL'} {row.test}: {row.figure} ({row.seconds:.0f} s)", flush=True)
            if not row.passed:
                print(f"     its output: {running.folder / 'log.txt'}", flush=True)
            else:
                shutil.rmtree(running.folder, ignore_errors=True)


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.campaign", description=__doc__)
    parser.add_argument(
        "--full", action="store_true", help="the acceptance: all cases at their full size, without a limit"
    )
    parser.add_argument("--soak", type=float, metavar="HOURS", help="train for so long, and measure what grows")
    parser.add_argument("--only", default="", help="cases whose names contain one of these words, by commas")
    parser.add_argument("--seed", type=int, default=0, help="of the draw; the same seed injects the same faults")
    parser.add_argument("--jobs", type=int, default=2, help="cases at a time")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="after which a draw starts no case")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder of faults.json and faults.md")
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    return parser.parse_args(arguments)


def chosen(cases: Sequence[Case], opts: argparse.Namespace) -> list[Case]:
    """The cases that the options name, shuffled by the seed in a draw."""
    if opts.soak is not None:
        from tests.faults.soak import soak_case

        return [soak_case(opts.soak)]
    words = [word.strip() for word in opts.only.split(",") if word.strip()]
    named = [one for one in cases if any(word in one.name for word in words)]
    if words or opts.full:
        return named if words else list(cases)
    drawn = [one for one in cases if not one.only_full]
    random.Random(opts.seed).shuffle(drawn)
    return drawn


def main(arguments: Sequence[str] | None = None, cases: Sequence[Case] | None = None) -> int:
    """Run the campaign; 0 where every case passes, 1 where one falls short, 2 where no case has such a name."""
    opts = options(arguments)
    cases = all_cases() if cases is None else cases
    picked = chosen(cases, opts)
    if opts.list or not picked:
        print("\n".join(one.name for one in cases))
        return 0 if opts.list else 2
    began = time.monotonic()
    adopt_orphans()
    scratch = Path(tempfile.mkdtemp(prefix="mmspeed-faults-"))
    endless = opts.full or opts.soak is not None
    limit = float("inf") if endless else opts.minutes * 60
    campaign = Campaign(opts.seed, opts.full, max(1, opts.jobs), limit, scratch)
    try:
        campaign.run(picked)
    finally:
        adopt_orphans(False)  # a test runs this in its own process, where an orphan of later tests would stay a zombie
        if all(row.passed for row in campaign.rows):
            shutil.rmtree(scratch, ignore_errors=True)
    order = {one.name: place for place, one in enumerate(picked if endless else cases)}
    rows = sorted(campaign.rows, key=lambda row: order[row.test])
    table.write(opts.output, rows, opts.seed, opts.full)
    short = [row for row in rows if not row.passed]
    minutes = (time.monotonic() - began) / 60
    print(f"\n{table.text(rows)}\n")
    if campaign.left_out:
        print(f"not begun within {opts.minutes:g} minutes: {', '.join(campaign.left_out)}")
    print(
        f"{len(rows) - len(short)} of {len(rows)} cases pass, seed {opts.seed}, {minutes:.1f} minutes; {opts.output}/faults.md"
    )
    return int(bool(short))


if __name__ == "__main__":
    sys.exit(main())
