"""Assemble a batch of videos from uses of samples: read the cache, make an epoch's draws (also noise and timesteps), pad captions.

No encoder is run and no video is opened here. Legend: B batch, C channels, T h w latent, L caption tokens, D text width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from mmspeed.config.conditioning import ConditioningConfig
from mmspeed.config.roles import ROLES
from mmspeed.data.cache.reader import DatasetCache
from mmspeed.data.cache.tables import Sample
from mmspeed.data.sampling.sampler import SampleUse
from mmspeed.errors import UserError
from mmspeed.protocols import Batch, BatchShape, Item, NumberRule, TextEntry
from mmspeed.protocols.calls import Conditioning
from mmspeed.rng import normal, uniform
from mmspeed.shapes import Bucket, Strides

from .conditioning_mask import conditioning_mask, draw_mode, prefix_of
from .frame_masks import FrameMask, checked_mask

# Quantiles of times stay on the CPU in float64; all other numbers take the number type of the computation.
RULES: dict[str, NumberRule] = {
    "latents": "compute",
    "text": "compute",
    "text_pooled": "compute",
    "noise": "compute",
    "text_mask": "keep",
    "fps": "keep",
    "loss_mask": "keep",
    "conditioning_mask": "keep",
    "condition": "compute",
    "image": "compute",
    "quantiles": "host",
}

Name = tuple[str, int, int]


def draw_latent(stored: dict[str, Tensor], seed: int, name: Name, role: str = "video") -> Tensor:
    """A latent (C, T, h, w) in float32: the stored mean, or a draw from the stored posterior that `name` and the role determine."""
    mean_CThw = stored["mean"].float()
    if "logvar" not in stored:
        return mean_CThw
    noise_CThw = normal(mean_CThw.shape, seed, "posterior", *(() if role == "video" else (role,)), *name)
    return mean_CThw + torch.exp(0.5 * stored["logvar"].float()) * noise_CThw


def first_frame(stored: Mapping[str, Tensor], seed: int | None = None, name: Name | None = None) -> Tensor:
    """The latent (C, 1, h, w), float32, of a clip's first frame alone: the condition of image-to-video training.

    For a causal codec it is the entry's first latent frame, which depends on the first frame only; for other codecs it is stored
    separately, where the model needs it or `preprocess.first_frame` asks for it. With a seed and a name it is a draw from the posterior
    that these determine, where the entry has one; else the mean.
    """
    mean_C1hw = (stored["first"] if "first" in stored else stored["mean"][:, :1]).float()
    if seed is None or name is None or "first_logvar" not in stored:
        return mean_C1hw
    noise_C1hw = normal(mean_C1hw.shape, seed, "first_posterior", *name)
    return mean_C1hw + torch.exp(0.5 * stored["first_logvar"].float()) * noise_C1hw


def draw_conditioning(
    latent_CThw: Tensor,
    stored: Mapping[str, Tensor],
    conditioning: ConditioningConfig,
    rule: Conditioning,
    strides: Strides,
    seed: int,
    name: Name,
    source: str,
) -> dict[str, Tensor]:
    """The conditioning frames of a use of a sample, in the mode that is drawn for it, by their names in a batch.

    `conditioning_mask` (T,), bool, is True at them. In `latents` the first of them is the one that was encoded alone, where the cache has
    it and the model takes it in its place; `condition` (C, T, h, w) has their latents, of a model that takes them as further channels, and
    `image` (K, L, D) the embeddings of the K given pictures, of a model that takes them. Raises UserError where an entry lacks a latent.
    """
    mode = draw_mode(conditioning, seed, name)
    prefix = prefix_of(conditioning.prefix_frames, strides) if mode == "prefix" else 0
    mask_T = conditioning_mask(mode, latent_CThw.shape[1], prefix, seed, name)
    given = bool(mask_T.any())
    if given and (missing := _missing(rule, mode, stored)):
        raise UserError(
            f"the cache's entry of {source} has no {missing[0]}, which `conditioning` needs: run mmspeed preprocess, which adds it"
        )
    tensors = {"latents": latent_CThw, "conditioning_mask": mask_T}
    if rule.how == "grey":
        tensors["condition"] = stored[f"grey_{mode}"].float()
    elif rule.how == "zeros":
        tensors["condition"] = torch.zeros_like(latent_CThw)
        if given:
            tensors["condition"][:, :1] = first_frame(stored, seed, name) if rule.drawn else first_frame(stored)
    elif given and mode in ("first", "first_last") and "first" in stored:
        tensors["latents"] = torch.cat((first_frame(stored), latent_CThw[:, 1:]), dim=1)
    if pictures := rule.pictures(mode):
        tensors["image"] = torch.stack([stored[each].float() for each in pictures])
    return tensors


def _missing(rule: Conditioning, mode: str, stored: Mapping[str, Tensor]) -> list[str]:
    """Names of what a mode needs and an entry lacks; a log-variance may be absent, of a codec without one."""
    return [each for each in rule.stored([mode]) if each not in stored and not each.endswith("_logvar")]


def choose_variant(sample: Sample, seed: int, name: Name) -> int:
    """The number of the window and crop for this use of a sample, of all its roles, drawn uniformly."""
    count = len(sample.latent_keys)
    return 0 if count == 1 else int(uniform(seed, "variant", *name) * count)


def choose_latent(sample: Sample, seed: int, name: Name) -> str:
    """The key of the latent for this use of a sample."""
    return sample.latent_keys[choose_variant(sample, seed, name)]


def role_latents(cache: DatasetCache, sample: Sample, seed: int, name: Name) -> dict[str, Tensor]:
    """The latents (C, T, h, w) of the further roles of a use of a sample, named `<role>.latents`."""
    variant, latents = choose_variant(sample, seed, name), {}
    for role, keys in sample.roles.items():
        stored = cache.latent(keys[variant])
        drawn = draw_latent(stored, seed, name, role) if ROLES[role].drawn else stored["mean"].float()
        latents[f"{role}.latents"] = drawn
    return latents


def choose_text(sample: Sample, seed: int, name: Name, caption_dropout: float) -> str | None:
    """The key of the caption for this use of a sample; None stands for the empty caption.

    One of several captions is drawn uniformly. Dropout is a separate draw, so changing its rate does not change the choice.
    """
    if not sample.text_keys or uniform(seed, "caption_dropout", *name) < caption_dropout:
        return None
    return sample.text_keys[int(uniform(seed, "caption", *name) * len(sample.text_keys))]


def pad_texts(texts: Sequence[TextEntry]) -> tuple[Tensor, Tensor]:
    """Captions (B, L, D) in float32, padded with zeros to the longest, and the mask (B, L), True at real tokens."""
    lengths_B = torch.tensor([text.embeds_LD.shape[0] for text in texts])
    text_BLD = torch.nn.utils.rnn.pad_sequence([text.embeds_LD.float() for text in texts], batch_first=True)
    mask_BL = torch.arange(text_BLD.shape[1])[None, :] < lengths_B[:, None]
    return text_BLD, mask_BL


def pooled_vectors(texts: Sequence[TextEntry]) -> Tensor | None:
    """The pooled vectors (B, D) of captions in float32; None unless each has one."""
    pooled = [text.pooled_D.float() for text in texts if text.pooled_D is not None]
    return torch.stack(pooled) if len(pooled) == len(texts) else None


def pad_other_texts(texts: Sequence[TextEntry]) -> dict[str, Tensor]:
    """Captions of further encoders by name, each padded as by `pad_texts`, with its mask under the name `<name>_mask`.

    Raises UserError where not all entries have the same ones.
    """
    names = list(texts[0].others)
    if any(list(text.others) != names for text in texts):
        raise UserError("some captions were encoded by more encoders than others; run mmspeed preprocess again")
    padded: dict[str, Tensor] = {}
    for name in names:
        padded[name], padded[f"{name}_mask"] = pad_texts([TextEntry(text.others[name]) for text in texts])
    return padded


def draw_noise(names: Sequence[Name], shape_CThw: tuple[int, ...], seed: int) -> Tensor:
    """Standard normal noise (B, C, T, h, w), float32 on the CPU, of samples named (key, epoch, repeat) (law 1)."""
    return torch.stack([normal(shape_CThw, seed, "noise", *name) for name in names])


def draw_quantiles(names: Sequence[Name], seed: int) -> Tensor:
    """Each sample's quantile in the training distribution of times: (B,), float64 in [0, 1), on the CPU (law 1)."""
    return torch.tensor([uniform(seed, "timestep", *name) for name in names], dtype=torch.float64)


