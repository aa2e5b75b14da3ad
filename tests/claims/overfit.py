"""Whether the main job works: a tiny model on four demo clips, each of which its caption must reproduce."""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mmspeed.cli.demo import write_manifest
from mmspeed.config import Config, make_config, video_config
from mmspeed.log import get_logger, setup
from tests.support.media import psnr

log = get_logger("bench")

OVERFIT_CLIPS = ("earth_000", "bbb_000", "bbb_002", "bbb_026")
SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class OverfitResult:
    """What the overfit bench found. PSNR in dB against the four training clips at the trained size."""

    right: int  # prompts x seeds whose nearest training clip is the right one
    total: int
    right_psnr: float  # mean PSNR to the right clip
    other_psnr: float  # mean PSNR to the other three
    codec_psnr: float  # what the codec itself reconstructs, mean over the clips
    empty_right: int  # the same count with an empty caption and guidance 1
    empty_right_psnr: float
    empty_other_psnr: float
    train_seconds: float
    steps: int

    def passed(self) -> bool:
        """Whether the model has learned its four clips by their captions."""
        return (
            self.right == self.total
            and self.right_psnr >= self.codec_psnr - 3.0
            and self.right_psnr >= self.other_psnr + 6.0
            and self.empty_right < self.total * 2 / 3  # of 12 draws among 4 clips, 8 or more have a chance of 0.3 %
            and self.empty_right_psnr < self.empty_other_psnr + 6.0
        )

    def lines(self) -> list[str]:
        return [
            f"nearest training clip is the right one: {self.right} of {self.total} (4 prompts x {len(SEEDS)} seeds)",
            f"PSNR to the right clip {self.right_psnr:.2f} dB, to the other three {self.other_psnr:.2f} dB",
            f"the codec itself reconstructs {self.codec_psnr:.2f} dB: {self.codec_psnr - self.right_psnr:.2f} dB above the model",
            f"empty caption, guidance 1: right {self.empty_right} of {self.total},"
            f" PSNR to the 'right' clip {self.empty_right_psnr:.2f} dB, to the others {self.empty_other_psnr:.2f} dB",
            f"{self.steps} steps in {self.train_seconds:.0f} s; {'PASSED' if self.passed() else 'FAILED'}",
        ]


def overfit_config(output: Path, arrangement: str, objective: str) -> Config:
    """Four clips, four captions, a tiny model."""
    write_manifest(output / "four.jsonl", OVERFIT_CLIPS)
    tree: dict[str, Any] = {
        "name": f"overfit-{arrangement}-{objective}",
        "output": str(output / "runs"),
        "data": {
            "sources": [{"path": str(output / "four.jsonl")}],
            "cache": str(output / "cache"),
            "fps": 8.0,
            "buckets": [{"frames": 9, "height": 64, "width": 112}],
            "repeats": 2,
        },
        "model": {"size": "tiny", "arrangement": arrangement},
        "objective": {"kind": objective},
        "train": {
            "steps": 2000,
            "batch_size": 8,
            "lr": 2e-3,
            "warmup_steps": 100,
            "schedule": "cosine",
            "ema_decay": 0.99,
            "caption_dropout": 0.1,
        },
        "validate": {"every": 100000, "samples": 0},
        "checkpoint": {"every": 500},
        "sample": {"steps": 32, "guidance": 1.0},
    }
    return video_config(make_config(tree, origin="overfit bench"), "overfit bench")


def overfit(
    output: str | Path, arrangement: str = "factorised", objective: str = "flow", overrides: tuple[str, ...] = ()
) -> OverfitResult:
    """Train on four clips, sample each caption with three seeds, and say which clip each video is nearest to."""
    from mmspeed.pipelines import TextToVideo, TrainPipeline
    from mmspeed.preprocess import CacheBuilder

    output = Path(output).resolve()
    config = overfit_config(output, arrangement, objective)
    if overrides:
        tree = config.model_dump(mode="json", by_alias=True)
        config = video_config(make_config(tree, overrides, origin="overfit bench"), "overfit bench")
    CacheBuilder(config).run()
    started = time.monotonic()
    TrainPipeline(config).run()
    seconds = time.monotonic() - started
    pipe = TextToVideo.from_run(config.run_dir)
    clips, captions, reconstructions = _clips(config, pipe)
    with_text = _nearest(pipe, captions, clips, guidance=None)
    without = _nearest(pipe, [""] * len(captions), clips, guidance=1.0)
    return OverfitResult(
        right=with_text[0],
        total=len(SEEDS) * len(clips),
        right_psnr=with_text[1],
        other_psnr=with_text[2],
        codec_psnr=statistics.mean(reconstructions),
        empty_right=without[0],
        empty_right_psnr=without[1],
        empty_other_psnr=without[2],
        train_seconds=seconds,
        steps=config.train.steps,
    )


def _clips(config: Config, pipe: Any) -> tuple[list[np.ndarray], list[str], list[float]]:
    """The training clips' pixels at the bucket's size (F, H, W, 3), their captions, and the codec's PSNR on each."""
    from mmspeed.pipelines.inference.media import from_model_range
    from mmspeed.preprocess.decoding.pool import DecodePool, Frames
    from mmspeed.preprocess.decoding.transform import to_model_range
    from mmspeed.preprocess.sources.discover import list_sources

    clips, captions, codec = [], [], []
    with DecodePool(config, list_sources(config.data).sources) as pool:
        for event in pool.run(lambda clip: True):
            if not isinstance(event, Frames):
                continue
            video = to_model_range(event.frames_FHWC)
            again = pipe.codec.decode(pipe.codec.encode(video[None]).mean_BCThw)[0]
            clips.append(event.frames_FHWC)
            captions.append(event.source.captions[0])
            codec.append(psnr(from_model_range(again, event.clip.fps).frames_FHWC, clips[-1]))
    return clips, captions, codec


def _nearest(
    pipe: Any, prompts: list[str], clips: list[np.ndarray], guidance: float | None
) -> tuple[int, float, float]:
    """(videos nearest to their own clip, mean PSNR to the right clip, mean PSNR to the others) over all seeds."""
    right, to_right, to_others = 0, [], []
    for seed in SEEDS:
        # each prompt has its own noise, so that four empty captions are four draws
        videos = [pipe(prompt, seed=seed * len(prompts) + i, guidance=guidance)[0] for i, prompt in enumerate(prompts)]
        for index, video in enumerate(videos):
            figures = [psnr(video.frames_FHWC, clip) for clip in clips]
            right += int(np.argmax(figures)) == index
            to_right.append(figures[index])
            to_others += [figure for other, figure in enumerate(figures) if other != index]
    return right, statistics.mean(to_right), statistics.mean(to_others)


def main() -> int:
    """Train, and check that each caption reproduces its clip; 1 where it does not."""
    parser = argparse.ArgumentParser(prog="python -m tests.claims.overfit", description=main.__doc__)
    parser.add_argument("--output", type=Path, default=Path("runs/overfit"))
    parser.add_argument("--arrangement", choices=("factorised", "full"), default="factorised")
    parser.add_argument("--objective", choices=("flow", "ddpm"), default="flow")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="keys to override")
    chosen = parser.parse_args()
    setup()
    result = overfit(chosen.output, chosen.arrangement, chosen.objective, tuple(chosen.overrides))
    print("\n".join(result.lines()))
    return 0 if result.passed() else 1


if __name__ == "__main__":
    raise SystemExit(main())
