"""An exact witness of refactorings: old code beside new code, bit by bit.

`python -m tests.golden.exact` runs every configuration below for 12 optimizer steps with the code of commit e6bf4be and with
the checkout that this file stands in, and compares loss and gradient norm of each step, the held-out losses, and every
parameter, optimizer moment and average at the end. AdamW hides the scale of gradients from the losses: the norms and the
moments show it. Both sides are reached through the command line and YAML alone, so that modules and classes may move; the
caches are the old code's (the new code trains from copies), and one more line compares a cache that the new code builds.

The configurations stand in exact_cases.py, with the tables of keys and names that the new code spells otherwise.

    python -m tests.golden.exact --quick                   # four configurations
    python -m tests.golden.exact --only tiers fsdp         # those
    python -m tests.golden.exact --old DIR --new DIR       # two checkouts
    python -m tests.golden.exact --old COMMIT              # a commit that has this witness is spoken to in its own keys

Exit code: 0 when all is bitwise equal, 1 when something differs or fails, 2 for a mistake in the command line.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import av
import yaml

from .exact_cases import (
    BASE,
    CACHE,
    CASES,
    CLIPS,
    DATA,
    NEW_KEYS,
    NEW_ONLY,
    NEW_VALUES,
    OWN_CACHE,
    PICTURES,
    QUICK,
    RENAMED,
    STEPS,
    Tree,
    nested,
    translated,
)
from .exact_records import Record, difference, entries_difference, read_entries, read_record

OLD_COMMIT = "e6bf4be"
ROOT = Path(__file__).resolve().parents[2]


class FailedError(Exception):
    """A command that did not end well, with the end of its output."""


@dataclass(frozen=True)
class Side:
    """One of the two codes: its checkout and the folder that its runs and caches are in."""

    name: str
    checkout: Path
    folder: Path
    keys: Mapping[str, str]
    values: Mapping[str, Mapping[Any, Any]]
    own: Mapping[str, Any] = field(default_factory=dict)  # keys that only this code has

    def call(self, *arguments: str, folder: Path | None = None) -> str:
        """Standard output of `python ARGUMENTS` in `folder` (else the side's) with this checkout's mmspeed. Raises FailedError."""
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        environment = {**os.environ, **threads, "PYTHONPATH": str(self.checkout)}
        ended = subprocess.run(
            [sys.executable, *arguments], cwd=folder or self.folder, env=environment, capture_output=True, text=True
        )
        if ended.returncode:
            end = " | ".join((ended.stdout + ended.stderr).strip().splitlines()[-4:])
            raise FailedError(f"the {self.name} code ended with {ended.returncode}: {end}")
        return ended.stdout

    def write(self, name: str, data: str, changes: Tree, cache: str | None = None) -> Path:
        """The config file of a run called `name`; `cache` is another folder than the data set's."""
        own: Tree = {
            "name": name,
            "output": "runs",
            "data.cache": cache or f"cache-{data}",
        }
        tree = {**BASE, **DATA[data], **own, **changes}
        path = self.folder / f"{name}.yaml"
        today = {**translated(tree, self.keys, self.values), **self.own}
        path.write_text(yaml.safe_dump(nested(today)), encoding="utf-8")
        return path

    def preprocess(self, data: str, cache: str) -> Path:
        """The folder of a data set's cache, built now."""
        self.call("-m", "mmspeed", "preprocess", str(self.write(f"data-{cache}", data, {}, cache)))
        return self.folder / cache

    def train(self, name: str) -> Record:
        """What a run of configuration `name` computed."""
        case = CASES[name]
        config = self.write(name, case.data, case.changes)
        folder = self.folder / "runs" / name
        if self.own:  # as a run of before, which draws with the first generator
            folder.mkdir(parents=True)
            (folder / "run.json").write_text("{}", encoding="utf-8")
        several = ["--nproc", str(case.processes)] if case.processes > 1 else []
        self.call("-m", "mmspeed", "train", str(config), *several)
        try:
            return read_record(folder)
        except (OSError, KeyError, ValueError) as error:
            raise FailedError(f"the {self.name} code's run cannot be read: {error!r}") from error


def make_side(name: str, checkout: Path, home: Path) -> Side:
    """A side with its folder. Raises FailedError when Python finds another mmspeed than the checkout's."""
    folder = home / name
    if folder.exists():
        raise FailedError(f"{folder} is there already: name a new folder")
    folder.mkdir()
    tables = (NEW_KEYS, NEW_VALUES, NEW_ONLY) if name == "new" else ({}, {}, {})
    side = Side(name, checkout.resolve(), folder, *tables)
    if name == "old" and (checkout / "tests" / "golden" / "exact_cases.py").exists():
        side = replace(side, **_own_tables(side))
    package = side.call("-c", "import mmspeed; print(mmspeed.__file__)").strip()
    if not Path(package).resolve().is_relative_to(side.checkout):
        raise FailedError(f"Python finds {package}, which is not in the {name} checkout {side.checkout}")
    return side


def _own_tables(side: Side) -> dict[str, Any]:
    """The tables by which a checkout's own witness speaks to its code. Raises FailedError where it has no such tables."""
    names = {"keys": "NEW_KEYS", "values": "NEW_VALUES", "own": "NEW_ONLY"}
    script = f"from tests.golden import exact_cases as c; print({{n: getattr(c, v, {{}}) for n, v in {names}.items()}})"
    return dict(ast.literal_eval(side.call("-c", script)))


def write_manifests(clips: Path, home: Path) -> None:
    """`clips.jsonl` of the first demo clips, of which the first is held out, and `mixed.jsonl` with pictures of others beside them."""
    lines = (clips / "metadata.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines[: CLIPS + PICTURES]]
    for number, row in enumerate(rows):
        row |= {"video": str(clips / row["video"]), "split": "val" if number == 0 else "train"}
    write_rows(home / "clips.jsonl", rows[:CLIPS])
    for row in rows[CLIPS:]:
        picture = home / f"{Path(row['video']).stem}.png"
        with av.open(row["video"]) as video:
            next(video.decode(video=0)).to_image().save(picture)
        row["video"] = str(picture)
    write_rows(home / "mixed.jsonl", rows)


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write a file of JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@contextmanager
def old_checkout(source: str | None, home: Path) -> Iterator[Path]:
    """The folder of the old code: the given one, or a git worktree of the given commit (default: OLD_COMMIT) while the block runs.

    Raises FailedError without git's commit.
    """
    if source is not None and Path(source).is_dir():
        yield Path(source)
        return
    folder, commit = home / "checkout", source or OLD_COMMIT
    git = ["git", "-C", str(ROOT), "worktree"]
    process = subprocess.run([*git, "add", "--detach", str(folder), commit], capture_output=True, text=True)
    if process.returncode:
        raise FailedError(
            f"no worktree of {commit} (fetch the whole history, or name a folder): {process.stderr.strip()}"
        )
    try:
        yield folder
    finally:
        subprocess.run([*git, "remove", "--force", str(folder)], capture_output=True)


@dataclass(frozen=True)
class Outcome:
    """One line of the table."""

    name: str
    processes: int
    difference: str | None
    digests: dict[str, Any]

    def line(self) -> str:
        verdict = "yes" if self.difference is None else f"NO  {self.difference}"
        return f"{self.name:<24} {self.processes:>9}  {verdict}"


HEADER = f"{'configuration':<24} {'processes':>9}  bitwise equal"


def compare_runs(old: Side, new: Side, names: Sequence[str], jobs: int) -> Iterator[Outcome]:
    """An outcome for each configuration, in their order; `jobs` commands run at a time."""
    with ThreadPoolExecutor(jobs) as pool:
        wanted = {OWN_CACHE if name == CACHE else CASES[name].data for name in names}
        caches = {data: pool.submit(old.preprocess, data, f"cache-{data}") for data in sorted(wanted)}
        own = pool.submit(_begun_before, new, caches[OWN_CACHE]) if CACHE in names else None
        for cache in caches.values():
            shutil.copytree(cache.result(), new.folder / cache.result().name)
        runs = {
            (name, side.name): pool.submit(side.train, name) for name in names for side in (old, new) if name != CACHE
        }
        for name in names:
            if own is not None and name == CACHE:
                yield _compare_caches(caches[OWN_CACHE].result(), own)
            else:
                yield _compare_pair(name, runs[name, "old"], runs[name, "new"])


def _begun_before(new: Side, old: Future[Path]) -> Path:
    """The cache that the new code builds where the old code's description of one stands: it draws as that one did."""
    folder = new.folder / "cache-own"
    folder.mkdir()
    shutil.copy(old.result() / "cache.json", folder)
    return new.preprocess(OWN_CACHE, folder.name)


def _compare_pair(name: str, old: Future[Record], new: Future[Record]) -> Outcome:
    processes = CASES[name].processes
    try:
        before, after = old.result(), new.result()
    except FailedError as error:
        return Outcome(name, processes, str(error), {})
    differences = difference(before, after, RENAMED)
    if differences is None and (not before.tensors or sum(key.endswith(" loss") for key in before.numbers) < STEPS):
        differences = f"only {len(before.numbers)} numbers and {len(before.tensors)} tensors were compared"
    return Outcome(name, processes, differences, {"old": before.digests(), "new": after.digests()})


def _compare_caches(old: Path, new: Future[Path]) -> Outcome:
    try:
        before, after = read_entries(old), read_entries(new.result())
    except FailedError as error:
        return Outcome(CACHE, 1, str(error), {})
    return Outcome(CACHE, 1, entries_difference(before, after), {"old": before, "new": after})


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.golden.exact", description="Compare old and new code bit by bit."
    )
    parser.add_argument(
        "--old", metavar="DIR", help=f"checkout of the old code, or a commit; else a worktree of {OLD_COMMIT}"
    )
    parser.add_argument("--new", type=Path, metavar="DIR", default=ROOT, help="checkout of the new code; else this one")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[*CASES, CACHE], help="these configurations only")
    parser.add_argument("--quick", action="store_true", help=f"only {', '.join(QUICK)}")
    parser.add_argument("--jobs", type=int, default=2, help="commands that run at a time")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write all numbers and hashes to this file")
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="make the runs in this new folder, and leave them there"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare what the command line says; returns the exit code."""
    options = parse(arguments)
    names = options.only or (QUICK if options.quick else (*CASES, CACHE))
    started, outcomes = time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix="exact-") as temporary:
        home = options.keep or Path(temporary)
        home.mkdir(parents=True, exist_ok=True)
        try:
            with old_checkout(options.old, home) as checkout:
                old, new = make_side("old", checkout, home), make_side("new", options.new, home)
                write_manifests(checkout.resolve() / "mmspeed" / "assets" / "demo-clips", home)
                print(HEADER, flush=True)
                for outcome in compare_runs(old, new, names, options.jobs):
                    outcomes.append(outcome)
                    print(outcome.line(), flush=True)
        except FailedError as error:
            print(f"exact: {error}", file=sys.stderr)
            return 1
    if options.json is not None:
        options.json.write_text(json.dumps({o.name: o.digests for o in outcomes}, indent=1) + "\n", encoding="utf-8")
    different = [outcome.name for outcome in outcomes if outcome.difference is not None]
    print(f"{len(outcomes) - len(different)} of {len(outcomes)} equal, {time.monotonic() - started:.0f} s")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
