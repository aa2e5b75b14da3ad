"""Discrete denoising diffusion as pure functions: noise schedules, targets, and the data that a prediction implies.

Schedules from Ho et al. 2020 (linear), Rombach et al. 2022 (scaled linear) and Nichol & Dhariwal 2021 (cosine); zero
terminal SNR and trailing timesteps from Lin et al. 2023 (arXiv:2305.08891); v-prediction from Salimans & Ho 2022
(arXiv:2202.00512); min-SNR weights from Hang et al. 2023 (arXiv:2303.09556).

Legend: B batch, S training timesteps; "abar" is the product of (1 - beta) up to a timestep, the share of x_t's variance
that is data: x_t = sqrt(abar) x0 + sqrt(1 - abar) noise. Other tensors have B first and any dims after it.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Literal

import torch
from torch import Tensor

from mmspeed.config.schema import DdpmConfig
from mmspeed.pipelines.diffusion.flow import per_sample

Prediction = Literal["v", "epsilon"]
LARGEST_BETA = 0.999  # of the cosine schedule, whose last beta would be 1


def betas(cfg: DdpmConfig) -> Tensor:
    """The variance that each timestep adds, float64 (S,), before any rescaling to zero terminal SNR."""
    if cfg.schedule == "cosine":
        s = torch.arange(cfg.steps + 1, dtype=torch.float64) / cfg.steps
        abar = torch.cos((s + 0.008) / 1.008 * (math.pi / 2)).square()
        return (1 - abar[1:] / abar[:-1]).clamp(max=LARGEST_BETA)
    power = 0.5 if cfg.schedule == "scaled_linear" else 1.0
    ends = (cfg.beta_start**power, cfg.beta_end**power)
    return torch.linspace(*ends, cfg.steps, dtype=torch.float64) ** (1 / power)


def alphas_cumprod(cfg: DdpmConfig) -> Tensor:
    """abar of every timestep, float64 (S,), falling; its last entry is exactly 0 under `zero_terminal_snr`."""
    abar = torch.cumprod(1 - betas(cfg), dim=0)
    if cfg.snr_shift_scale != 1:  # the signal-to-noise ratio abar / (1 - abar), divided by it
        abar = abar / (cfg.snr_shift_scale + (1 - cfg.snr_shift_scale) * abar)
    return rescale_zero_terminal_snr(abar) if cfg.zero_terminal_snr else abar


def rescale_zero_terminal_snr(abar: Tensor) -> Tensor:
    """`abar` (S,), its root moved and scaled: the last becomes 0, the first stays (Lin et al. 2023, algorithm 1)."""
    root = abar.sqrt()
    first, last = root[0], root[-1]
    return ((root - last) * (first / (first - last))).square()


def add_noise(x0: Tensor, noise: Tensor, abar_B: Tensor) -> Tensor:
    """x_t = sqrt(abar) x0 + sqrt(1 - abar) noise, of the shape (B, ...) and dtype of `x0`."""
    return _signal(abar_B, x0) * x0 + _spread(abar_B, x0) * noise


def training_target(x0: Tensor, noise: Tensor, abar_B: Tensor, prediction: Prediction) -> Tensor:
    """The model's target, (B, ...): the noise, or v = sqrt(abar) noise - sqrt(1 - abar) x0."""
    if prediction == "epsilon":
        return noise
    return _signal(abar_B, x0) * noise - _spread(abar_B, x0) * x0


def x0_and_noise(x_t: Tensor, predicted: Tensor, abar_B: Tensor, prediction: Prediction) -> tuple[Tensor, Tensor]:
    """The data and the noise that a prediction at `x_t` implies, both (B, ...).

    With epsilon-prediction abar must not be 0: pure noise has no information about the data.
    """
    signal, spread = _signal(abar_B, x_t), _spread(abar_B, x_t)
    if prediction == "epsilon":
        return (x_t - spread * predicted) / signal, predicted
    return signal * x_t - spread * predicted, signal * predicted + spread * x_t


def snr(abar_B: Tensor) -> Tensor:
    """Signal-to-noise ratio abar / (1 - abar), of the shape of `abar_B`; 0 at pure noise."""
    return abar_B / (1 - abar_B)


def min_snr_weight(snr_B: Tensor, gamma: float, prediction: Prediction) -> Tensor:
    """Loss weight (B,) that caps an x0-loss's weight at `gamma` (Hang et al. 2023); finite for every SNR from 0 on.

    epsilon: min(snr, gamma) / snr, which tends to 1 at SNR 0. v: min(snr, gamma) / (snr + 1), which is 0 there.
    """
    if prediction == "epsilon":
        return (gamma / snr_B).clamp(max=1)  # the same quotient, written so that SNR 0 gives 1 and not 0 / 0
    return snr_B.clamp(max=gamma) / (snr_B + 1)


def trailing_timesteps(train_steps: int, steps: int) -> list[int]:
    """`steps` evenly spaced timesteps, falling from the last training timestep ("trailing"; Lin et al. 2023, table 2).

    Exact fractions: in floating point the count is off by one for some step numbers. Raises ValueError when
    `steps` is not in 1..`train_steps`.
    """
    if not 1 <= steps <= train_steps:
        raise ValueError(f"a sampler of {train_steps} training timesteps takes 1 to {train_steps} steps, not {steps}")
    return [round(Fraction(train_steps * (steps - i), steps)) - 1 for i in range(steps)]


def _signal(abar_B: Tensor, like: Tensor) -> Tensor:
    return per_sample(abar_B.sqrt(), like)


def _spread(abar_B: Tensor, like: Tensor) -> Tensor:
    return per_sample((1 - abar_B).sqrt(), like)
