"""A small version of the video task: the same arrangement, heads and layout, sizes that a laptop computes in a moment, synthetic samples.

The splits of tokens and heads are the same: the number of heads, and the remainder of every size by the number of parts, so that
sizes that did not divide still do not.

Legend: B samples, C channels, T h w latent, L caption tokens, D text width.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mmspeed import comm, rng
from mmspeed.config import Config, RunConfig
from mmspeed.config.schema import FlowConfig, ModelConfig
from mmspeed.data import Batching, Sample, SampleUse
from mmspeed.data.loading.collate import draw_noise, draw_quantiles, video_batch
from mmspeed.data.loading.loader import Batches
from mmspeed.data.sampling.batch_sizes import make_batching, sample_costs
from mmspeed.data.sampling.rank_batches import count_present, rank_batches
from mmspeed.errors import UserError
from mmspeed.models import SoraDiTConfig
from mmspeed.models.codecs.vae import codec_geometry
from mmspeed.models.sections import sora_section
from mmspeed.models.sora.sizes import resolve_config
from mmspeed.pipelines.domains.video.domain import VideoDomain
from mmspeed.pipelines.domains.video.synthetic import EncoderShapes, further_captions
from mmspeed.protocols import Batch, CheckNotes, Item, RunPlace, StepData
from mmspeed.shapes import Bucket, Strides

CHANNELS, TEXT_WIDTH, HEAD_WIDTH, RANK = 4, 16, 12, 8
SHORTEST_CAPTION = 7  # tokens, padding included
LEAST_FPS = 20  # of synthetic clips
USUAL_STRIDES = Strides(4, 8)  # of most video codecs
TIME_STEPS, TIME_SAMPLES, TIME_BINS = 64, 64, 10
UNEVEN_TIMES = 50.0  # chi-square of 9 degrees of freedom: uniform times exceed it once in ten million tries
Latent = tuple[int, int, int]


def shrunk_size(size: int, parts: int, least: int) -> int:
    """The smallest number from `least` on that is as odd as `size` and leaves the same remainder by `parts`; never above `size`."""
    if size <= least:
        return size
    return least + (size - least) % math.lcm(2, parts)


def shrunk_latent(latent: Latent, patch: Latent, sequence: int, tensor: int) -> Latent:
    """A small latent whose patches split over `sequence` x `tensor` processes like those of `latent`. An image stays an image.

    If every process had tokens or frames, it still has. Sizes are multiples of the patch.
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
class SmallModel:
    """Facts of a small model that samples, exchanges and the report go by.

    words: its sizes, for the report. full: each of its blocks attends over all tokens.
    """

    words: str
    patch: Latent
    blocks: int
    full: bool


@dataclass(frozen=True)
class SmallSamples:
    """Samples of a small run: `latents` of an image, a video or both; `shown` names what they were made of.

    samples: of a step, for each latent.
    """

    latents: tuple[Latent, ...]
    shown: tuple[str, ...]
    samples: tuple[int, ...]
    text_tokens: int


