"""Objectives of published models, from their repositories' schedulers: times, losses and what a config may change of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mmspeed import rng
from mmspeed.config import make_config
from mmspeed.config.schema import Config, DdpmConfig, FamilyObjectiveConfig, FlowConfig
from mmspeed.models.families.complete import objective_of, objective_warnings
from mmspeed.pipelines.diffusion import ddpm, flow
from mmspeed.pipelines.diffusion.objective import make_objective, mean_error
from mmspeed.shapes import Bucket

DYNAMIC = {
    "_class_name": "FlowMatchEulerDiscreteScheduler", "use_dynamic_shifting": True, "base_shift": 0.95, "max_shift": 2.05,
    "base_image_seq_len": 1024, "max_image_seq_len": 4096, "shift_terminal": 0.1,
}  # fmt: skip
COGVIDEOX = {
    "_class_name": "CogVideoXDDIMScheduler", "beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear",
    "prediction_type": "v_prediction", "rescale_betas_zero_snr": True, "timestep_spacing": "linspace", "snr_shift_scale": 3.0,
    "num_train_timesteps": 1000,
}  # fmt: skip
WAN = {
    "_class_name": "UniPCMultistepScheduler",
    "use_flow_sigmas": True,
    "prediction_type": "flow_prediction",
    "flow_shift": 5.0,
}


def family(**keys: Any) -> FamilyObjectiveConfig:
    return FamilyObjectiveConfig(kind="family", **keys)


def test_a_flows_shift_is_the_schedulers() -> None:
    assert objective_of(WAN, family()) == FlowConfig(kind="flow", shift=5.0)
    euler = {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 7.0, "use_dynamic_shifting": False}
    assert objective_of(euler, family()) == FlowConfig(kind="flow", shift=7.0)
    assert objective_of(euler, family(shift=3)) == FlowConfig(kind="flow", shift=3.0)
    uniform = objective_of(euler, family(timesteps="uniform", guidance=1.0, weighting="token"))
    assert uniform == FlowConfig(kind="flow", shift=7.0, timesteps="uniform", guidance=1.0, weighting="token")


def test_a_dynamic_shift_is_the_schedulers_at_every_number_of_tokens() -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler
    from diffusers.pipelines.ltx.pipeline_ltx import calculate_shift

    objective = make_objective(objective_of(DYNAMIC, family()))
    scheduler: Any = FlowMatchEulerDiscreteScheduler(**{k: v for k, v in DYNAMIC.items() if k[0] != "_"})
    t = torch.tensor([0.1, 0.5, 0.9]).double()
    for tokens in (24, 1024, 5000):
        cfg: Any = objective.sized(Bucket(9, 32, 32), tokens).cfg  # type: ignore[union-attr]
        mu = calculate_shift(tokens, 1024, 4096, 0.95, 2.05)
        torch.testing.assert_close(flow.shift_time(t, cfg.shift), scheduler.time_shift(mu, 1.0, t), rtol=1e-12, atol=0)


@pytest.mark.parametrize(("scale", "zero"), [(3.0, True), (1.0, False)])
def test_the_noise_schedule_is_exactly_the_schedulers(scale: float, zero: bool) -> None:
    from diffusers import CogVideoXDDIMScheduler

    config = {**COGVIDEOX, "snr_shift_scale": scale, "rescale_betas_zero_snr": zero}
    theirs: Any = CogVideoXDDIMScheduler(**{k: v for k, v in config.items() if k[0] != "_"})
    ours = objective_of(config, family())
    assert isinstance(ours, DdpmConfig) and ours.snr_shift_scale == scale
    assert torch.equal(ddpm.alphas_cumprod(ours), theirs.alphas_cumprod.double())


# -- repositories -------------------------------------------------------------------------------------------------------


def repository(folder: Path, scheduler: dict[str, Any], index: dict[str, Any], *transformers: str) -> Path:
    """A repository without weights: settings alone."""
    import json

    files = {"model_index.json": index, "scheduler/scheduler_config.json": scheduler}
    files |= {f"{name}/config.json": {"_class_name": "WanTransformer3DModel"} for name in transformers}
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    return folder


def tuned(folder: Path, model: dict[str, Any] | None = None, **sections: Any) -> Config:
    tree: dict[str, Any] = {
        "data": {"sources": [{"path": str(folder)}], "buckets": [{"frames": 1, "height": 16, "width": 16}]},
        "model": {"kind": "diffusers", "pretrained": str(folder), **(model or {})},
    }
    return make_config({**tree, **sections}, origin="test")


def test_an_objective_by_hand_that_contradicts_the_scheduler_is_warned_of(tmp_path: Path) -> None:
    folder = repository(tmp_path, WAN, {}, "transformer")
    assert objective_warnings(tuned(folder)) == []
    assert objective_warnings(tuned(folder, objective={"kind": "flow", "shift": 5.0, "timesteps": "uniform"})) == []
    (line,) = objective_warnings(tuned(folder, objective={"kind": "flow", "shift": 3.0}))
    assert "shift is 3.0, the scheduler's 5.0" in line
    (line,) = objective_warnings(tuned(folder, objective={"kind": "ddpm"}))
    assert "kind is ddpm, the scheduler's flow" in line


# -- losses -------------------------------------------------------------------------------------------------------------


def test_a_flows_pair_and_loss_are_the_schedulers() -> None:
    """x_t as the pipeline's scheduler adds noise, and the loss and its gradient of a 15-line reference."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    scheduler: Any = FlowMatchEulerDiscreteScheduler(shift=7.0)
    objective = make_objective(FlowConfig(kind="flow", shift=7.0))
    x0, noise, weight = (rng.normal((4, 3, 2, 4, 4), 1, name) for name in ("x0", "noise", "weight"))
    places = [0, 300, 700, 999]
    x_t = scheduler.scale_noise(x0, scheduler.timesteps[places], noise)
    ours, theirs = weight.clone().requires_grad_(), weight.clone().requires_grad_()
    x, target = objective.training_pair(x0, noise, scheduler.sigmas[places])
    torch.testing.assert_close(x, x_t, rtol=0, atol=1e-6)
    loss = mean_error(ours * x, target) * objective.weight(scheduler.sigmas[places])
    reference = ((theirs * x_t - (noise - x0)) ** 2).flatten(1).mean(1)
    torch.testing.assert_close(loss, reference, rtol=1e-6, atol=1e-6)
    loss.sum().backward()
    reference.sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-5)


