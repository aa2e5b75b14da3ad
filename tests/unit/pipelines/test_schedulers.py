"""Multistep samplers against diffusers' pipelines: the loop of Wan's own pipeline, and loops of its form over a noise schedule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import DPMSolverMultistepScheduler, UniPCMultistepScheduler, WanPipeline
from diffusers.pipelines.ltx.pipeline_ltx import rescale_noise_cfg
from torch import Tensor

from mmspeed import rng
from mmspeed.config import make_config
from mmspeed.config.schema import DdpmConfig, FlowConfig
from mmspeed.device import Device
from mmspeed.errors import UserError
from mmspeed.pipelines.diffusion import samplers
from mmspeed.pipelines.diffusion.ddpm import trailing_timesteps
from mmspeed.pipelines.diffusion.objective import DdpmObjective, FlowObjective
from mmspeed.pipelines.diffusion.predictor import make_predictor
from mmspeed.pipelines.diffusion.schedulers import ddpm_scheduler, flow_scheduler
from mmspeed.pipelines.inference.generate import SampleSettings, generate_latents
from mmspeed.pipelines.inference.text_to_video import sampler_settings
from mmspeed.protocols import TextEntry
from tests.support.video_transformers import make_model
from tests.unit.config.test_shift import tree
from tests.unit.pipelines.test_samplers import noise, some_model

THEIRS = {"unipc": UniPCMultistepScheduler, "dpm++": DPMSolverMultistepScheduler}
FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}  # of Wan's scheduler_config.json


def pipelines_loop(scheduler: Any, last: int, x: Tensor) -> Tensor:
    """The loop that diffusers' video pipelines share."""
    for t in scheduler.timesteps:
        out = some_model(x, (t / last).expand(len(x)))
        x = scheduler.step(out, t, x, return_dict=False)[0]
    return x


@pytest.mark.parametrize(("name", "shift"), [("unipc", 1.0), ("dpm++", 5.0)])
def test_a_video_of_wan_is_that_of_its_own_pipeline(name: str, shift: float) -> None:
    model = make_model("wan").eval()
    cfg = FlowConfig(kind="flow", shift=shift)
    channels = int(model.config["in_channels"])  # type: ignore[index]
    predictor = make_predictor(model, cfg, channels, int(model.config["text_dim"]))  # type: ignore[index]
    text, negative = (TextEntry(rng.normal((length, model.config["text_dim"]), 0, length)) for length in (5, 1))  # type: ignore[index]
    shape, settings = (channels, 3, 4, 6), SampleSettings(steps=6, guidance=3.0, sampler=name, seed=1)
    ours = generate_latents(
        model, FlowObjective(cfg), [text], negative, ["a"], shape, settings, Device("cpu", 0), predictor=predictor
    )
    pipe: Any = WanPipeline(None, None, None, THEIRS[name](**FLOW, flow_shift=shift), model)  # type: ignore[arg-type]
    pipe.set_progress_bar_config(disable=True)
    filled = [torch.nn.functional.pad(e.embeds_LD, (0, 0, 0, 512 - len(e.embeds_LD)))[None] for e in (text, negative)]
    theirs = pipe(
        prompt_embeds=filled[0], negative_prompt_embeds=filled[1], height=32, width=48, num_frames=9,
        num_inference_steps=6, guidance_scale=3.0, latents=rng.normal(shape, 1, "sample", "a")[None],
        output_type="latent",
    ).frames  # fmt: skip
    assert ours.dtype == torch.float32 and ours.std() > 0.1
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("schedule", "prediction", "zero", "steps"),
    [("scaled_linear", "v", True, 20), ("linear", "epsilon", False, 4), ("cosine", "v", True, 1)],
)
@pytest.mark.parametrize("name", THEIRS)
def test_a_noise_schedule_is_walked_as_by_diffusers(
    name: str, steps: int, schedule: str, prediction: str, zero: bool
) -> None:
    cfg = DdpmConfig.model_validate(
        {"kind": "ddpm", "schedule": schedule, "prediction": prediction, "zero_terminal_snr": zero}
    )
    scheduler: Any = THEIRS[name](
        beta_start=cfg.beta_start,
        beta_end=cfg.beta_end,
        beta_schedule="squaredcos_cap_v2" if schedule == "cosine" else schedule,
        prediction_type="v_prediction" if prediction == "v" else "epsilon",
        rescale_betas_zero_snr=zero,
        timestep_spacing="trailing",
    )
    scheduler.set_timesteps(steps)
    ours = DdpmObjective(cfg).sample(some_model, noise(torch.float32), steps, name)
    theirs = pipelines_loop(scheduler, 999, noise(torch.float32))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * theirs.abs().max().item())


