"""Cross-entropy in parts: that of the whole logits, which are never all there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mmspeed.device import Device
from mmspeed.memory import peak_bytes
from mmspeed.memory.chunked import chunked_cross_entropy
from mmspeed.memory.planning.measure import MatmulCounter

CPU = Device("cpu", 0)


def close(got: Tensor, wanted: Tensor, within: float) -> bool:
    return bool((got - wanted).abs().max() <= within * wanted.abs().max())


def logits(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(2)
    hidden, weight = torch.randn(37, 12, generator=g, dtype=dtype), torch.randn(50, 12, generator=g, dtype=dtype)
    labels = torch.randint(50, (37,), generator=g)
    labels[[3, 20]] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), labels


def both(loss: Callable[[Tensor, Tensor, Tensor], Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight, labels = logits(dtype)
    value = loss(hidden, weight, labels)
    (value * 3).backward()
    assert hidden.grad is not None and weight.grad is not None
    return value.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize(("chunk", "reduction"), [(1, "mean"), (5, "sum"), (100, "mean")])
def test_cross_entropy_in_parts_is_cross_entropy(chunk: int, reduction: Any) -> None:
    """Softmax and sums are of float32: a few of its last bits."""
    wanted = both(lambda h, w, n: F.cross_entropy(h @ w.t(), n, reduction=reduction), torch.float32)
    got = both(lambda h, w, n: chunked_cross_entropy(h, w, n, chunk, reduction=reduction), torch.float32)
    for one, other in zip(got, wanted, strict=True):
        assert close(one, other.float(), 2e-6)
    assert got[1][3].count_nonzero() == 0  # a token that is ignored


def test_logits_are_never_whole_and_cost_no_product_more() -> None:
    tokens, width, words, chunk = 512, 16, 2000, 32
    hidden, weight = torch.randn(tokens, width, requires_grad=True), torch.randn(words, width, requires_grad=True)
    labels = torch.randint(words, (tokens,))
    whole = 4 * tokens * words
    plain = peak_bytes(CPU, 0, lambda: F.cross_entropy(hidden @ weight.t(), labels).backward())
    hidden.grad = weight.grad = None
    parts = peak_bytes(CPU, 0, lambda: chunked_cross_entropy(hidden, weight, labels, chunk).backward())
    assert plain > 2 * whole
    assert parts < 4 * 4 * chunk * words + 4 * 4 * (tokens + words) * width < whole
    with MatmulCounter() as count:
        chunked_cross_entropy(hidden, weight, labels, chunk).backward()
    assert count.total == 3 * tokens // chunk


def test_only_the_gradients_that_are_wanted_are_made() -> None:
    hidden, weight, labels = logits(torch.float32)
    with torch.no_grad(), MatmulCounter() as count:
        chunked_cross_entropy(hidden, weight, labels, 10)
    assert count.total == 4
    chunked_cross_entropy(hidden, weight.detach(), labels, 10).backward()
    assert hidden.grad is not None


def test_all_labels_ignored_and_labels_out_of_place() -> None:
    hidden, weight, labels = logits(torch.float32)
    nothing = torch.full_like(labels, -100)
    assert chunked_cross_entropy(hidden, weight, nothing, 10).isnan()
    assert chunked_cross_entropy(hidden, weight, nothing, 10, reduction="sum") == 0
    with pytest.raises(ValueError, match=r"labels lie in 50\.\.50"):
        chunked_cross_entropy(hidden, weight, torch.full_like(labels, 50), 10)
    with pytest.raises(ValueError, match="are not"):
        chunked_cross_entropy(hidden, weight, labels[1:], 10)


def test_cross_entropy_under_autocast() -> None:
    """Logits and gradients are rounded to bfloat16's 8 bits, as the plain way's are."""
    results = []
    for chunk in (None, 8):
        hidden, weight, labels = logits(torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            if chunk is None:
                loss = F.cross_entropy((hidden @ weight.t()).float(), labels)
            else:
                loss = chunked_cross_entropy(hidden, weight, labels, chunk)
        loss.backward()
        results.append((loss.detach(), hidden.grad, weight.grad))
    for one, other in zip(results[0], results[1], strict=True):
        assert one is not None and other is not None and one.dtype == other.dtype == torch.float32
        assert close(other, one, 3e-2)
