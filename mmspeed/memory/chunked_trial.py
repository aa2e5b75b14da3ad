"""Compare an MLP in parts with the whole one: equality of their bits on a device, or their distance.

Parts and the whole are matrix products of different shapes. A library may compute another shape with another kernel, which sums in another
order: so equality of the bits depends on the device, its library, its threads and the shape. It is measured here, once for each
shape of a run. Closeness holds everywhere: `MlpShape.tolerance`.

Legend: N tokens, E width, M hidden units, O width of the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mmspeed.device import is_out_of_memory

from .chunked import chunked_mlp

Activation = Callable[[Tensor], Tensor]
ROOM = 4  # factor of the tolerance: three products follow one another, and the largest of all differences counts


@dataclass(frozen=True)
class MlpShape:
    """The shapes and the dtype of an MLP's products on one device; `size` as in `chunked_mlp`."""

    tokens: int
    width: int
    units: int
    width_out: int
    size: int
    dtype: torch.dtype
    biased: bool = True

    @property
    def tolerance(self) -> float:
        """The distance, as a share of a tensor's largest value, that rounding explains.

        Two orders of a sum of n terms differ by about sqrt(n) roundings of float32, in which all libraries sum; one more rounding is
        that of the result to its dtype.
        """
        terms = max(self.tokens, self.width, self.units, self.width_out)
        own, summed = torch.finfo(self.dtype).eps, torch.finfo(torch.float32).eps
        return ROOM * (math.sqrt(terms) * min(own, summed) + own / 2)

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.tokens} tokens of {self.width} x {self.units} {dtype} in parts of {self.size}"


@dataclass(frozen=True)
class MlpTrial:
    """Distances of the result and gradients of an MLP in parts from the whole one's, as shares of each tensor's largest value.

    Without distances where the device's memory did not hold the whole MLP.
    """

    shape: MlpShape
    distances: Mapping[str, float]

    @property
    def bitwise(self) -> bool:
        return bool(self.distances) and not any(self.distances.values())

    @property
    def close(self) -> bool:
        """True where rounding explains all distances."""
        return all(distance <= self.shape.tolerance for distance in self.distances.values())

    def __str__(self) -> str:
        if not self.distances:
            return f"{self.shape} not tried, since memory does not hold the whole MLP"
        name, most = max(self.distances.items(), key=lambda item: item[1])
        beyond = "" if self.close else f", more than the {self.shape.tolerance:.0e} of rounding"
        return f"{self.shape}: {name} differs by {most:.0e} of its largest value{beyond}"


def try_mlp_in_parts(shape: MlpShape, device: torch.device, act: Activation) -> MlpTrial:
    """Compute an MLP whole and in parts on a device, forward and backward, with random numbers that depend on the shape alone.

    No generator, gradient or weight of the run changes.
    """
    try:
        names, tensors_Z, grad_NO = _operands(shape, device)
        whole = _step(tensors_Z, grad_NO, lambda x, up, down: F.linear(act(F.linear(x, *up)), *down))
        parts = _step(tensors_Z, grad_NO, lambda x, up, down: chunked_mlp(x, up, act, down, shape.size))
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            return MlpTrial(shape, {})
        raise
    pairs = zip(("result", *names), parts, whole, strict=True)
    return MlpTrial(shape, {name: _distance(one, other) for name, one, other in pairs})


def trial_line(trials: Sequence[MlpTrial]) -> str:
    """A line on the trials: the number of shapes whose parts equal the whole bit by bit, and the distances of the others."""
    others = [str(trial) for trial in trials if not trial.bitwise]
    line = f"memory.mlp_exact: bitwise on this device for {len(trials) - len(others)} of {len(trials)} shapes"
    if not others:
        return line
    return f"{line}; training goes on with ordinary rounding where it is not ({'; '.join(others)})"


def _operands(shape: MlpShape, device: torch.device) -> tuple[list[str], list[Tensor], Tensor]:
    """Names and values of the input, weights and biases, scaled as in a model; and a gradient of the result."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*size, generator=generator, device=device) * scale).to(shape.dtype)

    up_ME = normal(shape.units, shape.width, scale=shape.width**-0.5)
    down_OM = normal(shape.width_out, shape.units, scale=shape.units**-0.5)
    named = {"input": normal(shape.tokens, shape.width), "up.weight": up_ME, "down.weight": down_OM}
    if shape.biased:
        named |= {"up.bias": normal(shape.units), "down.bias": normal(shape.width_out)}
    tensors_Z = [tensor.requires_grad_() for tensor in named.values()]
    return [f"the gradient of {name}" for name in named], tensors_Z, normal(shape.tokens, shape.width_out)


Linear = tuple[Tensor, Tensor | None]


def _step(
    tensors_Z: Sequence[Tensor], grad_NO: Tensor, run: Callable[[Tensor, Linear, Linear], Tensor]
) -> tuple[Tensor, ...]:
    """The result and all gradients."""
    x_NE, up_ME, down_OM, *biases = tensors_Z
    up_M, down_O = biases if biases else (None, None)
    with torch.enable_grad(), torch.autocast(x_NE.device.type, enabled=False):
        out_NO = run(x_NE, (up_ME, up_M), (down_OM, down_O))
        return (out_NO.detach(), *torch.autograd.grad(out_NO, tensors_Z, grad_NO))


def _distance(one: Tensor, other: Tensor) -> float:
    if torch.equal(one, other):
        return 0.0
    largest = float(other.abs().max())
    return float((one.double() - other.double()).abs().max()) / (largest or 1.0)
