"""An exact witness of refactorings: old code beside new code, bit by bit.

`python -m tests.golden.exact` runs every configuration below for 12 optimizer steps with the code of commit e6bf4be and with
the checkout that this file stands in, and compares loss and gradient norm of each step, the held-out losses, and every
parameter, optimizer moment and average at the end. AdamW hides the scale of gradients from the losses: the norms and the
moments show it. Both sides are reached through the command line and YAML alone, so that modules and classes may move; the
caches are the old code's (the new code trains from copies), and one more line compares a cache that the new code builds.

    python -m tests.golden.exact --quick                   # four configurations
    python -m tests.golden.exact --only tiers fsdp         # those
    python -m tests.golden.exact --old DIR --new DIR       # two checkouts

Exit code: 0 when all is bitwise equal, 1 when something differs or fails, 2 for a mistake in the command line.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import av
import torch
import yaml
from safetensors import safe_open
from torch import Tensor

OLD_COMMIT = "e6bf4be"
ROOT = Path(__file__).resolve().parents[2]
STEPS = 12

# What the new code calls the keys below: an old key, or the beginning of several, to the new one.
NEW_KEYS: dict[str, str] = {}
# Values that the new code spells otherwise, by the old key: {"train.checkpointing": {True: "recompute"}}.
NEW_VALUES: dict[str, dict[Any, Any]] = {}
# Parts of the names of tensors in checkpoints (whole words between dots) that the new code calls otherwise.
RENAMED: dict[str, str] = {}

# ---- configurations, in the keys of the old code ----

Tree = dict[str, Any]

BASE: Tree = {
    "vae.kind": "linear",
    "vae.channels": 4,
    "preprocess.online": False,  # a cache that the new code finds stale is an error, not encoded again
    "preprocess.decode_workers": 1,
    "model.size": "nano",
    "train.steps": STEPS,
    "train.batch_size": 3,
    "train.lr": 1e-3,
    "train.warmup_steps": 2,
    "train.log_every": 1,
    "validate.every": 6,
    "validate.samples": 2,
    "validate.quantiles": 2,
    "checkpoint.every": 1000,  # the last step is always written
    "device.kind": "cpu",
    "device.peak_tflops": 0.1,
}


def _bucket(frames: int, height: int, width: int) -> dict[str, int]:
    return {"frames": frames, "height": height, "width": width}


# Data sets, each with a cache of its own: of 8 clips one is held out, so that the steps of an epoch are not equally full.
CLIPS, PICTURES = 8, 7
DATA: dict[str, Tree] = {
    "small": {"data.sources": [{"path": "../clips.jsonl"}], "data.buckets": [_bucket(5, 32, 48)]},
    "long": {"data.sources": [{"path": "../clips.jsonl"}], "data.buckets": [_bucket(13, 64, 96)]},
    "mixed": {"data.sources": [{"path": "../mixed.jsonl"}], "data.buckets": [_bucket(1, 32, 48), _bucket(5, 32, 48)]},
}


@dataclass(frozen=True)
class Case:
    """A configuration: what differs from BASE, the data set that it trains on, and the number of processes."""

    changes: Tree = field(default_factory=dict)
    data: str = "small"
    processes: int = 1


HALF = {"device.dtype": "bfloat16"}
CASES: dict[str, Case] = {
    # the three of tests/golden/test_curves.py
    "factorised-flow": Case(),
    "full-ddpm-v": Case({"model.arrangement": "full", "objective.kind": "ddpm"}),
    "factorised-ddpm-epsilon": Case(
        {
            "objective.kind": "ddpm",
            "objective.prediction": "epsilon",
            "objective.zero_terminal_snr": False,
            "objective.min_snr_gamma": 5,
        }
    ),
    "bfloat16": Case({**HALF, "train.weight_decay": 0.1, "train.schedule": "cosine"}),
    "tiers": Case(
        {
            **HALF,
            "memory.master": "host",
            "memory.states": "host",
            "memory.ema": "host",
            "memory.bucket": "64KiB",
            "train.micro_batch_size": 2,
        }
    ),
    "gradient-release": Case(
        {"memory.release_gradients": True, "memory.bucket": "64KiB", "train.clip_norm": None, "memory.states": "host"}
    ),
    "recompute": Case({"train.checkpointing": True}),
    "swap": Case(
        {
            "memory.spans.attention": "swap",
            "memory.spans.cross_attention": "recompute_cheap",
            "memory.spans.mlp": "swap_cheap",
            "memory.swap_from": "1KiB",
            "memory.keep_last": False,
        }
    ),
    # between the plain step and the least; which ways are chosen depends on the clock, what they compute does not
    "budget": Case({"memory.budget": "9MB", "model.arrangement": "full"}, data="long"),
    "sparse": Case(
        {
            "model.arrangement": "full",
            "model.depth": 3,
            "model.sparse.planner": "clusters",
            "model.sparse.keep": 0.3,
            "model.sparse.cluster_size": 16,
            "model.sparse.min_tokens": 16,
            "model.sparse.dense_first": 0,
            "model.sparse.dense_last": 0,
            "model.sparse.dense_steps": 2,
            "model.sparse.update_every": 3,
        },
        data="long",
    ),
    "images-with-videos": Case(
        {"train.batch_size": None, "batching.by": "tokens", "batching.mix": "window", "batching.accumulate": 2},
        data="mixed",
    ),
    "accumulation": Case({"train.batch_size": 5, "train.micro_batch_size": 2}),
    # on 2 ranks
    "fsdp": Case(
        {"parallel.strategy": "fsdp", "train.batch_size": 5, "train.micro_batch_size": 1, **HALF}, processes=2
    ),
    "ddp": Case(
        {
            "parallel.strategy": "ddp",
            "train.batch_size": None,
            "batching.by": "tokens",
            "batching.mix": "window",
            "batching.slots": 4,
        },
        data="mixed",
        processes=2,
    ),
    "fsdp-ulysses": Case(
        {"parallel.strategy": "fsdp", "parallel.ulysses": 2, "parallel.scheme": "ulysses", "train.checkpointing": True},
        processes=2,
    ),
    "tp": Case({"parallel.tp": 2, "train.batch_size": 4, "train.micro_batch_size": 2}, processes=2),
}
CACHE, OWN_CACHE = "cache", "mixed"  # the line that compares a cache which the new code builds, and its data set
QUICK = ("factorised-flow", "tiers", "images-with-videos", "fsdp")


def translated(tree: Mapping[str, Any], keys: Mapping[str, str], values: Mapping[str, Mapping[Any, Any]]) -> Tree:
    """`tree` of dotted keys with the new names of keys (the longest old one that fits) and values."""
    found = {}
    for key, value in tree.items():
        fits = [old for old in keys if key == old or key.startswith(old + ".")]
        old = max(fits, key=len, default="")
        changes = values.get(key, {})
        same = not isinstance(value, str | bool | int) or value not in changes
        found[keys[old] + key[len(old) :] if fits else key] = value if same else changes[value]
    return found


def nested(tree: Mapping[str, Any]) -> Tree:
    """The mapping of sections that a tree of dotted keys means."""
    root: Tree = {}
    for key, value in tree.items():
        *sections, last = key.split(".")
        node = root
        for section in sections:
            node = node.setdefault(section, {})
        node[last] = value
    return root


# ---- what a run computed ----


@dataclass(frozen=True)
class Record:
    """Numbers by row and name ("step 3 loss"), in the order of the steps, and the last checkpoint's tensors by name."""

    numbers: dict[str, float | None]
    tensors: dict[str, Tensor]

    def digests(self) -> dict[str, Any]:
        """Each number as `float.hex`, each tensor as SHA-256 of its bytes, for JSON."""
        numbers = {name: _hex(value) for name, value in self.numbers.items()}
        return {"numbers": numbers, "tensors": {name: digest(value) for name, value in self.tensors.items()}}


