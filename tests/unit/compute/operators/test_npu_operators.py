"""Operators by torch_npu: calls go through operators with the schemas of its published wheel, which compute by the formula.

Legend: B batch, T tokens, N tokens of a sequence, A heads, K heads of the keys, D head width, H half of D, W width of the values.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mmspeed.compute import npu_operators
from mmspeed.compute.registry import OPERATORS
from mmspeed.compute.rope import rope_dtype
from tests.support.npu_library import npu_library


def npu_rms_norm(input: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    assert gamma.dtype == input.dtype
    return F.rms_norm(input, (input.shape[-1],), gamma, epsilon), input.float().square().mean(-1, keepdim=True).rsqrt()


def npu_rotary_mul(input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str, rotate: Tensor | None) -> Tensor:
    assert input.dim() == r1.dim() == 4 and r1.shape[2] == 1 and r1.dtype == input.dtype and rotary_mode == "half"
    first, second = input.chunk(2, dim=-1)
    return input * r1 + torch.cat((-second, first), dim=-1) * r2


def npu_swiglu(input: Tensor, dim: int) -> Tensor:
    gate, up = input.chunk(2, dim=dim)
    return F.silu(gate) * up


def npu_fusion_attention(
    query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str, **options: Any
) -> tuple[Any, ...]:
    """The formula of one sequence after another; the mask stands for the upper triangle of each."""
    mask, ends = options["atten_mask"], options["actual_seq_qlen"]
    assert input_layout == "TND" and head_num == query.shape[1] and key.shape[-1] == value.shape[-1] == query.shape[-1]
    assert mask.shape == (2048, 2048) and mask.dtype == torch.bool and bool(mask[0, 1]) and not bool(mask[1, 1])
    assert ends == options["actual_seq_kvlen"] and ends == sorted(set(ends)) and ends[-1] == len(query)
    assert options["sparse_mode"] in (3, 4) and (options["sparse_mode"] == 3 or options["next_tockens"] == 0)
    outs = []
    for start, end in zip([0, *ends[:-1]], ends, strict=True):
        q, k, v = (x[start:end].transpose(0, 1) for x in (query, key, value))
        k, v = (x.repeat_interleave(q.shape[0] // x.shape[0], dim=0) for x in (k, v))
        seen = torch.ones(end - start, end - start, dtype=torch.bool).tril()
        if options["sparse_mode"] == 4:
            seen = seen.triu(-options["pre_tockens"])
        score = (q @ k.mT * options["scale"]).masked_fill(~seen, -torch.inf)
        outs.append((score.softmax(-1) @ v).transpose(0, 1))
    empty = torch.empty(0)
    return torch.cat(outs), empty, empty, empty, 0, 0, 0


FORMULAS = {f.__name__: f for f in (npu_rms_norm, npu_rotary_mul, npu_swiglu, npu_fusion_attention)}


@pytest.fixture
def operators() -> Iterator[None]:
    with npu_library(FORMULAS, ("operator", "attention"), "CompositeImplicitAutograd"):
        yield


def compare(operator: str, *args: Any) -> None:
    """The result and the gradients of torch_npu's call against the eager twin's."""
    results = []
    for name in ("fused", "eager"):
        own = [x.clone().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x for x in args]
        if operator == "rotary":
            own[1:] = args[1:]
        out = OPERATORS[operator][name].run(*own)
        weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
        (out * weights).sum().backward()
        results.append([out.detach(), *(x.grad for x in own if isinstance(x, Tensor) and x.requires_grad)])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=2e-6)


def draws(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.usefixtures("operators")
def test_norm_activation_and_turn() -> None:
    compare("rms_norm", draws(3, 7, 16), draws(16, seed=1), 1e-5)
    compare("swiglu", draws(5, 12), draws(5, 12, seed=1))
    angle_BNH = draws(2, 7, 4, seed=1)
    turn_2BNH = torch.stack((angle_BNH.cos(), angle_BNH.sin()))
    compare("rotary", draws(2, 7, 3, 8), turn_2BNH)
    assert rope_dtype(torch.bfloat16) == torch.float32
    half = OPERATORS["rotary"]["fused"].run(draws(2, 7, 3, 8).bfloat16(), turn_2BNH)
    assert half.dtype == torch.bfloat16


@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(("keys", "values"), [(4, 8), (2, 8), (4, 6)])
def test_attention_within_documents(
    monkeypatch: pytest.MonkeyPatch, window: int | None, keys: int, values: int
) -> None:
    """Of one token, with empty ones, over several calls; with grouped heads and narrower values."""
    monkeypatch.setattr(npu_operators, "SEQUENCES", 3)
    bounds_Z = torch.tensor([0, 0, 5, 6, 6, 13, 15, 20, 20], dtype=torch.int32)
    q_TAD, k_TKD, v_TKW = draws(20, 4, 8), draws(20, keys, 8, seed=1), draws(20, keys, values, seed=2)
    compare("document_attention", q_TAD, k_TKD, v_TKW, bounds_Z, window)


@pytest.mark.parametrize("name", ["rms_norm", "swiglu", "rotary", "document_attention"])
def test_other_devices_are_refused_in_words(name: str) -> None:
    bounds_Z = torch.tensor([0, 4])
    args = {
        "rms_norm": (draws(4, 8), draws(8), 1e-5),
        "swiglu": (draws(4, 8), draws(4, 8)),
        "rotary": (draws(1, 4, 2, 8), draws(2, 1, 4, 4)),
        "document_attention": (draws(4, 2, 8), draws(4, 2, 8), draws(4, 2, 8), bounds_Z, None),
    }[name]
    assert OPERATORS[name]["fused"].refuses(*args) == "it is a kernel of NPUs, not of cpu"
