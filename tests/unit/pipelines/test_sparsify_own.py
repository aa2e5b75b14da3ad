"""Sparse attention in a user's own model, its refusals, and the forms of its config."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mmspeed
from mmspeed.comm import Axis
from mmspeed.compute.sparse.module import clustered_layers
from mmspeed.config.sparse import SparseConfig
from mmspeed.errors import UserError
from mmspeed.models.diffusers.plans import plan_for
from mmspeed.parallel import sequence_parallel
from mmspeed.parallel.sequence.hybrid_attention import SequenceAxes
from mmspeed.pipelines.sparsify import sparse_config
from tests.support.sparse_transformers import SMALL, plain_model, sparse_model
from tests.support.video_transformers import loss_of, make_inputs, make_model


class Own(nn.Module):
    """A user's model: tokens (B, T, h, w, E), and one attention of each block, with the options of a call of attention."""

    def __init__(self, heads: int = 4, key_heads: int = 4, **options: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(OwnAttention(heads, key_heads, options) for _ in range(3))

    def forward(self, video: Tensor) -> Tensor:
        x = video.flatten(1, 3)
        for block in self.blocks:
            x = x + block(x)
        return x


class OwnAttention(nn.Module):
    def __init__(self, heads: int, key_heads: int, options: dict[str, Any]) -> None:
        super().__init__()
        self.options = dict(options)
        self.times = self.options.pop("times", 1)  # calls of attention
        self.q = nn.Linear(32, heads * 8)
        self.kv = nn.Linear(32, 2 * key_heads * 8)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(2, (-1, 8)).transpose(1, 2)
        k, v = (part.unflatten(2, (-1, 8)).transpose(1, 2) for part in self.kv(x).chunk(2, dim=2))
        for _ in range(self.times):
            out = F.scaled_dot_product_attention(q, k, v, **self.options)
        return out.transpose(1, 2).flatten(2)


OWN: dict[str, Any] = {"attention": {"blocks.*": ("video",)}, "grid": lambda inputs: inputs["video"].shape[1:4]}


def test_ones_own_model_declares_itself() -> None:
    torch.manual_seed(0)
    plain, video = Own(key_heads=2, enable_gqa=True, scale=0.7), torch.randn(2, 4, 3, 3, 32)
    model = copy.deepcopy(plain)
    controller = mmspeed.sparsify_model(model, SparseConfig(**{**SMALL, "tau": 0.0}), **OWN)
    assert torch.allclose(model(video), plain(video), atol=1e-5)
    assert dict(controller.layers["blocks.1"].counter) == {"sparse_grouped": 1}
    chrono, inputs = make_model("chronoedit, by its own declaration", num_layers=3), make_inputs("wan")
    wanted = loss_of(chrono, inputs)
    result = mmspeed.sparsify_model(
        chrono,
        {**SMALL, "tau": 0.0},
        attention={"blocks.*.attn1": ("video",)},
        grid=lambda inputs: (inputs["hidden_states"].shape[2], 3, 3),
    )
    assert torch.allclose(loss_of(chrono, inputs), wanted, rtol=1e-5) and list(result.layers) == ["blocks.1.attn1"]


def refused_call(match: str, changes: dict[str, Any], **declared: Any) -> None:
    model = Own(**changes)
    mmspeed.sparsify_model(model, {**SMALL, "keep": 0.5}, **{**OWN, **declared})
    with pytest.raises(UserError, match=match):
        model(torch.randn(2, 4, 3, 3, 32))


def test_what_a_call_cannot_have_is_refused() -> None:
    refused_call("differs by query or head", {"attn_mask": torch.ones(36, 36, dtype=torch.bool).tril()})
    refused_call("adds a bias", {"attn_mask": torch.full((1, 1, 1, 36), 0.5)})
    refused_call("has no dropout", {"dropout_p": 0.1})
    refused_call("has no causal mask", {"is_causal": True})
    refused_call("2 times, not once", {"times": 2})
    refused_call("the video has 5 x 3 x 3", {}, grid=lambda inputs: (5, 3, 3))
    refused_call("36 tokens attend as video", {}, grid=lambda inputs: (3, 3, 3))
    refused_call("1 at least", {}, grid=lambda inputs: (4, 9))


def test_models_that_cannot_be_made_sparse_are_refused() -> None:
    with pytest.raises(UserError, match=r"Own is not one of WanTransformer3DModel.*attention=.*grid="):
        mmspeed.sparsify_model(Own(), "keep=0.5")
    with pytest.raises(UserError, match=r"Own has no module 'block.\*'"):
        mmspeed.sparsify_model(Own(), "keep=0.5", **{**OWN, "attention": {"block.*": ("video",)}})
    with pytest.raises(UserError, match="has the sequences"):
        mmspeed.sparsify_model(Own(), "keep=0.5", **{**OWN, "attention": {"blocks.*": ("text",)}})
    model, _ = sparse_model("wan")
    with pytest.raises(UserError, match="sparse attention already"):
        mmspeed.sparsify_model(model, "keep=0.5")
    hooked = plain_model("wan")
    hooked.forward = lambda *args, **kwargs: None  # type: ignore[method-assign]
    with pytest.raises(UserError, match="has been replaced"):
        mmspeed.sparsify_model(hooked, "keep=0.5")
    unknown_size, _ = sparse_model("ltx")
    with pytest.raises(UserError, match="num_frames, height and width"):
        unknown_size(**{**make_inputs("ltx"), "height": None})


AXES = SequenceAxes(
    Axis.alone("ring"), Axis("ulysses", None, 2, 0)
)  # no process group is behind it: nothing is computed


@pytest.mark.parametrize("case", ["hunyuan"])
def test_joint_attention_is_sparse_or_split(case: str) -> None:
    words = "joint attention of .* is either sparse or split over processes for now, not both"
    split = plain_model(case)
    sequence_parallel(split, AXES, plan_for(split))
    names = list(split.state_dict())
    with pytest.raises(UserError, match=words):
        mmspeed.sparsify_model(split, "keep=0.5")
    assert not clustered_layers(split) and list(split.state_dict()) == names  # it is as it was
    sparse, _ = sparse_model(case)
    with pytest.raises(UserError, match=words):
        sequence_parallel(sparse, AXES, plan_for(sparse))
    assert loss_of(sparse, make_inputs(case)).isfinite()  # still sparse on one process


def test_what_is_sparse_must_stand_in_the_plan() -> None:
    sparse, _ = sparse_model("wan")
    with pytest.raises(UserError, match=r"blocks.1.attn1 \(WanAttention\) is sparse, and the plan .* does not name it"):
        sequence_parallel(sparse, AXES, replace(plan_for(sparse), attention={}))


def test_configs() -> None:
    got = sparse_config("keep=0.2, planner=tiles,tile=2x4x4,tail_clusters=null,keep_first_frame=true")
    assert got == SparseConfig(
        keep=0.2, planner="tiles", tile=(2, 4, 4), tail_clusters=None, keep_first_frame=True
    )  # fmt: skip
    assert sparse_config({"keep": 0.2}) == SparseConfig(keep=0.2) and sparse_config("") == SparseConfig()
    for wrong, match in {
        "kep=0.2": "sparse.kep: no such key; did you mean 'keep'",
        "keep": "has no value",
        "keep=0.2,keep=0.3": "twice",
        "keep=2": "sparse.keep",
        "tau=1,error=0.1": "use one of them",
    }.items():
        with pytest.raises(UserError, match=match):
            sparse_config(wrong)
    with pytest.raises(UserError, match="config is a list"):
        sparse_config([1])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("case", "changes", "words"),
    [
        ("qwen, images", {"img_shapes": [[(1, 5, 9), (1, 5, 9)]] * 2}, "sparse attention takes one image a sample"),
        ("flux, images", {"img_ids": torch.tensor([[0.0, 4, 9]] * 45)}, "row by row; these are 45 in 5 x 10"),
    ],
)
def test_images_beside_others_have_no_grid(case: str, changes: dict[str, Any], words: str) -> None:
    model, _ = sparse_model(case, keep=0.3)
    with pytest.raises(UserError, match=words):
        loss_of(model, {**make_inputs(case), **changes})
