"""Operators of torch_npu that compute by a formula, under the signatures of its published wheel."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parents[1] / "unit" / "compute"


def skip_with_torch_npu() -> None:
    """Skip a test where the real operators are there."""
    if hasattr(torch.ops.npu, "npu_fusion_attention"):
        pytest.skip("torch_npu is installed")


@contextmanager
def npu_library(formulas: Mapping[str, Callable[..., Any]], parts: tuple[str, ...], key: str = "CPU") -> Iterator[None]:
    """Inside, operators of these files of signatures are there, those of `formulas` alone; each gets its arguments by name."""
    skip_with_torch_npu()
    library = torch.library.Library("npu", "FRAGMENT")
    for line in "".join((FOLDER / f"npu_{part}_schema.txt").read_text() for part in parts).splitlines():
        schema = None if line.startswith("#") else torch._C.parse_schema(line)
        if schema is None or (name := schema.name.split("::")[1]) not in formulas:
            continue
        library.define(line.removeprefix("npu::"))
        names = [argument.name for argument in schema.arguments]
        defaults = {one.name: one.default_value for one in schema.arguments if one.has_default_value()}

        def implementation(
            *args: Any, _f: Any = formulas[name], _n: Any = names, _d: Any = defaults, **named: Any
        ) -> Any:
            return _f(**{**_d, **dict(zip(_n, args, strict=False)), **named})

        library.impl(name, implementation, key)
    yield
    library._destroy()
    for name in formulas:
        torch.ops.npu.__dict__.pop(name, None)
