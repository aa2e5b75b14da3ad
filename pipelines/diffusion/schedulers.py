"""Multistep samplers through diffusers' own schedulers: UniPC and DPM-Solver++, set as for its video pipelines.

UniPC from Zhao et al. 2023 (arXiv:2302.04867), DPM-Solver++ from Lu et al. 2022 (arXiv:2211.01095), both of second order. One call of the
model a step, at the scheduler's timesteps, which are whole numbers: so the samples are those of diffusers' pipelines.

Legend: B batch, C channels, T h w latent.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from mmspeed.config.schema import DdpmConfig
from mmspeed.pipelines.diffusion.ddpm import trailing_timesteps
from mmspeed.pipelines.diffusion.samplers import OnStep, Predict, call, tell, working

SCHEDULERS = ("unipc", "dpm++")
FLOW_STEPS = 1000  # timesteps between data and noise, as diffusers counts those of a flow
SCHEDULES = {"linear": "linear", "scaled_linear": "scaled_linear", "cosine": "squaredcos_cap_v2"}


class Scheduler(Protocol):
    """The members of a multistep scheduler of diffusers that sampling uses."""

    timesteps: Tensor
    sigmas: Tensor
    num_inference_steps: int

    def set_timesteps(self, num_inference_steps: int | None = None, *, timesteps: list[int] | None = None) -> None:
        """Set the timesteps: their number, or themselves (DPM-Solver++ alone)."""
        ...

    def step(self, model_output: Tensor, timestep: Tensor, sample: Tensor, *, return_dict: bool) -> tuple[Tensor]:
        """The sample after a step, in a tuple where `return_dict` is False."""
        ...


def flow_scheduler(name: str, shift: float, steps: int) -> Scheduler:
    """The scheduler of a flow for `steps` steps, as Wan's pipelines have it."""
    scheduler = _make(name, use_flow_sigmas=True, flow_shift=shift, prediction_type="flow_prediction")
    scheduler.set_timesteps(steps)
    return scheduler


def ddpm_scheduler(name: str, cfg: DdpmConfig, steps: int) -> Scheduler:
    """The scheduler of a denoising diffusion for `steps` trailing timesteps, with the noise schedule of the config."""
    scheduler = _make(
        name,
        num_train_timesteps=cfg.steps,
        beta_start=cfg.beta_start,
        beta_end=cfg.beta_end,
        beta_schedule=SCHEDULES[cfg.schedule],
        prediction_type="v_prediction" if cfg.prediction == "v" else "epsilon",
        rescale_betas_zero_snr=cfg.zero_terminal_snr,
        timestep_spacing="trailing",
    )
    if name == "dpm++":
        scheduler.set_timesteps(timesteps=trailing_timesteps(cfg.steps, steps))
        return scheduler
    scheduler.set_timesteps(steps)
    if len(scheduler.timesteps) > steps:  # for some numbers its division in floating point adds a step below the first
        scheduler.timesteps = scheduler.timesteps[:steps]
        scheduler.sigmas = torch.cat((scheduler.sigmas[:steps], scheduler.sigmas[-1:]))
        scheduler.num_inference_steps = steps
    return scheduler


@torch.no_grad()
def multistep(
    predict: Predict, noise_BCThw: Tensor, scheduler: Scheduler, last: int, on_step: OnStep | None = None
) -> Tensor:
    """Walk down the timesteps of a scheduler; one call of `predict` a step. `last`: the timestep that is model time 1."""
    x = working(noise_BCThw)
    total = len(scheduler.timesteps)
    for i, timestep in enumerate(scheduler.timesteps):
        predicted = call(predict, x, timestep.item() / last)
        x = scheduler.step(predicted, timestep, x, return_dict=False)[0].to(x.dtype)
        tell(on_step, i + 1, total)
    return x


def _make(name: str, **settings: str | float | bool) -> Scheduler:
    # imported here: only those who sample with diffusers wait for it
    from diffusers.schedulers.scheduling_dpmsolver_multistep import DPMSolverMultistepScheduler
    from diffusers.schedulers.scheduling_unipc_multistep import UniPCMultistepScheduler

    kind = UniPCMultistepScheduler if name == "unipc" else DPMSolverMultistepScheduler
    scheduler: Scheduler = kind(solver_order=2, **settings)
    return scheduler
