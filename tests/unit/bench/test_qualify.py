"""`mmspeed qualify`: all of it in small with nothing but the bundle's packages; kernels with faults, hangs, errors and short time."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from mmspeed.__main__ import main
from mmspeed.bench.qualify import noise, run, steps
from mmspeed.bench.qualify.bundle import LIMIT, PACKAGES, collect, install_lines, requirements
from mmspeed.bench.qualify.kernels import dense_checks
from mmspeed.bench.qualify.rates import rated
from mmspeed.bench.qualify.rows import Check, Outcome, QualifyResult, error_text, run_checks
from mmspeed.bench.qualify.run import qualify
from mmspeed.bench.qualify.sparse_kernels import sparse_checks
from mmspeed.compute import block_attention
from mmspeed.compute.block_kernels import CPU, BlockKernel
from mmspeed.compute.sparse import dispatch
from mmspeed.compute.sparse.kernels.grouped import GROUPED
from mmspeed.compute.sparse.kernels.kernel import SparseKernel
from mmspeed.device import Device
from mmspeed.errors import UserError
from tests.support.pages import ROOT

HERE = Device("cpu", 0)
FAULT = 1.03  # of a kernel's scale

BLOCKED = """
import sys
sys.modules.update(dict.fromkeys(sys.argv.pop(1).split(",")))  # as if they were not installed
from mmspeed.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


def normal(name: str) -> str:
    """A distribution's name as indices compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def closure(names: tuple[str, ...]) -> set[str]:
    """The distributions and all that they need."""
    known: set[str] = set()
    waiting = [normal(name) for name in names]
    while waiting:
        name = waiting.pop()
        if name in known:
            continue
        known.add(name)
        try:
            needs = requires(name) or []
        except PackageNotFoundError:
            continue
        waiting += [normal(re.split(r"[^\w.-]", need, maxsplit=1)[0]) for need in needs if "extra ==" not in need]
    return known


@pytest.mark.slow
def test_a_cpu_qualifies_with_the_packages_of_the_bundle_alone() -> None:
    """The JSON of a whole run in a process that can import torch, the bundle's packages, and what these need."""
    packages = closure((*PACKAGES, "torch")) | {"mmspeed"}
    others = {top for top, dists in packages_distributions().items() if not packages & {normal(dist) for dist in dists}}
    assert {"diffusers", "av", "transformers", "webdataset", "accelerate", "PIL", "pyarrow", "psutil"} <= others
    words = ["qualify", "--device", "cpu", "--json"]
    command = [sys.executable, "-c", BLOCKED, ",".join(sorted(others)), *words]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK")}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, env=environment | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    everything: dict[str, Any] = json.loads(done.stdout)
    assert everything["passed"] and everything["shortfalls"] == []
    states = {row["name"]: row["state"] for row in everything["rows"]}
    assert len(states) == len(everything["rows"])
    for dtype in ("float32", "bfloat16"):
        for kernel in block_attention.KERNELS:
            expected = "passed" if kernel in ("cpu_flash", "eager") else "absent"
            assert states[f"block {kernel} {dtype}"] == states[f"ring {kernel} {dtype}"] == expected
        for kernel in dispatch.KERNELS:
            expected = "passed" if kernel in ("grouped", "flex", "masked") else "absent"
            assert states[f"sparse {kernel} {dtype}"] == expected
        assert states[f"dense auto {dtype}"] == states[f"dense flash_attention {dtype}"] == "passed"
    assert everything["seconds"] < 60 * everything["minutes"]


def wrong_forward() -> BlockKernel:
    return replace(CPU, forward=lambda q, k, v, mask, causal, scale: CPU.forward(q, k, v, mask, causal, FAULT * scale))


def wrong_backward() -> BlockKernel:
    return replace(CPU, backward=lambda *arguments: CPU.backward(*arguments[:-1], FAULT * arguments[-1]))


def wrong_sparse() -> SparseKernel:
    def attend(q: Any, k: Any, v: Any, plan: Any, means: Any, scale: float, *ran: Any) -> Any:
        return GROUPED.attend(q, k, v, plan, means, FAULT * scale, *ran)

    return replace(GROUPED, attend=attend)


