"""Conditioning frames, latent ones that a model is given: the mode of each use of a sample, drawn by name, and its mask.

Pure functions. The purposes `given_count` and `given_frames` are parts of names of draws and stay as they are.

Legend: T latent frames.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmspeed.config.conditioning import ConditioningConfig, Mode
from mmspeed.errors import UserError
from mmspeed.rng import permutation, uniform
from mmspeed.shapes import Bucket, Strides

Name = tuple[str, int, int]  # (sample key, epoch, repeat)


def draw_mode(config: ConditioningConfig, seed: int, name: Name) -> Mode:
    """The mode of a use of a sample, by the shares of the config (law 1)."""
    modes, place = list(config.shares.items()), uniform(seed, "conditioning", *name)
    for mode, share in modes:
        place -= share
        if place < 0:
            return mode
    return modes[-1][0]  # by rounding


def prefix_of(pixels: int, strides: Strides) -> int:
    """Latent frames that hold the first `pixels` frames. Raises UserError where they end within a latent frame."""
    rest = (pixels - 1) % strides.temporal
    if pixels < 1 or rest:
        lower = max(1, pixels - rest)
        raise UserError(
            f"{pixels} given frames end within a latent frame, which holds {strides.temporal}: give {lower} or {lower + strides.temporal}"
        )
    return 1 + (pixels - 1) // strides.temporal


def conditioning_mask(mode: Mode, frames: int, prefix: int, seed: int, name: Name) -> Tensor:
    """bool (T,), True at the conditioning frames of `frames` latent frames; none of an image.

    Mode `prefix` gives the first `prefix` ones, mode `mask` 1 to T - 1 at any places; their number and places are drawn by name.
    """
    mask_T = torch.zeros(frames, dtype=torch.bool)
    if frames == 1 or mode == "none":
        return mask_T
    if mode == "mask":
        count = 1 + int(uniform(seed, "given_count", *name) * (frames - 1))
        mask_T[torch.as_tensor(permutation(frames, seed, "given_frames", *name)[:count])] = True
        return mask_T
    mask_T[: prefix if mode == "prefix" else 1] = True
    if mode == "first_last":
        mask_T[-1] = True
    return mask_T


def check_conditioning(config: ConditioningConfig, bucket: Bucket, strides: Strides) -> None:
    """Raises UserError for a mode that leaves nothing to predict of videos of a bucket, or gives a part of a latent frame."""
    if not config.gives_frames:
        return
    prefix = prefix_of(config.prefix_frames, strides) if config.prefix else 0
    if bucket.is_image:
        return
    frames = strides.latent(bucket)[0]
    for mode in config.shares:
        count = {"none": 0, "first": 1, "mask": 1, "first_last": 2, "prefix": prefix}[mode]
        if count >= frames:
            raise UserError(
                f"conditioning.{mode} gives {count} latent frames, and videos of bucket {bucket} have {frames}: nothing is left to predict"
            )
