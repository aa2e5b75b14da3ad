"""Linear layers whose frozen weights take one byte a number: int8 or float8 (E4M3), with a float32 scale for each row.

Rounded symmetrically by rows, as weight-only quantisation is in torchao: the largest absolute value of a row lies on 127 (int8; torchao uses
-128 too) or 448 (float8).
The layers are of plain parameters, since torchao's tensor classes lack the hooks that FSDP2 needs to gather them. All of these are whole
numbers, which FSDP2 neither casts to the number type of its gathers nor rounds: those of float8 and of the scales are their bits.

Legend: R rows (outputs), C columns (inputs).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

Kind = Literal["int8", "float8"]
LARGEST = {"int8": 127.0, "float8": 448.0}
LEAST_SCALE = torch.finfo(torch.float32).tiny
STORED = {"int8": torch.int8, "float8": torch.uint8}


def quantised(weight_RC: Tensor, kind: Kind) -> tuple[Tensor, Tensor]:
    """(one byte for each number (R, C), the bits of the float32 scale of each row (R, 1)) of a weight."""
    weight_RC = weight_RC.float()
    scale_R1 = (weight_RC.abs().amax(1, keepdim=True) / LARGEST[kind]).clamp(min=LEAST_SCALE)
    scaled_RC = (weight_RC / scale_R1).clamp(-LARGEST[kind], LARGEST[kind])
    if kind == "int8":
        return scaled_RC.round().to(torch.int8), scale_R1.view(torch.int32)
    return scaled_RC.to(torch.float8_e4m3fn).view(torch.uint8), scale_R1.view(torch.int32)


def dequantised(bytes_RC: Tensor, scale_R1: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight in a number type; its bytes and the bits of its scales are as of `quantised`, and exact until the last rounding."""
    values_RC = bytes_RC if bytes_RC.dtype == torch.int8 else bytes_RC.view(torch.float8_e4m3fn)
    return (
        values_RC.float().mul_(scale_R1.view(torch.float32)).to(dtype)
    )  # a product of two types makes a copy that no count sees


class _Product(torch.autograd.Function):
    """x @ weight.T + bias, which keeps the weight's bytes for backward instead of its numbers. The bias does not train either."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, bytes_RC: Tensor, scale_R1: Tensor, bias_R: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(bytes_RC, scale_R1)
        return functional.linear(x, dequantised(bytes_RC, scale_R1, x.dtype), bias_R)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        bytes_RC, scale_R1 = ctx.saved_tensors
        return grad @ dequantised(bytes_RC, scale_R1, grad.dtype), None, None, None


class FrozenLinear(nn.Linear):
    """A linear layer whose weight (R, C) is one byte a number and never trains; `scale` (R, 1) are the bits of float32 numbers."""

    def __init__(self, layer: nn.Linear, kind: Kind) -> None:
        """Takes the sizes, the device and the bias of a layer; its own numbers are to be read."""
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.kind = layer.in_features, layer.out_features, kind
        device = layer.weight.device
        weight = torch.empty(layer.weight.shape, dtype=STORED[kind], device=device)
        self.weight = nn.Parameter(weight, requires_grad=False)
        scale = torch.empty(len(layer.weight), 1, dtype=torch.int32, device=device)
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.register_parameter("bias", layer.bias)

    def forward(self, input: Tensor) -> Tensor:
        """The product in the number type of autocast, or of the input."""
        kind = input.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else input.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        output: Tensor = _Product.apply(input.to(dtype), self.weight, self.scale, bias)
        return output


def freeze_linears(module: nn.Module, kind: Kind, stays: Callable[[str], bool]) -> None:
    """Put frozen layers in the place of a module's plain linear layers that do not train, in place, but for names that `stays` is true of."""
    for path, parent in list(module.named_modules()):
        for child, layer in list(parent.named_children()):
            name = f"{path}.{child}" if path else child
            if type(layer) is nn.Linear and not layer.weight.requires_grad and not stays(name):
                setattr(parent, child, FrozenLinear(layer, kind))
