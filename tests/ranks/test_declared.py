"""A user's own model under a plan that it declares, on 2 ranks, against one process in float32."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from mmspeed.comm import Ledger
from mmspeed.errors import UserError
from mmspeed.memory import recompute
from mmspeed.parallel.boundaries.apply import sequence_axes, sequence_parallel
from mmspeed.protocols.plan import Block as PlanBlock
from mmspeed.protocols.plan import Gather, ModelPlan, Site, Split
from tests.support.spawn import run_ranks

TOLERANCE = 1e-5  # relative to a gradient's largest entry; sums over keys and ranks are taken in another order
HEADS, KEY_HEADS, WIDTH = 4, 2, 32


class Attention(nn.Module):
    """Attention with fewer key heads than query heads, as language models have; to itself or to other tokens."""

    def __init__(self, causal: bool = False, additive: bool = False) -> None:
        super().__init__()
        self.to_q, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.to_kv = nn.Linear(WIDTH, 2 * WIDTH * KEY_HEADS // HEADS)
        self.causal, self.additive = causal, additive

    def forward(
        self, x_BNE: torch.Tensor, other_BME: torch.Tensor | None = None, keys_BM: torch.Tensor | None = None
    ) -> torch.Tensor:
        q = self.to_q(x_BNE).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        kv = self.to_kv(x_BNE if other_BME is None else other_BME).unflatten(-1, (2 * KEY_HEADS, -1)).transpose(1, 2)
        k, v = kv.chunk(2, dim=1)
        mask = None if keys_BM is None else keys_BM[:, None, None, :]
        if mask is not None and self.additive:
            mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, float("-inf"))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.causal, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, causal: bool, additive: bool) -> None:
        super().__init__()
        self.own, self.text = Attention(causal), Attention(additive=additive)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x_BNE: torch.Tensor, text_BME: torch.Tensor, keys_BM: torch.Tensor | None) -> torch.Tensor:
        x_BNE = x_BNE + self.own(x_BNE)
        x_BNE = x_BNE + self.text(x_BNE, text_BME, keys_BM)
        return x_BNE + self.mlp(x_BNE)


class Model(nn.Module):
    """Video tokens that attend to one another, and to text that is long enough to be split too."""

    def own_plan(self) -> ModelPlan:
        return dataclasses.replace(self.plan, causal=self.blocks[0].own.causal)

    plan = ModelPlan(
        blocks=(PlanBlock("blocks.0"), PlanBlock("blocks.1")),
        inputs={"": {"tokens": Split("video", 1), "text": Split("text", 1), "text_mask": Split("text", 1)}},
        outputs={"head": {0: Gather("video", 1)}},
        attention={"blocks.*.own": Site(("video",)), "blocks.*.text": Site(("video",), ("text",))},
    )

    def __init__(self, causal: bool = False, additive: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.embed, self.head = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 3)
            self.blocks = nn.ModuleList(Block(causal, additive) for _ in range(2))

    def forward(self, tokens: torch.Tensor, text: torch.Tensor, text_mask: torch.Tensor | None = None) -> torch.Tensor:
        x_BNE = self.embed(tokens)
        for block in self.blocks:
            x_BNE = block(x_BNE, text, text_mask)
        return self.head(x_BNE)


def inputs(tokens: int = 11, text: int = 7) -> dict[str, Any]:
    g = torch.Generator().manual_seed(0)
    mask = torch.rand(2, text, generator=g) < 0.6
    mask[:, 0] = True
    return {
        "tokens": torch.randn(2, tokens, 3, generator=g),
        "text": torch.randn(2, text, WIDTH, generator=g),
        "text_mask": mask,
    }


def loss_of(out: torch.Tensor) -> torch.Tensor:
    return (out.float() - torch.linspace(-1, 1, out.numel()).view_as(out)).square().mean()


def compare(ulysses: int, ring: int, how: str = "", model: Any = None, **options: Any) -> dict[str, Any]:
    """Loss and worst gradient against one process; `how` names what is applied beside sequence parallelism."""
    mesh = init_device_mesh("cpu", (ring, ulysses), mesh_dim_names=("ring", "ulysses"))
    alone = Model(**(model or {}))
    split, ledger, batch = copy.deepcopy(alone), Ledger(), inputs(**options)
    true = loss_of(alone(**batch))
    true.backward()
    if how == "recompute before":
        for block in split.blocks:
            recompute(block)
    sequence_parallel(split, sequence_axes(mesh, ledger=ledger), split.own_plan())
    if how.startswith("recompute after"):
        for block in split.blocks:
            recompute(block)
    if how == "recompute after, two forwards":  # both graphs wait for one backward, with lengths that share a local one
        longer = inputs(**{**options, "tokens": options["tokens"] - 1})
        loss_of(alone(**longer)).backward()
        loss = loss_of(split(**batch))
        (loss + loss_of(split(**longer))).backward()
    else:
        loss = loss_of(split(**batch))
        loss.backward()
    worst = 0.0
    for (name, mine), theirs in zip(split.named_parameters(), alone.parameters(), strict=True):
        assert mine.grad is not None and theirs.grad is not None
        grad = mine.grad.clone()
        dist.all_reduce(grad)
        grad /= dist.get_world_size()
        if not name.endswith("to_kv.bias"):  # the keys' half has no gradient but rounding; the values' is seen at `out`
            worst = max(worst, float((grad - theirs.grad).abs().max() / theirs.grad.abs().max()))
    return {
        "loss": abs(float(loss.detach() - true.detach()) / float(true.detach())),
        "gradient": worst,
        "calls": {f"{kind} {axis}": count for (kind, axis), count in ledger.calls.items()},
    }


def local_loss() -> float:
    """A plan that gathers nothing: each rank's loss is a part of the sum, and recomputation finds its lengths."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ulysses",))
    alone = Model()
    split = copy.deepcopy(alone)
    plan = dataclasses.replace(Model.plan, outputs={})
    sequence_parallel(split, mesh, plan)
    for block in split.blocks:
        recompute(block)
    alone(**inputs()).square().sum().backward()
    out = split(**inputs())
    with torch.no_grad():
        split(**inputs(tokens=9))
    out.square().sum().backward()
    grad = split.embed.weight.grad
    dist.all_reduce(grad)
    true = alone.embed.weight.grad
    return float((grad - true).abs().max() / true.abs().max())


