"""A config made small: the same arrangement, heads and layout, sizes that a laptop computes in a moment, samples made up.

What decides how tokens and heads are split is kept: the number of heads, and of every size its remainder by the number of parts,
so that what did not divide still does not.

Legend: B samples, C channels, T h w latent, L caption tokens, D text width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import nn

from mmspeed import rng
from mmspeed.config import Config
from mmspeed.config.schema import ModelConfig
from mmspeed.data import Batching, Sample, SampleUse
from mmspeed.data.collate import draw_noise, draw_quantiles
from mmspeed.data.sampling.batch_sizes import make_batching, sample_costs
from mmspeed.models import SoraDiTConfig
from mmspeed.models.sora.layers import initial_value, set_parameter
from mmspeed.models.sora.sizes import resolve_config
from mmspeed.pipelines.tuning.synthetic_step import latent_in
from mmspeed.protocols import Batch
from mmspeed.shapes import Bucket, Strides

CHANNELS, TEXT_WIDTH, HEAD_WIDTH, RANK = 4, 16, 12, 8
SHORTEST_CAPTION = 7  # tokens, padding included
OFF_START = 0.1  # how far scales and biases are moved off their ones and zeros
Latent = tuple[int, int, int]


def shrunk_size(size: int, parts: int, least: int) -> int:
    """The smallest number from `least` on that is as odd as `size` and leaves the same remainder by `parts`; never above `size`."""
    if size <= least:
        return size
    return least + (size - least) % math.lcm(2, parts)


def shrunk_latent(latent: Latent, patch: Latent, sequence: int, tensor: int) -> Latent:
    """A small latent whose patches split over `sequence` x `tensor` processes as those of `latent`. An image stays one.

    Where there were tokens or frames for every process, there are. Sizes are multiples of the patch.
    """
    frames, height, width = (size // step for size, step in zip(latent, patch, strict=True))
    parts = sequence * tensor
    t = shrunk_size(frames, sequence, min(frames, max(3, sequence)))
    h = shrunk_size(height, parts, max(3, -(-parts // width)))
    w = shrunk_size(width, parts, max(3, -(-parts // h)))
    return t * patch[0], h * patch[1], w * patch[2]


def shrunk_model(model: SoraDiTConfig, tensor: int) -> ModelConfig:
    """A section that builds a model of few narrow blocks with the arrangement, heads and patch of `model`."""
    width = model.heads * HEAD_WIDTH
    hidden = shrunk_size(model.hidden, tensor, 2 * width)
    full = model.arrangement == "full"
    return ModelConfig(
        size="nano",
        arrangement=model.arrangement,
        width=width,
        depth=min(model.depth, 2) if full else shrunk_size(model.depth, 2, min(model.depth, 3)),
        heads=model.heads,
        mlp_ratio=(hidden + 0.5) / width,  # half a unit more, so that it is not rounded down below
        patch=model.patch,
        adaln_rank=min(model.adaln_rank, RANK),
    )


@dataclass(frozen=True)
class ShrunkRun:
    """A small run. `latents` are one image's, one video's or both; `shown` names what they were made of."""

    video: VideoTask
    config: Config  # with the model and parallel sections of the small run
    strides: Strides
    latents: tuple[Latent, ...]
    shown: tuple[str, ...]
    text_tokens: int
    samples: tuple[int, ...]  # of a step, for each latent

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of steps that the config has."""
        kinds = tuple("images" if latent[0] == 1 else "videos" for latent in self.latents)
        return (*kinds, "mixed") if len(kinds) > 1 else kinds

    def with_config(self, config: Config) -> ShrunkRun:
        """The same samples and model under another config."""
        return replace(self, config=config)

    @property
    def about(self) -> list[str]:
        """The shapes that are compared."""
        return list(self.shown)

    def task(self) -> VideoTask:
        """The task of the small run."""
        return self.video.with_config(self.config).use(Inputs(CHANNELS, self.strides, TEXT_WIDTH))

    def batching(self, world: int) -> Batching:
        """The config's batching of the small samples. Budgets are of large ones, so the costliest bucket sets it."""
        batching = self.config.batching
        if batching.by != "samples":
            by = "tokens" if batching.by == "time" else batching.by  # nothing is measured here
            batching = batching.model_copy(update={"by": by, "budget": None})
        costs = sample_costs(diffusion_model(self.task().bare), self.strides, self.text_tokens)
        buckets = [self.bucket(latent) for latent in self.latents]
        return make_batching(batching, self.config.train, buckets, costs, world, self.config.parallel)

    def step(self, kind: str, place: RunPlace) -> StepData:
        """The step of a kind, with this rank's micro-batches."""
        draws = self.draws(kind)
        parts = share(draws, self.batching(place.world), place.rank, place.world)
        batches = [self.batch(part) for part in parts]
        pending = iter(batches)
        return StepData(
            divisors={"samples": float(len(draws))},
            batches=Batches(len(batches), None, lambda: next(pending)),
            items=[Item(*draw.name, draw.sample.source, draw.sample.bucket.name) for draw in draws],
            counts=Counter(draw.sample.bucket for draw in draws),
        )

    def bucket(self, latent: Latent) -> Bucket:
        """The pixel shape that a latent would come from."""
        return self.strides.pixels(latent)

    def draws(self, kind: str, each: int | None = None, epoch: int = 0) -> list[SampleUse]:
        """The samples of a step of a kind, those of one bucket together; `each` sets how many of a bucket."""
        found = []
        for latent, count in zip(self.latents, self.samples, strict=True):
            if kind in ("mixed", "images" if latent[0] == 1 else "videos"):
                bucket = self.bucket(latent)
                keys = [f"{bucket.name}-{number}" for number in range(each or count)]
                found += [SampleUse(Sample(key, (), (), "train", bucket, "made up"), epoch, 0) for key in keys]
        return sorted(found, key=lambda draw: draw.sample.bucket)

    def batch(self, part: list[tuple[SampleUse, float]]) -> Batch:
        """The micro-batch of (draw, weight) pairs of one bucket: what is in a sample depends on its name alone."""
        seed, names, bucket = self.config.seed, [draw.name for draw, _ in part], part[0][0].sample.bucket
        shape = (CHANNELS, *self.strides.latent(bucket))
        text = (self.text_tokens, TEXT_WIDTH)
        lengths_B = torch.tensor([1 + rng.key64(seed, "caption length", name[0]) % (text[0] - 1) for name in names])
        return Batch(
            latents_BCThw=torch.stack([rng.normal(shape, seed, "latent", name[0]) for name in names]),
            text_BLD=torch.stack([rng.normal(text, seed, "text", name[0]) for name in names]),
            text_mask_BL=torch.arange(text[0])[None] < lengths_B[:, None],
            weights_B=torch.tensor([weight for _, weight in part], dtype=torch.float32),
            names=names,
            bucket=bucket,
            sources=["made up"] * len(part),
            noise_BCThw=draw_noise(names, shape, seed),
            u_B=draw_quantiles(names, seed),
        )

    def fill(self, model: nn.Module) -> None:
        """Give every parameter a value off its start: the zeros of a fresh model would hide most gradients."""
        seed = self.config.seed
        for name, parameter in model.named_parameters():
            value = initial_value(name, parameter.shape, seed, zero=False)
            if parameter.dim() == 1:  # matrices are drawn already
                value = value + OFF_START * rng.normal(parameter.shape, seed, "off start", name)
            set_parameter(parameter, value)

    def problems(self, place: RunPlace) -> tuple[list[str], list[float]]:
        """What is wrong with the times of many draws, and the smallest and the largest. A collective call."""
        return _times(self, self.batching(place.world), place.rank, place.world)


