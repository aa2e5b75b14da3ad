"""Version 1 of the generator: torch's on the CPU, seeded by a hash of the names, of which it takes the low 32 bits.

Among ten million draws 0.2 % meet another one's numbers. It stays for caches and runs that began with it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .names import key64

VERSION = 1


class TorchStream:
    """The numbers of one name, one draw after another."""

    def __init__(self, seed: int, *names: object) -> None:
        self.generator = torch.Generator("cpu").manual_seed(key64(int(seed), *names))

    def normal(self, shape: tuple[int, ...]) -> Tensor:
        """Standard normal numbers, float32."""
        return torch.randn(shape, generator=self.generator)

    def normal_part(self, count: int, begin: int, end: int) -> Tensor:
        """The values begin..end-1 of `count` normal numbers, float32; all are drawn."""
        return self.normal((count,))[begin:end].clone()

    def symmetric(self, shape: tuple[int, ...], bound: float) -> Tensor:
        """Uniform numbers between -bound and bound, float32."""
        return torch.empty(shape).uniform_(-bound, bound, generator=self.generator)

    def uniform(self) -> float:
        """A number in [0, 1)."""
        return torch.rand((), generator=self.generator, dtype=torch.float64).item()

    def permutation(self, count: int) -> npt.NDArray[Any]:
        """The numbers 0..count-1 in a random order, int64."""
        order: npt.NDArray[np.int64] = torch.randperm(count, generator=self.generator).numpy()
        return order