def video_batch(
    *,
    latents_BCThw: Tensor,
    text_BLD: Tensor,
    text_mask_BL: Tensor,
    weights_B: Tensor,
    names: Sequence[Name],
    bucket: Bucket,
    sources: Sequence[str],
    pooled_BD: Tensor | None = None,
    noise_BCThw: Tensor | None = None,
    u_B: Tensor | None = None,
    fps_B: Tensor | None = None,
    conditioning_mask_BT: Tensor | None = None,
    others: Mapping[str, Tensor] | None = None,
) -> Batch:
    """Make the batch of samples of one bucket.

    Args:
        text_mask_BL: bool, True at real tokens.
        weights_B: 1 for samples, 0 for fillers that keep ranks synchronised.
        names: (sample key, epoch, repeat) of each sample.
        pooled_BD: each caption's pooled vector, if the text encoder has one.
        noise_BCThw: the noise of training, drawn by name; None if not requested.
        u_B: float64 in [0, 1), the quantile of each sample's time.
        fps_B: frames per second of each clip, for models that take them.
        conditioning_mask_BT: bool, True at conditioning frames; None: the task gives none.
        others: further tensors under their names: latents of conditioning frames (`condition`), embeddings of given pictures (`image`),
            latents of further roles (`control.latents`), captions of a second encoder, the latent frames that count in the loss
            (`loss_mask`: True, or a weight). Those of bool are masks.
    """
    optional = {
        "text_pooled": pooled_BD,
        "noise": noise_BCThw,
        "quantiles": u_B,
        "fps": fps_B,
        "conditioning_mask": conditioning_mask_BT,
    }
    tensors = {"latents": latents_BCThw, "text": text_BLD, "text_mask": text_mask_BL}
    tensors |= {name: tensor for name, tensor in optional.items() if tensor is not None}
    tensors |= others or {}
    rules: dict[str, NumberRule] = {
        name: "keep" if tensor.dtype == torch.bool else "compute" for name, tensor in (others or {}).items()
    }
    quantiles: list[float | None] = [None] * len(names) if u_B is None else u_B.tolist()
    items = [
        Item(*name, source=source, shape=bucket.name, quantile=quantile)
        for name, source, quantile in zip(names, sources, quantiles, strict=True)
    ]
    return Batch(tensors, items, weights_B, bucket, {**rules, **RULES} if rules else RULES)


