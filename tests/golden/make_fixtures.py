"""A cache and a run folder as commit e6bf4be writes them, for test_old_runs.py: `python -m tests.golden.make_fixtures [--old DIR]`.

fixtures/e6bf4be/
  clips.jsonl      3 demo clips (test_old_runs.py puts them into videos/), one held out
  cache/           their cache: the linear codec, MiniLM
  runs/old/        a run of 4 steps in keys that have new names today, with an average, a checkpoint and sampled videos
  expected.json    loss and gradient norm of steps 5 to 8, as the old code goes on, in `float.hex`

All paths in them are relative: the old code is handed a config as it stands, without the folder of a file.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from .exact import OLD_COMMIT, FailedError, Side, make_side, old_checkout, write_rows
from .exact_cases import Tree, nested
from .exact_records import read_record

FIXTURE = Path(__file__).with_name("fixtures") / OLD_COMMIT
CLIPS = 3
STOPPED, STEPS = 4, 8
PROMPT = "A butterfly over a meadow"

# In the old code's keys; several are on the list of those that are renamed.
TREE: Tree = {
    "name": "old",
    "output": "runs",
    "data.sources": [{"path": "clips.jsonl"}],
    "data.cache": "cache",
    "data.buckets": [{"frames": 5, "height": 32, "width": 48}],
    "vae.kind": "linear",
    "vae.channels": 4,
    "preprocess.decode_workers": 1,
    "model.size": "nano",
    "model.width": 32,
    "model.heads": 2,
    "model.mlp_ratio": 2.0,
    "model.adaln_rank": 4,
    "train.steps": STOPPED,
    "train.batch_size": 2,
    "train.micro_batch_size": 1,
    "train.lr": 1e-3,
    "train.warmup_steps": 2,
    "train.ema_decay": 0.99,
    "train.checkpointing": False,
    "train.log_every": 1,
    "validate.every": 4,
    "validate.samples": 1,
    "validate.quantiles": 2,
    "validate.prompts": [PROMPT],
    "checkpoint.every": 4,
    "sample.steps": 2,
    "parallel.scheme": "ulysses",
    "memory.spans.attention": "swap_cheap",
    "memory.spans.cross_attention": "recompute",
    "memory.spans.mlp": "swap",
    "memory.swap_from": "1KiB",
    "device.kind": "cpu",
    "device.peak_tflops": 0.1,
}

# What the old code runs: its own names, which never change. A config that comes from no file keeps its relative paths.
BUILD = """
import json, sys
from mmspeed.config import make_config
from mmspeed.preprocess import CacheBuilder
CacheBuilder(make_config(json.loads(sys.argv[1]))).run()
"""
TRAIN = """
import json, sys
from mmspeed.config import make_config
from mmspeed.pipelines import TrainPipeline
TrainPipeline(make_config(json.loads(sys.argv[1]))).run()
"""


def bring_clips(clips: Path, home: Path) -> None:
    """Copy the fixture's clips into `home`/videos, where its manifest says that they are."""
    (home / "videos").mkdir()
    for row in _rows(clips):
        shutil.copyfile(clips / row["video"], home / row["video"])


def _rows(clips: Path) -> list[dict[str, Any]]:
    lines = (clips / "metadata.jsonl").read_text(encoding="utf-8").splitlines()[:CLIPS]
    rows = [json.loads(line) for line in lines]
    return [
        {"video": row["video"], "caption": row["caption"], "split": "val" if number == 0 else "train"}
        for number, row in enumerate(rows)
    ]


def make(old: Side, clips: Path) -> dict[str, Any]:
    """Write cache and run into the side's folder; returns what the old code computes when it goes on."""
    home = old.folder
    bring_clips(clips, home)
    write_rows(home / "clips.jsonl", _rows(clips))
    old.call("-c", BUILD, json.dumps(nested(TREE)))
    # paths in a run's config are taken from the run's folder
    run = home / "runs" / "old"
    run.mkdir(parents=True)
    places = {"output": "..", "data.cache": "../../cache", "data.sources": [{"path": "../../clips.jsonl"}]}
    old.call("-c", TRAIN, json.dumps(nested({**TREE, **places})), folder=run)
    later = shutil.copytree(home, home.with_name("later"))
    (later / "config.yaml").write_text(yaml.safe_dump(nested(TREE)), encoding="utf-8")
    old.call("-m", "mmspeed", "train", str(later / "config.yaml"), f"train.steps={STEPS}")
    numbers = read_record(later / "runs" / "old").digests()["numbers"]
    wanted = [f"step {step} {name}" for step in range(STOPPED + 1, STEPS + 1) for name in ("loss", "grad_norm")]
    return {name: numbers[name] for name in wanted}


def keep(home: Path, expected: dict[str, Any]) -> None:
    """Put what was made in the place of the fixture."""
    shutil.rmtree(FIXTURE, ignore_errors=True)
    shutil.copytree(home, FIXTURE, ignore=shutil.ignore_patterns("videos", "*.lock", ".lock", "*.html", "*-data.json"))
    (FIXTURE / "expected.json").write_text(json.dumps(expected, indent=1) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the fixture; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.golden.make_fixtures", description="Write the fixture again."
    )
    parser.add_argument(
        "--old", type=Path, metavar="DIR", help=f"checkout of the old code; else a worktree of {OLD_COMMIT}"
    )
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="fixtures-") as temporary:
        try:
            with old_checkout(options.old, Path(temporary)) as checkout:
                side = make_side("old", checkout, Path(temporary))
                expected = make(side, checkout.resolve() / "mmspeed" / "assets" / "demo-clips")
                keep(side.folder, expected)
        except FailedError as error:
            print(f"make_fixtures: {error}", file=sys.stderr)
            return 1
    size = sum(path.stat().st_size for path in FIXTURE.rglob("*") if path.is_file())
    print(f"{FIXTURE}: {size / 1e6:.2f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
