"""States of optimizers that are mapped into the device's memory, and states in tensor subclasses."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import return_and_correct_aliasing

from mmspeed.device import Device
from tests.support.clock import ControlledClock
from tests.support.tiered_cases import (
    MATRICES,
    VECTORS,
    EightBit,
    Plain,
    adamw,
    assert_equal,
    gradients_of,
    of,
    parameters,
    same,
    tiered,
    two_groups,
)

COUNT, SIDE = 6, 64


@dataclass(frozen=True)
class Mapping(Device):
    """A device with mapped memory, which is the CPU's."""

    tensors: list[Tensor] = field(default_factory=list, compare=False)

    def swapped_empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        self.tensors.append(torch.empty(shape, dtype=dtype))
        return self.tensors[-1]


@pytest.mark.parametrize(("master", "make"), [("parameters", adamw), ("host", EightBit)])
def test_mapped_states_are_never_copied(master: str, make: Any) -> None:
    dtype = torch.float32 if master == "parameters" else torch.bfloat16
    groups = two_groups((MATRICES, VECTORS), dtype)
    plain = Plain(groups, make, dtype)
    device, copies = Mapping("cpu", 0), ControlledClock(2e8)
    ours = tiered(groups, make, master, "host", bucket_bytes=3000, device=device, copies=copies)
    for step in range(5):
        gradients = gradients_of(groups, step)
        for p, gradient in zip(of(groups), gradients, strict=True):
            p.grad = None if gradient is None else gradient.to(p.dtype)
        plain.step(gradients)
        ours.step()
    assert_equal(ours, groups, plain)
    rests = sum(2 * p.numel() for p in of(groups))
    assert copies.inward.bytes >= 4 * rests if master == "host" else copies.inward.bytes == 0
    moving = sum(p.numel() for p in of(groups) if p.numel() > 1)
    if make is adamw:
        # one asks whether there is such memory
        assert len(device.tensors) == 1 + 2 * sum(p.numel() > 1 for p in of(groups))
        assert ours.host_bytes()["states"] == 8 * moving
        assert ours.device_bytes()["states"] <= 16 * len(of(groups))
    p = of(groups)[0]
    state = ours.state_of(p)
    ours.load_state_of(p, {**state, "extra": torch.arange(4.0)})
    assert same(ours.state_of(p), {**state, "extra": torch.arange(4.0)})


class Coded(Tensor):
    """Values as int8 codes and one scale for each row: a tensor subclass, as quantised optimizers have."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> Coded:
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)  # type: ignore[attr-defined]

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: None, size: Any, stride: Any) -> Coded:
        return cls(inner["codes"], inner["scale"])

    def values(self) -> Tensor:
        return self.codes * self.scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return return_and_correct_aliasing(func, args, kwargs or {}, cls(args[0].codes, args[0].scale))
        raise NotImplementedError(func)


class CodedMomentum(Optimizer):
    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    old = self.state[p]["momentum"].values() if self.state[p] else torch.zeros_like(p)
                    new = 0.9 * old + p.grad
                    scale = new.abs().amax(-1, keepdim=True) / 127 + 1e-12
                    self.state[p]["momentum"] = Coded((new / scale).round().to(torch.int8), scale)
                    p.sub_(new, alpha=group["lr"])


def test_states_in_tensor_subclasses_move() -> None:
    groups = [{"params": parameters([(SIDE, SIDE)] * COUNT, torch.bfloat16)}]
    plain = Plain(groups, CodedMomentum, torch.bfloat16)
    ours = tiered(groups, CodedMomentum, "split", "host", bucket_bytes=4 * SIDE * SIDE, copies=ControlledClock(2e8))
    for step in range(4):
        gradients = gradients_of(groups, step)
        for p, gradient in zip(of(groups), gradients, strict=True):
            p.grad = gradient
        plain.step(gradients)
        ours.step()
    assert ours.host_bytes()["states"] == COUNT * (SIDE * SIDE + 4 * SIDE)
    assert ours.device_bytes()["states"] == 0
    for p, m in zip(of(groups), plain.masters, strict=True):
        actual, expected = ours.state_of(p)["momentum"], plain.optimizer.state[m]["momentum"]
        assert isinstance(actual, Coded)
        assert same(actual.codes, expected.codes) and same(actual.scale, expected.scale)


def test_mapped_memory_is_asked_of_the_backend_as_its_schema_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    """empty_with_swapped_memory(int[] size, *, ScalarType? dtype=None, Device? device=None), as in generated code of the package."""

    def stand_in(size: list[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        asked.append(device)
        return torch.zeros(size, dtype=dtype)

    asked: list[torch.device] = []
    package = ModuleType("torch_npu")
    monkeypatch.setitem(sys.modules, "torch_npu", package)
    device = Device("npu", 1)
    monkeypatch.setattr(Device, "torch_device", torch.device("meta"))  # whose name torch knows without the package
    assert device.swapped_empty((2, 3), torch.uint8) is None  # of a version without it
    package.empty_with_swapped_memory = stand_in  # type: ignore[attr-defined]
    tensor = device.swapped_empty((2, 3), torch.uint8)
    assert asked == [torch.device("meta")]
    assert tensor is not None and tensor.shape == (2, 3) and tensor.dtype == torch.uint8