@dataclass(frozen=True)
class ShrunkRun:
    """A small run of the video task, a `CheckTask`."""

    video: VideoDomain
    config: Config  # with the model and parallel sections of the small run
    strides: Strides
    model: SmallModel
    small_samples: SmallSamples
    remarks: tuple[str, ...] = ()

    @property
    def known(self) -> dict[str, Any]:
        """The codec's strides, for which the codec is loaded, so one process does that for all."""
        return {"strides": list(astuple(self.strides))}

    @property
    def notes(self) -> CheckNotes:
        """Sizes of the model, and the samples."""
        samples = self.small_samples
        return CheckNotes(
            model=f"{self.model.words}, patch {sizes_of(self.model.patch)}",
            settings=[f"objective {self.config.objective.kind}"],
            items=[
                f"{count} synthetic samples of {shown}"
                for count, shown in zip(samples.samples, samples.shown, strict=True)
            ],
            remarks=self.remarks,
        )

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of steps that the config has."""
        kinds = tuple("images" if latent[0] == 1 else "videos" for latent in self.small_samples.latents)
        return (*kinds, "mixed") if len(kinds) > 1 else kinds

    def with_config(self, config: RunConfig) -> ShrunkRun:
        """The same samples and model under another config."""
        assert isinstance(config, Config)
        return replace(self, config=config)

    @cached_property
    def _task(self) -> VideoDomain:
        return self.video.with_config(self.config).use(EncoderShapes(CHANNELS, self.strides, TEXT_WIDTH))

    def task(self) -> VideoDomain:
        """The task of the small run."""
        return self._task

    # -- samples --------------------------------------------------------------------------------------------------------

    def batching(self, world: int) -> Batching:
        """The config's batching of the small samples. Budgets are meant for large ones, so the costliest bucket sets it."""
        batching = self.config.batching
        if batching.by != "samples":
            by = "tokens" if batching.by == "time" else batching.by  # no measurements of small samples
            batching = batching.model_copy(update={"by": by, "budget": None})
        costs = sample_costs(self._task.predictor, self.strides, self.small_samples.text_tokens)
        buckets = [self.bucket(latent) for latent in self.small_samples.latents]
        return make_batching(batching, self.config.train, buckets, costs, world, self.config.parallel)

    def step(self, kind: str, place: RunPlace) -> StepData:
        """The step of a kind, with this rank's micro-batches."""
        draws = self.draws(kind)
        batches = [
            self.batch(part) for part in rank_batches(draws, self.batching(place.dealt), place.number, place.dealt)
        ]
        pending = iter(batches)
        return StepData(
            divisors={
                "samples": float(count_present(draws)),
                "tokens": float(sum(self._task.tokens(draw.sample.bucket) for draw in draws)),
            },
            batches=Batches(len(batches), None, lambda: next(pending)),
            items=[Item(*draw.name, draw.sample.source, draw.sample.bucket.name) for draw in draws],
            counts=Counter(draw.sample.bucket for draw in draws),
        )

    def bucket(self, latent: Latent) -> Bucket:
        """The pixel shape that a latent would come from."""
        return self.strides.pixels(latent)

    def draws(self, kind: str, each: int | None = None, epoch: int = 0) -> list[SampleUse[Sample]]:
        """The samples of a step of a kind, those of one bucket together; `each` sets their number in a bucket."""
        uses = []
        for latent, count in zip(self.small_samples.latents, self.small_samples.samples, strict=True):
            if kind in ("mixed", "images" if latent[0] == 1 else "videos"):
                bucket = self.bucket(latent)
                keys = [f"{bucket.name}-{number}" for number in range(each or count)]
                uses += [SampleUse(Sample(key, (), (), "train", bucket, "synthetic"), epoch, 0) for key in keys]
        return sorted(uses, key=lambda draw: draw.sample.bucket)

    def batch(self, part: Sequence[tuple[SampleUse[Sample], float]]) -> Batch:
        """The micro-batch of (draw, weight) pairs of one bucket: the content of a sample depends on its name alone."""
        seed, names, bucket = self.config.seed, [draw.name for draw, _ in part], part[0][0].sample.bucket
        shape, predictor = (CHANNELS, *self.strides.latent(bucket)), self._task.predictor
        text = (self.small_samples.text_tokens, TEXT_WIDTH)
        lengths_B = torch.tensor([1 + rng.key64(seed, "caption length", name[0]) % (text[0] - 1) for name in names])
        mask_BL = torch.arange(text[0])[None] < lengths_B[:, None]

        def normal(kind: str, *size: int) -> Tensor:
            return torch.stack([rng.normal(size, seed, kind, name[0]) for name in names])

        frames: dict[str, Tensor] = {}
        if (rule := predictor.conditioning).how != "replace":  # the model always takes the first frame's latents
            frames["conditioning_mask"] = (torch.arange(shape[1]) == 0).expand(len(names), -1)
            frames["condition"] = normal("condition", *shape)
        if (size := rule.image_size) is not None:
            frames["image"] = normal("image", *size)
        return video_batch(
            latents_BCThw=normal("latent", *shape),
            text_BLD=normal("text", *text),
            text_mask_BL=mask_BL,
            weights_B=torch.tensor([weight for _, weight in part], dtype=torch.float32),
            names=names,
            bucket=bucket,
            sources=["synthetic"] * len(part),
            pooled_BD=normal("pooled", predictor.pooled_width) if predictor.pooled_width else None,
            noise_BCThw=draw_noise(names, shape, seed),
            u_B=draw_quantiles(names, seed),
            fps_B=torch.tensor([_fps(seed, name[0]) for name in names]) if predictor.timed else None,
            others=frames | further_captions(predictor.texts, mask_BL, normal),
        )

    # -- what must hold -------------------------------------------------------------------------------------------------

    def expected(self, kind: str) -> list[str]:
        """The exchanges that a step of a kind must make, as "kind axis": else an axis of the layout does nothing."""
        parallel, model = self.config.parallel, self.model
        exchanges = [f"{what} tp" for what in ("all_gather", "reduce_scatter", "all_reduce") if parallel.tp > 1]
        if kind == "images" or parallel.sequence == 1:
            return exchanges
        exchanges.append("all_gather sequence")  # the prediction, from all
        if model.full or model.blocks > 1 or parallel.shard == "space":
            exchanges += ["all_to_all ulysses"] if parallel.ulysses > 1 else []
            exchanges += ["ring ring"] if parallel.ring > 1 else []
            exchanges += (
                ["ring ring_outer"] if parallel.ring_window is not None and parallel.ring_window < parallel.ring else []
            )
        if parallel.dsp > 1 and model.blocks > 1:
            exchanges.append("all_to_all dsp")
        return exchanges

    def silent(self, kind: str) -> list[str]:
        """Axes of a video's group, in a step of images."""
        return ["sequence", "dsp", "ring", "ring_outer", "ulysses"] if kind == "images" else []

    def problems(self, place: RunPlace) -> tuple[list[str], list[str]]:
        """(ranks with uneven times, a line about captions and times). A collective call.

        Over many steps the times of each rank must be uniform.
        """
        kind, batching = self.kinds[-1], self.batching(place.dealt)
        names = [
            draw.name
            for step in range(TIME_STEPS)
            for part in rank_batches(self.draws(kind, TIME_SAMPLES, step), batching, place.number, place.dealt)
            for draw, weight in part
            if weight
        ]
        u_B = draw_quantiles(names, self.config.seed)
        counts = torch.histc(u_B.float(), TIME_BINS, 0.0, 1.0).long().tolist()
        counts_of_ranks = comm.all_gather_objects(counts)
        problems = [
            f"rank {rank} has uneven times: {rank_counts} samples in ten equal parts of their distribution"
            for rank, rank_counts in enumerate(counts_of_ranks)
            if uneven(rank_counts) > UNEVEN_TIMES
        ]
        buckets = {self.bucket(latent): latent for latent in self.small_samples.latents}
        objectives = [
            self._task.objective.sized(bucket, self._task.predictor.tokens(latent))
            for bucket, latent in buckets.items()
        ]
        t_B = torch.cat([objective.time_from_quantile(u_B) for objective in objectives])
        ends = comm.all_gather_objects([t_B.min().item(), t_B.max().item()])
        low, high = min(low for low, _ in ends), max(high for _, high in ends)
        times = f"times of many draws from {low:.3f} to {high:.3f}"
        return problems, [f"captions of {self.small_samples.text_tokens} tokens with padding; {times}"]


