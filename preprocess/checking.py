"""`mmspeed check`: what a config will do and cost, before any work and without an accelerator or an encoder's weights in memory."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from mmspeed.config import Bucket, Config
from mmspeed.data import DatasetCache, entry_key
from mmspeed.errors import UserError
from mmspeed.log import ProgressLine, format_bytes
from mmspeed.models import build_model
from mmspeed.models.text import text_identity, text_width
from mmspeed.models.vae import codec_geometry, codec_identity
from mmspeed.preprocess.build import latent_parts, text_parts
from mmspeed.preprocess.pool import DecodePool
from mmspeed.preprocess.reasons import Rejected, Rejection
from mmspeed.preprocess.select import Clip, split_of
from mmspeed.preprocess.sources import list_sources
from mmspeed.shapes import Strides


@dataclass
class CheckReport:
    """What `check` found. `problems` make the command fail; everything else is told."""

    lines_: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        return [*self.lines_, *(f"problem: {problem}" for problem in self.problems)]

    def print(self, console: Any = None) -> None:
        """Print the lines (to a rich console when one is given)."""
        for line in self.lines():
            if console is None:
                print(line)
            else:
                console.print(line, markup=False, highlight=False, soft_wrap=True)


def check(config: Config) -> CheckReport:
    """Probe every source, compare with the cache, and estimate size and cost. Decodes nothing, loads no weights.

    Raises UserError when sources or encoders cannot be found.
    """
    report = CheckReport()
    listing = list_sources(config.data)
    clips: list[Clip] = []
    rejections: list[Rejection] = list(listing.rejections)
    with DecodePool(config, listing.sources) as pool, ProgressLine("probe", len(listing.sources), "clip") as line:
        for source, clip, _ in pool.clips(lambda clip: False):
            line.advance()
            if isinstance(clip, Rejected):
                rejections.append(Rejection(source.name, clip.reason, clip.detail))
            else:
                clips.append(clip)
    report.lines_.append(
        f"data: {listing.files} files, {len(listing.sources)} sources, {len(clips)} usable, {len(rejections)} rejected"
    )
    for reason, count in Counter(r.reason.value for r in rejections).most_common():
        names = [r.source for r in rejections if r.reason.value == reason][:3]
        report.lines_.append(f"  {reason:<16} {count:>5}  {', '.join(names)}")
    if not clips:
        report.problems.append("no source is usable, so there is nothing to train on")
        return report
    splits = [split_of(clip.source, clip.content_id, config.data, config.seed) for clip in clips]
    buckets = Counter(clip.bucket for clip, split in zip(clips, splits, strict=True) if split == "train")
    held_out = splits.count("val")
    for bucket, count in sorted(buckets.items()):
        report.lines_.append(f"  bucket {bucket}: {count} training samples")
    report.lines_.append(f"  held out for validation: {held_out}")
    if not buckets:
        report.problems.append("every usable sample is held out: nothing is left to train on; lower data.val_fraction")
        return report
    channels, strides = codec_geometry(config.vae)
    _check_strides(config, strides, report)
    if not report.problems:
        _compare(config, clips, report)
        _cost(config, buckets, channels, strides, report)
    return report


def _check_strides(config: Config, strides: Strides, report: CheckReport) -> None:
    for bucket in config.buckets:
        try:
            strides.latent(bucket)
        except ValueError as error:
            report.problems.append(f"data.buckets: {bucket}: {error}")


def _compare(config: Config, clips: list[Clip], report: CheckReport) -> None:
    """Entries present, missing, stale and why, and no longer used."""
    weights = config.codec_weights
    root = config.cache_dir
    captions = sorted({caption for clip in clips for caption in clip.source.captions})
    cache: DatasetCache | None = None
    if (root / "index").is_dir():
        try:
            cache = DatasetCache(root)
        except UserError as error:
            report.lines_.append(f"cache: {error}")
            return
    if weights is not None and not weights.exists():
        report.lines_.append(f"cache {root}: not made yet; {len(clips)} latents and {len(captions)} captions to encode")
        return
    codec, text = codec_identity(config.vae, weights), text_identity(config.text)
    latents = {entry_key(parts): parts for parts in (latent_parts(config, codec, clip) for clip in clips)}
    texts = {entry_key(parts): parts for parts in (text_parts(config, text, caption) for caption in captions)}
    for section, wanted, same in (("latents", latents, "content"), ("texts", texts, "caption")):
        stored = cache.keys(section) if cache is not None else set()
        line = f"cache {section}: {len(wanted.keys() & stored)} present, {len(wanted.keys() - stored)} missing"
        report.lines_.append(f"{line}, {len(stored - wanted.keys())} not used by this config")
        if cache is not None and wanted.keys() - stored and stored - wanted.keys():
            unused = [json.loads(cache.entry(key, section).meta) for key in sorted(stored - wanted.keys())]
            reasons = stale_reasons([wanted[key] for key in sorted(wanted.keys() - stored)], unused, same)
            for names, count in reasons.most_common():
                report.lines_.append(f"  stale: {count}, made with another {names}")


def stale_reasons(missing: list[dict[str, Any]], unused: list[dict[str, Any]], same: str) -> Counter[str]:
    """How many missing entries have a stored counterpart, by the names of what differs.

    Both lists hold what keys are made from; counterparts agree in `same` (`content` or `caption`). Of several the nearest counts.
    """
    stored: dict[str, list[dict[str, Any]]] = {}
    for parts in unused:
        stored.setdefault(parts[same], []).append(parts)
    reasons: Counter[str] = Counter()
    for parts in missing:
        differences: list[list[str]] = [
            sorted(name for name in parts.keys() | other.keys() if parts.get(name) != other.get(name))
            for other in stored.get(parts[same], [])
        ]
        if differences:
            nearest: list[str] = min(differences, key=len)
            reasons[", ".join(nearest)] += 1
    return reasons


def _cost(config: Config, buckets: Counter[Bucket], channels: int, strides: Strides, report: CheckReport) -> None:
    """Model size, tokens, FLOPs of a step, steps of an epoch, bytes of the cache."""
    model = build_model(config.model, channels, text_width(config.text), device="meta")
    parameters = sum(p.numel() for p in model.parameters())
    report.lines_.append(f"model: {config.model.size}, {config.model.arrangement}, {parameters / 1e6:.1f} M parameters")
    width = 2 if config.preprocess.latent_dtype == "bfloat16" else 4
    size, steps, flops = 0.0, 0, 0.0
    for bucket, count in sorted(buckets.items()):
        latent = strides.latent(bucket)
        try:
            tokens = model.tokens(latent)
        except ValueError as error:
            report.problems.append(f"data.buckets: {bucket}: {error}")
            return
        one = 3 * model.flops(latent, min(64, config.text.max_tokens))
        report.lines_.append(
            f"  bucket {bucket}: {tokens} tokens, {one / 1e9:.1f} GFLOP forward and backward for a sample"
        )
        factor = 1 if config.vae.kind == "linear" else 2  # mean alone, or mean and log-variance
        size += count * channels * latent[0] * latent[1] * latent[2] * width * factor
        repeated = count * config.data.repeats
        steps += -(-repeated // config.train.batch_size)
        flops += repeated * one
        if repeated < config.train.batch_size:
            report.lines_.append(
                f"  bucket {bucket} holds fewer samples than a batch: its step of {repeated} is a short one"
            )
    epochs = config.train.steps / steps
    report.lines_.append(f"cache size: about {format_bytes(size)} of latents")
    report.lines_.append(
        f"training: {config.train.steps} steps of up to {config.train.batch_size} samples, {steps} steps an epoch, {epochs:.1f} epochs,"
        f" {flops * epochs / 1e12:.1f} TFLOP in all"
    )
