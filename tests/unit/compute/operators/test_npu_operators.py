"""Operators by torch_npu: calls go through operators with the schemas of its published wheel, which compute by the formula.

Legend: B batch, T tokens, N tokens of a sequence, A heads, K heads of the keys or choices of a token, D head width, H half of D, W width
of the values.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mmspeed.compute import npu_operators
from mmspeed.compute.operators.base import serves_all
from mmspeed.compute.operators.permutation import order_by_expert, order_rows
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


def npu_moe_token_permute(tokens: Tensor, indices: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    assert indices.shape[0] == len(tokens) and indices.dtype == torch.int32
    assert options == {"num_out_tokens": None, "padded_mode": False}
    order = indices.flatten().argsort(stable=True)
    return tokens[order // indices.shape[1]], order.argsort().int()


def npu_moe_token_unpermute(permuted_tokens: Tensor, sorted_indices: Tensor, probs: Tensor, **options: Any) -> Tensor:
    """Without probabilities a token would have one row."""
    assert sorted_indices.sort().values.tolist() == list(range(len(permuted_tokens)))
    assert sorted_indices.dtype == torch.int32 and probs.dtype == permuted_tokens.dtype
    assert options == {"padded_mode": False, "restore_shape": None}
    return (permuted_tokens[sorted_indices.long()].view(*probs.shape, -1) * probs[..., None]).sum(1)


def npu_grouped_matmul(x: list[Tensor], weight: list[Tensor], group_list: Tensor, **options: Any) -> list[Tensor]:
    """Groups divide the rows of x, whose last dim is dense, or the dim that is summed over, whose x lies transposed."""
    (left,), (right,), ends = x, weight, group_list.tolist()
    given = {name: value for name, value in options.items() if value is not None}
    assert given in ({"split_item": 3, "group_type": kind, "group_list_type": 0, "act_type": 0} for kind in (0, 2))
    assert group_list.dtype == torch.int64 and ends == sorted(ends) and left.dtype == right.dtype
    ranges = list(zip([0, *ends[:-1]], ends, strict=True))
    if options["group_type"] == 0:
        assert left.is_contiguous() and ends[-1] == len(left) and right.dim() == 3 and len(right) == len(ends)
        return [torch.cat([left[start:end] @ one for (start, end), one in zip(ranges, right, strict=True)])]
    assert left.mT.is_contiguous() and right.is_contiguous() and ends[-1] == len(right) == left.shape[1]
    out = torch.stack([left[:, start:end] @ right[start:end] for start, end in ranges])
    out[[start == end for start, end in ranges]] = torch.nan  # nothing is promised of a group without rows
    return [out]


ATTENTION = (npu_rms_norm, npu_rotary_mul, npu_swiglu, npu_fusion_attention)
EXPERTS = (npu_moe_token_permute, npu_moe_token_unpermute, npu_grouped_matmul)
FORMULAS = {f.__name__: f for f in (*ATTENTION, *EXPERTS)}


@pytest.fixture
def operators() -> Iterator[None]:
    with npu_library(FORMULAS, ("operator", "attention", "experts"), "CompositeImplicitAutograd"):
        yield


def compare(operator: str, *args: Any) -> None:
    """The result and the gradients of torch_npu's call against the eager twin's."""
    results = []
    for name in ("fused", OPERATORS[operator].eager.name):
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


@pytest.mark.usefixtures("operators")
def test_rows_of_experts() -> None:
    """Permutations, and products of groups of which some have no rows; the gradients of the first two may not be contiguous."""
    order = order_by_expert(torch.tensor([[2, 0], [0, 1], [4, 2], [0, 4], [2, 1]]), 6)
    compare("permute", draws(5, 8), order)
    compare("combine", draws(10, 8), order)
    compare("grouped_product", draws(10, 8), draws(6, 4, 8, seed=1), order.ends_G)
    weight = draws(6, 4, 8, seed=1)
    frozen = OPERATORS["grouped_product"]["fused"].run(draws(10, 8).requires_grad_(), weight, order.ends_G)
    frozen.sum().backward()
    with torch.autocast("cpu", torch.bfloat16):
        assert OPERATORS["grouped_product"]["fused"].run(draws(10, 8), weight, order.ends_G).dtype == torch.bfloat16


def test_what_kernels_of_experts_do_not_take_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(npu_operators, "refuses", lambda operator: serves_all)  # as on an NPU
    x, ends_G = draws(4, 8), torch.tensor([1, 4])
    some = order_rows(torch.tensor([[0, 2], [1, 2], [2, 2], [0, 1]]), 4)
    none = order_by_expert(torch.zeros(0, 2, dtype=torch.int64), 3)
    for name in ("permute", "combine"):
        fused = OPERATORS[name]["fused"]
        assert fused.refuses(x, order_by_expert(torch.arange(8).view(4, 2), 8)) == ""
        assert "8 pairs of token and choice become 4 rows" in fused.refuses(x, some)
        assert "0 pairs of token and choice become 0 rows" in fused.refuses(x[:0], none)
        wide = order_by_expert(torch.zeros(4, 600, dtype=torch.int64), 1)
        assert "512 choices, not 2400 and 600" in fused.refuses(x, wide)
    refuses = OPERATORS["grouped_product"]["fused"].refuses
    assert refuses(x, draws(2, 4, 8), ends_G) == "" and refuses(x[:0], draws(2, 4, 8), ends_G) == "there are no rows"
    assert "not torch.float32 x torch.bfloat16" in refuses(x, draws(2, 4, 8).bfloat16(), ends_G)
    assert "not 1025 and 8" in refuses(x, draws(1025, 1, 8), ends_G)
    assert "not 2 and 65536" in refuses(x, torch.empty(2, 65536, 8), ends_G)


@pytest.mark.parametrize("name", [name for name, one in OPERATORS.items() if one.implementations[0].name == "fused"])
def test_other_devices_are_refused_in_words(name: str) -> None:
    bounds_Z = torch.tensor([0, 4])
    args = {
        "rms_norm": (draws(4, 8), draws(8), 1e-5),
        "swiglu": (draws(4, 8), draws(4, 8)),
        "rotary": (draws(1, 4, 2, 8), draws(2, 1, 4, 4)),
        "document_attention": (draws(4, 2, 8), draws(4, 2, 8), draws(4, 2, 8), bounds_Z, None),
        "grouped_product": (draws(4, 8), draws(2, 8, 8), torch.tensor([1, 4])),
        "permute": (draws(4, 8), order_by_expert(torch.arange(8).view(4, 2), 8)),
        "combine": (draws(8, 8), order_by_expert(torch.arange(8).view(4, 2), 8)),
    }[name]
    assert OPERATORS[name].reasons(*args)["fused"] == "it is a kernel of NPUs, not of cpu"
