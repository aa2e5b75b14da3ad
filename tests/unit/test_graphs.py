"""Graphs of torch.compile together with recomputation, where something in a block stays outside of graphs."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
import torch._dynamo.utils
from torch import Tensor, nn

from mmspeed import rng
from mmspeed.compute.attention import attention
from mmspeed.graphs import MOST_GRAPHS, compile_forward, outside_graphs
from mmspeed.memory import recompute
from mmspeed.models import SoraDiT, SoraDiTConfig
from mmspeed.parallel import parallelize
from tests.support.attend_by import attend_by
from tests.support.graphs import CountingBackend
from tests.support.memory_ways import keeping_of, make_inputs
from tests.support.memory_ways import make_model as make_sora


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


def gradients(blocks: nn.ModuleList, x: Tensor) -> list[Tensor]:
    for block in blocks:
        x = block(x)
    x.square().sum().backward()
    results = [parameter.grad for parameter in blocks.parameters()]
    blocks.zero_grad(set_to_none=True)
    assert all(grad is not None for grad in results)
    return results  # type: ignore[return-value]


@pytest.fixture
def blocks() -> nn.ModuleList:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return nn.ModuleList(Block() for _ in range(3))


calls: Counter[str] = Counter()


@outside_graphs
def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """An exchange, like attention over several processes."""
    calls["attend"] += 1
    return attention(q, k, v, mask)


class Broken(nn.Module):
    """A block whose attention stays outside of graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x).tanh().unflatten(-1, (2, 6)).transpose(1, 2)
        return x + self.down(attend(h, h, h, None).transpose(1, 2).flatten(2)).sigmoid()


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Broken()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def small_inputs(number: int) -> tuple[Tensor, ...]:
    return (rng.normal((2, (7, 4, 5, 4)[number], 6), 0, number).requires_grad_(),)


def full_inputs(number: int) -> tuple[Tensor, ...]:
    x = rng.normal((2, 2, *((5, 4, 6), (3, 6, 6), (4, 2, 6), (3, 6, 6))[number]), 0, number)
    return x, torch.tensor([0.2, 0.7]), rng.normal((2, 5, 6), 0, "text"), torch.arange(5) < torch.tensor([[5], [2]])


@pytest.mark.slow
@pytest.mark.parametrize("full", [False, True], ids=["small", "SoraDiT"])
def test_recomputation_around_graphs_with_breaks(full: bool) -> None:
    """Shapes change, so that torch makes other graphs, which keep other tensors, between a forward pass and its recomputation."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    stats = torch._dynamo.utils.counters["stats"]
    stats.clear()
    config = SoraDiTConfig(width=24, depth=1, heads=2, latent_channels=2, text_width=6, adaln_rank=2)
    model = attend_by(SoraDiT(config), attend) if full else Small()
    for name, parameter in model.named_parameters():
        parameter.data += 0.1 * rng.normal(parameter.shape, 0, name)
    plain, graphs = copy.deepcopy(model), []
    for block in model.blocks:
        compile_forward(block, "aot_eager")
        recompute(block, around_graphs=True)
    for number in range(4):
        before = calls["attend"]
        for one in (model, plain):
            one.zero_grad(set_to_none=True)
            one(*(full_inputs if full else small_inputs)(number)).square().mean().backward()
        # forward, and again in backward; and in `plain`; a full block attends to the video and to the text
        assert calls["attend"] - before == (3 * 2 if full else 3)
        for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6, msg=name)
        graphs.append(stats["unique_graphs"])
    assert graphs[0] > 0 and graphs[-1] == graphs[-2]  # there are graphs, and no new ones for a shape that was met


def test_a_first_block_whose_input_has_no_gradient(blocks: nn.ModuleList) -> None:
    """Nothing before it trains: its parameters have their gradients all the same."""
    (before, *_) = [gradients(blocks, torch.ones(2, 6))]
    for block in blocks:
        recompute(block, around_graphs=True)
    for one, other in zip(gradients(blocks, torch.ones(2, 6)), before, strict=True):
        torch.testing.assert_close(one, other)


def test_copies_compute_with_their_own_parameters(blocks: nn.ModuleList) -> None:
    seen = CountingBackend()
    for block in blocks:
        compile_forward(block, seen)
    x = torch.randn(5, 6)
    right = blocks[0](x)
    graphs, other = seen.graphs, copy.deepcopy(blocks)
    with torch.no_grad():
        other[0].up.weight.zero_()  # type: ignore[union-attr]
    assert torch.equal(blocks[0](x), right) and not torch.equal(other[0](x), right)
    assert seen.graphs == graphs  # blocks of a class share them


def test_more_graphs_than_torch_allows_by_itself(blocks: nn.ModuleList) -> None:
    """The limit is torch's for the whole process, and never lowered."""
    config: Any = torch._dynamo.config
    with config.patch(recompile_limit=8):
        compile_forward(blocks[0], CountingBackend())
        assert config.recompile_limit == MOST_GRAPHS
    with config.patch(recompile_limit=1000):
        compile_forward(blocks[1], CountingBackend())
        assert config.recompile_limit == 1000


# arrangement, sparse attention, recomputed: graphs of three blocks of one or two kinds, and those that the forward of one block runs
COUNTS = [
    ("full", False, False, 1, 1),
    ("factorised", False, True, 2, 1),
    # before and after the sparse attention, and once more in the second pass
    ("factorised", True, True, 8, 2),
]


@pytest.mark.parametrize(
    ("arrangement", "sparse", "recomputed", "graphs", "runs"),
    [pytest.param(*case, marks=pytest.mark.slow if case[1] or case[0] == "factorised" else []) for case in COUNTS],
)
def test_graphs_of_a_block_on_one_process(
    arrangement: str, sparse: bool, recomputed: bool, graphs: int, runs: int
) -> None:
    torch._dynamo.reset()
    seen, name = CountingBackend(), f"seen {arrangement} {sparse} {recomputed}"
    torch._dynamo.register_backend(seen, name=name)
    keeping = keeping_of({"block": "recompute"} if recomputed else {})
    model = parallelize(make_sora(arrangement, sparse), None, "none", keeping=keeping, compile=name)
    out = model(*make_inputs())
    assert seen.runs == 3 * runs
    out.square().mean().backward()
    assert seen.graphs == graphs
    model(*make_inputs()).square().mean().backward()
    assert seen.graphs == graphs  # made once
