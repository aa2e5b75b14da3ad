"""The layers that get adapters, by the plans of published classes and of decoders; targets and layers that are refused by name."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch
from torch import nn

from mmspeed.config.adapters import AdapterConfig, BaseConfig
from mmspeed.errors import UserError
from mmspeed.models import SoraDiT, SoraDiTConfig
from mmspeed.models.adapters import adapt, is_adapter, target_layers
from mmspeed.models.diffusers.plans import declare_known_plan
from mmspeed.models.families import family_in
from mmspeed.models.language.decoder import Decoder
from mmspeed.models.language.shapes import SHAPES, tiny_twin
from tests.support.video_transformers import make_model

OWN = "to_q to_k to_v to_out.0"
TEXT = "add_k_proj add_v_proj"
LAST = "add_q_proj to_add_out"  # of text, which the last block of some classes leaves out
FF = "net.0.proj net.2"
# For each class (attention, what `attention+mlp` adds, what `blocks` adds): "part of a block: its layers", with the number of each.
TABLE: dict[str, tuple[dict[str, int], dict[str, int], dict[str, int]]] = {
    "wan": ({f"blocks.*.attn1: {OWN}": 2, f"blocks.*.attn2: {OWN}": 2}, {f"blocks.*.ffn: {FF}": 2}, {}),
    "wan vace": (
        {f"{kind}.*.{each}: {OWN}": n for kind, n in (("blocks", 3), ("vace_blocks", 2)) for each in ("attn1", "attn2")},
        {f"blocks.*.ffn: {FF}": 3, f"vace_blocks.*.ffn: {FF}": 2},
        {"vace_blocks.*: proj_in": 1, "vace_blocks.*: proj_out": 2},
    ),
    "ltx": (
        {f"transformer_blocks.*.{each}: {OWN}": 2 for each in ("attn1", "attn2")},
        {f"transformer_blocks.*.ff: {FF}": 2},
        {},
    ),
    "cogvideox": (
        {f"transformer_blocks.*.attn1: {OWN}": 2},
        {f"transformer_blocks.*.ff: {FF}": 2},
        {"transformer_blocks.*: norm1.linear norm2.linear": 2},
    ),
    "mochi": (
        {f"transformer_blocks.*.attn1: {OWN} {TEXT}": 2, f"transformer_blocks.*.attn1: {LAST}": 1},
        {f"transformer_blocks.*.ff: {FF}": 2, f"transformer_blocks.*.ff_context: {FF}": 1},
        {
            "transformer_blocks.*: norm1.linear": 2,
            "transformer_blocks.*.norm1_context: linear": 1,
            "transformer_blocks.*.norm1_context: linear_1": 1,
        },
    ),
    "hunyuan 1.5": (
        {f"transformer_blocks.*.attn: {OWN} {TEXT}": 2, f"transformer_blocks.*.attn: {LAST}": 1},
        {f"transformer_blocks.*.ff: {FF}": 2, f"transformer_blocks.*.ff_context: {FF}": 1},
        {"transformer_blocks.*: norm1.linear norm1_context.linear": 2},
    ),
    "qwen, images": (
        {f"transformer_blocks.*.attn: {OWN} {TEXT}": 2, f"transformer_blocks.*.attn: {LAST}": 1},
        {f"transformer_blocks.*.img_mlp: {FF}": 2, f"transformer_blocks.*.txt_mlp: {FF}": 1},
        {"transformer_blocks.*: img_mod.1 txt_mod.1": 2},
    ),
    **dict.fromkeys(
        ("hunyuan", "flux, images"),
        (
            {f"transformer_blocks.*.attn: {OWN} {TEXT} {LAST}": 1, "single_transformer_blocks.*.attn: to_q to_k to_v": 1},
            {f"transformer_blocks.*.ff: {FF}": 1, f"transformer_blocks.*.ff_context: {FF}": 1,
             "single_transformer_blocks.*: proj_mlp proj_out": 1},
            {"transformer_blocks.*: norm1.linear norm1_context.linear": 1, "single_transformer_blocks.*: norm.linear": 1},
        ),
    ),
}  # fmt: skip
LATENT = "self_attn.q_a_proj self_attn.q_b_proj self_attn.kv_a_proj_with_mqa self_attn.kv_b_proj self_attn.o_proj"
GROUPED = "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj"


def published(case: str) -> tuple[nn.Module, list[str]]:
    """A small model of a class of diffusers with its plan, and the parameters that training never reaches."""
    model = make_model(case)
    declare_known_plan(model)
    family = family_in(type(model))
    assert family is not None
    return model, family.always_unused([name for name, _ in model.named_parameters()])


def decoder(shape: str) -> nn.Module:
    with torch.device("meta"):
        return Decoder(tiny_twin(SHAPES[shape].settings))


def counts(names: list[str]) -> dict[str, int]:
    """The number of layers of each name, in which `*` stands for the number of a block."""
    return Counter(re.sub(r"^(\w+)\.\d+\.", r"\1.*.", name) for name in names)


def expanded(entries: dict[str, int]) -> dict[str, int]:
    each = ((entry.split(": "), number) for entry, number in entries.items())
    return {f"{part}.{layer}": number for (part, layers), number in each for layer in layers.split()}


@pytest.mark.parametrize("case", TABLE)
def test_layers_of_published_classes(case: str) -> None:
    model, unused = published(case)
    attention, mlp, others = map(expanded, TABLE[case])
    assert counts(target_layers(model, "attention", unused)) == attention
    assert counts(target_layers(model, "attention+mlp", unused)) == {**attention, **mlp}
    assert counts(target_layers(model, "blocks", unused)) == {**attention, **mlp, **others}
    queries = target_layers(model, ("to_q", "to_out.*"), unused)
    assert {name.rpartition(".")[2] for name in queries} <= {"to_q", "0"} and len(queries) > 1
    named = [name for name, _ in model.named_modules() if name in queries]
    assert queries == named and f"{queries[0]}.weight" not in unused


@pytest.mark.parametrize(
    ("shape", "attention"), [("qwen3-0.6b", GROUPED), ("llama3-8b", GROUPED), ("deepseek-v3", LATENT)]
)
def test_layers_of_decoders(shape: str, attention: str) -> None:
    model, both = decoder(shape), {f"layers.*.{layer}": 3 for layer in attention.split()}
    found = counts(target_layers(model, "attention"))
    assert {name: number for name, number in found.items() if name.startswith("layers")} == both
    if shape != "deepseek-v3":
        mlp = {f"layers.*.mlp.{layer}_proj": 3 for layer in ("gate", "up", "down")}
        assert counts(target_layers(model, "attention+mlp")) == {**both, **mlp}


def test_layers_of_the_last_block_that_training_never_reaches_get_no_adapter() -> None:
    model, unused = published("mochi")
    adapt(model, AdapterConfig(kind="lora", targets=("add_q_proj",)), BaseConfig(), unused)
    names = [name for name, _ in model.named_parameters() if is_adapter(name)]
    assert names and all(name.startswith("transformer_blocks.0.") for name in names)


@pytest.mark.parametrize(
    ("make", "targets", "said"),
    [
        (lambda: published("wan")[0], ("to_qq",), "has no linear layer 'to_qq'; did you mean 'to_q'"),
        (lambda: published("ltx")[0], ("attn1.to_x",), "has no linear layer 'attn1.to_x'; did you mean 'attn1.to_"),
        (lambda: make_model("wan"), ("norm1",), "has no linear layer 'norm1'"),
        (lambda: make_model("ltx"), "attention", "LTXVideoTransformer3DModel has no plan that names its blocks"),
        (lambda: decoder("qwen3-30b-a3b"), "attention+mlp", r"layers\.0\.mlp.* holds the weights of experts.*: use attention"),
        (lambda: decoder("deepseek-v3"), "blocks", r"holds the weights of experts.*: use attention"),
        (lambda: SoraDiT(SoraDiTConfig(width=24, depth=1, heads=2, latent_channels=2, text_width=6)), ("mlp.down",), "no adapter is for it"),
    ],
)  # fmt: skip
def test_what_gets_no_adapter_is_refused_by_name(make: object, targets: str | tuple[str, ...], said: str) -> None:
    assert callable(make)
    with pytest.raises(UserError, match=said):
        target_layers(make(), targets)
