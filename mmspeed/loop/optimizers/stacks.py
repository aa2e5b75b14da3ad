"""Muon for stacks of matrices, as of experts. Legend: G matrices (O, I) of a stack."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Muon


class MuonOfStacks(Muon):
    """Muon for parameters (G, O, I), each of whose matrices is orthogonalised by itself; torch's takes single matrices alone.

    Its constants are torch's, its updates scaled to the size of AdamW's.
    """

    def __init__(self, groups: list[dict[str, Any]], lr: float) -> None:
        super().__init__([{"params": []}], lr=lr, adjust_lr_fn="match_rms_adamw")
        self.param_groups.clear()
        for group in groups:
            self.add_param_group(group)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the parameters by their present gradients."""
        for group in self.param_groups:
            lr = float(group["lr"])
            for parameter in (p for p in group["params"] if p.grad is not None):
                state, gradient = self.state[parameter], parameter.grad
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(gradient)
                momentum = state["momentum_buffer"]
                momentum.lerp_(gradient, 1 - group["momentum"])
                update = orthogonalised(
                    gradient.lerp(momentum, group["momentum"]),
                    group["ns_coefficients"],
                    group["ns_steps"],
                    group["eps"],
                )
                parameter.mul_(1 - lr * group["weight_decay"])
                parameter.add_(update, alpha=-lr * 0.2 * math.sqrt(max(parameter.shape[-2:])))


def orthogonalised(
    stack_GOI: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float = 1e-7
) -> Tensor:
    """Each matrix with singular values near 1, in bfloat16, by iterations of Newton and Schulz (Jordan et al., 2024)."""
    a, b, c = coefficients
    x, tall = stack_GOI.bfloat16(), stack_GOI.shape[-2] > stack_GOI.shape[-1]
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
