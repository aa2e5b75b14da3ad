"""Diffusers' video transformers with sparse attention, and their gradients."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

import mmspeed
from mmspeed.pipelines.sparsify import ModelSparsity
from tests.support.video_transformers import Inputs, loss_of, make_model

CASES = ("wan", "ltx", "cogvideox", "hunyuan", "hunyuan 1.5", "mochi", "qwen, images", "flux, images")
JOINT = CASES[2:]
IMAGES = ("qwen, images", "flux, images")
FIRST = ("cogvideox", *IMAGES)  # text stands before the video
MASKED = ("hunyuan", "hunyuan 1.5", "qwen, images")
TOKENS, TEXT = 45, 7


def text_of(case: str) -> int:
    """Tokens of text that attend; with HunyuanVideo 1.5 also five of glyphs and three of an image."""
    return TEXT + 8 if case == "hunyuan 1.5" else TEXT


def calls_of_samples(case: str) -> int:
    """Attentions of one module for two samples: Mochi's attends to one after the other."""
    return 2 if case == "mochi" else 1


SMALL: dict[str, Any] = {"min_tokens": 1, "cluster_size": 8, "dense_steps": 1}


def plain_model(case: str) -> nn.Module:
    two_stacks = case.partition(",")[0] in ("hunyuan", "flux")
    deep = {"num_layers": 2, "num_single_layers": 2} if two_stacks else {"num_layers": 3}
    return make_model(case, **deep)


def sparse_model(case: str, **settings: Any) -> tuple[nn.Module, ModelSparsity]:
    model = plain_model(case)
    return model, mmspeed.sparsify_model(model, {**SMALL, **settings})


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(got: dict[str, Tensor], wanted: dict[str, Tensor], within: float = 2e-5) -> None:
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        assert (got[name] - value).abs().max() <= within * (value.abs().max() + 1e-3), name


def backward(model: nn.Module, inputs: Inputs) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad()
    loss = loss_of(model, inputs)
    loss.backward()
    return loss.item(), gradients(model)
