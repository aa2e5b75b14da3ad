"""An exact witness of refactorings: old code beside new code, bit by bit.

`python -m tests.golden.exact` builds caches and trains tiny models with the code of a commit, HEAD~ by default, and with the checkout that
this file stands in. It compares caches byte for byte, and of each run the loss and gradient norm of each step, the held-out losses, and
every parameter, optimizer moment and average at the end. AdamW hides the scale of gradients from the losses: the norms and the moments
show it. Both sides are reached through the command line and YAML alone, so that modules and classes may move; both train from the old
side's caches, so that the new code must read them.

exact_cases.py names caches and runs. Each side is given those of its own checkout's file, in its own keys, by their names; what the
old checkout's file does not have is given as it stands here.

    python -m tests.golden.exact --quick                   # a few
    python -m tests.golden.exact --only tiers fsdp         # those
    python -m tests.golden.exact --old COMMIT              # another commit, or a folder

Exit code: 0 when all is bitwise equal, 1 when something differs or fails, 2 for a mistake in the command line.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import av
import yaml

from .exact_cases import CACHES, CLIPS, PICTURES, QUICK, RENAMED, RUNS, STEPS, Cache, Run
from .exact_records import Record, difference, read_cache, read_run

ROOT = Path(__file__).resolve().parents[2]


class FailedError(Exception):
    """A command that did not end well, with the end of its output."""


@dataclass(frozen=True)
class Side:
    """One of the two codes: its checkout, the folder of the materials, and caches and runs in its own keys."""

    name: str
    checkout: Path
    home: Path
    caches: Mapping[str, Cache]
    runs: Mapping[str, Run]

    def call(self, *arguments: str) -> str:
        """Standard output of `python ARGUMENTS` with this checkout's mmspeed. Raises FailedError."""
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        environment = {**os.environ, **threads, "PYTHONPATH": str(self.checkout)}
        ended = subprocess.run(
            [sys.executable, *arguments], cwd=self.home, env=environment, capture_output=True, text=True
        )
        if ended.returncode:
            end = " | ".join((ended.stdout + ended.stderr).strip().splitlines()[-4:])
            raise FailedError(f"the {self.name} code ended with {ended.returncode}: {end}")
        return ended.stdout

    def command(self, verb: str, name: str, folder: str, cache: str, *more: str) -> None:
        """Run a command of mmspeed with the config of a cache, which is in `folder`."""
        config = self.caches[cache]
        path = self.home / f"{self.name}-{name}.yaml"
        path.write_text(yaml.safe_dump(config.tree), encoding="utf-8")
        section = "texts" if "texts" in config.tree else "data"
        own = (f"name={name}", f"output={self.name}/runs", f"{section}.cache={folder}/{cache}")
        self.call("-m", "mmspeed", verb, str(path), *config.words.split(), *own, *more)

    def preprocess(self, name: str) -> Record:
        """What a cache holds, built now."""
        self.command("preprocess", name, self.name, name)
        return read_cache(self.home / self.name / name)

    def train(self, name: str) -> Record:
        """What a run on the old code's cache computed."""
        run = self.runs[name]
        several = ["--nproc", str(run.processes)] if run.processes > 1 else []
        self.command("train", name, "old", run.cache, *run.words.split(), *several)
        try:
            return read_run(self.home / self.name / "runs" / name)
        except (OSError, KeyError, ValueError) as error:
            raise FailedError(f"the {self.name} code's run cannot be read: {error!r}") from error


def make_side(name: str, checkout: Path, home: Path) -> Side:
    """A side, with its folder made. Raises FailedError when Python finds another mmspeed than the checkout's."""
    checkout, home = checkout.resolve(), home.resolve()
    cases = checkout / "tests" / "golden" / "exact_cases.py"
    own = runpy.run_path(str(cases)) if cases.exists() else {}
    side = Side(name, checkout, home, {**CACHES, **own.get("CACHES", {})}, {**RUNS, **own.get("RUNS", {})})
    (home / name).mkdir()
    package = side.call("-c", "import mmspeed; print(mmspeed.__file__)").strip()
    if not Path(package).resolve().is_relative_to(checkout):
        raise FailedError(f"Python finds {package}, which is not in the {name} checkout {checkout}")
    return side


# ---- materials ----


def write_materials(home: Path, names: Sequence[str]) -> None:
    """What configs name by `./`: manifests of demo clips, a text, and those tiny repositories that one of `names` reads."""
    write_manifests(ROOT / "mmspeed" / "assets" / "demo-clips", home)
    shutil.copy(ROOT / "mmspeed" / "assets" / "demo-texts" / "train" / "sonnets.txt", home)
    runs = [RUNS[name] for name in names if name in RUNS]
    caches = {*names, *(run.cache for run in runs)} & CACHES.keys()
    words = " ".join([run.words for run in runs] + [CACHES[name].words for name in caches]).split()
    for name, save in repositories().items():
        if any(word.endswith(f"=./{name}") for word in words):
            save(home / name)


