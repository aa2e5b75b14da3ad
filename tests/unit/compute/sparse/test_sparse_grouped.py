"""Sparse attention on the CPU: threads, layouts, widths, memory. That the kernel is right at all: test_sparse_attention.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mmspeed.compute.sparse import clustered_attention
from mmspeed.compute.sparse.kernels import grouped
from tests.support.sparse_plans import PLANS, TOLERANCE, alike, error, plan_of, qkv, random_plan, results

TAILS = ("zero", "summary")


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """One thread, and three that share even the smallest call."""
    before = torch.get_num_threads()
    monkeypatch.setattr(grouped, "SERIAL", 0)
    torch.set_num_threads(request.param)
    yield request.param
    assert torch.get_num_threads() == request.param  # as it was
    torch.set_num_threads(before)


@pytest.mark.parametrize(("width", "value_width"), [(3, 3), (160, 160), (16, 24)])
@pytest.mark.parametrize("tail", TAILS)
def test_any_width_of_heads(width: int, value_width: int, tail: str, threads: int) -> None:
    plan = random_plan(1, 2, 50, 60, tail_clusters=5)
    tensors = qkv(plan, width, value_width=value_width)
    options = {"tail": tail, "scale": 0.2}
    alike(
        results(tensors, plan, backend="grouped", **options), results(tensors, plan, backend="masked", **options), 1e-5
    )


@pytest.mark.parametrize("tail", TAILS)
def test_large_clusters_in_parts(tail: str, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped, "ROWS", 7)
    for name in PLANS:
        plan = plan_of(name)
        tensors = qkv(plan, dtype=torch.float64)
        options = {"tail": tail, "backend": "grouped"}
        alike(results(tensors, plan, **options), results(tensors, plan, tail=tail, backend="masked"), 1e-11)


def test_any_layout_in_memory(threads: int) -> None:
    plan = random_plan(2, 3, 40, 50, tail_clusters=4)
    alone = qkv(plan)
    swapped = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in alone]
    got = [results(each, plan, tail="summary", backend="grouped") for each in (alone, swapped)]
    assert all(torch.equal(x, y) for x, y in zip(*got, strict=True))
    total = clustered_attention(*alone, plan, backend="grouped").out_BAND.sum()  # type: ignore[arg-type]
    right = clustered_attention(*alone, plan, backend="masked").out_BAND.sum()  # type: ignore[arg-type]
    for x, y in zip(torch.autograd.grad(total, alone), torch.autograd.grad(right, alone), strict=True):
        assert error(x + 1, y + 1) <= 1e-5  # one number, expanded, is the gradient of each; that of queries is almost 0


@pytest.mark.parametrize(("batch", "queries", "keys"), [(0, 5, 5), (2, 0, 5), (2, 5, 0), (0, 0, 0)])
@pytest.mark.parametrize("tail", TAILS)
def test_nothing_to_attend_to(batch: int, queries: int, keys: int, tail: str) -> None:
    plan = random_plan(batch, 2, queries, keys, tail_clusters=3)
    tensors = qkv(plan)
    out, lse, *grads = results(tensors, plan, tail=tail, backend="grouped")
    assert out.shape == tensors[0].shape and out.eq(0).all() and lse.shape == out.shape[:3] and lse.eq(-torch.inf).all()
    assert all(grad.shape == x.shape and grad.eq(0).all() for grad, x in zip(grads, tensors, strict=True))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("tail", TAILS)
def test_same_bits_for_any_number_of_threads(tail: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped, "SERIAL", 0)
    plan, before = random_plan(1, 3, 300, 310, clusters=20, keep=0.4, tail_clusters=6), torch.get_num_threads()
    tensors, runs = qkv(plan, 16, dtype), []
    try:
        for number in (1, 1, 2, 5, 5, 5):
            torch.set_num_threads(number)
            runs.append(results(tensors, plan, tail=tail, backend="grouped"))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(x, y) for run in runs[1:] for x, y in zip(runs[0], run, strict=True))


def test_gradients_are_added_in_order() -> None:
    turns, seen = grouped._Turns(), list[int]()
    for number in (2, 1, 4, 0, 5, 3):
        turns.put(number, lambda number=number: seen.append(number))  # type: ignore[misc]
        assert seen == list(range(len(seen)))
    assert seen == [0, 1, 2, 3, 4, 5] and not turns.early


def test_an_error_in_a_thread_is_raised(threads: int) -> None:
    plan = random_plan(1, 2, 300, 40, clusters=30)
    broken = replace(plan, kv_index_Z=torch.full_like(plan.kv_index_Z, 10**6))
    with pytest.raises(IndexError):
        clustered_attention(*qkv(plan), broken, backend="grouped")  # type: ignore[arg-type]


class _Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operator gave."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, Tensor):
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.element_size())
        return out


def test_no_matrix_of_all_pairs() -> None:
    plan = random_plan(1, 1, 1024, 1024, clusters=16, keep=0.1, tail_clusters=8)
    tensors = qkv(plan, 16)
    with _Largest() as largest:
        results(tensors, plan, tail="summary", backend="grouped")
    assert 1024 * 16 <= largest.elements <= 1024 * 32  # queries or keys, and their list
    with _Largest() as largest:
        results(tensors, plan, backend="masked")
    assert largest.elements >= 1024 * 1024
