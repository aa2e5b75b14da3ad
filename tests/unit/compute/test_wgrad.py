"""Gradients of weights that wait are those of autograd, bit for bit, once they are taken; memory policies give back nothing twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mmspeed.compute.operators.grouped import grouped_outer, grouped_product
from mmspeed.compute.wgrad import WeightGradients
from mmspeed.device import Device
from mmspeed.memory.planning.measure import DeviceProfiler


def draws(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    value = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    return value.requires_grad_()


ENDS = torch.tensor([3, 3, 10])  # the second group has no rows
Product = Callable[..., Tensor]
CASES: dict[str, tuple[Product, Callable[[WeightGradients], Product], Callable[[], list[Any]]]] = {
    "linear": (F.linear, lambda g: g.linear, lambda: [draws(2, 5, 8, seed=0), draws(4, 8, seed=1), draws(4, seed=2)]),
    "no bias": (F.linear, lambda g: g.linear, lambda: [draws(5, 8, seed=0), draws(4, 8, seed=1), None]),
    "grouped": (grouped_product, lambda g: g.grouped, lambda: [draws(10, 8, seed=0), draws(3, 4, 8, seed=1), ENDS]),
    "grouped in a loop": (
        grouped_product,
        lambda g: g.grouped,
        lambda: [draws(10, 7, seed=0), draws(3, 5, 7, seed=1), ENDS],
    ),
}


@pytest.mark.parametrize("way", ["plain", "recomputed", "view"])
@pytest.mark.parametrize("case", CASES)
def test_gradients_that_waited_are_those_of_autograd(case: str, way: str) -> None:
    plain, waiting, make = CASES[case]
    gradients, fetched = WeightGradients(), list[int]()

    def run(product: Product, inputs: list[Any]) -> Tensor:
        x, weight, *rest = inputs

        def step(x: Tensor) -> Tensor:
            fetched.append(1)
            return product(x * 2, weight * 1.5 if way == "view" else weight, *rest).tanh()

        out: Tensor = checkpoint(step, x, use_reentrant=False) if way == "recomputed" else step(x)
        return out.square().sum()

    inputs, others = make(), make()
    run(plain, inputs).backward()
    fetched.clear()
    for _ in range(2):  # two micro-batches
        run(waiting(gradients), others).backward()
    assert others[1].grad is None and gradients.left == 2
    take = gradients.take()
    assert gradients.left == 0
    with torch.autocast("cpu", torch.bfloat16):  # of the pass in whose exchange they are computed
        take()
    for mine, theirs in zip(others, inputs, strict=True):
        if isinstance(mine, Tensor) and mine.requires_grad:
            assert torch.equal(mine.grad, 2 * theirs.grad)  # type: ignore[arg-type, operator]
    assert len(fetched) == (4 if way == "recomputed" else 2)  # no forward once more


def test_a_recomputed_product_keeps_no_cast_of_its_weight() -> None:
    gradients, x, weight, outs = WeightGradients(), draws(1, 64, seed=0), draws(64, 64, seed=1), list[Tensor]()
    for product in (F.linear, gradients.linear):

        def forward(product: Product = product) -> None:
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
                outs.append(checkpoint(lambda: product(x * 2, weight, None).sum(), use_reentrant=False))

        kept, _ = DeviceProfiler(Device("cpu", 0)).section(forward)
        assert kept < 2 * weight.numel()
        outs.pop().backward()
    gradients.take()()
    assert weight.grad is not None and weight.grad.dtype == torch.float32


def test_nothing_waits_without_a_gradient_of_the_input() -> None:
    gradients, weight = WeightGradients(), draws(4, 8, seed=1)
    gradients.linear(draws(5, 8, seed=0).detach(), weight, None).sum().backward()
    assert gradients.left == 0 and weight.grad is not None


@pytest.mark.parametrize("width", [8, 7])
def test_grouped_outer(width: int) -> None:
    left, right = draws(10, width, seed=0).detach(), draws(10, width, seed=1).detach()
    expected = torch.stack([left[a:b].T @ right[a:b] for a, b in ((0, 3), (3, 3), (3, 10))])
    assert grouped_outer.choose(left, right, ENDS).name == ("grouped_mm" if width == 8 else "loop")
    torch.testing.assert_close(grouped_outer(left, right, ENDS), expected)