def _hex(value: float | None) -> str:
    return "null" if value is None else float(value).hex()


def raw(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, [bytes]."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def digest(tensor: Tensor) -> str:
    """SHA-256 of number type, shape and bytes."""
    head = f"{tensor.dtype} {tuple(tensor.shape)} ".encode()
    return hashlib.sha256(head + raw(tensor).numpy().tobytes()).hexdigest()


def renamed(name: str, table: Mapping[str, str]) -> str:
    """A tensor's name with the table's words (whole ones between dots) in place of the old ones."""
    for old, new in table.items():
        name = re.sub(rf"(?<![^.]){re.escape(old)}(?![^.])", new, name)
    return name


def difference(old: Record, new: Record, names: Mapping[str, str]) -> str | None:
    """The first difference, with its name and both values; None where all is equal to the bit."""
    for name in {**old.numbers, **new.numbers}:
        if name not in old.numbers or name not in new.numbers:
            return f"{name}: only the {'old' if name in old.numbers else 'new'} run has it"
        before, after = _hex(old.numbers[name]), _hex(new.numbers[name])
        if before != after:
            return f"{name}: {before} ({old.numbers[name]}) against {after} ({new.numbers[name]})"
    expected = {renamed(name, names): tensor for name, tensor in old.tensors.items()}
    different = [
        name for name in sorted({*expected, *new.tensors}) if not _same(expected.get(name), new.tensors.get(name))
    ]
    if not different:
        return None
    name = different[0]
    more = f"; {len(different)} of {len(expected)} tensors differ" if len(different) > 1 else ""
    return f"{name}: {_tensor_difference(expected.get(name), new.tensors.get(name))}{more}"


def _same(old: Tensor | None, new: Tensor | None) -> bool:
    if old is None or new is None or old.dtype != new.dtype or old.shape != new.shape:
        return False
    return torch.equal(raw(old), raw(new))


def _tensor_difference(old: Tensor | None, new: Tensor | None) -> str:
    if old is None or new is None:
        return f"only the {'new' if old is None else 'old'} run has it"
    kinds = [f"{tensor.dtype} {list(tensor.shape)}" for tensor in (old, new)]
    if kinds[0] != kinds[1]:
        return f"{kinds[0]} against {kinds[1]}"
    size = old.element_size()
    places = (raw(old) != raw(new)).view(-1, size).any(dim=1).nonzero()[:, 0]
    first = int(places[0])
    values = [_hex(tensor.reshape(-1)[first].item()) for tensor in (old, new)]
    return f"{len(places)} of {old.numel()} numbers, at {first}: {values[0]} against {values[1]}"


def read_record(run: Path) -> Record:
    """What a run folder holds of a run. Raises OSError, KeyError or ValueError for a folder that is not whole."""
    numbers: dict[str, float | None] = {}
    for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row["kind"] == "train":
            numbers |= {f"step {row['step']} {name}": row[name] for name in ("loss", "grad_norm", "samples")}
        elif row["kind"] == "validation":
            numbers[f"step {row['step']} held-out loss"] = row["loss"]
    newest = json.loads((run / "checkpoints" / "latest.json").read_text(encoding="utf-8"))["latest"]
    return Record(numbers, read_tensors(run / "checkpoints" / newest))


def read_tensors(checkpoint: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, put together from the parts that the ranks wrote. Raises ValueError where a part lacks."""
    index = json.loads((checkpoint / "index.json").read_text(encoding="utf-8"))["tensors"]
    found = {}
    for name, entry in index.items():
        whole = torch.empty(entry["shape"], dtype=getattr(torch, entry["dtype"]))
        filled = torch.zeros(entry["shape"], dtype=torch.bool)
        for chunk in entry["chunks"]:
            with safe_open(checkpoint / chunk["file"], framework="pt") as file:
                part = file.get_tensor(name)
            place = tuple(slice(at, at + size) for at, size in zip(chunk["offsets"], chunk["shape"], strict=True))
            whole[place] = part.view(chunk["shape"])
            filled[place] = True
        if not filled.all():
            raise ValueError(f"{checkpoint}: {name} is not whole")
        found[name] = whole
    return found


def read_entries(cache: Path) -> dict[str, str]:
    """SHA-256 of every member of a cache's shards, and of every tensor of its codec, by path and name."""
    found = {}
    for shard in sorted(cache.rglob("*.tar")):
        with tarfile.open(shard) as tar:
            for member in tar:
                file = tar.extractfile(member)
                assert file is not None  # shards hold files only
                name = f"{shard.relative_to(cache).as_posix()}:{member.name}"
                found[name] = hashlib.sha256(file.read()).hexdigest()
    for codec in sorted((cache / "codec").glob("*.safetensors")):
        with safe_open(codec, framework="pt") as tensors:  # its header is in any order
            found |= {f"codec/{codec.name}:{name}": digest(tensors.get_tensor(name)) for name in tensors.keys()}
    return found


def entries_difference(old: Mapping[str, str], new: Mapping[str, str]) -> str | None:
    """The first entry of a cache that differs, or None."""
    for name in sorted({*old, *new}):
        if old.get(name) != new.get(name):
            return f"{name}: {old.get(name, 'not there')} against {new.get(name, 'not there')}"
    return None if old else "no entries"


# ---- running ----


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

    def call(self, *arguments: str) -> str:
        """Standard output of `python ARGUMENTS` with this checkout's mmspeed. Raises FailedError."""
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        environment = {**os.environ, **threads, "PYTHONPATH": str(self.checkout)}
        ended = subprocess.run(
            [sys.executable, *arguments], cwd=self.folder, env=environment, capture_output=True, text=True
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
        path.write_text(yaml.safe_dump(nested(translated(tree, self.keys, self.values))), encoding="utf-8")
        return path

    def preprocess(self, data: str, cache: str) -> Path:
        """The folder of a data set's cache, built now."""
        self.call("-m", "mmspeed", "preprocess", str(self.write(f"data-{cache}", data, {}, cache)))
        return self.folder / cache

    def train(self, name: str) -> Record:
        """What a run of configuration `name` computed."""
        case = CASES[name]
        config = self.write(name, case.data, case.changes)
        several = ["--nproc", str(case.processes)] if case.processes > 1 else []
        self.call("-m", "mmspeed", "train", str(config), *several)
        try:
            return read_record(self.folder / "runs" / name)
        except (OSError, KeyError, ValueError) as error:
            raise FailedError(f"the {self.name} code's run cannot be read: {error!r}") from error


def make_side(name: str, checkout: Path, home: Path) -> Side:
    """A side with its folder. Raises FailedError when Python finds another mmspeed than the checkout's."""
    folder = home / name
    folder.mkdir()
    new = name == "new"
    side = Side(name, checkout.resolve(), folder, NEW_KEYS if new else {}, NEW_VALUES if new else {})
    found = side.call("-c", "import mmspeed; print(mmspeed.__file__)").strip()
    if not Path(found).resolve().is_relative_to(side.checkout):
        raise FailedError(f"Python finds {found}, which is not in the {name} checkout {side.checkout}")
    return side


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
def old_checkout(given: Path | None, home: Path) -> Iterator[Path]:
    """The folder of the old code: the given one, or a git worktree while the block runs. Raises FailedError without git's commit."""
    if given is not None:
        yield given
        return
    folder = home / "checkout"
    git = ["git", "-C", str(ROOT), "worktree"]
    made = subprocess.run([*git, "add", "--detach", str(folder), OLD_COMMIT], capture_output=True, text=True)
    if made.returncode:
        raise FailedError(f"no worktree of {OLD_COMMIT} (fetch the whole history, or use --old): {made.stderr.strip()}")
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
        own = pool.submit(new.preprocess, OWN_CACHE, "cache-own") if CACHE in names else None
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


def _compare_pair(name: str, old: Future[Record], new: Future[Record]) -> Outcome:
    processes = CASES[name].processes
    try:
        before, after = old.result(), new.result()
    except FailedError as error:
        return Outcome(name, processes, str(error), {})
    found = difference(before, after, RENAMED)
    if found is None and (not before.tensors or sum(key.endswith(" loss") for key in before.numbers) < STEPS):
        found = f"only {len(before.numbers)} numbers and {len(before.tensors)} tensors were compared"
    return Outcome(name, processes, found, {"old": before.digests(), "new": after.digests()})


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
        "--old", type=Path, metavar="DIR", help=f"checkout of the old code; else a worktree of {OLD_COMMIT}"
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
    given = parse(arguments)
    names = given.only or (QUICK if given.quick else (*CASES, CACHE))
    started, outcomes = time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix="exact-") as temporary:
        home = given.keep or Path(temporary)
        home.mkdir(parents=True, exist_ok=True)
        try:
            with old_checkout(given.old, home) as checkout:
                old, new = make_side("old", checkout, home), make_side("new", given.new, home)
                write_manifests(checkout.resolve() / "mmspeed" / "assets" / "demo-clips", home)
                print(HEADER, flush=True)
                for outcome in compare_runs(old, new, names, given.jobs):
                    outcomes.append(outcome)
                    print(outcome.line(), flush=True)
        except FailedError as error:
            print(f"exact: {error}", file=sys.stderr)
            return 1
    if given.json is not None:
        given.json.write_text(json.dumps({o.name: o.digests for o in outcomes}, indent=1) + "\n", encoding="utf-8")
    different = [outcome.name for outcome in outcomes if outcome.difference is not None]
    print(f"{len(outcomes) - len(different)} of {len(outcomes)} equal, {time.monotonic() - started:.0f} s")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
