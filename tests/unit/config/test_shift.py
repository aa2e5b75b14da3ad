"""Timestep shifts by size: the formulae against diffusers' and the papers', and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
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


@pytest.mark.parametrize("tokens", [1, 240, 256, 4096, 16_384])
@pytest.mark.parametrize(
    ("rule", "ends"), [("exponential", (0.5, 1.15)), ("linear", (0.5, 1.15)), ("exponential", (0.95, 2.05))]
)
def test_a_line_over_tokens_shifts_as_diffusers_does(rule: str, ends: tuple[float, float], tokens: int) -> None:
    base, most = (256, 4096) if ends[0] == 0.5 else (1024, 4096)  # Flux's and LTX's
    auto = {"rule": rule, "base_tokens": base, "max_tokens": most, "base_shift": ends[0], "max_shift": ends[1]}
    cfg = flow(shift="auto", auto_shift=auto)
    mu = calculate_shift(tokens, base, most, *ends)
    scheduler: Any = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, time_shift_type=rule)
    times = [1.0, 0.75, 0.5, 0.25]
    scheduler.set_timesteps(sigmas=times, mu=mu)
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
    assert flow(shift=2).shift_of(CLIP, 7) == flow().shift_of(CLIP, 7) + 1 == 2.0


@pytest.mark.parametrize("shift", ["auto", 3.0, {"13x96x160": 3.0, "1x96x160": 1.5}])
def test_a_recorded_config_has_the_same_shift(shift: Any) -> None:
    import yaml

    config = make_config(tree({"shift": shift}))
    assert make_config(yaml.safe_load(dump_config(config))).objective == config.objective


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        ({"shift": 0}, r"'objective\.shift': must be a number above 0, auto, or numbers by bucket"),
        ({"shift": -1.5}, r"'objective\.shift': must be a number above 0"),
        ({"shift": True}, r"'objective\.shift': must be a number above 0"),
        ({"shift": "automatic"}, r"'objective\.shift': must be a number above 0, auto, .*got 'automatic'"),
        ({"shift": {}}, r"'objective\.shift': by bucket it needs one at least"),
        ({"shift": {"13x96": 2}}, r"'objective\.shift': '13x96' is no bucket: write frames x height x width"),
        ({"shift": {"13x96x160": 0}}, r"'objective\.shift': the shift of 13x96x160 is 0; it must be a number above 0"),
        ({"shift": {"13x96x160": "x"}}, r"'objective\.shift': the shift of 13x96x160 is 'x'"),
        ({"shift": {"13x96x160": 2}}, r"objective\.shift has no number for 1x96x160, which is one of data\.buckets"),
        ({"auto_shift": {"base_tokens": 64}}, r"'objective': auto_shift goes with shift: auto"),
        ({"shift": "auto", "auto_shift": {"rule": "root"}}, r"'objective\.auto_shift\.rule': input should be 'sqrt'"),
        ({"shift": "auto", "auto_shift": {"base_tokens": 0}}, r"'objective\.auto_shift\.base_tokens'"),
        ({"shift": "auto", "auto_shift": {"max_tokens": 1}}, r"'objective\.auto_shift\.max_tokens'"),
        ({"shift": "auto", "auto_shift": {"max_shift": 2.0}}, r"max_shift goes with rule: exponential or linear"),
        (
            {"shift": "auto", "auto_shift": {"base_shift": 0}},
            r"with rule: sqrt base_shift and max_shift must be above 0",
        ),
        ({"shift": "auto", "auto_shift": {"rule": "linear", "max_shift": -1}}, r"with rule: linear base_shift and max"),
        (
            {"shift": "auto", "auto_shift": {"rule": "linear", "base_tokens": 5000}},
            r"'objective\.auto_shift': max_tokens 4096 must be above base_tokens 5000",
        ),
        ({"shift": "auto", "auto_shift": {"rool": "sqrt"}}, r"unknown key 'objective\.auto_shift\.rool'"),
    ],
)
def test_what_makes_no_shift_is_refused_in_one_line(objective: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        make_config(tree(objective))
    assert "\n" not in str(caught.value)


def test_a_line_that_leaves_what_a_shift_can_be_is_refused_by_size() -> None:
    falling = flow(shift="auto", auto_shift={"rule": "linear", "base_shift": 2.0, "max_shift": 1.0})
    with pytest.raises(
        UserError, match=r"objective\.shift: auto has no shift for 13x96x160: the line .* is -.* at 20000 tokens"
    ):
        falling.shift_of(CLIP, 20_000)
    steep = flow(shift="auto", auto_shift={"rule": "exponential"})
    with pytest.raises(UserError, match=r"the shift of objective\.auto_shift is exp\(.*\) at 100000 tokens; choose"):
        steep.shift_of(CLIP, 100_000)
