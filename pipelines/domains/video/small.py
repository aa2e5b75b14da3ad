"""A small run of the video task: the same arrangement, heads and layout, sizes that a laptop computes in a moment, a synthetic cache.

The splits of tokens and heads are the same: the number of heads, and the remainder of every size by the number of parts, so that
sizes that did not divide still do not.

Legend: C channels, T h w latent, L caption tokens, D text width.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from mmspeed import rng
from mmspeed.config import Config
from mmspeed.config.inputs import BucketConfig, DataConfig, DiffusersVaeConfig, SourceConfig, TransformersTextConfig
from mmspeed.config.schema import FlowConfig, ModelConfig, ValidateConfig
from mmspeed.config.training import BatchingConfig, StageConfig
from mmspeed.data import CacheWriter, Sample
from mmspeed.data.cache.keys import entry_key, sample_key
from mmspeed.data.cache.tables import write_info, write_rejects, write_samples
from mmspeed.data.cache.writer import latent_tensors, text_tensors
from mmspeed.errors import UserError
from mmspeed.models import SoraDiTConfig
from mmspeed.models.codecs.vae import codec_geometry
from mmspeed.models.sections import AnySection, call_of, opened_of, sora_section, with_weights
from mmspeed.models.sora.sizes import resolve_config
from mmspeed.pipelines.diffusion.predictor import Predictor, make_predictor
from mmspeed.pipelines.domains.small import shrunk_size
from mmspeed.plan.schedules import Pipeline
from mmspeed.protocols import SmallRun, TextEntry
from mmspeed.protocols.calls import IMAGES
from mmspeed.shapes import Bucket, Strides

CHANNELS, TEXT_WIDTH, HEAD_WIDTH, RANK = 4, 16, 12, 8
SHORTEST_CAPTION = 7  # tokens of the longest caption, at least
LEAST_FPS = 20  # of synthetic clips
STILLS = 3  # images of a step
USUAL_STRIDES = Strides(4, 8)  # of most video codecs
Latent = tuple[int, int, int]


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


def shrunk_model(model: SoraDiTConfig, tensor: int, stages: int = 1) -> ModelConfig:
    """A section that builds a model of few narrow blocks, at least `stages`, with the arrangement, heads and patch of `model`."""
    width = model.heads * HEAD_WIDTH
    hidden = shrunk_size(model.hidden, tensor, 2 * width)
    full = model.arrangement == "full"
    return ModelConfig(
        size="nano",
        arrangement=model.arrangement,
        width=width,
        depth=max(stages, min(model.depth, 2) if full else shrunk_size(model.depth, 2, min(model.depth, 3))),
        heads=model.heads,
        mlp_ratio=(hidden + 0.5) / width,  # half a unit more, so that it is not rounded down below
        patch=model.patch,
        adaln_rank=min(model.adaln_rank, RANK),
        control=model.control,
    )


@dataclass(frozen=True)
class SmallSamples:
    """The samples of a small run: `counts` of each bucket, an image's, a video's or both, in place of the buckets `stood_for`.

    shown: both in words. text_tokens: of the longest caption.
    """

    strides: Strides
    counts: dict[Bucket, int]
    stood_for: dict[Bucket, Bucket]
    shown: tuple[str, ...]
    text_tokens: int

    @property
    def latent(self) -> Latent:
        """The latent of a video, where there are any; else of an image."""
        return self.strides.latent(max(self.counts))

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of steps."""
        kinds = tuple("images" if bucket.is_image else "videos" for bucket in self.counts)
        return (*kinds, "mixed") if len(kinds) > 1 else kinds


def small_sora(config: Config, folder: Path) -> SmallRun:
    """The small run of a config of SoraDiT, at the layout that its parallel section names with numbers only.

    Raises UserError for a bucket that fits neither codec nor model, and as `resolve_config`.
    """
    strides, remarks = known_strides(config)
    model = resolve_config(sora_section(config, "this check"), CHANNELS, TEXT_WIDTH)
    parallel = config.parallel
    section = shrunk_model(model, parallel.together(split=False), Pipeline.of(parallel).stages)
    if model.sparse is not None:
        remarks += [
            "attention is dense in this check: over a ring, sparse attention has other plans than in one process"
        ]
    words = f"{section.arrangement}, {section.depth} blocks, {section.heads} heads of width {HEAD_WIDTH}"
    samples = small_samples(config, strides, model.patch, model.grid)
    return written(config, folder, section, samples, f"{words}, patch {sizes_of(model.patch)}", remarks)


