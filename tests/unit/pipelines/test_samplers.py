"""Samplers against closed forms and diffusers.

The closed forms: for data of one point every exact prediction leads straight to it; for Gaussian data N(m, s^2) the
exact prediction is linear in x, and the path of a noise z ends at m + s z.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler, FlowMatchHeunDiscreteScheduler
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from mmspeed import rng
from mmspeed.config.schema import DdpmConfig, FlowConfig
from mmspeed.errors import UserError
from mmspeed.pipelines.diffusion import samplers
from mmspeed.pipelines.diffusion.flow import per_sample
from mmspeed.pipelines.diffusion.objective import DdpmObjective, FlowObjective, Objective
from tests.support.machine import parts_of_numbers_have_the_bits_of_the_whole

SHAPE = (2, 3, 2, 4, 5)
MEAN, STD = 1.5, 0.3


def noise(dtype: torch.dtype = torch.float64) -> Tensor:
    return rng.normal(SHAPE, 0, "noise").to(dtype)


def flow_objective(shift: float = 1.0) -> FlowObjective:
    return FlowObjective(FlowConfig(kind="flow", shift=shift))


def ddpm_objective(prediction: str = "v", zero: bool = True, steps: int = 1000) -> DdpmObjective:
    cfg = {"kind": "ddpm", "prediction": prediction, "zero_terminal_snr": zero, "steps": steps}
    return DdpmObjective(DdpmConfig.model_validate(cfg))


def some_model(x: Tensor, t_B: Tensor) -> Tensor:
    """Nothing like a solution: a smooth function of x and t that mixes channels and positions."""
    return torch.sin(1.7 * x + 3 * per_sample(t_B, x)) + torch.tanh(x.roll(1, dims=1)) * x.mean(dim=-1, keepdim=True)


@pytest.mark.parametrize(("steps", "shift"), [(1, 1.0), (7, 3.0)])
def test_euler_matches_diffusers_on_any_model(steps: int, shift: float) -> None:
    scheduler: Any = FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(sigmas=torch.linspace(1, 1 / steps, steps, dtype=torch.float64).tolist())
    x = noise(torch.float32)
    for t in scheduler.timesteps:
        x = scheduler.step(some_model(x, (t / 1000).expand(SHAPE[0])), t, x).prev_sample
    ours = flow_objective(shift).sample(some_model, noise(torch.float32), steps, "euler")
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, x, rtol=1e-4, atol=1e-4)


def test_heun_matches_diffusers_on_any_model() -> None:
    steps = 7
    scheduler: Any = FlowMatchHeunDiscreteScheduler()
    scheduler.set_timesteps(steps)
    x = noise(torch.float32)
    for t in scheduler.timesteps:
        x = scheduler.step(some_model(x, (t / 1000).expand(SHAPE[0])), t, x).prev_sample
    times = [scheduler.sigmas[0].item(), *scheduler.sigmas[1:-1:2].tolist(), 0.0]
    assert len(times) == steps + 1
    ours = samplers.heun(some_model, noise(torch.float32), times)
    torch.testing.assert_close(ours, x, rtol=1e-4, atol=1e-4)


# the steps are divisors of 1000: only there does diffusers step from one to the next
@pytest.mark.parametrize(("prediction", "zero", "steps"), [("v", True, 10), ("v", False, 50), ("epsilon", False, 10)])
def test_ddim_matches_diffusers_on_any_model(prediction: str, zero: bool, steps: int) -> None:
    objective = ddpm_objective(prediction, zero)
    scheduler: Any = DDIMScheduler(
        beta_start=objective.cfg.beta_start, beta_end=objective.cfg.beta_end, beta_schedule="scaled_linear",
        prediction_type="v_prediction" if prediction == "v" else "epsilon", rescale_betas_zero_snr=zero,
        timestep_spacing="trailing", clip_sample=False,
    )  # fmt: skip
    scheduler.set_timesteps(steps)
    x = noise(torch.float32)
    for t in scheduler.timesteps:
        x = scheduler.step(some_model(x, (t / 999).expand(SHAPE[0])), int(t), x).prev_sample
    ours = objective.sample(some_model, noise(torch.float32), steps)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, x, rtol=1e-3, atol=1e-4 * x.abs().max().item())


@pytest.mark.parametrize(
    ("objective", "sampler", "calls"),
    [(flow_objective(), "euler", 5), (flow_objective(), "heun", 9), (ddpm_objective(), "ddim", 5)],
)
def test_calls_times_and_progress(objective: Objective, sampler: str, calls: int) -> None:
    seen: list[float] = []
    progress: list[tuple[int, int]] = []

    def predict(x: Tensor, t_B: Tensor) -> Tensor:
        assert x.shape == SHAPE
        assert x.dtype == t_B.dtype == torch.float32
        assert t_B.shape == (SHAPE[0],)
        assert not torch.is_grad_enabled()
        seen.append(t_B[0].item())
        return 0.1 * x

    objective.sample(predict, noise(torch.float32), 5, sampler, lambda done, total: progress.append((done, total)))
    assert len(seen) == calls
    assert seen[0] == 1  # every sampler starts at pure noise, where training goes too
    assert all(0 < t <= 1 for t in seen)
    assert sorted(seen, reverse=True) == seen
    assert progress == [(i, 5) for i in range(1, 6)]


@pytest.mark.parametrize("objective", [flow_objective(3.0), ddpm_objective()])
def test_the_sample_stays_float32_when_the_model_answers_in_bfloat16(objective: Objective) -> None:
    def coarse(x: Tensor, t_B: Tensor) -> Tensor:
        assert x.dtype == torch.float32
        return some_model(x, t_B).bfloat16()

    def rounded(x: Tensor, t_B: Tensor) -> Tensor:
        return some_model(x, t_B).bfloat16().float()

    actual = objective.sample(coarse, noise(torch.bfloat16), 6)
    assert actual.dtype == torch.float32
    assert torch.equal(actual, objective.sample(rounded, noise(torch.bfloat16).float(), 6))


@pytest.mark.parametrize("objective", [flow_objective(), ddpm_objective()])
def test_a_sample_does_not_depend_on_its_batch(objective: Objective) -> None:
    """The same bits beside any other sample. By itself its tensors have another shape, whose last numbers a machine may round otherwise: in
    4 steps of about 10 operations on numbers up to 4, 40 x 2^-22, and twice that for what grows on the way."""

    def alone(x: Tensor, t_B: Tensor) -> Tensor:
        return torch.sin(x + per_sample(t_B, x))

    z = noise(torch.float32)
    together, beside_another = objective.sample(alone, z, 4), objective.sample(alone, torch.cat((3 - z[:1], z[1:])), 4)
    assert torch.equal(beside_another[1], together[1]) and not torch.equal(beside_another[0], together[0])
    by_itself = objective.sample(alone, z[1:], 4)[0]
    torch.testing.assert_close(by_itself, together[1], rtol=0, atol=2e-5)
    if parts_of_numbers_have_the_bits_of_the_whole(z, slice(1, 2)):
        assert torch.equal(by_itself, together[1])


def test_auto_takes_the_first_and_strangers_are_named() -> None:
    for objective, other in ((flow_objective(), "ddim"), (ddpm_objective(), "euler")):
        z = noise(torch.float32)
        first = objective.sample(some_model, z, 3, objective.sampler_names[0])
        assert torch.equal(objective.sample(some_model, z, 3), first)
        with pytest.raises(UserError, match=rf"sample\.sampler is '{other}'"):
            objective.sample(some_model, z, 3, other)
        with pytest.raises(UserError, match=r"sample\.steps is 0"):
            objective.sample(some_model, z, 0)
    with pytest.raises(UserError, match="use 1 to 10"):
        ddpm_objective(steps=10).sample(some_model, z, 11)


@settings(deadline=None)
@given(st.floats(0, 20))
@example(0.0)
@example(1.0)
def test_guidance_moves_from_one_prediction_through_the_other(scale: float) -> None:
    x, t_B = noise(), torch.ones(SHAPE[0], dtype=torch.float64)
    calls: list[str] = []

    def cond(x: Tensor, t_B: Tensor) -> Tensor:
        calls.append("cond")
        return x.cos()

    def uncond(x: Tensor, t_B: Tensor) -> Tensor:
        calls.append("uncond")
        return x.sin()

    actual = samplers.guided(cond, uncond, scale)(x, t_B)
    torch.testing.assert_close(actual, x.sin() + scale * (x.cos() - x.sin()))
    assert sorted(calls) == {0.0: ["uncond"], 1.0: ["cond"]}.get(scale, ["cond", "uncond"])


def test_guidance_is_computed_in_the_samples_precision() -> None:
    x = noise(torch.float32)
    cond, uncond = x.cos().bfloat16(), x.sin().bfloat16()
    actual = samplers.guided(lambda x, t: cond, lambda x, t: uncond, 4.0)(x, torch.ones(SHAPE[0]))
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, uncond.float() + 4 * (cond.float() - uncond.float()))