def _fps(seed: int, sample: str) -> float:
    """Frames per second of a synthetic clip."""
    return float(LEAST_FPS + rng.key64(seed, "fps", sample) % 8)


def uneven(counts: Sequence[int]) -> float:
    """The chi-square of a histogram against a uniform one."""
    expected = sum(counts) / len(counts)
    return sum((count - expected) ** 2 for count in counts) / expected if expected else 0.0


def shrunk_video(video: VideoDomain, known: Mapping[str, Any] | None = None) -> ShrunkRun:
    """The small run of a video task. `known`: the strides, from another process; else they are the codec's, or the usual ones where
    the codec is not available. Raises UserError as `shrink_run`.
    """
    strides, remarks = known_strides(video.config, known)
    if video.config.model.sparse is not None:
        remarks.append(
            "attention is dense in this check: over a ring, sparse attention has other plans than in one process"
        )
    return replace(shrink_run(video, strides), remarks=("; ".join(remarks),) if remarks else ())


def known_strides(config: Config, known: Mapping[str, Any] | None) -> tuple[Strides, list[str]]:
    """(the codec's strides, as another process found them or the codec says, a remark where the usual ones stand for them)."""
    if known is not None:
        return Strides(*known["strides"]), []
    with contextlib.suppress(UserError):
        return codec_geometry(config.vae)[1], []
    strides = USUAL_STRIDES
    return strides, [f"the codec is not available: latents as of strides {strides.temporal}x{strides.spatial}"]


