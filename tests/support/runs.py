"""Small configs of the whole way, on the clips that ship with the package; used as `from tests.support.runs import ...`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mmspeed.config import Config, make_config
from mmspeed.log import read_metrics

CLIPS = Path(__file__).resolve().parents[2] / "mmspeed" / "assets" / "demo-clips" / "metadata.jsonl"

# of small runs: a checkpoint where they end or are stopped, and no more, since each takes as long as their steps do
SAVED_ONCE = {"every": 100, "keep_best": False}


def small_tree(folder: Path, clips: int = 8) -> dict[str, Any]:
    """A nano model on a few clips of 5 frames of 32 x 48 pixels; one clip is held out."""
    manifest = folder / "clips.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in CLIPS.read_text(encoding="utf-8").splitlines()][:clips]
    for number, row in enumerate(rows):
        row |= {"video": str(CLIPS.parent / row["video"]), "split": "val" if number == 0 else "train"}
    manifest.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return {
        "name": "small",
        "output": str(folder / "runs"),
        "data": {
            "sources": [{"path": str(manifest)}],
            "cache": str(folder / "cache"),
            "buckets": [{"frames": 5, "height": 32, "width": 48}],
        },
        "vae": {"kind": "linear", "channels": 4},
        "model": {"size": "nano"},
        "train": {"steps": 6, "batch_size": 3, "lr": 1e-3, "warmup_steps": 2, "log_every": 1},
        "validate": {"every": 3, "samples": 2, "quantiles": 2, "report": False},
        "checkpoint": {**SAVED_ONCE},
        "sample": {"steps": 2},
        "preprocess": {"decode_workers": 1},  # each is a process that starts
        "device": {"kind": "cpu", "peak_tflops": 0.1},
    }


def pictures(folder: Path, count: int = 4) -> Path:
    """The first frames of demo clips as images, each with its caption beside it."""
    import av

    folder.mkdir()
    for row in [json.loads(line) for line in CLIPS.read_text(encoding="utf-8").splitlines()][:count]:
        with av.open(CLIPS.parent / row["video"]) as video:
            frame = next(video.decode(video=0)).to_image()
        path = folder / Path(row["video"]).with_suffix(".png").name
        frame.save(path)
        path.with_suffix(".txt").write_text(row["caption"], encoding="utf-8")
    return folder


def small_config(folder: Path, *overrides: str, clips: int = 8) -> Config:
    """`small_tree`, checked, with overrides."""
    return make_config(small_tree(folder, clips), overrides, origin="test")


def losses(config: Config) -> list[float]:
    """The losses of a run's steps, in order."""
    return [row["loss"] for row in read_metrics(config.run_dir / "metrics.jsonl") if row["kind"] == "train"]
