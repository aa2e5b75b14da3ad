"""Routers and experts: balance by bias and by auxiliary losses, and the same choice when a block is recomputed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mmspeed.errors import UserError
from mmspeed.memory.recompute.policy import BlockPolicies
from mmspeed.models.language.config import Balance, DecoderSettings, ExpertSettings
from mmspeed.models.language.decoder import Decoder, DecoderOutput, next_tokens
from mmspeed.models.language.experts import BiasedRouter, Router
from mmspeed.models.language.shapes import SHAPES, tiny_twin
from mmspeed.parallel import parallelize
from mmspeed.protocols import DeclaredState, stays_float32


def small(balance: Balance | None = None, **changes: Any) -> DecoderSettings:
    settings = tiny_twin(SHAPES["deepseek-v3"].settings)
    assert settings.experts is not None
    experts = replace(settings.experts, balance=balance, **changes)
    return replace(settings, experts=experts, num_nextn_predict_layers=0, first_std=0.2)


def routers(model: Decoder) -> list[Router]:
    return [module for module in model.modules() if isinstance(module, Router)]


def inputs(rows: int = 2) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, 512, (rows, 24), generator=torch.Generator().manual_seed(1))
    return ids, next_tokens(ids)


def run(model: Decoder, rows: int = 2) -> DecoderOutput:
    ids, targets = inputs(rows)
    output: DecoderOutput = model(ids, None, targets)
    return output


@pytest.mark.parametrize("policy", ["recompute"])
def test_a_recomputed_block_sends_tokens_to_the_same_experts(policy: Any) -> None:
    """Bit for bit, and its loads are counted once."""
    plain, again = Decoder(small("global_batch")).train(), Decoder(small("global_batch")).train()
    parallelize(again, None, "none", keeping=BlockPolicies.everywhere({"block": policy}))
    for model in (plain, again):
        for _ in range(2):  # the second pass's shares are of both
            output = run(model)
            assert output.loss_BN is not None and output.balance_B is not None
            (output.loss_BN.sum() + output.balance_B.sum()).backward()
    for (name, one), (_, other) in zip(plain.named_parameters(), again.named_parameters(), strict=True):
        assert one.grad is not None and other.grad is not None and torch.equal(one.grad, other.grad), name
    loads = [router.load_G for router in routers(again)]
    assert [int(load.sum()) for load in loads] == [2 * 2 * 24 * 2] * len(loads) and len(loads) == 2
    assert all(torch.equal(one.load_G, load) for one, load in zip(routers(plain), loads, strict=True))


def test_a_bias_balances_loads_without_a_loss() -> None:
    """It moves by its rate each step, against the load, and takes no part in the weights."""
    settings = ExpertSettings(8, 2, 4, scoring_func="sigmoid", norm_topk_prob=True, router_bias=True, balance_rate=0.01)
    router = BiasedRouter(16, settings).train()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        router.weight.copy_(torch.randn(8, 16, generator=generator))
    x = torch.randn(512, 16, generator=generator) + 0.5  # some experts are preferred by all

    def spread() -> float:
        router.load_G.zero_()
        router(x)
        return float(router.load_G.max() / router.load_G.mean())

    before = spread()
    first = router.load_G.clone()
    router.after_update(first.long())
    assert torch.equal(router.e_score_correction_bias, 0.01 * torch.sign(first.mean() - first))
    for _ in range(150):
        router.begin_counts(Tensor.long)
        router(x)
        router.after_update(router.step_counts().long())
    assert before > 1.5 and spread() < 1.15
    weights, experts, scores = router(x)
    assert torch.allclose(weights, scores.gather(1, experts) / scores.gather(1, experts).sum(1, keepdim=True))
    assert not router.e_score_correction_bias.requires_grad


def test_the_bias_belongs_to_the_state_of_a_run() -> None:
    model = Decoder(small())
    for router in routers(model):
        assert isinstance(router, DeclaredState) and dict(router.state_buffers) == {"e_score_correction_bias": "kept"}
    names = [name for name in model.state_dict() if "load" in name or "bias" in name]
    assert names == [f"layers.{place}.mlp.gate.e_score_correction_bias" for place in (1, 2)]
    assert stays_float32(model, "layers.1.mlp.gate.weight") and not stays_float32(model, "layers.1.mlp.gate_proj")


def by_formula(scores: Tensor, experts: Tensor) -> Tensor:
    """G x the sum of (share of choices) x (mean share of scores), expert by expert."""
    count, total = scores.shape[1], torch.zeros(())
    for expert in range(count):
        share = (experts == expert).float().sum() / experts.numel()
        total = total + share * (scores[:, expert] / scores.sum(1)).mean()
    return count * total


@pytest.mark.parametrize("balance", ["sequence", "micro_batch", "global_batch"])
@pytest.mark.parametrize("real", [(24, 24), (24, 10), (7, 0)], ids=["full", "padding", "filler"])
def test_the_gradient_of_an_auxiliary_loss_is_that_of_its_formula(balance: Balance, real: tuple[int, int]) -> None:
    """Over the real tokens: padding, and a pack that fills up a rank's share, have no part in it."""
    model = Decoder(small(balance)).train()
    seen: list[tuple[Tensor, Tensor]] = []
    for router in routers(model):
        router.register_forward_hook(lambda _, __, out: seen.append((out[2], out[1])))
    ids, targets = inputs()
    counted = torch.arange(24) < torch.tensor(real)[:, None]
    output = model(ids, None, targets, counted)
    assert output.balance_B is not None and output.balance_B.shape == (2,)
    parts: list[Tensor] = []
    for scores, experts in seen:
        rows = [(scores.chunk(2)[row][counted[row]], experts.chunk(2)[row][counted[row]]) for row in (0, 1)]
        if balance != "sequence":
            rows = [(scores[counted.flatten()], experts[counted.flatten()])] * 2
        parts.append(torch.stack([by_formula(*row) if len(row[0]) else torch.zeros(()) for row in rows]))
    wanted = torch.stack(parts).sum(0)
    torch.testing.assert_close(output.balance_B, wanted)
    weights = [router.weight for router in routers(model)]
    got = torch.autograd.grad(output.balance_B.sum(), weights, retain_graph=True)
    for one, other in zip(got, torch.autograd.grad(wanted.sum(), weights), strict=True):
        assert one.any()
        torch.testing.assert_close(one, other)


