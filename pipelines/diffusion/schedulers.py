"""Multistep samplers through diffusers' own schedulers: UniPC and DPM-Solver++, set as for its video pipelines.

UniPC from Zhao et al. 2023 (arXiv:2302.04867), DPM-Solver++ from Lu et al. 2022 (arXiv:2211.01095), both of second order. One call of the
model a step, at the scheduler's timesteps, which are whole numbers: so the samples are those of diffusers' pipelines.

Legend: B batch, C channels, T h w latent.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from mmspeed.config.schema import Config, DdpmConfig, PublishedModelConfig
from mmspeed.errors import UserError
from mmspeed.models.diffusers.repository import Repository
from mmspeed.models.families import family_of
from mmspeed.models.families.base import Sampling
from mmspeed.models.families.complete import shift_by_tokens
from mmspeed.models.sections import repository_of
from mmspeed.pipelines.diffusion.ddpm import trailing_timesteps
from mmspeed.pipelines.diffusion.samplers import OnStep, Predict, at_least_float32, call, tell

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
    x = at_least_float32(noise_BCThw)
    total = len(scheduler.timesteps)
    for i, timestep in enumerate(scheduler.timesteps):
        predicted = call(predict, x, timestep.item() / last)
        x = scheduler.step(predicted, timestep, x, return_dict=False)[0].to(x.dtype)
        tell(on_step, i + 1, total)
    return x


@dataclass(frozen=True)
class FamilySampler:
    """The sampler of a published model: its repository's own scheduler, driven as its pipeline does.

    Args:
        scheduler: the contents of the repository's scheduler_config.json.
        sampling: what the pipeline does around it.
        tokens: of the model, of the videos that are sampled; None: not known yet (see `sized`).
    """

    scheduler: Mapping[str, Any]
    sampling: Sampling
    tokens: int | None = None

    def sized(self, tokens: int) -> FamilySampler:
        """The sampler of videos of so many tokens."""
        return replace(self, tokens=tokens)

    def prepared(self, steps: int) -> Any:
        """The scheduler, set to a number of steps. Raises UserError for a scheduler that diffusers does not have, or of another kind."""
        import diffusers

        name = str(self.scheduler.get("_class_name"))
        kind = getattr(diffusers, name, None)
        if kind is None or "sample" not in inspect.signature(kind.step).parameters:
            raise UserError(f"sample.sampler: family: the scheduler {name} of the model's repository is not known")
        scheduler = kind.from_config(dict(self.scheduler))
        arguments: dict[str, Any] = {}
        if self.sampling.sigmas is not None:
            arguments["sigmas"] = self.sampling.sigmas(steps)
        if scheduler.config.get("use_dynamic_shifting", False):
            arguments["mu"] = self._mu(scheduler.config)
        scheduler.set_timesteps(**(arguments if "sigmas" in arguments else {"num_inference_steps": steps, **arguments}))
        if hasattr(scheduler, "set_begin_index"):
            scheduler.set_begin_index(0)
        return scheduler

    def _mu(self, config: Mapping[str, Any]) -> float:
        """The exponent of the shift, on a line over the tokens."""
        if self.tokens is None:
            raise ValueError("the shift depends on the size of videos: take the sampler of a size first (sized)")
        return shift_by_tokens(config).on_line(self.tokens)

    @torch.no_grad()
    def sample(self, predict: Predict, noise_BCThw: Tensor, steps: int, on_step: OnStep | None = None) -> Tensor:
        """Data (B, C, T, h, w) from noise, float32; one call of `predict` a step. Raises UserError as `prepared`."""
        scheduler = self.prepared(steps)
        takes = inspect.signature(scheduler.step).parameters
        further = {"generator": generators(noise_BCThw)} if "generator" in takes else {}
        pack, unpack, start = self.sampling.pack, self.sampling.unpack, at_least_float32(noise_BCThw)
        x = pack(start) * float(getattr(scheduler, "init_noise_sigma", 1.0))
        timesteps, data = scheduler.timesteps, None
        for i, timestep in enumerate(timesteps):
            time = self.sampling.time(timestep.item())
            predicted = self.sampling.sign * pack(call(predict, unpack(x, start), time))
            if (
                "old_pred_original_sample" in takes
            ):  # it keeps the data that the step before predicted outside of itself
                before = timesteps[i - 1] if i else None
                x, data = scheduler.step(predicted, data, timestep, before, x, **further, return_dict=False)
            else:
                x = scheduler.step(predicted, timestep, x, **further, return_dict=False)[0]
            x = x.to(start.dtype)
            tell(on_step, i + 1, len(timesteps))
        return unpack(x, start)


def generators(noise_BCThw: Tensor) -> list[torch.Generator]:
    """Generators of the noise that some schedulers add in their steps, one for each sample, begun by the sample's first noise.

    So a sample's draws depend on its seed and prompt, and on nothing that is sampled beside it.
    """
    begun = []
    for noise in noise_BCThw.detach().float().cpu():
        seed = int.from_bytes(noise.flatten()[:2].contiguous().numpy().tobytes(), "little") >> 1
        begun.append(torch.Generator().manual_seed(seed))
    return begun


def family_sampler(config: Config, opened: Repository | None = None) -> FamilySampler | None:
    """The sampler of a config's published model; None for a model of our own, and for a repository without a scheduler."""
    if not isinstance(config.model, PublishedModelConfig):
        return None
    repository = repository_of(config.model, opened)
    if not repository.has("scheduler"):
        return None
    family = family_of(repository.class_name, repository.key)
    return FamilySampler(repository.config("scheduler"), family.sampling_of(repository.index))


def _make(name: str, **settings: str | float | bool) -> Scheduler:
    # imported here: only those who sample with diffusers wait for it
    from diffusers.schedulers.scheduling_dpmsolver_multistep import DPMSolverMultistepScheduler
    from diffusers.schedulers.scheduling_unipc_multistep import UniPCMultistepScheduler

    kind = UniPCMultistepScheduler if name == "unipc" else DPMSolverMultistepScheduler
    scheduler: Scheduler = kind(solver_order=2, **settings)
    return scheduler
