"""Gradients of weights that wait: the backward pass of a product gives the gradient of its input, and leaves that of its weight for later.

So a stage of a pipeline sends the gradient of its input on first (zero bubble: Qi et al. 2023). A product's input and the gradient of its
output are kept until then; both are what backward has at hand anyway, so that memory policies give back nothing twice.

Legend: R rows, I width of the input, O width of the output, G groups.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmspeed.torch_internals import add_gradient

from .autocast import autocast_alike, without_autocast
from .operators.grouped import grouped_outer, grouped_product


class WeightGradients:
    """The gradients of weights that wait, of one model."""

    def __init__(self) -> None:
        self._left: list[tuple[Tensor, Callable[[], Tensor]]] = []

    def __deepcopy__(self, memo: Any) -> WeightGradients:
        return self

    def linear(self, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        """`F.linear`."""
        if not self._can_wait(x, weight_OI):
            return F.linear(x, weight_OI, bias_O)
        x, cast_OI, *bias = autocast_alike(x, weight_OI, *([] if bias_O is None else [bias_O]))
        out: Tensor = _Linear.apply(x, bias[0] if bias else None, (weight_OI, cast_OI), self)  # type: ignore[no-untyped-call]
        return out

    def grouped(self, x_RI: Tensor, weight_GOI: Tensor, ends_G: Tensor) -> Tensor:
        """`grouped_product`."""
        if not self._can_wait(x_RI, weight_GOI):
            return grouped_product(x_RI, weight_GOI, ends_G)
        x_RI, cast_GOI = autocast_alike(x_RI, weight_GOI)
        out: Tensor = _Grouped.apply(x_RI, ends_G, (weight_GOI, cast_GOI), self)  # type: ignore[no-untyped-call]
        return out

    def _can_wait(self, x: Tensor, weight: Tensor) -> bool:
        # weights are hidden from autograd, which would add zeros to them: without a gradient of x nothing would call the backward
        return torch.is_grad_enabled() and weight.requires_grad and x.requires_grad

    @property
    def left(self) -> int:
        """The number of gradients left since the last `take`."""
        return len(self._left)

    def leave(self, weight: Tensor, gradient: Callable[[], Tensor]) -> None:
        """Leave a weight's gradient for `take`."""
        self._left.append((weight, gradient))

    def take(self) -> Callable[[], None]:
        """A function that computes the gradients left since the last call and adds them to their parameters."""
        left, self._left = self._left, []

        def compute() -> None:
            while left:
                _add(*left.pop(0))

        return compute


def _add(weight: Tensor, gradient: Callable[[], Tensor]) -> None:
    with torch.no_grad(), without_autocast(weight):  # that of the pass in whose exchange it is computed
        add_gradient(weight, gradient())


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias_O: Tensor | None, weights: tuple[Tensor, Tensor], gradients: WeightGradients
    ) -> Tensor:
        (ctx.weight, cast_OI), ctx.gradients = weights, gradients
        ctx.save_for_backward(x, cast_OI)  # a policy may compute the cast again
        return F.linear(x, cast_OI, bias_O)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, cast_OI = ctx.saved_tensors
        x_RI, grad_RO = x.flatten(0, -2), grads[0].flatten(0, -2)
        ctx.gradients.leave(ctx.weight, lambda: grad_RO.mT @ x_RI)
        of_bias = grad_RO.sum(0) if ctx.needs_input_grad[1] else None
        return (grad_RO @ cast_OI).view_as(x), of_bias, None, None


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_RI: Tensor, ends_G: Tensor, weights: tuple[Tensor, Tensor], gradients: WeightGradients
    ) -> Tensor:
        (ctx.weight, cast_GOI), ctx.gradients = weights, gradients
        ctx.save_for_backward(x_RI, ends_G, cast_GOI)
        out_RO: Tensor = grouped_product(x_RI, cast_GOI, ends_G)
        return out_RO

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x_RI, ends_G, cast_GOI), grad_RO = ctx.saved_tensors, grads[0].contiguous()
        ctx.gradients.leave(ctx.weight, lambda: grouped_outer(grad_RO, x_RI, ends_G))
        return grouped_product(grad_RO, cast_GOI.mT, ends_G), None, None, None


class Leaves(nn.Module):
    """A module whose products can leave the gradients of their weights."""

    _gradients: WeightGradients | None = None


class LeavingLinear(Leaves, nn.Linear):
    """Mixed in before a linear layer."""

    _gradients: WeightGradients

    def forward(self, x: Tensor) -> Tensor:
        return self._gradients.linear(x, self.weight, self.bias)


class LeavingProjection(Leaves, nn.Linear):
    """Mixed in before a linear layer that prepares its input."""

    _gradients: WeightGradients

    def project(self, x: Tensor) -> Tensor:
        """The product."""
        return self._gradients.linear(x, self.weight, self.bias)