def test_statistics_of_the_global_batch_are_those_of_all_its_micro_batches() -> None:
    """The second micro-batch meets the shares of both; the last of the step is that of the whole batch, accumulated or not."""
    model = Decoder(small("global_batch")).train()
    ids, targets = inputs(4)
    last = [model(part, None, target).balance_B for part, target in zip(ids.chunk(2), targets.chunk(2), strict=True)][
        -1
    ]
    loads = [router.load_G.clone() for router in routers(model)]
    for router in routers(model):
        router.load_G.zero_()
    model(ids, None, targets)
    assert all(torch.equal(router.load_G, load) for router, load in zip(routers(model), loads, strict=True))
    assert last is not None and last.shape == (2,)


def test_evaluation_counts_no_loads() -> None:
    model = Decoder(small("global_batch")).eval()
    run(model)
    assert not any(router.load_G.any() for router in routers(model))


def test_a_half_model_routes_in_float32() -> None:
    model = Decoder(small()).to(torch.bfloat16)
    kinds: list[torch.dtype] = []
    for router in routers(model):
        router.register_forward_hook(lambda _, __, out: kinds.extend((out[0].dtype, out[2].dtype)))
    with torch.autocast("cpu", torch.bfloat16):
        run(model)
    assert set(kinds) == {torch.float32}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_group": 3}, "8 experts cannot be in 3 groups"),
        ({"n_group": 4, "topk_group": 1, "top_k": 3}, "1 of 4 groups hold fewer than 3 experts"),
    ],
)
def test_experts_that_do_not_fit(changes: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        small(**changes)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("balance", ["global_batch"])
def test_blocks_with_experts_compile(balance: Balance | None) -> None:
    """In float32 a graph has no grouped product and breaks at the loop."""
    plain, compiled = Decoder(small(balance)).train(), Decoder(small(balance)).train()
    parallelize(compiled, None, "none", compile="aot_eager")
    sums: list[Tensor] = []

    def total(counts: Tensor) -> Tensor:
        sums.append(counts.clone())
        return 2 * counts.long()

    for model in (plain, compiled):
        for router in routers(model):
            router.begin_counts(total)
        output = run(model)
        assert output.loss_BN is not None
        losses = output.loss_BN.sum()
        if output.balance_B is not None:
            losses = losses + output.balance_B.sum()
        losses.backward()
    assert len(sums) == (4 if balance == "global_batch" else 0)  # once a router
    for (name, one), (_, other) in zip(plain.named_parameters(), compiled.named_parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5, msg=name)