def written(
    config: Config, folder: Path, section: AnySection, samples: SmallSamples, model: str, remarks: Sequence[str]
) -> SmallRun:
    """The small run of a model's section and of samples, whose cache is written."""
    small = _small_config(config, folder, section, samples)
    opened = opened_of(section)
    outline = with_weights(section, CHANNELS, TEXT_WIDTH, "meta", opened)
    predictor = make_predictor(outline, small.objective, CHANNELS, TEXT_WIDTH, call_of(section, opened))
    _write_cache(small, predictor, samples)
    numbers = [
        f"{count} synthetic samples of {of}" for count, of in zip(samples.counts.values(), samples.shown, strict=True)
    ]
    return SmallRun(
        small,
        model,
        samples.kinds,
        settings=[f"objective {small.objective.kind}"],
        items=[*numbers, f"captions of up to {samples.text_tokens} tokens"],
        remarks=["; ".join(remarks)] if remarks else [],
    )


def known_strides(config: Config) -> tuple[Strides, list[str]]:
    """(the codec's strides, a remark where the usual ones stand for them because it is not available)."""
    with contextlib.suppress(UserError):
        return codec_geometry(config.vae)[1], []
    strides = USUAL_STRIDES
    return strides, [f"the codec is not available: latents as of strides {strides.temporal}x{strides.spatial}"]


def small_samples(config: Config, strides: Strides, patch: Latent, grid: Callable[[Latent], Latent]) -> SmallSamples:
    """Small samples of the config's most awkward buckets. `grid`: a latent's patches; raises ValueError where they do not fit.

    Raises UserError for a bucket that fits neither codec nor model.
    """
    parallel = config.parallel
    sequence, lanes = parallel.sequence, math.prod(parallel.sizes().values()) // parallel.group
    counts, stood_for, shown = {}, {}, []
    for images in (True, False):
        fitting = {b: _latent_in(b, strides, grid) for b in config.buckets if b.is_image == images}
        if fitting:
            bucket = max(fitting, key=lambda bucket: _awkward(fitting[bucket], grid, sequence))
            latent = shrunk_latent(fitting[bucket], patch, sequence, parallel.together(split=False))
            small = strides.pixels(latent)
            counts[small] = STILLS if images else lanes + 2  # numbers that are seldom divisible by the lanes
            stood_for[small] = bucket
            shown.append(f"{bucket} (latent {sizes_of(fitting[bucket])}) as {sizes_of(latent)}")
    return SmallSamples(strides, counts, stood_for, tuple(shown), max(SHORTEST_CAPTION, 2 * sequence + 1))


