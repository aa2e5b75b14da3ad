"""The gather kernel: interpreted on CPU tensors it equals the oracle; compiled without a device it fits the memory of real ones."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mmspeed.compute.sparse.kernels import triton_gather
from tests.support.sparse_plans import random_plan
from tests.support.sparse_triton_cases import CASES

ROOT = Path(__file__).resolve().parents[4]
LIMITS = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 2e-2}
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def run(interpret: str, folder: Path, *arguments: str) -> dict[str, Any]:
    """The report of tests/support/sparse_triton_cases.py from a process of its own."""
    environment = {"TRITON_INTERPRET": interpret, "TRITON_CACHE_DIR": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.sparse_triton_cases", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run("1", tmp_path_factory.mktemp("triton"), *CASES)


def assert_near(errors: list[float], case: str, tail: str) -> None:
    """Hold the errors of out, lse, dq, dk, dv, and of the means' gradients, to the limit of their type."""
    assert len(errors) == (5 if tail == "zero" else 7)
    assert max(errors) < LIMITS[CASES[case][-1]], errors


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("tail", ["zero", "summary"])
@pytest.mark.parametrize("case", CASES)
def test_equals_the_oracle(interpreted: dict[str, Any], case: str, tail: str) -> None:
    assert_near(interpreted[f"{case} {tail}"], case, tail)


@pytest.mark.slow
@needs_triton
def test_same_plan_same_bits(interpreted: dict[str, Any]) -> None:
    assert interpreted["same bits"] is True


@pytest.mark.slow
@needs_triton
def test_ranges_of_keys_hold_the_same_work(interpreted: dict[str, Any]) -> None:
    """Also with keys that every cluster keeps beside ones that few do: equal numbers of keys would give one range four times the mean."""
    cuts = interpreted["cuts"]
    assert cuts["ends"] and cuts["one_bound"] and cuts["most"] < 1.3, cuts


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize(
    ("capability", "dtype", "width", "block", "memory"),
    [
        (90, "bfloat16", 128, 128, 227 << 10),
        (80, "bfloat16", 128, 64, 99 << 10),  # what the smallest of the kind have
        (80, "bfloat16", 128, 128, 99 << 10),
        (90, "float16", 96, 64, 227 << 10),
        (80, "bfloat16", 256, 64, triton_gather.WIDE_MEMORY),
        (90, "bfloat16", 64, 128, 227 << 10),
        (80, "float32", 64, 64, 99 << 10),
    ],
)
def test_compiles_for_real_devices(
    tmp_path: Path, capability: int, dtype: str, width: int, block: int, memory: int
) -> None:
    """The compiler accepts the kernels, and their blocks fit, which the interpreter cannot show."""
    report = run("0", tmp_path, str(capability), dtype, str(width), str(block))
    assert len(report) == 6
    assert all(kernel["memory"] <= memory for kernel in report.values()), report
    if dtype != "float32":
        products = {name for name, kernel in report.items() if kernel["matrix"]}
        assert products == {"forward", "query_gradient", "key_gradient", "mean_gradient"}


@pytest.mark.parametrize("block", [1, 3, 64])
def test_every_query_is_in_one_program(block: int) -> None:
    plan = random_plan(2, 2, 53, 9, clusters=7, uneven=3.0)
    row, place = triton_gather.items(plan, block)
    seen = torch.zeros(4, 53, dtype=torch.int64)
    ends = plan.q_offsets_GC[:, 1:].flatten()
    for r, first in zip(row.tolist(), place.tolist(), strict=True):
        if r < 4 * plan.clusters:
            assert first < ends[r]
            seen[r // plan.clusters, first : min(first + block, int(ends[r]))] += 1
    assert seen.eq(1).all()


def test_pairs_are_those_of_whole_blocks() -> None:
    plan = random_plan(1, 2, 300, 400, clusters=4, tail_clusters=5)
    sizes, lengths = plan.sizes().flatten().tolist(), plan.lengths().flatten().tolist()
    wanted = sum(-(-n // 64) * 64 * (-(-m // 64) + 1) * 64 for n, m in zip(sizes, lengths, strict=True))
    assert triton_gather.TRITON.pairs(plan, True) == wanted


def test_what_it_does_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = random_plan(1, 1, 4, 4)
    x = torch.zeros(1, 1, 4, 16)

    def refused(x: torch.Tensor) -> str:
        return triton_gather.TRITON.refuses(x, x, x, plan, None)

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "without Triton's interpreter" in refused(x)
    assert "tensors on meta" in refused(x.to("meta"))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "float64" in refused(x.double())
    assert "width 512" in refused(torch.zeros(1, 1, 4, 512))
    monkeypatch.setattr(triton_gather, "_installed", lambda: False)
    assert "without triton" in refused(x)
