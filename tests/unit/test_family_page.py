"""The family of docs/extending.md runs as it is printed: its call is the class's, its counts are torch's, and the code takes the family."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mmspeed.config.schema import FlowConfig
from mmspeed.errors import UserError
from mmspeed.models.diffusers import plans
from mmspeed.models.families import FAMILIES
from mmspeed.pipelines.diffusion.predictor import FamilyPredictor, make_predictor, predict
from mmspeed.pipelines.domains.video.unused import freeze_unused
from mmspeed.protocols import Conditions, blocks_of
from tests.support.pages import ROOT, blocks_under

PAGE = ROOT / "docs" / "extending.md"
TIMES = torch.tensor([0.31, 0.84])


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """The page's code, in the registries."""
    code = blocks_under(PAGE, "A family")
    place = tmp_path_factory.mktemp("page") / "family_page.py"
    place.write_text("\n\n".join(code), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("family_page", place)
    assert spec is not None and spec.loader is not None
    module = sys.modules["family_page"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with (
        mock.patch.dict(FAMILIES, {module.NAME: module.FAMILY}),
        mock.patch.dict(plans.PLANS, {module.NAME: module.plan}),
    ):  # type: ignore[arg-type]
        yield module


def model_of(**changes: Any) -> nn.Module:
    from diffusers import SD3Transformer2DModel

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return SD3Transformer2DModel(**{
            "sample_size": 16, "patch_size": 2, "in_channels": 4, "num_layers": 3, "attention_head_dim": 8, "num_attention_heads": 2,
            "joint_attention_dim": 8, "caption_projection_dim": 16, "pooled_projection_dim": 8, "out_channels": 4,
            "pos_embed_max_size": 16, **changes,
        }).train()  # fmt: skip


def conditions() -> Conditions:
    g = torch.Generator().manual_seed(0)
    return Conditions(
        torch.randn(2, 5, 8, generator=g), torch.ones(2, 5, dtype=torch.bool), torch.randn(2, 8, generator=g)
    )


def test_the_family_is_called_counted_and_planned(page: ModuleType) -> None:
    model, inputs = model_of(), conditions()
    predictor = make_predictor(model, FlowConfig(kind="flow"), 4, 8)
    assert isinstance(predictor, FamilyPredictor) and len(blocks_of(model)) == 3
    x = torch.randn(2, 4, 1, 6, 8, generator=torch.Generator().manual_seed(1))
    by_hand = model(x[:, :, 0], inputs.text_BLD, inputs.pooled_BD, 1000 * TIMES, return_dict=False)[0]
    torch.testing.assert_close(predict(predictor, model, x, TIMES, inputs)[:, :, 0], by_hand, rtol=0, atol=0)
    assert inputs.pooled_BD is not None
    one = Conditions(inputs.text_BLD[:1], inputs.text_mask_BL[:1], inputs.pooled_BD[:1])
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
        predict(predictor, model, x[:1], TIMES[:1], one)
    assert predictor.flops((1, 6, 8), 5) == counter.get_total_flops()
    assert predictor.tokens((1, 6, 8)) == 12
    with pytest.raises(ValueError, match="use buckets of 1 frame"):
        predictor.tokens((2, 6, 8))


def test_its_unused_weights_are_listed(page: ModuleType) -> None:
    model = model_of()
    assert freeze_unused(model, dict(model.config), page.FAMILY.call) == [  # type: ignore[arg-type]
        "transformer_blocks.2.attn.add_q_proj.weight",
        "transformer_blocks.2.attn.add_q_proj.bias",
    ]


def test_another_version_is_refused(page: ModuleType) -> None:
    with pytest.raises(UserError, match="dual_attention_layers is set"):
        make_predictor(model_of(dual_attention_layers=(0,)), FlowConfig(kind="flow"), 4, 8)


def test_the_page_names_its_test() -> None:
    assert Path(__file__).name in PAGE.read_text(encoding="utf-8")
