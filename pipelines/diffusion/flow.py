"""Rectified flow as pure functions: straight lines from data (t = 0) to noise (t = 1), and the velocity along them.

From Liu et al. 2022 (rectified flow, arXiv:2209.03003); logit-normal times and timestep shift from Esser et al. 2024
(Stable Diffusion 3, arXiv:2403.03206).

Legend: B batch; every other tensor has B first and any dims after it, such as (B, C, T, h, w).
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmspeed.config.schema import FlowConfig
from mmspeed.device import without_waiting
from mmspeed.shapes import Bucket

# Half the spacing of the float64 numbers that `rng.uniform` draws: keeps the inverse normal CDF finite at u = 0.
SMALLEST_QUANTILE = 2.0**-54
LARGEST_QUANTILE = 1.0 - 2.0**-53


def per_sample(c_B: Tensor, like: Tensor) -> Tensor:
    """Coefficients (B,), one for each sample, as (B, 1, ...) with the dtype, device and dims of `like` (B, ...)."""
    return without_waiting(c_B.to(like.dtype), like.device).reshape(-1, *[1] * (like.ndim - 1))


def interpolate(x0: Tensor, noise: Tensor, t_B: Tensor) -> Tensor:
    """x_t = (1 - t) x0 + t noise, of the shape (B, ...) and dtype of `x0`. `t_B` in [0, 1]: 0 data, 1 noise."""
    return per_sample(1 - t_B, x0) * x0 + per_sample(t_B, x0) * noise


def velocity(x0: Tensor, noise: Tensor) -> Tensor:
    """The velocity d x_t / dt = noise - x0, (B, ...), the model's target; it is the same at every time of a line."""
    return noise - x0


def shift_time(t: Tensor, shift: float) -> Tensor:
    """t' = s t / (1 + (s - 1) t), of any shape: keeps 0 and 1, moves the rest towards noise when s > 1."""
    return shift * t / (shift * t + (1 - t))  # the same denominator, written so that 1 stays exactly 1


def sized(cfg: FlowConfig, bucket: Bucket, tokens: int) -> FlowConfig:
    """The config for samples of a bucket, of `tokens` tokens each: with a number as shift. Raises UserError where there is none."""
    shift = cfg.shift_of(bucket, tokens)
    return cfg if shift == cfg.shift else cfg.model_copy(update={"shift": shift})


def number_of_shift(cfg: FlowConfig) -> float:
    """The shift of a config whose shift is a number. Raises ValueError for one that depends on the sample's size."""
    if not isinstance(cfg.shift, float):
        raise ValueError(f"objective.shift is {cfg.shift}: take the objective of a size first (Objective.sized)")
    return cfg.shift


def time_from_quantile(u_B: Tensor, cfg: FlowConfig) -> Tensor:
    """The training time below which a share `u_B` in [0, 1) of all training times lies, float64 (B,).

    The inverse CDF of the configured distribution, then the shift (a number: see `sized`). Uniform numbers give training times; the
    middles of equal parts of [0, 1] give fixed times for validation. With a `range` the distribution is cut at its ends.
    """
    u_B = u_B.double().clamp(SMALLEST_QUANTILE, LARGEST_QUANTILE)
    if cfg.range is not None:
        low, high = (quantile_of_time(time, cfg) for time in cfg.range)
        cut = cfg.model_copy(update={"range": None})
        # rounding may step over an end, and that to float32, in which the model gets times
        return time_from_quantile(low + u_B * (high - low), cut).clamp(*_float32_inside(cfg.range))
    if cfg.timesteps == "logit_normal":
        u_B = torch.sigmoid(cfg.logit_mean + cfg.logit_std * torch.special.ndtri(u_B))
    return shift_time(u_B, number_of_shift(cfg))


def _float32_inside(bounds: tuple[float, float]) -> tuple[float, float]:
    """The least and the largest float32 number between two bounds."""
    low, high = (torch.tensor(bound, dtype=torch.float32) for bound in bounds)
    if low.double() < bounds[0]:
        low = torch.nextafter(low, torch.tensor(1.0))
    if high.double() > bounds[1]:
        high = torch.nextafter(high, torch.tensor(0.0))
    return float(low), float(high)


def quantile_of_time(time: float, cfg: FlowConfig) -> float:
    """The share of all training times below a time in [0, 1], without the config's `range`: the inverse of `time_from_quantile`."""
    shift = number_of_shift(cfg)
    t = torch.tensor(time / (shift - (shift - 1) * time), dtype=torch.float64)
    if cfg.timesteps == "logit_normal":
        t = torch.special.ndtr((torch.logit(t) - cfg.logit_mean) / cfg.logit_std)
    return float(t)


def euler_times(steps: int, shift: float) -> Tensor:
    """The `steps` + 1 times of a sampler, float64, falling from exactly 1 to exactly 0, evenly spaced before the shift.

    Raises ValueError when `steps` is below 1.
    """
    if steps < 1:
        raise ValueError(f"a sampler needs at least 1 step, not {steps}")
    return shift_time(torch.linspace(1, 0, steps + 1, dtype=torch.float64), shift)