def strides_of(cache: DatasetCache) -> Strides:
    """The strides of the codec that a cache was made with."""
    return Strides(*cache.info["encoders"]["vae"]["strides"])


def assemble(
    cache: DatasetCache,
    draws: Sequence[tuple[SampleUse[Sample], float]],
    seed: int,
    caption_dropout: float,
    noise: bool = False,
    fps: bool = False,
    frame_mask: FrameMask | None = None,
    conditioning: ConditioningConfig | None = None,
    rule: Conditioning = Conditioning(),
) -> Batch:
    """Read the batch of (draw, weight) pairs of one bucket; an item does not depend on the others in its batch.

    With `noise` the batch holds the draws of training, so that they are made before the model waits for them; with `fps` the frames
    per second of each clip, as stored in the cache (1 for an image); with `frame_mask` the latent frames that count in the loss; with
    `conditioning` the conditioning frames, in the mode that is drawn by name and in the way that `rule` says.

    No draw may be of a lost sample; `rank_batches` replaces those. Raises UserError if an entry is missing or
    damaged, if latents of the bucket differ in shape, or for a mask of other frames or of none.
    """
    items, texts = [], []
    for draw, _ in draws:
        sample, name = draw.sample, draw.name
        latent_key = choose_latent(sample, seed, name)
        stored = cache.latent(latent_key)
        item = {"latents": draw_latent(stored, seed, name)}
        if fps:
            item["fps"] = torch.tensor(cache.entry(latent_key, "latents").fps or 1.0)
        if frame_mask is not None:
            mask_T = frame_mask(cache.entry(latent_key, "latents"), strides_of(cache))
            item["loss_mask"] = checked_mask(mask_T, item["latents"].shape[1], sample.source)
        if conditioning is not None:
            item |= draw_conditioning(
                item["latents"], stored, conditioning, rule, strides_of(cache), seed, name, sample.source
            )
        items.append(item | role_latents(cache, sample, seed, name))
        text_key = choose_text(sample, seed, name, caption_dropout)
        texts.append(cache.null_text() if text_key is None else cache.text(text_key))
    _check_alike(cache, items, [draw.sample.source for draw, _ in draws])
    tensors = stacked(items)
    latents_BCThw = tensors.pop("latents")
    text_BLD, mask_BL = pad_texts(texts)
    names = [draw.name for draw, _ in draws]
    return video_batch(
        latents_BCThw=latents_BCThw,
        text_BLD=text_BLD,
        text_mask_BL=mask_BL,
        weights_B=torch.tensor([weight for _, weight in draws], dtype=torch.float32),
        names=names,
        bucket=draws[0][0].sample.bucket,
        sources=[draw.sample.source for draw, _ in draws],
        pooled_BD=pooled_vectors(texts),
        noise_BCThw=draw_noise(names, tuple(latents_BCThw.shape[1:]), seed) if noise else None,
        u_B=draw_quantiles(names, seed) if noise else None,
        others=tensors | pad_other_texts(texts),
    )