def test_every_number_of_steps_has_so_many_steps() -> None:
    """diffusers' UniPC alone has one more for 62 numbers up to 1000, at timestep -1."""
    theirs: Any = UniPCMultistepScheduler(timestep_spacing="trailing")
    theirs.set_timesteps(61)
    assert len(theirs.timesteps) == 62 and theirs.timesteps[-1] == -1
    cfg = DdpmConfig(kind="ddpm")
    for steps in (1, 2, 61, 103, 999, 1000):
        for name in THEIRS:
            scheduler = ddpm_scheduler(name, cfg, steps)
            assert (
                scheduler.timesteps.tolist() == trailing_timesteps(1000, steps) and len(scheduler.sigmas) == steps + 1
            )
            assert len(flow_scheduler(name, 3.0, steps).timesteps) == steps


def test_a_sample_is_float32_or_float64_whatever_the_model_answers() -> None:
    objective = FlowObjective(FlowConfig(kind="flow"))
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        seen = set()

        def predict(x: Tensor, t_B: Tensor, seen: set[torch.dtype] = seen) -> Tensor:
            assert not torch.is_grad_enabled()
            seen.add(x.dtype)
            return some_model(x, t_B).bfloat16()

        assert objective.sample(predict, noise(dtype), 4, "unipc").dtype == expected and seen == {expected}


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_rescaled_guidance_is_that_of_diffusers(share: float) -> None:
    x, t_B = noise(torch.float32), torch.ones(2)
    cond, uncond = x.cos(), x.sin()
    actual = samplers.guided(lambda x, t: cond, lambda x, t: uncond, 7.5, share)(x, t_B)
    plain = uncond + 7.5 * (cond - uncond)
    expected = rescale_noise_cfg(plain, cond, guidance_rescale=share)
    torch.testing.assert_close(actual, expected if share else plain, rtol=1e-6, atol=1e-6)
    if share == 1.0:  # the spread is that of the prediction with the caption, sample by sample
        torch.testing.assert_close(actual.flatten(1).std(1), cond.flatten(1).std(1))
    flat = samplers.guided(lambda x, t: torch.ones_like(x), lambda x, t: torch.zeros_like(x), 7.5, share)(x, t_B)
    assert torch.equal(flat, torch.full_like(x, 7.5))  # without a spread there is nothing to rescale


def test_a_rescale_is_a_share() -> None:
    config = make_config(tree({}, guidance_rescale=0.7))
    assert sampler_settings(config, None, None, None, 0).rescale == 0.7
    assert sampler_settings(config, None, None, None, 0, 0.0).rescale == 0.0
    with pytest.raises(UserError, match=r"sample\.guidance_rescale is 1\.5: use 0 \(none\) to 1"):
        sampler_settings(config, None, None, None, 0, 1.5)
    for wrong in (-0.1, 1.1, "much"):
        with pytest.raises(UserError, match=r"'sample\.guidance_rescale'"):
            make_config(tree({}, guidance_rescale=wrong))


def test_a_sampler_that_nobody_knows_is_refused() -> None:
    with pytest.raises(UserError, match=r"'sample\.sampler': .*'unipc' or 'dpm\+\+' \(got 'dpm'\)"):
        make_config(tree({}, sampler="dpm"))
    with pytest.raises(
        UserError, match=r"sample\.sampler ddim does not go with objective flow: use auto or euler .*dpm\+\+"
    ):
        make_config(tree({}, sampler="ddim"))
    with pytest.raises(UserError, match=r"use 1 to 1000"):
        DdpmObjective(DdpmConfig(kind="ddpm")).sample(some_model, noise(torch.float32), 1001, "unipc")
