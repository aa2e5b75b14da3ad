"""A shared expert beside experts of other processes, on a simulated clock: its products run while rows travel, forward and backward."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mmspeed import rng
from mmspeed.comm import Axis, Ledger
from mmspeed.mixin import mix_in
from mmspeed.models.language.experts import ExpertMlp
from mmspeed.models.language.shapes import SHAPES, tiny_twin
from mmspeed.moe.dispatch import FlatDispatcher
from mmspeed.parallel.experts import SpreadExperts
from tests.support.clock import ReckonedGroup

RANKS, EXPERTS, CHOICES, TOKENS, WIDTH, HIDDEN = 4, 8, 2, 256, 32, 48
MESSAGE = TOKENS * CHOICES * WIDTH * 4 * (RANKS - 1) // RANKS  # bytes that a process sends to others, without gates


class SharedProducts(TorchDispatchMode):
    """Gives the shared expert's products, and no others, a time: those of its input take as long as dispatch, that of `down` as combine."""

    def __init__(self, group: ReckonedGroup, mlp: ExpertMlp, x_TE: Tensor) -> None:
        super().__init__()
        shared = mlp.shared_experts
        assert shared is not None
        self.group = group
        of_input = (x_TE, shared.gate_proj.weight, shared.up_proj.weight)  # one of them is in each product
        self.of_input = {each.untyped_storage().data_ptr() for each in of_input}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default and HIDDEN in {size for each in args for size in each.shape}:
            first = any(each.untyped_storage().data_ptr() in self.of_input for each in args)
            self.group.compute(MESSAGE * (1 + 1 / WIDTH) / 2 if first else MESSAGE)
        return func(*args, **(kwargs or {}))


def spread_mlp() -> tuple[ExpertMlp, ReckonedGroup]:
    """Experts of which a process holds a part, and the group in which a byte takes a second."""
    settings = replace(tiny_twin(SHAPES["deepseek-v3"].settings), hidden_size=WIDTH)
    assert settings.experts is not None
    of_experts = replace(
        settings.experts, num_experts=EXPERTS // RANKS, top_k=1, n_group=1, topk_group=1, moe_intermediate_size=HIDDEN,
        n_shared_experts=1,
    )  # fmt: skip
    mlp, group = ExpertMlp(settings, of_experts), ReckonedGroup(1.0, RANKS)
    for name, p in mlp.named_parameters():
        p.data.copy_(rng.normal(p.shape, 3, name) * 0.1)
    axis = Axis("ep", group, RANKS, 0, Ledger())  # type: ignore[arg-type]
    spread = mix_in(mlp.experts, SpreadExperts, rename=False)
    spread._dispatcher, spread._joined = FlatDispatcher(axis, EXPERTS), {}
    return mlp, group


@pytest.mark.parametrize("overlaps", [True, False])
def test_95_percent_of_dispatch_and_combine_are_hidden_behind_the_shared_experts_products(overlaps: bool) -> None:
    mlp, group = spread_mlp()
    x_TE = rng.normal((TOKENS, WIDTH), 4, "tokens").requires_grad_()
    gates_TK = torch.full((TOKENS, CHOICES), 0.5, requires_grad=True)
    expert_TK = torch.arange(TOKENS * CHOICES).view(TOKENS, CHOICES) % EXPERTS
    with SharedProducts(group, mlp, x_TE):
        if overlaps:
            out_TE = mlp.experts(x_TE, gates_TK, expert_TK, mlp.shared_experts)
        else:
            out_TE = mlp.experts(x_TE, gates_TK, expert_TK) + mlp.shared_experts(x_TE)
        clock = group.clock
        forward, of_messages = clock.now - clock.seconds["compute"], clock.copying
        out_TE.square().sum().backward()
    back = clock.now - clock.seconds["compute"] - forward
    shares = forward / of_messages, back / (clock.copying - of_messages)
    counts, first, last = ["issue", "wait"], ["compute"] * 2, ["compute"]  # a product and two of its gradients
    if overlaps:
        assert max(shares) <= 0.05
        there_and_back = ["issue", *first, "wait", "issue", *last, "wait"]
        assert group.events == [*counts, *there_and_back, "issue", *last * 2, "wait", "issue", *first * 2, "wait"]
    else:
        assert shares == pytest.approx((1, 1))
        assert group.events == [*counts * 3, *first, *last, *last * 2, *first * 2, *counts * 2]
    assert all(p.grad is not None for p in (*mlp.experts.parameters(), *mlp.shared_experts.parameters()))