def repositories() -> dict[str, Callable[[Path], Any]]:
    """How each tiny repository of random weights is made."""
    from tests.support.language_models import saved
    from tests.support.tiny_repositories import REPOSITORIES, save_wan_experts

    return {
        **REPOSITORIES,
        "wan-experts": save_wan_experts,
        "qwen3-experts": partial(saved, "qwen3_moe", vocab_size=512),
    }


def write_manifests(clips: Path, home: Path) -> None:
    """`clips.jsonl` of the first demo clips, of which the first is held out, and `mixed.jsonl` with pictures of others beside them."""
    lines = (clips / "metadata.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines[: CLIPS + PICTURES]]
    for number, row in enumerate(rows):
        row |= {"video": str(clips / row["video"]), "split": "val" if number == 0 else "train"}
        row["caption"] += f'  &amp; "{number}"'  # to be cleaned, and words to be drawn
    for row in rows[CLIPS:]:
        picture = home / f"{Path(row['video']).stem}.png"
        with av.open(row["video"]) as video:
            next(video.decode(video=0)).to_image().save(picture)
        row["video"] = str(picture)
    for name, kept in (("clips", rows[:CLIPS]), ("mixed", rows)):
        (home / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")


@contextmanager
def old_checkout(source: str, home: Path) -> Iterator[Path]:
    """The folder of the old code: the given one, or a git worktree of the given commit while the block runs.

    Raises FailedError without git's commit.
    """
    if Path(source).is_dir():
        yield Path(source)
        return
    folder = home / "checkout"
    git = ["git", "-C", str(ROOT), "worktree"]
    process = subprocess.run([*git, "add", "--detach", str(folder), source], capture_output=True, text=True)
    if process.returncode:
        raise FailedError(
            f"no worktree of {source} (fetch the whole history, or name a folder): {process.stderr.strip()}"
        )
    try:
        yield folder
    finally:
        subprocess.run([*git, "remove", "--force", str(folder)], capture_output=True)


# ---- comparing ----


def compare(old: Side, new: Side, names: Sequence[str], jobs: int) -> Iterator[tuple[str, str | None]]:
    """Each name with its first difference, in their order; `jobs` commands run at a time."""
    runs = [name for name in names if name in RUNS]
    caches = [name for name in names if name in CACHES]
    read = [side.runs[name].cache for name in runs for side in (old, new)]
    before: dict[str, Future[Record]] = {}
    after: dict[str, Future[Record]] = {}
    with ThreadPoolExecutor(jobs) as pool:
        before |= {name: pool.submit(old.preprocess, name) for name in dict.fromkeys(caches + read)}
        after |= {name: pool.submit(new.preprocess, name) for name in caches}
        wait(before.values())
        for name in runs:
            before[name], after[name] = pool.submit(old.train, name), pool.submit(new.train, name)
        for name in names:
            try:
                yield name, compare_pair(name, before[name].result(), after[name].result())
            except FailedError as error:
                yield name, str(error)


def compare_pair(name: str, before: Record, after: Record) -> str | None:
    """The first difference of two caches or runs."""
    found = difference(before, after, RENAMED)
    lacking = name in RUNS and f"step {STEPS} grad_norm" not in before
    return found or (f"the run has no step {STEPS}" if lacking else None)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.golden.exact", description="Compare old and new code bit by bit."
    )
    parser.add_argument("--old", metavar="COMMIT|DIR", default="HEAD~", help="the old code; else HEAD~")
    parser.add_argument("--new", type=Path, metavar="DIR", default=ROOT, help="checkout of the new code; else this one")
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", choices=[*CACHES, *RUNS], help="these caches and runs only"
    )
    parser.add_argument("--quick", action="store_true", help=f"only {', '.join(QUICK)}")
    parser.add_argument("--jobs", type=int, default=2, help="commands that run at a time")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="work in this new folder, and leave it there")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare what the command line says; returns the exit code."""
    options = parse(arguments)
    names = options.only or (QUICK if options.quick else (*CACHES, *RUNS))
    started, different = time.monotonic(), 0
    with tempfile.TemporaryDirectory(prefix="exact-") as temporary:
        home = options.keep or Path(temporary)
        try:
            home.mkdir(parents=True, exist_ok=options.keep is None)
            with old_checkout(options.old, home) as checkout:
                old, new = make_side("old", checkout, home), make_side("new", options.new, home)
                write_materials(home, names)
                for name, found in compare(old, new, names, options.jobs):
                    different += found is not None
                    print(f"{name:<24} {'equal' if found is None else f'DIFFERENT  {found}'}", flush=True)
        except (FailedError, FileExistsError) as error:
            print(f"exact: {error}", file=sys.stderr)
            return 1
    print(f"{len(names) - different} of {len(names)} equal, {time.monotonic() - started:.0f} s")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
