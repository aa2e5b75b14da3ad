"""Denoising diffusion: schedules, targets and weights, against diffusers and closed forms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import DDPMScheduler
from hypothesis import given, settings
from hypothesis import strategies as st

from mmspeed import rng
from mmspeed.config import make_config
from mmspeed.config.schema import DdpmConfig
from mmspeed.data.loading.collate import draw_noise, draw_quantiles
from mmspeed.errors import UserError
from mmspeed.pipelines.diffusion import ddpm
from mmspeed.pipelines.diffusion.objective import DdpmObjective, make_objective, mean_error

SHAPE = (4, 3, 2, 4, 5)
SCHEDULES = ["linear", "scaled_linear", "cosine"]
DIFFUSERS_NAME = {"linear": "linear", "scaled_linear": "scaled_linear", "cosine": "squaredcos_cap_v2"}


def config(schedule: str = "scaled_linear", zero: bool = False, steps: int = 1000, **fields: object) -> DdpmConfig:
    return DdpmConfig.model_validate(
        {"kind": "ddpm", "schedule": schedule, "zero_terminal_snr": zero, "steps": steps, **fields}
    )


def theirs(cfg: DdpmConfig) -> Any:
    scheduler: Any = DDPMScheduler
    return scheduler(
        num_train_timesteps=cfg.steps, beta_schedule=DIFFUSERS_NAME[cfg.schedule], beta_start=cfg.beta_start,
        beta_end=cfg.beta_end, rescale_betas_zero_snr=cfg.zero_terminal_snr,
        prediction_type="v_prediction" if cfg.prediction == "v" else "epsilon",
    )  # fmt: skip


def data() -> tuple[torch.Tensor, torch.Tensor]:
    return rng.normal(SHAPE, 0, "x0"), rng.normal(SHAPE, 0, "noise")


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_alphas_cumprod_matches_diffusers(schedule: str, zero: bool) -> None:
    cfg = config(schedule, zero)
    abar = ddpm.alphas_cumprod(cfg)
    # diffusers multiplies a thousand float32 factors, each off by up to 6e-8.
    torch.testing.assert_close(abar.float(), theirs(cfg).alphas_cumprod, rtol=2e-5, atol=2e-6)
    assert abar.dtype == torch.float64
    assert (abar.diff() < 0).all()


@pytest.mark.parametrize("prediction", ["v", "epsilon"])
def test_min_snr_makes_either_target_the_same_clipped_loss_of_the_data(prediction: ddpm.Prediction) -> None:
    # Hang et al.: the weighted loss is min(snr, gamma) |x0 - found x0|^2, whatever is predicted.
    x0, noise = (tensor.double() for tensor in data())
    abar_B = torch.tensor([0.999, 0.9, 0.4, 0.01], dtype=torch.float64)
    snr_B = ddpm.snr(abar_B)
    x_t = ddpm.add_noise(x0, noise, abar_B)
    target = ddpm.training_target(x0, noise, abar_B, prediction)
    predicted = target + 0.1 * rng.normal(SHAPE, 0, "error").double()
    error_B = (predicted - target).pow(2).flatten(1).mean(1)
    x0_error_B = (ddpm.x0_and_noise(x_t, predicted, abar_B, prediction)[0] - x0).pow(2).flatten(1).mean(1)
    weighted_B = ddpm.min_snr_weight(snr_B, 5.0, prediction) * error_B
    torch.testing.assert_close(weighted_B, snr_B.clamp(max=5.0) * x0_error_B)


def test_min_snr_weights_at_the_ends_are_finite() -> None:
    snr_B = torch.tensor([0.0, 5e-324, float("inf")], dtype=torch.float64)
    assert ddpm.min_snr_weight(snr_B, 5.0, "epsilon").tolist() == [1, 1, 0]
    assert ddpm.min_snr_weight(snr_B, 5.0, "v").tolist() == [0, 5e-324, 0]


@settings(deadline=None)
@given(st.integers(2, 5000))
def test_model_time_and_timestep_are_one_to_one_also_in_float32(steps: int) -> None:
    objective = DdpmObjective(config(steps=steps))
    index_B = torch.arange(steps)
    t_B = objective.time_of(index_B)
    assert t_B[0] == 0
    assert t_B[-1] == 1
    assert torch.equal(objective.index_of(t_B), index_B)
    assert torch.equal(objective.index_of(t_B.float()), index_B)


@pytest.mark.parametrize("prediction", ["v", "epsilon"])
def test_objective_pair_matches_diffusers(prediction: str) -> None:
    cfg = config(prediction=prediction)
    objective = make_objective(cfg)
    assert isinstance(objective, DdpmObjective)
    x0, _ = data()
    names = [(f"{i}", 0, 0) for i in range(SHAPE[0])]
    noise, t_B = draw_noise(names, SHAPE[1:], 0), objective.time_from_quantile(draw_quantiles(names, 0))
    x_t, target = objective.training_pair(x0.bfloat16(), noise, t_B)
    assert x_t.dtype == target.dtype == torch.float32
    scheduler, index = theirs(cfg), objective.index_of(t_B)
    x0 = x0.bfloat16().float()
    torch.testing.assert_close(x_t, scheduler.add_noise(x0, noise, index), rtol=1e-4, atol=1e-4)
    expected = noise if prediction == "epsilon" else scheduler.get_velocity(x0, noise, index)
    torch.testing.assert_close(target, expected, rtol=1e-4, atol=1e-4)


def test_objective_loss_carries_the_weight() -> None:
    t_B = torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64)
    target = torch.zeros(3, 2, 1, 2, 2)
    plain = make_objective(config(zero=True, min_snr_gamma=None))
    assert (mean_error(target + 2, target) * plain.weight(t_B)).tolist() == [4, 4, 4]
    capped = make_objective(config(zero=True, min_snr_gamma=5.0, allow_zero_weight=True))
    assert isinstance(capped, DdpmObjective)
    snr_B = ddpm.snr(capped.abar(t_B))
    loss_B = mean_error((target + 2).bfloat16(), target) * capped.weight(t_B)
    assert loss_B.dtype == torch.float32
    torch.testing.assert_close(loss_B, (4 * snr_B.clamp(max=5) / (snr_B + 1)).float())
    assert torch.isfinite(loss_B).all()


def test_weights_that_do_not_train_the_start_of_sampling_are_refused_unless_forced() -> None:
    tree = {"data": {"sources": [{"path": "clips"}], "buckets": [{"frames": 5, "height": 32, "width": 48}]}}
    section = {"kind": "ddpm", "min_snr_gamma": 5}
    with pytest.raises(
        UserError, match=r"has the weight 0 at pure noise, where sampling begins.*allow_zero_weight: true"
    ) as caught:
        make_config({**tree, "objective": section})
    assert "\n" not in str(caught.value)
    forced = make_config({**tree, "objective": section | {"allow_zero_weight": True}}).objective
    at_noise = torch.ones(1, dtype=torch.float64)
    assert make_objective(forced).weight(at_noise).item() == 0
    for change in ({"zero_terminal_snr": False}, {"prediction": "epsilon", "zero_terminal_snr": False}):
        assert make_objective(make_config({**tree, "objective": section | change}).objective).weight(at_noise) > 0
        with pytest.raises(
            UserError, match="allow_zero_weight goes with min_snr_gamma, zero_terminal_snr and prediction: v"
        ):
            make_config({**tree, "objective": section | change | {"allow_zero_weight": True}})
    with pytest.raises(UserError, match=r"'objective\.allow_zero_weight'"):
        make_config({**tree, "objective": section | {"allow_zero_weight": "perhaps"}})