def only_of(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the part of the kernels check those whose row has these words."""

    def some(device: Device, small: bool) -> Iterator[Check]:
        yield from (
            check for maker in (dense_checks, sparse_checks) for check in maker(device, small) if words in check.name
        )

    monkeypatch.setitem(run.PARTS, "kernels", (some,))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fault", [wrong_forward, wrong_backward])
def test_a_block_kernel_with_a_wrong_scale_fails(fault: Any, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    only_of(f"cpu_flash {dtype}", monkeypatch)
    assert qualify("cpu", 4, ["kernels"]).passed()
    monkeypatch.setitem(block_attention.KERNELS, "cpu_flash", fault())
    result = qualify("cpu", 4, ["kernels"])
    assert [row.state for row in result.rows] == ["failed", "failed"] and not result.passed()  # alone, and in the ring
    assert [line.split(": ")[1] for line in result.shortfalls()] == [
        f"block cpu_flash {dtype}",
        f"ring cpu_flash {dtype}",
    ]


def test_the_command_fails_with_a_sparse_kernel_of_a_wrong_scale(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    only_of("sparse grouped", monkeypatch)
    assert main(["qualify", "--device", "cpu", "--only", "kernels"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "PASS"
    monkeypatch.setitem(dispatch.KERNELS, "grouped", wrong_sparse())
    assert main(["qualify", "--device", "cpu", "--only", "kernels", "--json"]) == 1
    contents = json.loads(capsys.readouterr().out)
    assert not contents["passed"] and [row["state"] for row in contents["rows"]] == ["failed", "failed"]
    assert all(row["figures"]["share_of_limit"] > 1 for row in contents["rows"])


def test_noise_with_another_bit_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = (2, 3, 4)
    assert noise.check_draws(HERE, shape).state == noise.check_rounding(HERE, shape).state == "passed"
    monkeypatch.setattr(Device, "to_device", lambda self, x: x.nextafter(torch.tensor(math.inf)))
    assert noise.check_draws(HERE, shape).state == "failed"
    monkeypatch.setattr(Device, "to_device", lambda self, x: x * 1.01)
    assert noise.check_rounding(HERE, shape).state == "failed"


def good() -> Outcome:
    return Outcome("passed", "right")


def broken() -> Outcome:
    raise RuntimeError("a driver's\nlong   words")


def result_of(checks: list[Check], seconds: float = 20.0) -> QualifyResult:
    rows, hung = run_checks(checks, HERE, time.monotonic() + seconds)
    return QualifyResult("this", "cpu", {"torch": "2"}, 1.0, 0.0, rows, hung)


def test_an_error_is_its_rows_alone() -> None:
    result = result_of([Check("a", "one", broken), Check("a", "two", good)])
    assert [(row.state, row.text) for row in result.rows] == [
        ("failed", "RuntimeError: a driver's long words"),
        ("passed", "right"),
    ]
    assert not result.passed() and result.lines()[-2:] == [
        "FAIL:",
        "  a: one: FAILED: RuntimeError: a driver's long words",
    ]
    assert len(error_text(RuntimeError("x" * 10_000))) < 400


def test_a_part_that_cannot_begin_is_a_failed_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def unusable(device: Device, small: bool) -> Iterator[Check]:
        raise RuntimeError("no driver")
        yield

    monkeypatch.setitem(run.PARTS, "rates", (unusable,))
    (row,) = qualify("cpu", 4, ["rates"]).rows
    assert (row.part, row.state, row.text) == ("rates", "failed", "RuntimeError: no driver")


def test_checks_without_time_are_skipped_by_name() -> None:
    result = result_of([Check("a", "long", good, 1e6), Check("a", "short", good)])
    assert [(row.name, row.state) for row in result.rows] == [("long", "skipped"), ("short", "passed")]
    assert not result.passed() and "  a: long: skipped: no time left" in result.lines()
    result = qualify("cpu", 1e-6)
    assert {row.state for row in result.rows} == {"skipped"} and not result.passed()


def test_a_check_that_hangs_does_not_hold_the_command() -> None:
    hangs = Check("a", "hangs", lambda: time.sleep(5) or good(), 0.0)  # type: ignore[func-returns-value]
    result = result_of([Check("a", "first", good, 0.0), hangs, Check("a", "last", good, 0.0)], 0.5)
    assert result.hung
    assert [row.state for row in result.rows] == ["passed", "failed", "skipped"]
    assert "had not ended after" in result.rows[1].text


def test_nothing_that_ran_is_no_pass() -> None:
    assert not result_of([Check("a", "x", lambda: Outcome("absent", "another device"))]).passed()


class KnownDevice(Device):
    """A device with a data sheet."""

    name = "NVIDIA H200"  # type: ignore[assignment]


def test_a_rate_below_its_goal_falls_short() -> None:
    device, flops = KnownDevice("cuda", 0), 989e12
    assert rated(device, torch.bfloat16, flops, 1 / 0.39, 0.4, "").state == "short"
    assert rated(device, torch.float16, flops, 1 / 0.41, 0.4, "").state == "passed"
    assert rated(device, torch.bfloat16, flops, 1 / 0.39, None, "").state == "passed"
    assert rated(device, torch.float32, flops, 100.0, 0.4, "").state == "passed"
    assert rated(HERE, torch.bfloat16, 1.0, 1.0, 0.4, "").state == "passed"


@pytest.mark.parametrize(("full", "state", "policy"), [(2, "passed", {"block": "recompute"}), (3, "failed", None)])
def test_a_step_that_does_not_fit_keeps_less(
    full: int, state: str, policy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, calls = steps.take_step, []

    def often_full(*arguments: Any) -> float:
        calls.append(1)
        if len(calls) <= full:
            raise torch.OutOfMemoryError("out of memory")
        return right(*arguments)

    monkeypatch.setattr(steps, "take_step", often_full)
    outcome = steps.check_step(steps.StepBench(HERE, True), "nano", (2, 8, 8), "dense")
    assert outcome.state == state and outcome.figures.get("policy") == policy
    assert ("block: recompute" in outcome.text) and (state == "passed" or "memory ran out" in outcome.text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--minutes", "0"], "--minutes is 0"),
        (["--minutes", "nan"], "--minutes is nan"),
        (["--only", "kernel"], "--only: 'kernel' is not one of noise, kernels, rates, swap, steps"),
        (["--only", ""], "--only: ''"),
        (["--device", "abacus"], "device.kind is 'abacus'"),
    ],
)
def test_bad_options_are_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["qualify", *arguments]) == 1
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_host_without_psutil_knows_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    total, mine = psutil.virtual_memory().total, psutil.Process().memory_info().rss
    monkeypatch.setitem(sys.modules, "psutil", None)
    assert HERE.total_memory_bytes() == total and 0 < HERE.free_memory_bytes() < total
    assert HERE.memory_bytes() == pytest.approx(mine, rel=0.2)


def test_the_bundle_asks_for_the_projects_versions() -> None:
    wanted = requirements((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert wanted == [
        "numpy>=1.26",
        "safetensors>=0.5",
        "pyyaml>=6",
        "pydantic>=2.7",
        "typer>=0.12",
        "rich>=13",
        "fsspec",
    ]
    assert not [name for name in wanted if name.startswith("torch")]
    (line, command) = install_lines(Path("wheels"), "mmspeed-1-py3-none-any.whl")
    assert line == (
        "python -m pip install --no-index --find-links wheels -r wheels/requirements.txt && "
        "python -m pip install --no-index --no-deps wheels/mmspeed-1-py3-none-any.whl"
    )
    assert command == "python -m mmspeed qualify"


def test_an_installed_package_says_that_a_bundle_needs_a_checkout(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from mmspeed.bench.qualify import bundle

    monkeypatch.setattr(bundle, "__file__", str(tmp_path / "site" / "mmspeed" / "bench" / "qualify" / "bundle.py"))
    with pytest.raises(UserError, match="from a checkout"):
        collect(tmp_path / "wheels")
    assert bundle.main([str(tmp_path / "wheels")]) == 1


@pytest.mark.slow
def test_the_bundle_is_whole_and_small(tmp_path: Path) -> None:
    """With pip and its index."""
    wheels = collect(tmp_path)
    assert sum(wheel.stat().st_size for wheel in wheels) < LIMIT
    names = {normal(wheel.name.split("-")[0]) for wheel in wheels}
    assert {normal(name) for name in PACKAGES} | {"mmspeed", "pydantic-core", "typing-extensions"} <= names
    assert not {"torch", "diffusers", "transformers", "pyarrow", "av"} & names
    tags = [wheel.stem.split("-")[-3:] for wheel in wheels]  # Python, ABI, platform
    assert all(abi in ("none", "abi3", "cp312") for _, abi, _ in tags)
    assert all(platform == "any" or "x86_64" in platform for *_, platform in tags)
