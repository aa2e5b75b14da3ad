"""Diffusers' video transformers with sparse attention, and their gradients."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

import mmspeed
from mmspeed.pipelines.sparsify import ModelSparsity
from tests.support.video_transformers import Inputs, loss_of, make_model

CASES = ("wan", "ltx", "cogvideox", "hunyuan")
JOINT = ("cogvideox", "hunyuan")
TOKENS, TEXT = 45, 7
SMALL: dict[str, Any] = {"min_tokens": 1, "cluster_size": 8, "dense_steps": 1}


def plain_model(case: str) -> nn.Module:
    deep = {"num_layers": 2, "num_single_layers": 2} if case == "hunyuan" else {"num_layers": 3}
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
