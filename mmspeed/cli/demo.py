"""`mmspeed demo`: preprocess, train, sample and report on the clips that ship with the package, offline, on any machine."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmspeed.config import Config, RunConfig, make_config, video_config
from mmspeed.errors import UserError
from mmspeed.log import ProgressLine, format_seconds, get_logger
from mmspeed.models.sections import size_of

log = get_logger("demo")

CLIPS = Path(__file__).parent.parent / "assets" / "demo-clips" / "metadata.jsonl"
# Few clips, so that two minutes of training on a CPU have a visible effect; two more are held out.
TRAINED = ("bbb_000", "bbb_002", "bbb_062", "earth_000")
HELD_OUT = ("bbb_001", "earth_001")


def write_manifest(path: Path, train: Sequence[str], val: Sequence[str] = ()) -> list[str]:
    """Write a manifest of some of the packaged clips, by stem, and return the captions of the training clips."""
    rows = {Path(row["video"]).stem: row for row in map(json.loads, CLIPS.read_text(encoding="utf-8").splitlines())}
    selected = [
        {"video": str(CLIPS.parent / rows[stem]["video"]), "caption": rows[stem]["caption"], "split": split}
        for split, stems in (("train", train), ("val", val))
        for stem in stems
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in selected), encoding="utf-8")
    return [rows[stem]["caption"] for stem in train]


def demo_tree(output: Path, short: bool) -> dict[str, Any]:
    """Write the manifest of the demo's clips into `output` and return the demo's config, unchecked."""
    steps = 60 if short else 800
    captions = write_manifest(output / "clips.jsonl", TRAINED, HELD_OUT)
    return {
        "name": "short" if short else "demo",
        "output": str(output / "runs"),
        "data": {
            "sources": [{"path": str(output / "clips.jsonl")}],
            "cache": str(output / "cache"),
            "fps": 8.0,
            "buckets": [{"frames": 9, "height": 64, "width": 112}],
            "repeats": 2,
        },
        "model": {"size": "tiny", "arrangement": "full"},  # small latents: attending over all tokens costs little
        "train": {
            "steps": steps,
            "batch_size": 8,
            "lr": 2e-3,
            "warmup_steps": 20,
            "schedule": "cosine",
            "ema_decay": 0.98,
            "log_every": 5,
        },
        "validate": {"every": steps // 2, "samples": 2, "quantiles": 4, "prompts": captions[: 1 if short else None]},
        "checkpoint": {"every": steps // 2},
        "sample": {"steps": 12 if short else 24, "guidance": 2.0},
    }


def demo_config(output: Path, short: bool) -> Config:
    """The checked config of the demo."""
    return video_config(make_config(demo_tree(output, short), origin="demo"), "demo")


def trained(config: RunConfig) -> bool:
    """Train the model of a demo. False where it was asked to stop."""
    from mmspeed.pipelines import TrainPipeline

    result = TrainPipeline(config).run()
    for line in result.lines():
        log.info(line)
    return not result.asked


def clear_export(folder: Path, *files: str) -> None:
    """Remove what an earlier demo exported, which one of these files tells. Raises UserError for a folder that has none of them."""
    if not folder.exists():
        return
    if not any((folder / file).is_file() for file in files):
        raise UserError(f"{folder} is there, and is no export of a demo: move it away, or choose another --output")
    shutil.rmtree(folder)


def run_demo(output: str | Path = "mmspeed-demo", short: bool = False) -> list[Path] | None:
    """Run the whole demo into `output`; return the paths to look at.

    A second run continues from the first: nothing is encoded again, and a finished training is not repeated. None where the training
    was asked to stop.
    """
    from mmspeed.pipelines import TextToVideo, write_report
    from mmspeed.pipelines.inference.media import contact_sheet, save_image
    from mmspeed.preprocess import CacheBuilder

    started = time.monotonic()
    output = Path(output).resolve()
    config = demo_config(output, short)
    log.info("1/4 preprocess: encode the clips and captions once")
    for line in CacheBuilder(config).run().lines():
        log.info(line)
    log.info(f"2/4 train: {config.train.steps} steps of a {size_of(config.model)} model on {os.cpu_count()} cores")
    if not trained(config):
        return None
    log.info("3/4 sample: text to video with the trained weights")
    pipe = TextToVideo.from_run(config.run_dir)
    prompts = list(config.validate_.prompts)
    with ProgressLine("sample", (pipe.config.sample.steps or 0) * len(prompts), "step") as progress:
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
