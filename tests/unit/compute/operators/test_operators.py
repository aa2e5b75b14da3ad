"""Every implementation of every operator against its eager twin, with gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mmspeed.compute.operators.cross_entropy import IGNORED, linear_cross_entropy, linear_log_sums, rows_of_chunk
from mmspeed.compute.operators.document_attention import document_attention, numbers_of, positions_of
from mmspeed.compute.operators.grouped import grouped_product
from mmspeed.compute.operators.permutation import order_by_expert, order_rows
from mmspeed.compute.registry import OPERATORS, counting


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    value = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    return value.requires_grad_()


def turns() -> Tensor:
    angle = torch.arange(2 * 5 * 3).reshape(2, 5, 3).float()
    return torch.stack((angle.cos(), angle.sin()))


def documents() -> tuple[Any, ...]:
    return (numbers(12, 4, 6), numbers(12, 2, 6, seed=1), numbers(12, 2, 5, seed=2), torch.tensor([0, 5, 5, 6, 12]))


ORDER = order_by_expert(torch.tensor([[2, 0], [0, 1], [4, 2], [0, 4], [2, 1]]), 5)
SOME = order_rows(torch.tensor([[1, 3], [3, 3], [0, 1], [0, 0], [3, 2]]), 6)  # of 10 pairs
CASES: dict[str, list[Callable[[], tuple[Any, ...]]]] = {
    "document_attention": [lambda: (*documents(), None), lambda: (*documents(), 2)],
    "rms_norm": [lambda: (numbers(3, 7, 8), numbers(8, seed=1), 1e-5)],
    "swiglu": [lambda: (numbers(3, 8), numbers(3, 8, seed=1))],
    "rotary": [lambda: (numbers(2, 5, 4, 6), turns())],
    "linear_cross_entropy": [
        lambda: (numbers(37, 8), numbers(21, 8, seed=1), torch.arange(37) % 21),
        lambda: (numbers(5, 8), numbers(21, 8, seed=1), torch.tensor([IGNORED, 3, IGNORED, 20, 0])),
    ],
    "linear_log_sums": [lambda: (numbers(37, 8), numbers(21, 8, seed=1), torch.arange(37) - 9)],
    "grouped_product": [lambda: (numbers(10, 8), numbers(5, 4, 8, seed=1), ORDER.ends_G)],
    "permute": [lambda: (numbers(5, 8), ORDER), lambda: (numbers(5, 8), SOME)],
    "combine": [lambda: (numbers(10, 8), ORDER), lambda: (numbers(6, 8), SOME)],
}
PAIRS = [
    (name, one.name, place)
    for name, operator in OPERATORS.items()
    for one in operator.implementations[:-1]
    for place in range(len(CASES[name]))
    if one.name not in ("varlen", "fused")  # other devices
]


def results(run: Callable[..., Any], arguments: tuple[Any, ...]) -> list[Tensor]:
    """Results, and gradients of all inputs under other weights of each number."""
    outs = run(*arguments)
    outs = outs if isinstance(outs, tuple) else (outs,)
    sum((out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum() for out in outs).backward()
    leaves = [one for one in arguments if isinstance(one, Tensor) and one.requires_grad]
    return [*outs, *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@pytest.mark.parametrize(("name", "implementation", "place"), PAIRS)
def test_an_implementation_equals_its_twin(name: str, implementation: str, place: int) -> None:
    operator, case = OPERATORS[name], CASES[name][place]
    assert operator.choose(*case()).name == implementation
    with counting() as counts:
        got = results(operator, case())
    wanted = results(operator.eager.run, case())
    assert counts == {f"{name}.{implementation}": 1}
    assert len(got) == len(wanted)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", OPERATORS)
def test_a_twin_serves_everything(name: str) -> None:
    for case in CASES[name]:
        assert OPERATORS[name].eager.refuses(*case()) == ""
    assert OPERATORS[name][OPERATORS[name].eager.name] is OPERATORS[name].eager
    with pytest.raises(KeyError, match="has no implementation 'other'"):
        OPERATORS[name]["other"]


@given(st.lists(st.integers(0, 6), min_size=1, max_size=8).filter(any))
@settings(max_examples=30, deadline=None)
def test_numbers_and_positions_of_documents(lengths: list[int]) -> None:
    bounds, tokens = torch.tensor([0, *lengths]).cumsum(0), sum(lengths)
    assert numbers_of(bounds, tokens).tolist() == [n for n, length in enumerate(lengths) for _ in range(length)]
    assert positions_of(bounds, tokens).tolist() == [place for length in lengths for place in range(length)]


def test_bounds_that_are_not_the_tokens_are_an_error() -> None:
    q, k, v, _ = documents()
    with pytest.raises(ValueError, match="from 0 to the 12 tokens, not from 0 to 11"):
        document_attention["each"].run(q, k, v, torch.tensor([0, 11]), None)


def test_a_loop_serves_what_grouped_mm_refuses() -> None:
    wide = numbers(4, 17), numbers(2, 8, 17, seed=1), torch.tensor([1, 4])
    assert "no multiple of 16 bytes" in grouped_product["grouped_mm"].refuses(*wide)
    double = numbers(4, 8, dtype=torch.float64), numbers(2, 8, 8, dtype=torch.float64), torch.tensor([1, 4])
    assert "takes no torch.float64" in grouped_product["grouped_mm"].refuses(*double)
    assert grouped_product.choose(*wide).name == grouped_product.choose(*double).name == "loop"
    assert torch.autograd.gradcheck(lambda x, w: grouped_product(x, w, double[2]), double[:2])
    with pytest.raises(ValueError, match="4 rows, and the last group ends at 3"):
        grouped_product["loop"].run(*double[:2], torch.tensor([1, 3]))


def test_a_group_without_rows_has_a_gradient_of_zero() -> None:
    for name in ("grouped_mm", "loop"):
        weight = numbers(3, 4, 8)
        grouped_product[name].run(numbers(6, 8), weight, torch.tensor([2, 2, 6], dtype=torch.int32)).sum().backward()
        assert weight.grad is not None and not weight.grad[1].any() and weight.grad[2].any()


def test_losses_and_their_gradients_are_those_of_torch() -> None:
    x, weight, target = numbers(9, 8), numbers(21, 8, seed=1), torch.tensor([IGNORED, 3, 4, 20, 0, 7, 7, IGNORED, 1])
    loss, lse = linear_cross_entropy(x, weight, target)
    (loss.sum() + 1e-2 * lse.square().sum()).backward()
    got = x.grad, weight.grad
    x, weight = numbers(9, 8), numbers(21, 8, seed=1)
    logits = x @ weight.mT
    wanted = F.cross_entropy(logits, target, reduction="none", ignore_index=IGNORED)
    torch.testing.assert_close(loss, wanted)
    (wanted.sum() + 1e-2 * (logits.logsumexp(-1) * (target != IGNORED)).square().sum()).backward()
    for one, other in zip(got, (x.grad, weight.grad), strict=True):
        torch.testing.assert_close(one, other)


def test_gradients_of_log_sums_of_any_sign_and_size() -> None:
    """As vocabulary rows on several processes give them: a log-sum-exp may count nothing while the picked logit counts."""
    place, grads = (
        torch.tensor([3, -1, 20, 0, 25]),
        torch.tensor([[1.0, -0.5, 0.0, 1e-300, 2.0], [-1.0, 3.0, -2.0, -1.0, 1.0]]),
    )
    results = []
    for one in linear_log_sums.implementations:
        x, weight = numbers(5, 8), numbers(21, 8, seed=1)
        sums = one.run(x, weight, place)
        results.append((*sums, *torch.autograd.grad(sums, (x, weight), list(grads.to(sums[0])))))
    for got, right in zip(*results, strict=True):
        torch.testing.assert_close(got, right)


def test_no_logits_in_full() -> None:
    """A chunk has at most a quarter of the tokens, and fewer where the vocabulary is large."""
    assert (
        rows_of_chunk(4_096, 32_000) == 1_024 and rows_of_chunk(65_536, 131_072) == 2_560 and rows_of_chunk(3, 10) == 1
    )
    sizes: list[int] = []

    class Sizes(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = function(*args, **(kwargs or {}))
            if isinstance(out, Tensor):
                sizes.append(out.numel())
            return out

    with Sizes():
        linear_cross_entropy(numbers(64, 4), numbers(500, 4, seed=1), torch.arange(64))[0].sum().backward()
    assert max(sizes) < 64 * 500 // 3


def test_swiglu_keeps_its_two_inputs_alone() -> None:
    def kept(run: Callable[..., Tensor]) -> int:
        saved: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
            run(numbers(4, 8), numbers(4, 8, seed=1))
        return sum(saved)

    operator = OPERATORS["swiglu"]
    assert kept(operator) == 2 * 32 < kept(operator.eager.run)


def test_swiglu_of_half_types_has_the_gradients_of_its_twin() -> None:
    def halves() -> tuple[Tensor, Tensor]:
        return numbers(4, 8, dtype=torch.bfloat16), numbers(4, 8, seed=1, dtype=torch.bfloat16)

    operator = OPERATORS["swiglu"]
    for one, other in zip(results(operator, halves()), results(operator.eager.run, halves()), strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.01)
