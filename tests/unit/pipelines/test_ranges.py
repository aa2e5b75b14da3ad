"""Training times of published models' objectives: distributions, ranges, experts and guidance."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mmspeed.config import make_config
from mmspeed.config.schema import DdpmConfig, FlowConfig
from mmspeed.errors import UserError
from mmspeed.models.families.complete import completed
from mmspeed.pipelines.diffusion.flow import quantile_of_time
from mmspeed.pipelines.diffusion.objective import make_objective
from mmspeed.pipelines.domains.video.domain import VideoDomain
from tests.support.tiny_repositories import save_hunyuan_video, save_wan

DRAWS = 100_000


def draws(count: int = DRAWS) -> Tensor:
    return torch.rand(count, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def distance(times: Tensor, share_below: Tensor) -> float:
    """The Kolmogorov-Smirnov distance of sorted times from a distribution, whose values at them are `share_below`."""
    steps = torch.arange(1, len(times) + 1, dtype=torch.float64) / len(times)
    return float(torch.maximum((steps - share_below).abs(), (steps - 1 / len(times) - share_below).abs()).max())


def closed_form(times: Tensor, cfg: FlowConfig) -> Tensor:
    """The share of times below each, by the formula of a shifted and cut distribution."""

    def whole(t: Tensor) -> Tensor:
        shift = cfg.shift
        assert isinstance(shift, float)
        before = t / (shift - (shift - 1) * t)
        if cfg.timesteps == "uniform":
            return before
        return torch.special.ndtr((torch.logit(before) - cfg.logit_mean) / cfg.logit_std)

    low, high = (whole(torch.tensor(end, dtype=torch.float64)) for end in cfg.range or (0.0, 1.0))
    return (whole(times) - low) / (high - low)


@pytest.mark.parametrize(
    ("timesteps", "ends", "shift"),
    [("uniform", None, 5.0), ("logit_normal", (0.875, 1.0), 5.0), ("uniform", (0.2, 0.3), 1.0), ("logit_normal", (0.0, 0.875), 1.0)],
)  # fmt: skip
def test_times_follow_the_cut_distribution(timesteps: Any, ends: Any, shift: float) -> None:
    cfg = FlowConfig(kind="flow", timesteps=timesteps, shift=shift, range=ends)
    times = make_objective(cfg).time_from_quantile(draws()).float().double()
    low, high = ends or (0.0, 1.0)
    assert float(times.min()) >= low and float(times.max()) <= high  # also in float32, which may round an end
    assert distance(times.sort().values, closed_form(times.sort().values.clamp(low, high), cfg)) < 0.006
    # truncation is not seen by the distance alone; above 512 every 16,384th number in float32 is whole by chance
    thousandths = (1000 * make_objective(cfg).time_from_quantile(draws(10 * DRAWS)).float()).double()
    assert float((thousandths == thousandths.round()).double().mean()) < 1e-4


def test_a_time_and_its_quantile_are_inverse() -> None:
    cfg = FlowConfig(kind="flow", shift=3.0, logit_mean=0.3, logit_std=0.8)
    for quantile in (0.001, 0.3, 0.5, 0.99):
        time = float(make_objective(cfg).time_from_quantile(torch.tensor([quantile], dtype=torch.float64)))
        assert quantile_of_time(time, cfg) == pytest.approx(quantile, abs=1e-9)


@pytest.mark.parametrize("ends", [None, (0.25, 0.75)])
def test_indices_are_uniform_within_their_range(ends: Any) -> None:
    cfg = DdpmConfig(kind="ddpm", range=ends)
    objective = make_objective(cfg)
    index = (objective.time_from_quantile(draws()) * 999).round().long()
    low, high = ends or (0.0, 1.0)
    assert int(index.min()) == -int(-low * 999 // 1) and int(index.max()) == int(high * 999)
    counts = torch.bincount(index - index.min()).double()
    expected = DRAWS / len(counts)
    freedom = max(1, len(counts) - 1)
    assert float(((counts - expected).square() / expected).sum()) < freedom + 5 * (2 * freedom) ** 0.5


def test_an_expert_has_its_range_and_its_folder(tmp_path: Path) -> None:
    base = save_wan(tmp_path / "two")
    shutil.copytree(base / "transformer", base / "transformer_2")
    index = json.loads((base / "model_index.json").read_text())
    (base / "model_index.json").write_text(json.dumps(index | {"boundary_ratio": 0.875}))

    def config(**objective: Any) -> Any:
        tree = {
            "data": {"sources": [{"path": "v"}], "buckets": [{"frames": 1, "height": 16, "width": 16}]},
            "model": {"kind": "diffusers", "pretrained": str(base)},
            "objective": {"kind": "family", **objective},
        }
        return completed(make_config(tree))

    high, low = config(expert="high"), config(expert="low")
    assert (high.objective.range, high.model.subfolder) == ((0.875, 1.0), "transformer")
    assert (low.objective.range, low.model.subfolder) == ((0.0, 0.875), "transformer_2")
    with pytest.raises(UserError, match=r"has two experts, of times above and below 0.875: set objective.expert"):
        config()
    assert config(range=[0.1, 0.2]).objective.range == (0.1, 0.2)  # by hand
    (base / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"has one transformer for all times: leave expert out"):
        config(expert="high")


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        ({"range": [0.5, 0.5]}, r"0 <= low < high <= 1"),
        ({"range": [0.1, 0.5], "expert": "low"}, r"leave range out"),
        ({"shift": 0}, r"must be a number above 0"),
    ],
)
def test_bad_values_are_one_line(objective: dict[str, Any], message: str) -> None:
    tree = {
        "data": {"sources": [{"path": "v"}], "buckets": [{"frames": 1, "height": 16, "width": 16}]},
        "model": {"kind": "diffusers", "pretrained": "a/b"},
        "objective": {"kind": "family", **objective},
    }
    with pytest.raises(UserError, match=message):
        make_config(tree)


def test_guidance_reaches_a_distilled_model_alone(tmp_path: Path) -> None:
    tree = {
        "data": {"sources": [{"path": "v"}], "buckets": [{"frames": 1, "height": 16, "width": 16}]},
        "objective": {"kind": "family", "guidance": 2.5},
    }
    from mmspeed.pipelines.domains.video.synthetic import EncoderShapes
    from mmspeed.shapes import Strides

    save_hunyuan_video(tmp_path / "distilled")
    save_wan(tmp_path / "plain")
    inputs = EncoderShapes(16, Strides(4, 8), 16)
    for name in ("distilled", "plain"):
        task = VideoDomain(make_config({**tree, "model": {"kind": "diffusers", "pretrained": str(tmp_path / name)}}))
        if name == "plain":
            with pytest.raises(UserError, match="WanTransformer3DModel takes no guidance"):
                task.use(inputs).build()
        else:
            predictor = task.use(inputs).predictor
            assert predictor.call.guidance == 2.5  # type: ignore[attr-defined]
            other, scale = predictor.guided(7.0)
            assert (other.call.guidance, scale) == (7.0, 1.0)  # type: ignore[attr-defined]
