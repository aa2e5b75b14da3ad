"""Experts' tokens by DeepEP, of which a stand-in computes, beside collectives: the same bits; and what is refused."""

from __future__ import annotations

import sys
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mmspeed import rng
from mmspeed.comm import Axis
from mmspeed.config.parallel import ParallelConfig
from mmspeed.errors import UserError
from mmspeed.models.language.experts import Experts
from mmspeed.models.language.shapes import SHAPES, tiny_twin
from mmspeed.moe import deepep
from mmspeed.moe.deepep import Buffers, DeepEpDispatcher
from mmspeed.moe.dispatch import FlatDispatcher
from mmspeed.replay import ExchangeRecord
from tests.support import deep_ep
from tests.support.spawn import run_ranks

WIDTH, EXPERTS = 16, 8
WAYS = ("plain", "kept", "again")  # what a recomputation does with exchanges
TOKENS = ((11, 4), (3, 40))  # of processes, call by call: the second needs more memory


def experts_of(rank: int) -> Experts:
    """A process's half of the experts of a Qwen3-MoE, in bfloat16."""
    twin = tiny_twin(SHAPES["qwen3-30b-a3b"].settings).experts
    assert twin is not None
    module = Experts(WIDTH, twin)
    for name, p in list(module.named_parameters()):
        part = (rng.normal((EXPERTS, *p.shape[1:]), 3, name) * 0.3).chunk(2)[rank].bfloat16()
        module.register_parameter(name, nn.Parameter(part))
    return module


def through(dispatcher: Any, way: str) -> list[list[Tensor]]:
    """Outputs and gradients of calls: of tokens, gates and experts. Two are under way at once, as in micro-batches of a pipeline."""
    rank = dist.get_rank()
    module, results, outs = experts_of(rank), [], []

    def layer(x: Tensor, gates: Tensor, expert: Tensor) -> Any:
        sent = dispatcher.start(x, gates, expert)
        return dispatcher.finish_back(sent, dispatcher.start_back(sent, module(*dispatcher.finish(sent))))

    for call, tokens in enumerate(TOKENS):
        x = rng.normal((tokens[rank], WIDTH), 4, "tokens", rank, call).bfloat16().requires_grad_()
        gates, expert = rng.normal((tokens[rank], EXPERTS), 4, "gates", rank, call).softmax(-1).topk(2)
        gates.requires_grad_()
        if way == "plain":
            out = layer(x, gates, expert)
        else:
            record = ExchangeRecord(again=way == "again")
            passes = lambda record=record: (record.in_force(), record.in_force())  # noqa: E731
            out = checkpoint(layer, x, gates, expert, use_reentrant=False, context_fn=passes)
        outs.append(out)
        results.append([x, gates])
    sum(out.float().square().sum() for out in outs).backward()
    of_experts = [p.grad for _, p in sorted(module.named_parameters())]
    return [[out.detach() for out in outs], [leaf.grad for pair in results for leaf in pair], of_experts]


def computed() -> dict[str, Any]:
    sys.modules["deep_ep"] = deep_ep
    group = dist.new_group([0, 1])
    axis = Axis("ep", group, 2, dist.get_rank())
    found: dict[str, Any] = {}
    with patch.object(deepep, "missing", lambda kind: ""):
        for way in WAYS:
            before = axis.ledger.copy()
            buffers = Buffers(axis)
            sides = [
                through(dispatcher, way)
                for dispatcher in (DeepEpDispatcher(buffers, EXPERTS), FlatDispatcher(axis, EXPERTS))
            ]
            found[way] = [
                torch.equal(a, b) for one, other in zip(*sides, strict=True) for a, b in zip(one, other, strict=True)
            ]
            found[f"{way} calls"] = axis.ledger.since(before).calls
        found["most"] = buffers._buffer.most
    return found


def test_the_same_bits_as_collectives() -> None:
    for found in run_ranks(computed, 2):
        for way in WAYS:
            assert all(found[way]) and len(found[way]) == 8, (way, found[way])
            sent = 2 * 2 * (3 if way == "again" else 2)  # dispatchers x calls x passes
            assert found[f"{way} calls"][("dispatch", "ep")] == sent, found[f"{way} calls"]
        assert found["most"] == 40


def test_what_it_does_not_take_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="deepep does not serve: it has kernels of CUDA, not of cpu; use collective"):
        deepep.check_backend("cpu")
    assert "deep_ep is not installed" in deepep.missing("cuda")
    x, gates, expert = torch.zeros(3, 16, dtype=torch.bfloat16), torch.zeros(3, 2), torch.zeros(3, 2)
    assert "not of cpu" in deepep.refuses(x, gates, expert)
    monkeypatch.setattr(deepep, "missing", lambda kind: "")
    assert deepep.refuses(x, gates, expert) == ""
    assert "not torch.float32 with torch.float32: set device.dtype" in deepep.refuses(x.float(), gates, expert)
    assert "not 12 and 2" in deepep.refuses(x[:, :12], gates, expert)
    assert "not 16 and 33" in deepep.refuses(x, gates, torch.zeros(3, 33))


@pytest.mark.parametrize("more", [{"ep": 1}, {"etp": 2}, {"ep_inner": 2}, {"balance": {"copies": 1}}])
def test_other_keys_that_it_does_not_go_with(more: dict[str, Any]) -> None:
    fields = {"ep": 4, "ep_backend": "deepep"}
    assert ParallelConfig.model_validate(fields).ep_backend == "deepep"
    with pytest.raises(ValidationError, match="deepep goes with ep above 1, without etp, ep_inner, balance"):
        ParallelConfig.model_validate(fields | more)