def failures() -> dict[str, str]:
    """The messages to the user, by what went wrong."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ring",))
    own = Model.plan
    messages = {}

    def catch(name: str, model: nn.Module, plan: ModelPlan | None = None, **changes: Any) -> None:
        with pytest.raises(UserError) as caught:
            sequence_parallel(model, mesh, plan)(**{**inputs(), **changes})
        messages[name] = str(caught.value)

    class Biased(Attention):
        def forward(self, x_BNE: torch.Tensor, *_: Any) -> torch.Tensor:
            q = x_BNE.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            mask = None if self.kind != "bias" else torch.full((1, 1, 1, q.shape[2]), 0.5)
            if self.kind == "square":
                mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool)
            y = F.scaled_dot_product_attention(
                q, q, q, attn_mask=mask, dropout_p=0.1 if self.kind == "dropout" else 0.0
            )
            if self.kind == "twice":
                y = F.scaled_dot_product_attention(y, y, y)
            return y.transpose(1, 2).flatten(2)

    for kind in ("bias", "square", "dropout", "twice"):
        model = Model()
        attention = Biased()
        attention.kind = kind  # type: ignore[assignment]
        model.blocks[0].own = attention
        catch(kind, model)
    catch("causal", Model(causal=True))
    catch("other lengths", Model(), dataclasses.replace(own, attention={"blocks.*.text": Site(("video",))}))
    late = {"head": {"input": Split("video", 1)}}  # after the blocks
    catch("split late", Model(), ModelPlan((), inputs=late, attention={"blocks.*.own": Site(("video",))}))
    catch("mask too long", Model(), text_mask=torch.ones(2, 9, dtype=torch.bool))
    return messages


def on_two() -> dict[str, Any]:
    return {
        "local loss": local_loss(),
        "failures": failures(),
        **{name: compare(*how, **more) for name, (how, more) in TWO.items()},
    }


TWO: dict[str, Any] = {
    "additive mask": ((1, 2), {"model": {"additive": True}}),
    "causal ring": ((1, 2), {"model": {"causal": True}}),
    "causal ulysses": ((2, 1), {"model": {"causal": True}}),
    "recompute before": ((2, 1, "recompute before"), {}),
    "two forwards": ((1, 2, "recompute after, two forwards"), {"tokens": 10}),
}


@pytest.fixture(scope="module")
def two() -> dict[str, Any]:
    return run_ranks(on_two, 2)[0]


def hold(actual: dict[str, Any]) -> None:
    assert actual["loss"] <= TOLERANCE and actual["gradient"] <= TOLERANCE, actual
    assert actual["calls"], "nothing was exchanged"


def test_one_process_and_two_agree(two: dict[str, Any]) -> None:
    for name in TWO:
        hold(two[name])


def test_without_a_gather_the_losses_of_ranks_add_up(two: dict[str, Any]) -> None:
    assert two["local loss"] <= TOLERANCE


FAILURES = {
    "bias": "adds a bias",
    "square": "only masks of keys work",
    "dropout": "attention dropout 0.1",
    "twice": "2 times, not once",
    "causal": "a plan with causal=True",
    "other lengths": "attention has 4 keys where the plan has 6",
    "split late": "sequence 'video' is needed before it was split",
    "mask too long": "sequence 'text' has 9 tokens here and had 7 before",
}


def test_errors_say_what_to_do(two: dict[str, Any]) -> None:
    assert two["failures"].keys() == FAILURES.keys()
    for name, words in FAILURES.items():
        assert words in two["failures"][name]
