"""`mmspeed demo`: preprocess, train, sample and report on the clips that ship with the package, offline, on any machine."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from mmspeed.config import Config, make_config
from mmspeed.log import ProgressLine, format_seconds, get_logger

log = get_logger("demo")

CLIPS = Path(__file__).parent.parent / "assets" / "demo-clips" / "metadata.jsonl"
PROMPTS = (
    "The dark globe of Earth turns in black space with city lights on its surface",
    "A flying squirrel glides through a blue sky with white clouds",
    "The camera pans down from a pink sky to a green meadow with pine trees",
)


def demo_tree(output: Path, short: bool) -> dict[str, Any]:
    """The demo's config before it is checked: also what `--print-config` style tests read."""
    steps = 60 if short else 600
    return {
        "name": "demo",
        "output": str(output / "runs"),
        "data": {
            "sources": [{"path": str(CLIPS)}],
            "cache": str(output / "cache"),
            "fps": 8.0,
            "buckets": [{"frames": 9, "height": 64, "width": 112}],
        },
        "model": {"size": "tiny"},
        "train": {
            "steps": steps,
            "batch_size": 8,
            "lr": 1e-3,
            "warmup_steps": 20,
            "schedule": "cosine",
            "ema_decay": 0.99,
            "log_every": 5,
        },
        "validate": {"every": steps // 2, "samples": 8, "quantiles": 4, "prompts": list(PROMPTS[: 1 if short else 3])},
        "checkpoint": {"every": steps // 2},
        "sample": {"steps": 12 if short else 24, "guidance": 3.0},
    }


def demo_config(output: Path, short: bool) -> Config:
    """The demo's config."""
    return make_config(demo_tree(output, short), origin="demo")


def run_demo(output: str | Path = "mmspeed-demo", short: bool = False) -> list[Path]:
    """Run the whole demo into `output`; returns the paths to look at.

    A second run goes on from what is there: nothing is encoded again, and a finished training says so.
    """
    from mmspeed.pipelines import TextToVideo, TrainPipeline, write_report
    from mmspeed.pipelines.media import contact_sheet, save_image
    from mmspeed.preprocess import CacheBuilder

    started = time.monotonic()
    output = Path(output).resolve()
    config = demo_config(output, short)
    log.info("1/4 preprocess: encode the clips and captions once")
    for line in CacheBuilder(config).run().lines():
        log.info(line)
    log.info(f"2/4 train: {config.train.steps} steps of a {config.model.size} model on {os.cpu_count()} cores")
    for line in TrainPipeline(config).run().lines():
        log.info(line)
    log.info("3/4 sample: text to video with the trained weights")
    pipe = TextToVideo.from_run(config.run_dir)
    prompts = list(PROMPTS[:1] if short else PROMPTS)
    with ProgressLine("sample", None, "step") as progress:
        videos = pipe(prompts, seed=1, on_step=lambda done, total: progress.advance())
    paths = []
    for index, video in enumerate(videos):
        paths.append(output / f"sample-{index}.mp4")
        video.save(paths[-1])
    sheet = output / "samples.png"
    save_image(contact_sheet(videos, prompts), sheet)
    log.info("4/4 report")
    paths = [*paths, sheet, write_report(config.run_dir)]
    log.info(f"done in {format_seconds(time.monotonic() - started)}; look at:")
    return paths