def shrink_run(video: VideoDomain, strides: Strides) -> ShrunkRun:
    """The small run of a task's config, at the layout that its parallel section names with numbers only.

    Raises UserError for a bucket that fits neither codec nor model, and as `resolve_config`.
    """
    config = video.config
    model = resolve_config(sora_section(config, "this check"), CHANNELS, TEXT_WIDTH)
    section = shrunk_model(model, config.parallel.together(split=False))
    samples = shrunk_samples(config, strides, model.patch, model.grid)
    words = f"{section.arrangement}, {section.depth} blocks, {section.heads} heads of width {HEAD_WIDTH}"
    small = SmallModel(words, model.patch, section.depth or 1, model.arrangement == "full")
    return ShrunkRun(video, small_config(config, section, samples), strides, small, samples)


def small_config(config: Config, section: ModelConfig, samples: SmallSamples) -> Config:
    """The config with the small model, and captions that are split if those of training may be."""
    parallel, threshold = config.parallel, config.parallel.shard_text
    if threshold is not None:
        threshold = min(threshold, samples.text_tokens) if threshold <= config.text.max_tokens else None
    objective = config.objective
    if isinstance(objective, FlowConfig) and isinstance(objective.shift, dict):  # small samples have other buckets
        objective = objective.model_copy(update={"shift": max(objective.shift.values())})
    return config.model_copy(
        update={
            "model": section,
            "objective": objective,
            "parallel": parallel.model_copy(update={"shard_text": threshold}),
        }
    )


def shrunk_samples(config: Config, strides: Strides, patch: Latent, grid: Callable[[Latent], Latent]) -> SmallSamples:
    """Small latents of the config's most awkward buckets. `grid`: a latent's patches; raises ValueError where they do not fit.

    Raises UserError for a bucket that fits neither codec nor model.
    """
    parallel = config.parallel
    sequence, lanes = parallel.sequence, math.prod(parallel.sizes().values()) // parallel.group
    latents, shown, samples = [], [], []
    for images in (True, False):
        some = [bucket for bucket in config.buckets if bucket.is_image == images]
        if some:
            fitting = {bucket: _latent_in(bucket, strides, grid) for bucket in some}
            bucket = max(some, key=lambda bucket: _awkward(fitting[bucket], grid, sequence))
            small = shrunk_latent(fitting[bucket], patch, sequence, parallel.together(split=False))
            latents.append(small)
            shown.append(f"{bucket} (latent {sizes_of(fitting[bucket])}) as {sizes_of(small)}")
            samples.append(3 if images else lanes + 2)  # numbers that are seldom divisible by the lanes
    return SmallSamples(tuple(latents), tuple(shown), tuple(samples), max(SHORTEST_CAPTION, 2 * sequence + 1))


def _latent_in(bucket: Bucket, strides: Strides, grid: Callable[[Latent], Latent]) -> Latent:
    try:
        latent = strides.latent(bucket)
    except ValueError as error:
        raise UserError(f"bucket {bucket} does not fit the codec: {error}") from None
    try:
        grid(latent)
    except ValueError as error:
        raise UserError(f"bucket {bucket} does not fit the model: {error}") from None
    return latent


def _awkward(latent: Latent, grid: Callable[[Latent], Latent], sequence: int) -> tuple[bool, bool, int]:
    """The sort key for choosing a bucket to try: frames and positions that do not divide, and then its size."""
    t, h, w = grid(latent)
    return bool(t % sequence), bool(h * w % sequence), t * h * w


def sizes_of(sizes: Latent) -> str:
    """Sizes as `4x8x8`."""
    return "x".join(map(str, sizes))
