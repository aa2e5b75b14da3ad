"""The count of a training step: launches, bytes, waits and copies, of operators and of whole configs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from mmspeed.bench.step import Traffic, counting, kind_of, total
from mmspeed.cli.app import run
from mmspeed.device import without_waiting

META = torch.device("meta")
LANGUAGE = (
    "task: language\nmodel: {shape: tiny-qwen3-0.6b}\nsequence_length: 64\ntexts: {cache: c, sources: [{path: t}]}\n"
)
VIDEO = "data: {cache: c, sources: [{path: v}], buckets: [{frames: 5, height: 64, width: 96}]}\nmodel: {size: nano}\n"
REST = "train: {steps: 2, batch_size: 1}\ndevice: {kind: cpu, dtype: bfloat16}\n"


def test_launches_read_and_write_and_views_are_none() -> None:
    x_NE, weight_EE = torch.ones(4, 8), torch.ones(8, 8)
    with counting(torch.device("cpu")) as counter:
        y_NE = (x_NE @ weight_EE).view(8, 4).mT  # 128 + 256 bytes to 128
        y_NE.add_(1.0)  # 128 to 128
        torch.empty(9).copy_(torch.ones(9))  # 36 written; 36 to 36
        y_NE.sum()
    kinds = counter.kinds
    assert kinds["products"] == Traffic(1, 384, 128) and kinds["casts and copies"] == Traffic(1, 36, 36)
    assert kinds["elementwise"] == Traffic(2, 128, 164) and kinds["reductions"] == Traffic(1, 128, 4)
    assert total(kinds) == Traffic(5, 676, 332)


@pytest.mark.parametrize(
    ("work", "waits", "copies"),
    [
        (lambda x, host: x.to(META), {}, {}),
        (lambda x, host: without_waiting(host, META), {}, {}),
        (lambda x, host: host.to(META), {}, {"_to_copy": 1}),
        (lambda x, host: x.copy_(host), {}, {"copy_": 1}),
        (lambda x, host: torch.tensor([1.0], device=META), {}, {"tensor": 1}),
        (lambda x, host: x.sum().item(), {"_local_scalar_dense": 1}, {}),
        (lambda x, host: x.cpu(), {"_to_copy": 1}, {}),
        (lambda x, host: x.nonzero(), {"nonzero": 1}, {}),
        (lambda x, host: x + host.sum(), {}, {}),
    ],
)
def test_what_holds_up_the_host(work: object, waits: dict[str, int], copies: dict[str, int]) -> None:
    x, host = torch.ones(3, device=META), torch.ones(3)
    with counting(META) as counter:
        assert isinstance(work(x, host), Tensor | float)  # type: ignore[operator]
    assert (+counter.waits, +counter.copies) == (waits, copies)


@pytest.mark.parametrize("config", [LANGUAGE, VIDEO])
def test_no_micro_batch_waits_or_copies(tmp_path: Path, capsys: pytest.CaptureFixture[str], config: str) -> None:
    (tmp_path / "c.yaml").write_text(config + REST)
    assert run(["bench", "step", str(tmp_path / "c.yaml"), "--count"]) == 0
    printed = capsys.readouterr().out
    assert "host waits: 0; blocking copies to the device: 0" in printed
    assert run(["bench", "step", str(tmp_path / "c.yaml"), "--rounds", "1"]) == 0
    assert "a step takes" in capsys.readouterr().out


def test_kinds_by_name() -> None:
    assert (
        kind_of("_fused_adamw_") == "optimizer" and kind_of("addmm") == "products" and kind_of("gelu") == "elementwise"
    )