def shrink_run(video: VideoTask, strides: Strides) -> ShrunkRun:
    """The small run of a task's config, at the layout that its parallel section names with numbers only.

    Raises UserError for a bucket that fits neither codec nor model, and as `resolve_config`.
    """
    config = video.config
    parallel = config.parallel
    model = resolve_config(config.model, CHANNELS, TEXT_WIDTH)
    sequence, lanes = parallel.sequence, math.prod(parallel.sizes().values()) // parallel.group
    text_tokens = max(SHORTEST_CAPTION, 2 * sequence + 1)
    threshold = parallel.shard_text
    if threshold is not None:  # captions are split here if they may be there
        threshold = min(threshold, text_tokens) if threshold <= config.text.max_tokens else None
    latents, shown, samples = [], [], []
    for images in (True, False):
        some = [bucket for bucket in config.buckets if bucket.is_image == images]
        if some:
            fitting = {bucket: latent_in(bucket, strides, model) for bucket in some}
            bucket = max(some, key=lambda bucket: _awkward(fitting[bucket], model, sequence))
            small = shrunk_latent(fitting[bucket], model.patch, sequence, parallel.together(split=False))
            latents.append(small)
            shown.append(f"{bucket} (latent {_sizes(fitting[bucket])}) as {_sizes(small)}")
            samples.append(3 if images else lanes + 2)  # numbers that lanes seldom divide
    small_config = config.model_copy(
        update={
            "model": shrunk_model(model, parallel.together(split=False)),
            "parallel": parallel.model_copy(update={"shard_text": threshold}),
        }
    )
    return ShrunkRun(video, small_config, strides, tuple(latents), tuple(shown), text_tokens, tuple(samples))


def _awkward(latent: Latent, model: SoraDiTConfig, sequence: int) -> tuple[bool, bool, int]:
    """What makes a bucket worth trying: frames and places that do not divide, and then its size."""
    t, h, w = model.grid(latent)
    return bool(t % sequence), bool(h * w % sequence), t * h * w


def _sizes(sizes: Latent) -> str:
    return "x".join(map(str, sizes))
