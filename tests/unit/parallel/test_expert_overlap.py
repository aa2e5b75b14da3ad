"""A shared expert beside experts of other processes, on a simulated clock: its products run while rows travel, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mmspeed import rng
from mmspeed.comm import Axis, Ledger
from mmspeed.config.memory import ActivationPolicy
from mmspeed.memory import ActivationPolicies, set_policies
from mmspeed.mixin import mix_in
from mmspeed.models.language.experts import ExpertMlp
from mmspeed.models.language.shapes import SHAPES, tiny_twin
from mmspeed.moe.dispatch import FlatDispatcher
from mmspeed.parallel.experts import SpreadExperts
from mmspeed.protocols.plan import BlockParts, Region
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


def spread_mlp() -> tuple[ExpertMlp, ReckonedGroup, Ledger]:
    """Experts of which a process holds a part, the group in which a byte takes a second, and the bytes."""
    settings = replace(tiny_twin(SHAPES["deepseek-v3"].settings), hidden_size=WIDTH)
    assert settings.experts is not None
    of_experts = replace(
        settings.experts, num_experts=EXPERTS // RANKS, top_k=1, n_group=1, topk_group=1, moe_intermediate_size=HIDDEN,
        n_shared_experts=1,
    )  # fmt: skip
    mlp, group = ExpertMlp(settings, of_experts), ReckonedGroup(1.0, RANKS)
    for name, p in mlp.named_parameters():
        p.data.copy_(rng.normal(p.shape, 3, name) * 0.1)
    vars(mlp)["block_parts"] = BlockParts(
        {"dispatch": Region(("experts.dispatch",)), "experts": Region(("experts.activation",))}, draws=False
    )
    counted = Ledger()
    axis = Axis("ep", group, RANKS, 0, counted)  # type: ignore[arg-type]
    spread = mix_in(mlp.experts, SpreadExperts, rename=False)
    spread._dispatcher, spread._joined = FlatDispatcher(axis, EXPERTS), {}
    return mlp, group, counted


@dataclass(frozen=True)
class Passed:
    """Seconds that messages add to a forward and to a backward pass, over those of the messages; events, gradients and bytes."""

    shares: tuple[float, float]
    events: list[str]
    grads: list[Tensor]
    sent: dict[tuple[str, str], int]


def passed(overlaps: bool = True, ways: ActivationPolicies | None = None) -> Passed:
    """Both passes over experts and a shared one."""
    mlp, group, counted = spread_mlp()
    set_policies(mlp, ways or {})
    x_TE = rng.normal((TOKENS, WIDTH), 4, "tokens").requires_grad_()
    gates_TK = torch.full((TOKENS, CHOICES), 0.5, requires_grad=True)
    expert_TK = torch.arange(TOKENS * CHOICES).view(TOKENS, CHOICES) % EXPERTS
    clock, shared = group.clock, mlp.shared_experts
    with SharedProducts(group, mlp, x_TE):
        if overlaps:
            out_TE = mlp.experts(x_TE, gates_TK, expert_TK, shared)
        else:
            out_TE = mlp.experts(x_TE, gates_TK, expert_TK) + shared(x_TE)
        forward, of_messages = clock.now - clock.seconds["compute"], clock.copying
        out_TE.square().sum().backward()
    back = clock.now - clock.seconds["compute"] - forward
    shares = forward / of_messages, back / (clock.copying - of_messages)
    grads = [p.grad for p in (x_TE, gates_TK, *mlp.experts.parameters(), *shared.parameters())]
    return Passed(shares, group.events, [grad for grad in grads if grad is not None], dict(counted.bytes))


COUNTS, FIRST, LAST = ["issue", "wait"], ["compute"] * 2, ["compute"]  # in backward two products for each
THERE_AND_BACK = ["issue", *FIRST, "wait", "issue", *LAST, "wait"]
OVERLAPPED = [*COUNTS, *THERE_AND_BACK, "issue", *LAST * 2, "wait", "issue", *FIRST * 2, "wait"]


def test_95_percent_of_dispatch_and_combine_are_hidden_behind_the_shared_experts_products() -> None:
    beside, series = passed(), passed(overlaps=False)
    assert max(beside.shares) <= 0.05 and beside.events == OVERLAPPED
    assert series.shares == pytest.approx((1, 1))
    assert series.events == [*COUNTS * 3, *FIRST, *LAST, *LAST * 2, *FIRST * 2, *COUNTS * 2]
    assert len(beside.grads) == 7 and beside.sent == series.sent
    for one, other in zip(beside.grads, series.grads, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("way", ["recompute", "selective"])
def test_rows_of_experts_that_are_made_again_are_not_sent_again(way: ActivationPolicy) -> None:
    plain, again = passed(), passed(ways={"dispatch": way, "experts": way})
    assert again.sent == plain.sent and again.events == OVERLAPPED
    assert all(map(torch.equal, again.grads, plain.grads))
