"""Counting matrix products as they are made: what recomputation costs, told by no clock."""

from __future__ import annotations

from collections import Counter
from typing import Any

from mmspeed.memory.recompute.region import matmul_operators
from mmspeed.torch_internals import TorchDispatchMode

from .measure import operations


class MatmulCounter(TorchDispatchMode):
    """Inside, counts the matrix products that are computed, by operator. Those that a region gives back are not.

    `work` is their floating-point operations, where torch knows the operator's.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.work = 0
        self._operators = matmul_operators()

    @property
    def total(self) -> int:
        return sum(self.calls.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in self._operators:
            self.calls[str(func)] += 1
            self.work += operations(func, args, kwargs or {}, out)
        return out
