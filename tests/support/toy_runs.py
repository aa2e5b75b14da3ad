"""Runs of `tests.support.toy.ToyDiT`, as it stands, through the training pipeline: a small cache of its sizes, and the video task."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch import nn

from mmspeed import rng
from mmspeed.config import Config, make_config
from mmspeed.config.schema import ModelConfig
from mmspeed.data import CacheWriter, Sample
from mmspeed.data.cache.keys import entry_key, number_duplicates, sample_key
from mmspeed.data.cache.tables import write_info, write_rejects, write_samples
from mmspeed.data.cache.writer import latent_tensors, text_tensors
from mmspeed.pipelines import TrainPipeline
from mmspeed.pipelines.domains.video.domain import VideoDomain
from mmspeed.protocols import TextEntry
from mmspeed.shapes import Bucket
from tests.support.runs import SAVED_ONCE
from tests.support.toy import C, D, H, T, ToyDiT, W

BUCKET = Bucket(5, 16, 24)


def toy_config(folder: Path, *overrides: str, bucket: Bucket = BUCKET) -> Config:
    """Six steps over seven samples, three a step; the encoders are not at hand."""
    tree: dict[str, Any] = {
        "name": "small",
        "output": str(folder / "runs"),
        "data": {
            "sources": [{"path": str(folder / "clips.jsonl")}],
            "cache": str(folder / "cache"),
            "buckets": [{"frames": bucket.frames, "height": bucket.height, "width": bucket.width}],
        },
        "vae": {"kind": "diffusers", "pretrained": str(folder / "no-codec")},
        "text": {"kind": "transformers", "pretrained": str(folder / "no-encoder")},
        "train": {"steps": 6, "batch_size": 3, "lr": 1e-3, "warmup_steps": 2, "log_every": 1},
        "validate": {"every": 3, "samples": 1, "quantiles": 2, "report": False},
        "checkpoint": {**SAVED_ONCE},
        "device": {"kind": "cpu", "peak_tflops": 0.1},
    }
    return make_config(tree, overrides, origin="test")


def write_toy_cache(
    config: Config,
    samples: int = 8,
    bucket: Bucket = BUCKET,
    sizes: tuple[int, ...] = (C, T, H, W),
    factors: Mapping[int, float] | None = None,
) -> None:
    """A cache of the toy's channels and text width; the first sample is held out. `sizes`: of a latent of the bucket.

    `factors`: of some samples' latents, by number; one that is not finite is stored as by a writer that does not look.
    """
    root, tokens = config.local_cache_dir(), math.prod(sizes[1:])
    latents, texts = [], []
    unchecked = patch("mmspeed.data.cache.writer.not_finite", lambda tensors: None)
    with unchecked if factors else nullcontext(), CacheWriter(root) as writer:
        for number in range(samples):
            parts = {"kind": "latent", "number": number}
            mean = rng.normal(sizes, 0, "latent", number) * (factors or {}).get(number, 1.0)
            tensors = latent_tensors(mean, rng.normal(sizes, 0, "spread", number) - 5)
            latents.append(entry_key(parts))
            writer.add(
                "latents", latents[-1], tensors, parts, bucket=bucket, tokens=tokens, content_id=f"c{number}",
                frames=range(bucket.frames), fps=8.0, source=f"{number}.mp4",
            )  # fmt: skip
        for length, section in ((3, "texts"), (4, "texts"), (1, "null")):
            parts = {"kind": "text", "length": length, "section": section}
            if section == "texts":
                texts.append(entry_key(parts))
            entry = TextEntry(rng.normal((length, D), 0, "text", length).bfloat16())
            writer.add(section, entry_key(parts), text_tensors(entry), {"caption": "x" * (length - 1)}, tokens=length)
    keys = number_duplicates(sample_key([key], texts[row % 2 :][:1]) for row, key in enumerate(latents))
    rows = [
        Sample(key, (latents[row],), tuple(texts[row % 2 :][:1]), "train" if row else "val", bucket, f"{row}.mp4",
               tokens, f"c{row}")
        for row, key in enumerate(keys)
    ]  # fmt: skip
    write_samples(root, rows)
    write_rejects(root, [])
    encoders = {
        "vae": {"channels": C, "strides": [4, 8], "fingerprint": "made up"},
        "text": {"width": D, "fingerprint": "made up"},
    }
    write_info(root, {"encoders": encoders, "fps": 8.0, "made_for": config.sample_settings()})


def build_toy(section: ModelConfig, channels: int, text_width: int, device: str) -> nn.Module:
    """The toy with its own weights, whatever the config's model section says."""
    assert (channels, text_width) == (C, D)
    return ToyDiT()


def train_toy(folder: str, overrides: tuple[str, ...] = ()) -> None:
    """Train, on however many ranks call this."""
    config = toy_config(Path(folder), *overrides)
    TrainPipeline(config, task=VideoDomain(config, build=build_toy)).run()