def stacked(items: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors of a batch by name, of the items that have them."""
    names = dict.fromkeys(name for item in items for name in item)
    return {name: torch.stack([item[name] for item in items if name in item]) for name in names}


def _check_alike(cache: DatasetCache, items: Sequence[Mapping[str, Tensor]], sources: Sequence[str]) -> None:
    """Raise UserError unless the latents of a batch have one shape, and all samples the same roles."""
    shape = tuple(items[0]["latents"].shape)
    names = dict.fromkeys(name for item in items for name in item if name.endswith("latents"))
    for (item, source), name in product(zip(items, sources, strict=True), names):
        role = "latent" if name == "latents" else name.removesuffix(".latents")
        if name not in item:
            problem = f"{source} has no {role}, as others of its batch have"
        elif (found := tuple(item[name].shape)) != shape:
            problem = f"the {role} of {source} has shape {found}, others of its bucket {shape}"
        else:
            continue
        raise UserError(f"cache {cache.location}: {problem}; run mmspeed preprocess again")


class VideoCollate:
    """Read batches of (draw, weight) pairs. In another process the cache is opened again at the first read, so that errors are reported."""

    def __init__(
        self,
        cache: DatasetCache,
        seed: int = 0,
        caption_dropout: float = 0.0,
        fps: bool = False,
        frame_mask: FrameMask | None = None,
        conditioning: ConditioningConfig | None = None,
        rule: Conditioning = Conditioning(),
    ) -> None:
        self._cache: DatasetCache | None = cache
        self._opening = cache.__reduce__()
        self._seed, self._caption_dropout, self._fps, self._frame_mask = seed, caption_dropout, fps, frame_mask
        self._conditioning, self._rule = conditioning, rule

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_cache": None}

    @property
    def cache(self) -> DatasetCache:
        """The cache to read from; opened at first use in another process."""
        if self._cache is None:
            kind, arguments = self._opening
            self._cache = kind(*arguments)
        return self._cache

    def __call__(self, draws: Sequence[tuple[SampleUse[Sample], float]]) -> Batch:
        """Read a batch. Raises UserError like `assemble`."""
        return assemble(
            self.cache,
            draws,
            self._seed,
            self._caption_dropout,
            noise=True,
            fps=self._fps,
            frame_mask=self._frame_mask,
            conditioning=self._conditioning,
            rule=self._rule,
        )

    def shape(self, draws: Sequence[tuple[SampleUse[Sample], float]]) -> BatchShape:
        """The shapes of a batch's tensors, from the index of the cache; captions are read for their vectors and further rows."""
        encoders, bucket = self.cache.info["encoders"], draws[0][0].sample.bucket
        latent = (encoders["vae"]["channels"], *strides_of(self.cache).latent(bucket))
        count, length = len(draws), max(self._text_tokens(draw) for draw, _ in draws)
        tensors = {
            "latents": (count, *latent),
            "noise": (count, *latent),
            "text": (count, length, encoders["text"]["width"]),
            "text_mask": (count, length),
            "quantiles": (count,),
            **{f"{role}.latents": (count, *latent) for role in draws[0][0].sample.roles},
        }
        if self._fps:
            tensors["fps"] = (count,)
        if self._frame_mask is not None:
            tensors["loss_mask"] = (count, latent[1])
        if self._conditioning is not None:
            tensors["conditioning_mask"] = (count, latent[1])
            if self._rule.how != "replace":
                tensors["condition"] = (count, *latent)
            if self._rule.image_size is not None:
                tensors["image"] = (count, *self._rule.image_size)
        texts = [self._text(draw) for draw, _ in draws]
        pooled = [text.pooled_D for text in texts]
        if pooled[0] is not None and None not in pooled:
            tensors["text_pooled"] = (count, *pooled[0].shape)
        for name, tensor in texts[0].others.items():
            longest = max(text.others[name].shape[0] for text in texts)
            tensors |= {name: (count, longest, tensor.shape[1]), f"{name}_mask": (count, longest)}
        return BatchShape(bucket, count, tensors)

    def _text(self, draw: SampleUse[Sample]) -> TextEntry:
        key = choose_text(draw.sample, self._seed, draw.name, self._caption_dropout)
        return self.cache.null_text() if key is None else self.cache.text(key)

    def _text_tokens(self, draw: SampleUse[Sample]) -> int:
        key = choose_text(draw.sample, self._seed, draw.name, self._caption_dropout)
        if key is None:
            return self.cache.entry(self.cache.null_key, "null").tokens
        return self.cache.entry(key, "texts").tokens
