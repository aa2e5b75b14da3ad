"""Pipelines that cannot be are refused early, in a line that names the nearest values."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from mmspeed.config.parallel import ParallelConfig
from mmspeed.errors import UserError
from mmspeed.models.sora.model import SoraDiT, SoraDiTConfig
from mmspeed.parallel import check_division
from mmspeed.parallel.stage_weights import check_waiting
from mmspeed.protocols.plan import Block, ModelPlan, declare_plan
from tests.support.runs import small_config


class Own(nn.Module):
    """A user's model."""

    def __init__(self, plan: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(6)])
        if plan:
            declare_plan(self, ModelPlan(tuple(Block(f"layers.{number}") for number in range(6))))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"virtual": 2}, "virtual 2 is for the stages of pp devices: set pp, or leave it out"),
        ({"schedule": "zbv"}, "schedule zbv is for the stages of pp devices: set pp, or leave it out"),
        ({"extra_warmup": True}, "extra_warmup is for the stages of pp devices: set pp, or leave it out"),
        ({"pp": 2, "schedule": "interleaved"}, "is for virtual 2 or more, not 1: set virtual 2, or schedule 1f1b or zb_h1"),
        ({"pp": 2, "schedule": "1f1b", "virtual": 3}, "is for virtual 1, not 3: set virtual 1, or schedule interleaved or overlap"),
        ({"pp": 2, "schedule": "zb_h1", "virtual": 2}, "set virtual 1, or schedule zbv or dualpipe_v or interleaved or overlap"),
        ({"pp": 2, "schedule": "zbv"}, "is for virtual 2, not 1: set virtual 2, or schedule 1f1b or zb_h1"),
        ({"pp": 2, "schedule": "dualpipe_v", "virtual": 3}, "is for virtual 2, not 3: set virtual 2, or schedule interleaved or overlap"),
        ({"pp": 2, "schedule": "zbv", "virtual": 2, "extra_warmup": True}, "for the schedules 1f1b and interleaved, not for zbv: leave one"),
        ({"pp": 2, "strategy": "ddp"}, "pp goes with strategy fsdp or auto, not with ddp"),
        ({"pp": 2, "strategy": "none"}, "pp goes with strategy fsdp or auto, not with none"),
    ],
)  # fmt: skip
def test_keys_that_do_not_fit_name_those_that_do(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ParallelConfig.model_validate(settings)


@pytest.mark.parametrize(
    ("model", "settings", "words"),
    [
        ("sora", {"pp": 8}, "8 stages, and the model has 6 blocks: each stage needs one, so use parallel.pp 6"),
        ("sora", {"pp": 2, "virtual": 4}, "so use parallel.virtual 3"),
        ("sora", {"pp": 4, "virtual": 2}, "so use parallel.virtual 1 or parallel.pp 3"),
        ("sora", {"pp": 4, "virtual": 2, "schedule": "zbv"}, "so use parallel.pp 3"),
        ("own", {"pp": 2}, "parallel.pp 2: Own has a plan without `carried`, which says what travels between blocks: declare it"),
        ("bare", {"pp": 2}, "parallel.pp 2: Own has no plan, which says what travels between blocks: declare it"),
    ],
)  # fmt: skip
def test_models_that_cannot_be_cut_are_refused(model: str, settings: dict[str, object], words: str) -> None:
    sora = SoraDiTConfig(width=32, depth=6, heads=2, latent_channels=4, text_width=8)
    made = SoraDiT(sora) if model == "sora" else Own(plan=model == "own")
    with pytest.raises(UserError) as caught:
        check_division(made, ParallelConfig.model_validate(settings), 8)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_schedules_that_put_off_gradients_want_linear_layers_that_train() -> None:
    parallel = ParallelConfig(pp=2, schedule="zb_h1")
    model = Own(plan=True)
    assert check_waiting(model, parallel) is None
    for layer in model.layers:
        layer.conv = nn.Conv1d(4, 4, 5)
    assert "only 15% of the gradients" in str(check_waiting(model, parallel))  # 16 of 16 + 4 + 80 + 4
    for layer in model.layers:
        layer.weight.requires_grad_(False)
    with pytest.raises(
        UserError, match=r"parallel\.schedule zb_h1: nothing that trains .* of Own .* set parallel\.schedule 1f1b"
    ):
        check_waiting(model, parallel)
    assert check_waiting(model, ParallelConfig(pp=2)) is None


def test_devices_are_multiples_of_the_stages() -> None:
    parallel = ParallelConfig(pp=2, tp=2, ep=2)
    assert (parallel.least_devices, parallel.dealt(8), parallel.groups(8)) == (4, 4, 2)
    parallel.check_world(8)
    for world in (1, 2, 6):
        with pytest.raises(UserError, match=f"parallel: pp 2 x tp 2 does not divide the {world} processes of this run"):
            parallel.check_world(world)


def test_gradients_are_kept_through_a_pipeline(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"release_gradients is for whole models, and parallel\.pp 2 keeps several"):
        small_config(tmp_path, "parallel.pp=2", "memory.release_gradients=true", "train.clip_norm=null")
