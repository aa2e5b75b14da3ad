"""Rectified flow: the path, the distribution of times and the sampler's times, against closed forms and diffusers."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from hypothesis import given, settings
from hypothesis import strategies as st

from mmspeed import rng
from mmspeed.config.schema import FlowConfig
from mmspeed.data.loading.collate import draw_noise, draw_quantiles
from mmspeed.pipelines.diffusion import flow
from mmspeed.pipelines.diffusion.objective import FlowObjective, make_objective, mean_error

SHAPE = (3, 4, 2, 5, 6)
NAMES = [("a.mp4", 0, 0), ("b.mp4", 0, 0), ("a.mp4", 1, 0), ("a.mp4", 0, 1)]

shifts = st.floats(0.1, 20)


def pair(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    return rng.normal(SHAPE, 0, "x0").to(dtype), rng.normal(SHAPE, 0, "noise").to(dtype)


def test_interpolate_matches_diffusers() -> None:
    x0, noise = pair(torch.float32)
    scheduler: Any = FlowMatchEulerDiscreteScheduler()
    timesteps = scheduler.timesteps[[10, 500, 990]]
    theirs = scheduler.scale_noise(x0, timesteps, noise)
    torch.testing.assert_close(flow.interpolate(x0, noise, timesteps.double() / 1000), theirs)


def test_times_near_noise_keep_their_precision() -> None:
    # 1 - t is taken in float64: in float32 this t is 1, and the data would vanish from x_t.
    t_B = torch.tensor([1 - 1e-9], dtype=torch.float64)
    x_t = flow.interpolate(torch.full((1, 1), 1e9), torch.zeros(1, 1), t_B)
    assert x_t.item() == pytest.approx(1.0)


@settings(deadline=None)
@given(shifts, st.floats(-3, 3), st.floats(0.05, 50), st.sampled_from(["uniform", "logit_normal"]))
def test_times_rise_with_the_quantile_and_stay_finite_at_both_ends(
    shift: float, mean: float, std: float, timesteps: Literal["uniform", "logit_normal"]
) -> None:
    cfg = FlowConfig(kind="flow", timesteps=timesteps, logit_mean=mean, logit_std=std, shift=shift)
    u_B = torch.tensor([0.0, 1e-300, 0.1, 0.4, 0.7, math.nextafter(1.0, 0.0), 1.0], dtype=torch.float64)
    t_B = flow.time_from_quantile(u_B, cfg)
    assert t_B.dtype == torch.float64
    assert torch.isfinite(t_B).all()
    assert t_B.min() >= 0
    assert t_B.max() <= 1
    assert (t_B.diff() >= 0).all()


@pytest.mark.parametrize("timesteps", ["uniform", "logit_normal"])
def test_training_times_stay_clear_of_both_ends(timesteps: Literal["uniform", "logit_normal"]) -> None:
    u_B = torch.tensor([0.0, 1.0], dtype=torch.float64)
    first, last = flow.time_from_quantile(u_B, FlowConfig(kind="flow", timesteps=timesteps)).tolist()
    assert 0 < first < 0.001
    assert 0.999 < last < 1


@settings(deadline=None)
@given(st.integers(1, 60), shifts)
def test_sampler_times_match_diffusers(steps: int, shift: float) -> None:
    times = flow.euler_times(steps, shift)
    assert times[0] == 1
    assert times[-1] == 0
    assert (times.diff() < 0).all()
    scheduler: Any = FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(sigmas=np.linspace(1, 1 / steps, steps).tolist())
    torch.testing.assert_close(times.float(), scheduler.sigmas)


def test_objective_pair_and_loss_are_float32_for_bfloat16_data() -> None:
    objective = make_objective(FlowConfig(kind="flow"))
    assert isinstance(objective, FlowObjective)
    x0, noise = pair(torch.float32)
    t_B = torch.tensor([0.2, 0.5, 0.9], dtype=torch.float64)
    x_t, target = objective.training_pair(x0.bfloat16(), noise, t_B)
    assert x_t.dtype == target.dtype == torch.float32
    assert torch.equal(target, noise - x0.bfloat16().float())
    loss_B = mean_error(target.bfloat16(), target) * objective.weight(t_B)
    assert loss_B.dtype == torch.float32
    torch.testing.assert_close(loss_B, (target.bfloat16().float() - target).pow(2).mean(dim=(1, 2, 3, 4)))
    both_B = mean_error(noise.bfloat16(), target.bfloat16()) * objective.weight(t_B)
    exact_B = (noise.bfloat16().float() - target.bfloat16().float()).pow(2).mean(dim=(1, 2, 3, 4))
    assert torch.equal(both_B, exact_B)


def test_draws_depend_on_the_name_alone() -> None:
    noise, u_B = draw_noise(NAMES, SHAPE[1:], 7), draw_quantiles(NAMES, 7)
    assert noise.shape == (4, *SHAPE[1:])
    assert noise.dtype == torch.float32
    assert u_B.dtype == torch.float64
    for i, name in enumerate(NAMES):  # alone, and in another company, each meets the same draws
        assert torch.equal(draw_noise([name], SHAPE[1:], 7)[0], noise[i])
        assert draw_quantiles([name], 7)[0] == u_B[i]
    assert torch.equal(draw_noise(NAMES[::-1], SHAPE[1:], 7), noise.flip(0))
    assert len({x.item() for x in u_B}) == len(NAMES)
    assert len({x.item() for x in noise[:, 0, 0, 0, 0]}) == len(NAMES)
    assert not torch.equal(draw_noise(NAMES, SHAPE[1:], 8), noise)
