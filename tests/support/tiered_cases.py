"""Parameters, gradients and a plain optimizer to hold a tiered one against."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Muon, Optimizer

from mmspeed.device import Device
from mmspeed.memory.optimizer.split_bits import rounded
from mmspeed.memory.optimizer.tiered_optimizer import TieredOptimizer

Make = Callable[[list[dict[str, Any]]], Optimizer]

CPU = Device("cpu", 0)
TIERS = [(master, states) for master in ("parameters", "float32", "split", "host") for states in ("device", "host")]
MATRICES = [(32, 48), (7, 5), (64, 33), (3, 4, 5)]
VECTORS = [(48,), (1,), (31,)]


def adamw(groups: list[dict[str, Any]]) -> Optimizer:
    return AdamW(groups, lr=1e-2, betas=(0.9, 0.95), foreach=True)


def sgd(groups: list[dict[str, Any]]) -> Optimizer:
    return SGD(groups, lr=1e-2, momentum=0.9, nesterov=True, foreach=True)


def muon(groups: list[dict[str, Any]]) -> Optimizer:
    return Muon(groups, lr=1e-2, momentum=0.9)


class EightBit(Optimizer):
    """Momentum in bytes: codes, a scale for each 16 elements, and one table that all parameters share. Steps are counted by group."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {"lr": 1e-2, "weight_decay": 0.0, "steps": 0})
        self.table = torch.linspace(-1, 1, 256)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["steps"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                padded = -(-p.numel() // 16) * 16
                if not state:
                    state["codes"] = torch.full((padded,), 128, dtype=torch.uint8)
                    state["nested"] = {"scales": [torch.zeros(padded // 16, 1), "no tensor"]}
                    state["table"] = self.table
                scales, codes = state["nested"]["scales"][0], state["codes"]
                momentum = state["table"][codes.long()].view(-1, 16) * scales
                momentum.view(-1)[: p.numel()].mul_(0.9).add_(p.grad.reshape(-1))
                scales.copy_(momentum.abs().amax(1, keepdim=True))
                state["codes"] = ((momentum / scales.clamp_min(1e-12) + 1) * 127.5).round().to(torch.uint8).view(-1)
                decay = 1 - group["lr"] * group["weight_decay"]
                p.mul_(decay).sub_(momentum.view(-1)[: p.numel()].view_as(p), alpha=group["lr"] / group["steps"])


def parameters(shapes: list[tuple[int, ...]], dtype: torch.dtype, seed: int = 0) -> list[nn.Parameter]:
    """Values that bfloat16 holds, so that every tier begins alike."""
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(shape, generator=generator).to(torch.bfloat16) for shape in shapes]
    return [nn.Parameter(v.to(dtype)) for v in values]


def two_groups(shapes: tuple[list[Any], list[Any]], dtype: torch.dtype) -> list[dict[str, Any]]:
    return [
        {"params": parameters(shapes[0], dtype), "weight_decay": 0.1, "lr": 1e-2},
        {"params": parameters(shapes[1], dtype, 1), "weight_decay": 0.0, "lr": 3e-2},
    ]


def of(groups: list[dict[str, Any]]) -> list[nn.Parameter]:
    return [p for group in groups for p in group["params"]]


def tiered(groups: list[dict[str, Any]], make: Make, master: str, states: str, **more: Any) -> TieredOptimizer:
    options = {"bucket_bytes": 9000, "device": CPU, **more}
    return TieredOptimizer(groups, make, master=master, states=states, **options)  # type: ignore[arg-type]


def gradients_of(groups: list[dict[str, Any]], step: int) -> list[Tensor | None]:
    """What one step's backward left: in the parameters' dtype; one parameter has none in every third step."""
    generator = torch.Generator().manual_seed(1000 + step)
    results: list[Tensor | None] = []
    for k, p in enumerate(of(groups)):
        gradient = torch.randn(p.shape, generator=generator).to(torch.bfloat16)
        results.append(None if k == 1 and step % 3 == 1 else gradient)
    return results


class Plain:
    """float32 masters, a plain optimizer, and parameters rounded after each step (none where the masters are the parameters)."""

    def __init__(self, groups: list[dict[str, Any]], make: Make, dtype: torch.dtype) -> None:
        self.parameters = of(groups)
        self.dtype = dtype
        self.groups = [
            {**g, "params": [nn.Parameter(p.detach().to(torch.float32, copy=True)) for p in g["params"]]}
            for g in groups
        ]
        self.masters = of(self.groups)
        self.optimizer = make(self.groups)

    def step(self, gradients: list[Tensor | None]) -> None:
        for master, gradient in zip(self.masters, gradients, strict=True):
            master.grad = None if gradient is None else gradient.float()
        self.optimizer.step()

    def rounded(self) -> list[Tensor]:
        return [m.detach() if self.dtype == torch.float32 else rounded(m) for m in self.masters]


def set_lr(optimizer: Any, step: int) -> None:
    for k, group in enumerate(optimizer.param_groups):
        group["lr"] = (1e-2 + 3e-2 * k) / (1 + step)


def _bytes(tensor: Tensor) -> bytes:
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1))
    return flat.view(torch.uint8).numpy().tobytes()


def same(a: Any, b: Any) -> bool:
    """Bit for bit, at any depth."""
    if isinstance(a, Tensor):
        same_kind = isinstance(b, Tensor) and a.dtype == b.dtype and a.shape == b.shape
        return same_kind and _bytes(a) == _bytes(b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def assert_equal(ours: TieredOptimizer, groups: list[dict[str, Any]], plain: Plain) -> None:
    """Parameters, masters and states, bit for bit."""
    for p, expected in zip(of(groups), plain.rounded(), strict=True):
        assert same(p.detach(), expected)
    masters = {p: values.clone() for p, values in ours.masters()}
    for p, master in zip(of(groups), plain.masters, strict=True):
        assert same(masters[p], master.detach())
        assert same(ours.state_of(p), dict(plain.optimizer.state.get(master, {})))
