"""Frequencies of rotary positions: the original ones, and those of its extensions to longer sequences.

They are numbers of float32 on the CPU, as transformers computes them, and no tensors of the model: casting a model rounds none of them.

Legend: B batch, N tokens, A heads, D channels that rotate, H half of D, 2 cosine and sine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mmspeed.compute.operators.rotary import rotary
from mmspeed.compute.rope import rope_dtype
from mmspeed.device import without_waiting
from mmspeed.models.language.config import RotarySettings


@dataclass(frozen=True)
class Rotary:
    """Rotations by positions. frequencies: of each pair of channels. amplitude: a factor to cosines and sines (yarn)."""

    frequencies: tuple[float, ...]
    amplitude: float
    interleaved: bool

    def tables(self, pos_BN: Tensor, dtype: torch.dtype) -> Tensor:
        """Cosines and sines `turn_2BNH` in `rope_dtype(dtype)`: made once a forward pass, for all blocks."""
        kind = rope_dtype(dtype)
        frequency_H = without_waiting(torch.tensor(self.frequencies, dtype=kind), pos_BN.device)
        angle_BNH = pos_BN[..., None].to(kind) * frequency_H
        return torch.stack((angle_BNH.cos() * self.amplitude, angle_BNH.sin() * self.amplitude))

    def rotate(self, x_BNAD: Tensor, turn_2BNH: Tensor) -> Tensor:
        """Queries or keys, rotated; interleaved pairs come out in two halves, for both alike."""
        if self.interleaved:
            x_BNAD = torch.cat((x_BNAD[..., 0::2], x_BNAD[..., 1::2]), dim=-1)
        rotated_BNAD: Tensor = rotary(x_BNAD, turn_2BNH)
        return rotated_BNAD


def make_rotary(settings: RotarySettings, width: int) -> Rotary:
    """The rotations of `width` channels."""
    step_H = torch.arange(0, width, 2, dtype=torch.float32, device="cpu") / width
    rate_H = 1.0 / settings.theta**step_H
    amplitude = 1.0
    if settings.kind == "linear":
        assert settings.factor is not None
        rate_H = rate_H / settings.factor
    elif settings.kind == "llama3":
        rate_H = _llama3(rate_H, settings)
    elif settings.kind == "yarn":
        rate_H = _yarn(step_H, settings, width)
        amplitude = _yarn_amplitude(settings)
    return Rotary(tuple(rate_H.tolist()), amplitude, settings.interleaved)


def _llama3(rate_H: Tensor, settings: RotarySettings) -> Tensor:
    """Slow rotations are slowed down further, fast ones are kept, those between by interpolation (Llama 3.1)."""
    assert settings.factor is not None and settings.original is not None
    low, high, factor = settings.low_frequency, settings.high_frequency, settings.factor
    period_H = 2 * math.pi / rate_H
    slow_H = torch.where(period_H > settings.original / low, rate_H / factor, rate_H)
    share_H = (settings.original / period_H - low) / (high - low)
    between_H = (1 - share_H) * slow_H / factor + share_H * slow_H
    medium_H = ~(period_H < settings.original / high) & ~(period_H > settings.original / low)
    return torch.where(medium_H, between_H, slow_H)


def _factor(settings: RotarySettings) -> float:
    """Yarn's factor: the ratio of lengths where the settings name none."""
    if settings.factor is not None:
        return settings.factor
    assert settings.longest is not None and settings.original is not None
    return settings.longest / settings.original


def _yarn(step_H: Tensor, settings: RotarySettings, width: int) -> Tensor:
    """Interpolation of slow rotations, extrapolation of fast ones, and a ramp between (Peng et al. 2023)."""
    assert settings.original is not None
    factor, period_H = _factor(settings), settings.theta**step_H

    def channel(rotations: float) -> float:
        assert settings.original is not None
        return width * math.log(settings.original / (rotations * 2 * math.pi)) / (2 * math.log(settings.theta))

    low, high = channel(settings.beta_fast), channel(settings.beta_slow)
    if settings.truncates:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    if low == high:
        high += 0.001
    ramp_H = ((torch.arange(width // 2, dtype=torch.float32, device="cpu") - low) / (high - low)).clamp(0, 1)
    kept_H = 1 - ramp_H
    return 1.0 / (factor * period_H) * (1 - kept_H) + 1.0 / period_H * kept_H


def _stretch(factor: float, scale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _yarn_amplitude(settings: RotarySettings) -> float:
    if settings.attention is not None:
        return settings.attention
    factor = _factor(settings)
    if settings.scale and settings.scale_all:
        return _stretch(factor, settings.scale) / _stretch(factor, settings.scale_all)
    return _stretch(factor)


def score_factor(settings: RotarySettings) -> float:
    """A factor to the scores of latent attention beside 1 / sqrt(D): the square of yarn's scale over all channels (DeepSeek-V2)."""
    if settings.kind == "default" or not settings.scale_all:
        return 1.0
    assert settings.factor is not None
    return _stretch(settings.factor, settings.scale_all) ** 2
