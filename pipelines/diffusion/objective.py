"""Objectives: one interface to rectified flow and denoising diffusion, in training and in sampling.

Model time is a number in [0, 1], 0 at data and 1 at noise, for both. Of S diffusion timesteps, index i is model time
i / (S - 1); that is the only place where the two meet.

Times are float64 and may stay on the CPU while samples are on an accelerator; only coefficients move. The model is
given the time in float32. Targets, losses and weights are float32, also when the model answers in bfloat16.

Legend: B batch, C channels, T h w latent.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from mmspeed.config.schema import DdpmConfig, FamilyObjectiveConfig, FlowConfig, ObjectiveConfig
from mmspeed.errors import UserError, nearest
from mmspeed.pipelines.diffusion import ddpm, flow, samplers, schedulers
from mmspeed.pipelines.diffusion.samplers import OnStep, Predict, at_least_float32
from mmspeed.pipelines.diffusion.schedulers import FamilySampler
from mmspeed.shapes import Bucket

ROUNDING = 1e-9  # of a time that stands for a whole step


class Objective(Protocol):
    """The interface of an objective in training and sampling."""

    sampler_names: tuple[str, ...]  # the first is the one of `auto`
    family: FamilySampler | None  # of a published model's repository

    def sized(self, bucket: Bucket, tokens: int) -> Objective:
        """The objective of samples of a bucket, of `tokens` tokens each; itself where nothing depends on size.

        Raises UserError for a size that it has no times for.
        """
        ...

    def time_from_quantile(self, u_B: Tensor) -> Tensor:
        """Model times (B,), float64, of quantiles `u_B` in [0, 1) of the training distribution of times."""
        ...

    def training_pair(self, x0_BCThw: Tensor, noise_BCThw: Tensor, t_B: Tensor) -> tuple[Tensor, Tensor]:
        """(x_t, target), both (B, C, T, h, w) on the device of `x0_BCThw`, at least float32."""
        ...

    def weight(self, t_B: Tensor) -> Tensor:
        """Weight of each sample's mean squared error in the loss, float32 (B,), on the device of `t_B`."""
        ...

    def clean(self, x_BCThw: Tensor, predicted_BCThw: Tensor, t_B: Tensor) -> Tensor:
        """The data in noisy latents, by their prediction."""
        ...

    def sample(
        self, predict: Predict, noise_BCThw: Tensor, steps: int, sampler: str = "auto", on_step: OnStep | None = None
    ) -> Tensor:
        """Data (B, C, T, h, w) from noise, float32, without gradients.

        `on_step(done, total)` is called after each step. Raises UserError for a sampler that does not fit the objective
        or a number of steps it cannot take.
        """
        ...


class FlowObjective:
    """Rectified flow: the model predicts the velocity noise - x0."""

    sampler_names: tuple[str, ...] = FlowConfig.samplers

    def __init__(self, cfg: FlowConfig, family: FamilySampler | None = None) -> None:
        self.cfg, self.family = cfg, family

    def sized(self, bucket: Bucket, tokens: int) -> FlowObjective:
        cfg = flow.sized(self.cfg, bucket, tokens)
        if cfg is self.cfg and self.family is None:
            return self
        return FlowObjective(cfg, None if self.family is None else self.family.sized(tokens))

    def time_from_quantile(self, u_B: Tensor) -> Tensor:
        return flow.time_from_quantile(u_B, self.cfg)

    def training_pair(self, x0_BCThw: Tensor, noise_BCThw: Tensor, t_B: Tensor) -> tuple[Tensor, Tensor]:
        x0, noise = _working_pair(x0_BCThw, noise_BCThw)
        return flow.interpolate(x0, noise, t_B.double()), flow.velocity(x0, noise)

    def weight(self, t_B: Tensor) -> Tensor:
        return torch.ones_like(t_B, dtype=torch.float32)

    def clean(self, x_BCThw: Tensor, predicted_BCThw: Tensor, t_B: Tensor) -> Tensor:
        return x_BCThw - t_B.to(x_BCThw)[:, None, None, None, None] * predicted_BCThw.to(x_BCThw)

    @torch.no_grad()
    def sample(
        self, predict: Predict, noise_BCThw: Tensor, steps: int, sampler: str = "auto", on_step: OnStep | None = None
    ) -> Tensor:
        if sampler == "family":
            return _family(self.family).sample(predict, noise_BCThw, steps, on_step)
        name = _pick_sampler(sampler, self.sampler_names, "flow")
        if steps < 1:
            raise UserError(f"sample.steps is {steps}: use at least 1")
        if name in schedulers.SCHEDULERS:
            scheduler = schedulers.flow_scheduler(name, flow.number_of_shift(self.cfg), steps)
            return schedulers.multistep(predict, noise_BCThw, scheduler, schedulers.FLOW_STEPS, on_step)
        times = flow.euler_times(steps, flow.number_of_shift(self.cfg)).tolist()
        loop = samplers.heun if name == "heun" else samplers.euler
        return loop(predict, noise_BCThw, times, on_step)


