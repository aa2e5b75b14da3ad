"""Timestep shifts by size: the formulae against diffusers' and the papers', and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import yaml
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.ltx.pipeline_ltx import calculate_shift

from mmspeed.config import dump_config, make_config
from mmspeed.config.schema import FlowConfig
from mmspeed.errors import UserError
from mmspeed.pipelines.diffusion.flow import shift_time
from mmspeed.shapes import Bucket

CLIP = Bucket(13, 96, 160)


def tree(objective: dict[str, Any], **sample: Any) -> dict[str, Any]:
    buckets = [{"frames": 13, "height": 96, "width": 160}, {"frames": 1, "height": 96, "width": 160}]
    data = {"sources": [{"path": "clips"}], "buckets": buckets}
    return {"data": data, "objective": {"kind": "flow", **objective}, "sample": sample}


def flow(**fields: Any) -> FlowConfig:
    return FlowConfig.model_validate({"kind": "flow", **fields})


@pytest.mark.parametrize(("rule", "ends"), [("linear", (0.5, 1.15)), ("exponential", (0.95, 2.05))])
def test_a_line_over_tokens_shifts_as_diffusers_does(rule: str, ends: tuple[float, float]) -> None:
    base, most = (256, 4096) if ends[0] == 0.5 else (1024, 4096)  # Flux's and LTX's
    auto = {"rule": rule, "base_tokens": base, "max_tokens": most, "base_shift": ends[0], "max_shift": ends[1]}
    cfg = flow(shift="auto", auto_shift=auto)
    times = [1.0, 0.75, 0.5, 0.25]
    for tokens in (1, 240, 4096, 16_384):
        scheduler: Any = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, time_shift_type=rule)
        scheduler.set_timesteps(sigmas=times, mu=calculate_shift(tokens, base, most, *ends))
        ours = shift_time(torch.tensor(times, dtype=torch.float64), cfg.shift_of(CLIP, tokens))
        torch.testing.assert_close(ours.float(), scheduler.sigmas[:-1], rtol=1e-6, atol=1e-7)
        if ends[0] == 0.5:  # the defaults are diffusers'
            assert flow(shift="auto", auto_shift={"rule": rule}).shift_of(CLIP, tokens) == cfg.shift_of(CLIP, tokens)


def test_the_root_of_tokens_is_the_shift_of_stable_diffusion_3() -> None:
    # Esser et al. 2024, equation 23: t_m = sqrt(m / n) t_n / (1 + (sqrt(m / n) - 1) t_n)
    cfg = flow(shift="auto")
    for tokens in (256, 1024, 32_760):
        root = math.sqrt(tokens / 256)
        t_n = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
        expected = root * t_n / (1 + (root - 1) * t_n)
        torch.testing.assert_close(shift_time(t_n, cfg.shift_of(CLIP, tokens)), expected)
    assert flow(shift="auto", auto_shift={"base_tokens": 4096, "base_shift": 3.0}).shift_of(CLIP, 4096) == 3.0


def test_a_number_for_each_bucket_is_that_buckets() -> None:
    config = make_config(tree({"shift": {"13x96x160": 3, "1x96x160": 1.5}}))
    assert isinstance(config.objective, FlowConfig)
    assert [config.objective.shift_of(bucket, 7) for bucket in config.buckets] == [3.0, 1.5]
    with pytest.raises(
        UserError, match=r"objective\.shift has no number for 5x96x160: add it, use one of 13x96x160, 1x96x160"
    ):
        config.objective.shift_of(Bucket(5, 96, 160), 7)
    assert make_config(yaml.safe_load(dump_config(config))).objective == config.objective
    assert flow(shift=2).shift_of(CLIP, 7) == flow().shift_of(CLIP, 7) + 1 == 2.0


def test_a_line_that_leaves_what_a_shift_can_be_is_refused_by_size() -> None:
    falling = flow(shift="auto", auto_shift={"rule": "linear", "base_shift": 2.0, "max_shift": 1.0})
    with pytest.raises(
        UserError, match=r"objective\.shift: auto has no shift for 13x96x160: the line .* is -.* at 20000 tokens"
    ):
        falling.shift_of(CLIP, 20_000)
    steep = flow(shift="auto", auto_shift={"rule": "exponential"})
    with pytest.raises(UserError, match=r"the shift of objective\.auto_shift is exp\(.*\) at 100000 tokens; choose"):
        steep.shift_of(CLIP, 100_000)