def test_a_diffusions_pair_and_loss_are_the_schedulers() -> None:
    from diffusers import CogVideoXDDIMScheduler

    scheduler: Any = CogVideoXDDIMScheduler(**{k: v for k, v in COGVIDEOX.items() if k[0] != "_"})
    objective: Any = make_objective(objective_of(COGVIDEOX, family()))
    x0, noise, weight = (rng.normal((4, 3, 2, 4, 4), 1, name) for name in ("x0", "noise", "weight"))
    index = torch.tensor([0, 300, 700, 999])
    x_t, v = scheduler.add_noise(x0, noise, index), scheduler.get_velocity(x0, noise, index)
    ours, theirs = weight.clone().requires_grad_(), weight.clone().requires_grad_()
    x, target = objective.training_pair(x0, noise, objective.time_of(index))
    loss = mean_error(ours * x, target) * objective.weight(objective.time_of(index))
    reference = ((theirs * x_t - v) ** 2).flatten(1).mean(1)
    torch.testing.assert_close(loss, reference, rtol=1e-6, atol=1e-6)
    loss.sum().backward()
    reference.sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-5)


def test_guidance_of_a_family_gets_the_norm_of_the_captions_prediction() -> None:
    """As in QwenImagePipeline, on packed tokens; other families have the plain sum."""
    from mmspeed.models.families import FAMILIES
    from mmspeed.models.families.base import packed

    cond, uncond = (rng.normal((2, 16, 1, 4, 6), 1, name) for name in ("cond", "uncond"))
    rows, others = packed(cond, (1, 2, 2)), packed(uncond, (1, 2, 2))
    both = others + 4.0 * (rows - others)
    truth = both * (torch.norm(rows, dim=-1, keepdim=True) / torch.norm(both, dim=-1, keepdim=True))
    qwen, wan = (FAMILIES[f"{name}"].sampling for name in ("QwenImageTransformer2DModel", "WanTransformer3DModel"))
    assert torch.equal(packed(qwen.guided(cond, uncond, 4.0), (1, 2, 2)), truth)
    assert torch.equal(wan.guided(cond, uncond, 4.0), uncond + 4.0 * (cond - uncond))
