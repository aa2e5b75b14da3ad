"""SoraDiT as a family: its call, its counts and its notes are those of the class."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mmspeed.config import Bucket, make_config
from mmspeed.config.schema import DdpmConfig, FlowConfig, ModelConfig
from mmspeed.config.sparse import SparseConfig
from mmspeed.errors import UserError
from mmspeed.models.families import FAMILIES, call_for, class_name, family_of, published_classes
from mmspeed.models.sections import arguments_of, call_of, counts_of, outline
from mmspeed.models.sora.model import SoraDiT, SoraDiTConfig, forward_work
from mmspeed.pipelines.diffusion.predictor import FamilyPredictor, make_predictor, predict
from mmspeed.protocols.calls import Conditions

LATENT, CHANNELS, TEXT = (3, 4, 6), 4, 8
SIZES: dict[str, Any] = {
    "width": 24,
    "depth": 2,
    "heads": 2,
    "latent_channels": CHANNELS,
    "text_width": TEXT,
    "adaln_rank": 4,
}


def model_of(**changes: Any) -> SoraDiT:
    return SoraDiT(SoraDiTConfig(**{**SIZES, **changes}))


@pytest.mark.parametrize("objective", [FlowConfig(kind="flow"), DdpmConfig(kind="ddpm", prediction="v", steps=100)])
def test_it_is_predicted_for_any_objective_by_its_call(objective: FlowConfig | DdpmConfig) -> None:
    model = model_of()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    predictor = make_predictor(model, objective, CHANNELS, TEXT)
    assert isinstance(predictor, FamilyPredictor) and predictor.seeded
    assert class_name(model) == "SoraDiT" and call_for(model) is FAMILIES["SoraDiT"].call
    x, t = torch.randn(2, CHANNELS, *LATENT), torch.tensor([0.2, 0.7])
    text, mask = torch.randn(2, 5, TEXT), torch.ones(2, 5, dtype=torch.bool)
    torch.testing.assert_close(
        predict(predictor, model, x, t, Conditions(text, mask)), model(x, t, text, mask), atol=0, rtol=0
    )
    conditioning = torch.tensor([[True, False, False], [False, False, False]])
    times = torch.tensor([[0.0, 0.2, 0.2], [0.7, 0.7, 0.7]])
    conditioned = predict(predictor, model, x, t, Conditions(text, mask, named={"conditioning_mask": conditioning}))
    torch.testing.assert_close(conditioned, model(x, times, text, mask), atol=0, rtol=0)


def test_its_counts_are_those_of_the_class() -> None:
    for sparse in (None, SparseConfig(dense_first=0, dense_last=0, min_tokens=1, keep=0.3)):
        model = model_of(sparse=sparse, arrangement="full")
        predictor = make_predictor(model, FlowConfig(kind="flow"), CHANNELS, TEXT)
        assert predictor.tokens(LATENT) == model.tokens(LATENT) == 3 * 2 * 3
        assert predictor.flops(LATENT, 7) == model.flops(LATENT, 7)
        assert (
            predictor.work(LATENT, 7)
            == model.work(LATENT, 7)
            == forward_work(model_of(arrangement="full").config, LATENT, 7)
        )
        with pytest.raises(
            ValueError, match=r"latent height 5 of \(3, 5, 6\) is no multiple of 2 of the model's patch"
        ):
            predictor.tokens((3, 5, 6))


def test_a_patch_of_several_frames_takes_no_given_frames() -> None:
    for patch, modes in (((1, 2, 2), 5), ((3, 2, 2), 1)):
        predictor = make_predictor(model_of(patch=patch), FlowConfig(kind="flow"), CHANNELS, TEXT)
        assert len(predictor.conditioning.modes) == modes and predictor.conditioning.how == "replace"


def test_its_notes_are_of_sparse_blocks() -> None:
    section = {"kind": "sora", "size": "nano", "sparse": {"min_tokens": 10_000, "dense_first": 0, "dense_last": 0}}
    tree = {
        "data": {"sources": [{"path": "."}], "buckets": [{"frames": 9, "height": 32, "width": 48}]},
        "model": section,
    }
    config = make_config(tree, origin="test")
    assert isinstance(config.model, ModelConfig) and call_of(config.model) is None
    model = outline(config.model, CHANNELS, TEXT)
    counts = counts_of(config.model, model)
    assert counts.call is FAMILIES["SoraDiT"].call and counts.config == arguments_of(model)
    predictor = make_predictor(model, FlowConfig(kind="flow"), CHANNELS, TEXT)
    lines, warnings = predictor.notes({Bucket(9, 32, 48): LATENT}, config)
    assert lines[0].startswith("sparse attention: ") and any("no video is long enough" in line for line in warnings)


def test_no_repository_is_of_it() -> None:
    assert "SoraDiT" not in published_classes()
    with pytest.raises(UserError, match=r"model.pretrained: SoraDiT is no class that mmspeed trains: known are Wan"):
        family_of("SoraDiT", "model.pretrained")
