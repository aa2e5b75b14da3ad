"""Weights of published models that training never reaches: what a small model finds, what families list, and what is an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mmspeed.config.adapters import AdapterConfig, BaseConfig
from mmspeed.errors import UserError
from mmspeed.models.adapters import adapt
from mmspeed.models.diffusers.plans import declare_known_plan
from mmspeed.models.families import FAMILIES, class_name
from mmspeed.pipelines.domains.video.unused import freeze_unused, unused_lines
from tests.support.video_transformers import make_model

CASES = {
    "wan": {}, "hunyuan": {"num_layers": 2}, "hunyuan 1.5": {"num_layers": 3}, "mochi": {}, "qwen, images": {"num_layers": 3},
}  # fmt: skip
STREAM = (
    "attn.add_q_proj.weight", "attn.add_q_proj.bias", "attn.norm_added_q.weight", "attn.to_add_out.weight",
    "attn.to_add_out.bias",
)  # fmt: skip
MLP = ("net.0.proj.weight", "net.0.proj.bias", "net.2.weight", "net.2.bias")
FROZEN = {
    "hunyuan 1.5": 17,  # 6 without gradient, 11 of zeros; 8 more have zeros where no caption has words to be drawn
    "mochi": 2,
    "qwen, images": 9,
}


def frozen(case: str, zeros: bool = False, **changes: Any) -> tuple[torch.nn.Module, list[str]]:
    model = make_model(case, **{**CASES[case], **changes})
    if zeros:
        for parameter in model.parameters():
            parameter.data.zero_()
    name = class_name(model)
    assert name is not None
    return model, freeze_unused(model, dict(model.config), FAMILIES[name].call)  # type: ignore[arg-type]


@pytest.mark.parametrize("case", CASES)
def test_unused_weights_are_those_that_the_family_lists(case: str) -> None:
    model, names = frozen(case)
    assert len(names) == FROZEN.get(case, 0)
    assert [name for name, parameter in model.named_parameters() if not parameter.requires_grad] == names
    assert bool(unused_lines(names)) == bool(names)


def test_names_are_of_the_last_block_of_the_large_model() -> None:
    _, names = frozen("qwen, images")
    last = [f"transformer_blocks.2.{part}" for part in (*STREAM, *(f"txt_mlp.{each}" for each in MLP))]
    assert sorted(names) == sorted(last)
    line = unused_lines(names)[0]
    assert line.startswith("9 tensors that this training never reaches stay frozen: transformer_blocks.2.attn.")


def test_tensors_that_begin_at_zero_hide_nothing() -> None:
    assert frozen("qwen, images", zeros=True)[1] == frozen("qwen, images")[1]


def test_weights_that_no_family_lists_are_an_error() -> None:
    with pytest.raises(
        UserError,
        match=r"HunyuanVideo.*: \d+ trainable tensors get no gradient in this training, first transformer_blocks.2.*`unused`",
    ):
        frozen("hunyuan", num_layers=3, num_single_layers=0)


def test_weights_that_the_user_froze_are_no_error() -> None:
    model = make_model("hunyuan", num_layers=2, num_single_layers=0)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("transformer_blocks.1" not in name)
    assert freeze_unused(model, dict(model.config), FAMILIES["HunyuanVideoTransformer3DModel"].call) == []  # type: ignore[arg-type]


def test_an_adapter_that_training_never_reaches_is_refused() -> None:
    model: Any = make_model("hunyuan 1.5", num_layers=3)
    declare_known_plan(model)
    adapt(model, AdapterConfig(kind="lora", targets=("image_embedder.linear_*",)), BaseConfig())
    with pytest.raises(
        UserError, match=r"model\.adapter\.targets: this training never reaches image_embedder\.linear_1 of"
    ):
        freeze_unused(model, dict(model.config), FAMILIES[type(model).__name__].call)
