"""Proof that conditioning frames are learnt: `python -m tests.claims.conditioning` trains a small model and compares held-out losses.

The model is given each clip's first frame and no caption. On clips that it has not seen it is then given the right first frame, that of
another clip, and none, with the same noise: the loss of the other frames shows what the frame tells it.

Legend: B batch, C channels, T h w latent.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mmspeed import rng
from mmspeed.cli.demo import CLIPS
from mmspeed.config import Config, make_config, video_config
from mmspeed.config.conditioning import ConditioningConfig
from mmspeed.data import DatasetCache, SampleUse
from mmspeed.data.loading.collate import assemble
from mmspeed.pipelines import TextToVideo, TrainPipeline
from mmspeed.pipelines.diffusion.conditioning_frames import counted_frames, held
from mmspeed.pipelines.diffusion.objective import mean_error
from mmspeed.pipelines.diffusion.predictor import conditions_of, predict

STEPS = 400
QUANTILES = (0.5, 0.7, 0.9)  # of the time, at which the noisy frames tell less and less themselves
GOAL = 0.8  # of the loss with another clip's first frame


@dataclass(frozen=True)
class GivenFrames:
    """Mean losses of the frames after the first, of held-out clips: with the right first frame, another clip's, and none."""

    right: float
    other: float
    none: float
    clips: int

    @property
    def passed(self) -> bool:
        """True where the right first frame is clearly better than another, and than none."""
        return self.right < GOAL * min(self.other, self.none)

    def line(self) -> str:
        """The result in a line."""
        verdict = "PASSED" if self.passed else "FAILED"
        return (
            f"{self.clips} held-out clips: loss {self.right:.4f} with the right first frame, {self.other:.4f} with another clip's, "
            f"{self.none:.4f} with none; goal: below {GOAL} of either: {verdict}"
        )


def config_of(folder: Path, steps: int) -> Config:
    """A nano model on the clips of the package, a quarter of them held out, without captions."""
    tree = {
        "name": "given",
        "output": str(folder / "runs"),
        "data": {
            "sources": [{"path": str(CLIPS)}],
            "cache": str(folder / "cache"),
            "fps": 8.0,
            "buckets": [{"frames": 9, "height": 32, "width": 48}],
            "val_fraction": 0.25,
        },
        "vae": {"kind": "linear", "channels": 8},
        "model": {"size": "nano", "arrangement": "full"},
        "conditioning": {"first": 0.8},
        "train": {
            "steps": steps,
            "batch_size": 8,
            "lr": 2e-3,
            "warmup_steps": 50,
            "caption_dropout": 1.0,
            "ema_decay": None,
        },
        "validate": {"samples": 0},
        "checkpoint": {"every": steps},
        "device": {"kind": "cpu"},
    }
    return video_config(make_config(tree, origin="given_frames"), "given_frames")


def measure(folder: Path, steps: int = STEPS) -> GivenFrames:
    """Train in a folder, and take the losses."""
    config = config_of(folder, steps)
    TrainPipeline(config, online=True).run()
    pipe, cache = TextToVideo.from_run(config.run_dir, device="cpu"), DatasetCache(config.cache_root)
    samples = cache.split("val")
    uses = [(SampleUse(sample, 0, 0), 1.0) for sample in samples]
    first = ConditioningConfig(first=1.0)
    batch = assemble(cache, uses, seed=0, caption_dropout=1.0, conditioning=first)
    latents_BCThw, mask_BT = batch["latents"], batch["conditioning_mask"]
    counted_BT = counted_frames(batch, "replace")
    conditions = conditions_of(batch, pipe.codec.strides)
    size = samples[0].bucket
    objective = pipe.objective.sized(size, pipe.predictor.tokens(pipe.codec.strides.latent(size)))
    losses: dict[str, list[float]] = {"right": [], "other": [], "none": []}
    for quantile in QUANTILES:
        t_B = objective.time_from_quantile(torch.full((len(samples),), quantile, dtype=torch.float64)).float()
        noise_BCThw = rng.normal(latents_BCThw.shape, 0, "given_frames", int(100 * quantile))
        x_BCThw, target_BCThw = objective.training_pair(latents_BCThw, noise_BCThw, t_B)

        def loss(
            frames_BCThw: Tensor | None, x: Tensor = x_BCThw, target: Tensor = target_BCThw, t: Tensor = t_B
        ) -> float:
            given_BT = torch.zeros_like(mask_BT) if frames_BCThw is None else mask_BT
            inputs = x if frames_BCThw is None else held(x, frames_BCThw, mask_BT)
            named = type(conditions)(
                conditions.text_BLD, conditions.text_mask_BL, named={"conditioning_mask": given_BT}
            )
            with torch.no_grad():
                predicted = predict(pipe.predictor, pipe.model, inputs, t, named)
            return float(mean_error(predicted, target, counted_BT).mean())

        losses["right"].append(loss(latents_BCThw))
        losses["other"].append(loss(latents_BCThw.roll(1, 0)))
        losses["none"].append(loss(None))
    means = {name: sum(values) / len(values) for name, values in losses.items()}
    return GivenFrames(means["right"], means["other"], means["none"], len(samples))


def main() -> int:
    """Print the result; 0 where it passes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(Path(folder), arguments.steps)
    print(result.line())
    return 0 if result.passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