class DdpmObjective:
    """Denoising diffusion: the model predicts v or the noise, at one of `cfg.steps` timesteps."""

    sampler_names: tuple[str, ...] = DdpmConfig.samplers

    def __init__(self, cfg: DdpmConfig, family: FamilySampler | None = None) -> None:
        self.cfg, self.family = cfg, family
        self.alphas_cumprod = ddpm.alphas_cumprod(cfg)

    def sized(self, bucket: Bucket, tokens: int) -> DdpmObjective:
        return self if self.family is None else DdpmObjective(self.cfg, self.family.sized(tokens))

    def time_from_quantile(self, u_B: Tensor) -> Tensor:
        last = self.cfg.steps - 1
        low, high = self.cfg.range or (0.0, 1.0)
        first, end = math.ceil(low * last - ROUNDING), math.floor(high * last + ROUNDING)
        index_B = (first + u_B.double() * (end - first + 1)).floor().clamp(first, end)
        return self.time_of(index_B)

    def time_of(self, index_B: Tensor) -> Tensor:
        """Model times (B,), float64, of timesteps 0..steps - 1."""
        return index_B.double() / (self.cfg.steps - 1)

    def index_of(self, t_B: Tensor) -> Tensor:
        """The timestep (B,), int64, nearest to a model time of any float type from float32 up."""
        return (t_B.double() * (self.cfg.steps - 1)).round().long()

    def abar(self, t_B: Tensor) -> Tensor:
        """Share of data in the variance of x_t at model times (B,), float64 on the device of `t_B`."""
        return self.alphas_cumprod.to(t_B.device)[self.index_of(t_B)]

    def training_pair(self, x0_BCThw: Tensor, noise_BCThw: Tensor, t_B: Tensor) -> tuple[Tensor, Tensor]:
        x0, noise = _working_pair(x0_BCThw, noise_BCThw)
        abar_B = self.abar(t_B)
        return ddpm.add_noise(x0, noise, abar_B), ddpm.training_target(x0, noise, abar_B, self.cfg.prediction)

    def weight(self, t_B: Tensor) -> Tensor:
        if self.cfg.min_snr_gamma is None:
            return torch.ones_like(t_B, dtype=torch.float32)
        return ddpm.min_snr_weight(ddpm.snr(self.abar(t_B)), self.cfg.min_snr_gamma, self.cfg.prediction).float()

    def clean(self, x_BCThw: Tensor, predicted_BCThw: Tensor, t_B: Tensor) -> Tensor:
        return ddpm.x0_and_noise(x_BCThw, predicted_BCThw.to(x_BCThw), self.abar(t_B), self.cfg.prediction)[0]

    @torch.no_grad()
    def sample(
        self, predict: Predict, noise_BCThw: Tensor, steps: int, sampler: str = "auto", on_step: OnStep | None = None
    ) -> Tensor:
        if sampler == "family":
            return _family(self.family).sample(predict, noise_BCThw, steps, on_step)
        name = _pick_sampler(sampler, self.sampler_names, "ddpm")
        if not 1 <= steps <= self.cfg.steps:
            raise UserError(f"sample.steps is {steps}: use 1 to {self.cfg.steps}, the objective's timesteps")
        if name in schedulers.SCHEDULERS:
            scheduler = schedulers.ddpm_scheduler(name, self.cfg, steps)
            return schedulers.multistep(predict, noise_BCThw, scheduler, self.cfg.steps - 1, on_step)
        index = torch.tensor(ddpm.trailing_timesteps(self.cfg.steps, steps))
        times = self.time_of(index).tolist()
        abars = [*self.alphas_cumprod[index].tolist(), 1.0]
        decompose = partial(_decompose, prediction=self.cfg.prediction)
        return samplers.ddim(predict, noise_BCThw, times, abars, decompose, on_step)


def make_objective(cfg: ObjectiveConfig, family: FamilySampler | None = None) -> FlowObjective | DdpmObjective:
    """The objective of a config section; `family`: the sampler of a published model's repository, for `sampler: family`.

    Raises ValueError for kind `family`: `mmspeed.models.families.complete` replaces it.
    """
    if isinstance(cfg, FamilyObjectiveConfig):
        raise ValueError("complete the config first (mmspeed.models.families.complete)")
    return FlowObjective(cfg, family) if isinstance(cfg, FlowConfig) else DdpmObjective(cfg, family)


def _family(sampler: FamilySampler | None) -> FamilySampler:
    """The repository's sampler. Raises UserError for a model without one."""
    if sampler is None:
        raise UserError(
            "sample.sampler: family is the scheduler of a published model's repository, and this model has none"
        )
    return sampler


def _working_pair(x0: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(x0.dtype, torch.float32)
    return x0.to(dtype), noise.to(dtype)


def mean_error(predicted_BCThw: Tensor, target_BCThw: Tensor, mask_BT: Tensor | None = None) -> Tensor:
    """The mean squared error of each sample, at least float32 (B,), over the latent frames that count (`mask_BT`; None: all).

    0 for a sample of which no frame counts.
    """
    squares_BCThw = (at_least_float32(predicted_BCThw) - at_least_float32(target_BCThw)).square()
    if mask_BT is None:
        return squares_BCThw.flatten(1).mean(dim=1)
    weight_BT = mask_BT.to(squares_BCThw)
    # left out by where, not by a product: what is not counted may be NaN
    frames_BT = squares_BCThw.mean(dim=(1, 3, 4)).where(weight_BT > 0, 0.0)
    return (frames_BT * weight_BT).sum(dim=1) / weight_BT.sum(dim=1).clamp(min=torch.finfo(torch.float32).tiny)


def _decompose(x: Tensor, predicted: Tensor, abar: float, prediction: ddpm.Prediction) -> tuple[Tensor, Tensor]:
    abar_B = torch.full((x.shape[0],), abar, dtype=torch.float64)
    return ddpm.x0_and_noise(x, predicted, abar_B, prediction)


def _pick_sampler(name: str, choices: tuple[str, ...], kind: str) -> str:
    if name == "auto":
        return choices[0]
    if name not in choices:
        known = " or ".join(choices)
        raise UserError(f"sample.sampler is {name!r}: a {kind} model takes {known}{nearest(name, choices)}")
    return name
