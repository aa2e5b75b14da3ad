"""Operators of language models in `mmspeed qualify`: all pass on a CPU, and one with a fault in its gradient does not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from mmspeed.bench.qualify import run
from mmspeed.bench.qualify.operators import operator_checks
from mmspeed.compute.registry import OPERATORS
from mmspeed.device import pick


def outcomes() -> dict[str, tuple[str, str]]:
    """(state, text) of each check, by its name."""
    results = {check.name: check.run() for check in operator_checks(pick("cpu"), True)}
    return {name: (outcome.state, outcome.text) for name, outcome in results.items()}


def test_every_implementation_passes_or_says_why_it_is_absent() -> None:
    results = outcomes()
    assert len(results) == 2 * sum(len(operator.implementations) for operator in OPERATORS.values())
    absent = {name: text for name, (state, text) in results.items() if state != "passed"}
    kernels = {"document_attention varlen": "CUDA"}
    kernels |= {f"{name} fused": "NPUs" for name in OPERATORS if not name.startswith("linear_")}
    assert absent == {
        f"{name} {dtype}": f"it is a kernel of {device}, not of cpu"
        for name, device in kernels.items()
        for dtype in ("float32", "bfloat16")
    }
    assert operator_checks in run.PARTS["kernels"]


def test_a_fault_in_a_gradient_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    operator = OPERATORS["swiglu"]
    first = operator["lean"]

    def scaled(gate: torch.Tensor, up: torch.Tensor) -> Any:
        return first.run(gate + 0.1 * (gate - gate.detach()), up)  # the same output

    wrong = replace(operator, implementations=(replace(first, run=scaled), operator.eager))
    monkeypatch.setitem(OPERATORS, "swiglu", wrong)
    failed = {name for name, (state, _) in outcomes().items() if state == "failed"}
    assert failed == {"swiglu lean float32", "swiglu lean bfloat16"}
