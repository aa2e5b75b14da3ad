"""Latents of conditioning frames, encoded apart from those of the whole video.

Legend: B batch, C channels, F H W frames and pixels, T h w latent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from mmspeed.protocols import Posterior


def with_grey(video_BCFHW: Tensor, last: bool) -> Tensor:
    """The video with grey pixels in all frames but the first, and but the last where `last` is set."""
    grey_BCFHW = torch.zeros_like(video_BCFHW)
    places = [0, -1] if last else [0]
    grey_BCFHW[:, :, places] = video_BCFHW[:, :, places]
    return grey_BCFHW


def frame_latents(
    video_BCFHW: Tensor, names: Iterable[str], encode: Callable[[Tensor], Posterior]
) -> dict[str, Tensor]:
    """The latents of conditioning frames of videos, by their names (see `Conditioning.stored`), each (B, C, T, h, w).

    `first` is the mean of the first frame encoded alone, `first_logvar` its log-variance, where the codec has one; `grey_first` and
    `grey_first_last` are those of the video with grey frames in place of those that are not given.
    """
    names, latents = list(names), {}
    if "first" in names:
        alone = encode(video_BCFHW[:, :, :1])
        latents["first"] = alone.mean_BCThw
        if "first_logvar" in names and alone.logvar_BCThw is not None:
            latents["first_logvar"] = alone.logvar_BCThw
    for name in names:
        if name.startswith("grey_"):
            latents[name] = encode(with_grey(video_BCFHW, last=name == "grey_first_last")).mean_BCThw
    return latents