def _small_config(config: Config, folder: Path, section: AnySection, samples: SmallSamples) -> Config:
    """The config of the small model and cache: a step of each kind, and captions that are split if those of training may be."""
    threshold, objective, stood_for = config.parallel.shard_text, config.objective, samples.stood_for
    if threshold is not None:
        threshold = min(threshold, samples.text_tokens) if threshold <= config.text.max_tokens else None
    if isinstance(objective, FlowConfig) and isinstance(objective.shift, dict):
        shift = {str(small): objective.shift[str(bucket)] for small, bucket in stood_for.items()}
        objective = objective.model_copy(update={"shift": shift})
    stages = (StageConfig(steps=1, max_frames=1), StageConfig(steps=1, min_frames=2), StageConfig())
    # budgets are meant for large samples
    at_once = config.train.micro_batch_size if config.batching.by == "samples" else 1
    whole_step = {"batch_size": sum(samples.counts.values()), "micro_batch_size": at_once}
    changes: dict[str, Any] = {
        "output": str(folder / "runs"),
        "data": DataConfig(
            sources=(SourceConfig(path=str(folder / "synthetic"), roles=config.data.sources[0].roles),),
            cache=str(folder / "cache"),
            buckets=tuple(BucketConfig(frames=b.frames, height=b.height, width=b.width) for b in samples.counts),
        ),
        "vae": DiffusersVaeConfig(kind="diffusers", pretrained=str(folder / "no codec")),
        "text": TransformersTextConfig(
            kind="transformers", pretrained=str(folder / "no encoder"), max_tokens=samples.text_tokens
        ),
        "model": section,
        "objective": objective,
        "conditioning": config.conditioning.model_copy(update={"prefix_frames": 1}),  # a small video has few frames
        "train": config.train.model_copy(update=whole_step),
        "batching": BatchingConfig(mix="window"),  # an epoch of a stage is one step
        "curriculum": stages if len(samples.counts) > 1 else (),
        "validate_": ValidateConfig(),
        "parallel": config.parallel.model_copy(update={"shard_text": threshold}),
    }
    return config.model_copy(update=changes)


def _write_cache(config: Config, predictor: Predictor, samples: SmallSamples) -> None:
    """Write random latents, captions and all else that the model takes, drawn by the names of samples."""
    seed, rule, root, rows = config.seed, predictor.conditioning, config.local_cache_dir(), []

    def normal(name: str, *size: int) -> Tensor:
        return rng.normal(size, seed, "small", name)

    def caption(name: str, tokens: int) -> TextEntry:
        pooled = normal(f"pooled {name}", predictor.pooled_width) if predictor.pooled_width else None
        others = {key: normal(f"{key} {name}", tokens, width) for key, width in predictor.texts.items()}
        return TextEntry(normal(f"text {name}", tokens, TEXT_WIDTH), pooled, others)

    with CacheWriter(root) as writer:
        writer.add("null", entry_key({"null": 0}), text_tensors(caption("null", 1)), {}, tokens=1)
        for bucket, count in samples.counts.items():
            shape = (CHANNELS, *samples.strides.latent(bucket))
            for number in range(count):
                name = f"{bucket.name}-{number}"
                latent, text = entry_key({"latent": name}), entry_key({"text": name})
                tensors = latent_tensors(normal(f"latent {name}", *shape))
                for stored in rule.stored(config.conditioning.shares):
                    size: tuple[int, ...] = (CHANNELS, 1, *shape[2:]) if stored.startswith("first") else shape
                    if rule.embedding is not None and stored in IMAGES:
                        size = rule.embedding
                    tensors[stored] = normal(f"{stored} {name}", *size)
                writer.add(
                    "latents", latent, tensors, {}, bucket=bucket, content_id=name, frames=range(bucket.frames),
                    fps=None if bucket.is_image else LEAST_FPS + float(rng.key64(seed, "fps", name) % 8), source=name,
                )  # fmt: skip
                longest = samples.text_tokens
                tokens = 1 + rng.key64(seed, "caption length", name) % (longest - 1) if number else longest
                writer.add("texts", text, text_tensors(caption(name, tokens)), {}, tokens=tokens)
                roles = {role: (entry_key({role: name}),) for role in config.data.roles}
                for role, (key,) in roles.items():
                    tensors = latent_tensors(normal(f"{role} {name}", *shape))
                    writer.add(
                        "latents", key, tensors, {}, bucket=bucket, content_id=key, frames=range(bucket.frames), fps=None,
                        source=name,
                    )  # fmt: skip
                row = Sample(
                    sample_key([latent], [text], roles), (latent,), (text,), "train", bucket, name, content_id=name
                )
                rows.append(replace(row, dataset="synthetic", roles=roles))
    write_samples(root, rows)
    write_rejects(root, [])
    vae = {"channels": CHANNELS, "strides": list(astuple(samples.strides)), "fingerprint": "synthetic"}
    encoders = {"vae": vae, "text": {"width": TEXT_WIDTH, "fingerprint": "synthetic"}}
    write_info(root, {"encoders": encoders, "fps": None, "made_for": config.sample_settings()})


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
