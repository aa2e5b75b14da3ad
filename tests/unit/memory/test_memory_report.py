"""What a step's memory report says, against torch's own count and against what is known of the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mmspeed.config import Config, dump_config
from mmspeed.device import Device
from mmspeed.errors import UserError
from mmspeed.memory import set_policies
from mmspeed.memory.planning.report import CATEGORIES, LayerMemory, MemoryReport
from mmspeed.mesh import process_group
from mmspeed.pipelines.domains.video.domain import VideoDomain
from mmspeed.pipelines.report.memory_page import measure_report, read_report
from mmspeed.pipelines.report.run_page import write_report
from mmspeed.pipelines.tasks import as_task
from mmspeed.pipelines.tuning.synthetic_step import SyntheticStep
from mmspeed.shapes import Bucket
from tests.support.memory_counts import kept_bytes
from tests.support.mlps import PlainMlp
from tests.support.runs import small_config

CPU = Device("cpu", 0)
BUCKET = Bucket(9, 96, 96)
WIDER = (
    "data.buckets=[{frames: 9, height: 96, width: 96}]", "model.depth=4", "model.width=96", "model.heads=6",
)  # fmt: skip


def trial_of(config: Config) -> SyntheticStep:
    task = VideoDomain(config)
    task.open_without_data()
    return SyntheticStep(config, as_task(task, config), CPU)


def measured(folder: Path, *overrides: str, batch: int = 2) -> tuple[MemoryReport, dict[str, int]]:
    """The report of a step, and bytes that are known."""
    with process_group(CPU):
        trial = trial_of(small_config(folder, *WIDER, *overrides))
        report = measure_report(trial, BUCKET, batch)
        parameters = list(trial.model.parameters())
        return report, {
            "parameters": sum(p.nbytes for p in parameters),
            "float32": sum(4 * p.numel() for p in parameters),
            "state": trial.state_bytes,
        }


HALF = ("device.dtype=bfloat16", "memory.bucket=256KiB")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "within"),
    [
        ((), 0.0),
        (("memory.activation_policy={block: recompute}",), 0.0),
        (("memory.activation_policy={block: offload_selective}", "memory.offload_from=1"), 0.0),
        (("memory.mlp_chunk=50",), 0.01),
        (("device.dtype=bfloat16",), 0.02),
        ((*HALF, "memory.master=split"), 0.03),
        ((*HALF, "memory.master=host", "memory.states=host", "memory.ema=host"), 0.03),
    ],
)
def test_the_report_sums_to_what_torch_counts(tmp_path: Path, overrides: tuple[str, ...], within: float) -> None:
    """The tracker sees what operations return, the allocator also what they take inside: in float32 on a CPU that is next to nothing,
    with bfloat16 parameters a product's copy of a weight (here 2 % of the peak of a small model). With parts the tracker's hooks hold
    one a little longer."""
    report, known = measured(tmp_path, *overrides)
    assert report.counted_peak is not None
    assert sum(report.categories.values()) == report.peak
    assert abs(report.peak - report.counted_peak) <= within * report.counted_peak + 1000
    assert report.categories["parameters"] == known["parameters"]
    assert report.categories["average"] == (0 if "memory.ema=host" in overrides else known["float32"])
    assert report.categories["optimizer"] == known["state"] - known["parameters"] - report.categories["average"]
    assert report.phase in ("forward", "loss", "backward", "update")
    assert report.host.keys() == {
        name
        for name, key in {"activations": "offload", "optimizer": "states=host", "average": "ema=host"}.items()
        if any(key in override for override in overrides)
    }


def test_compiled_steps_are_refused(tmp_path: Path) -> None:
    with process_group(CPU):
        trial = trial_of(small_config(tmp_path, *WIDER))
        trial.config = small_config(tmp_path, *WIDER, "train.compile=true")
        with pytest.raises(UserError, match=r"train\.compile: false"):
            measure_report(trial, BUCKET, 1)


def test_kept_bytes_are_those_of_a_linear_layers_result() -> None:
    mlp, x = PlainMlp(16, 64, 16), torch.randn(10, 16, requires_grad=True)
    assert kept_bytes(CPU, mlp, lambda: mlp(x), [x]) == 4 * 10 * (64 + 64 + 16)
    set_policies(mlp, {"activation": "recompute"})
    assert kept_bytes(CPU, mlp, lambda: mlp(x), [x]) == 4 * 10 * (64 + 16)


def example(**changes: Any) -> MemoryReport:
    layers = (
        LayerMemory("patch_in", 10),
        *(LayerMemory(f"blocks.{n}", 4000) for n in range(28)),
        LayerMemory("final", 0),
    )
    fields: dict[str, Any] = {
        "device": "a device", "setting": "17x128x128, 2 a device", "peak": 100_000, "phase": "backward",
        "module": "blocks.27.mlp", "host": {"activations": 40_000, "optimizer": 8_000}, "layers": layers,
        "categories": dict(zip(CATEGORIES, (20_000, 10_000, 30_000, 20_000, 15_000, 5_000), strict=True)),
        "counted_peak": 101_000,
    }  # fmt: skip
    return MemoryReport(**{**fields, **changes})


def test_a_report_goes_through_json() -> None:
    assert MemoryReport.from_json(json.loads(json.dumps(example().to_json()))) == example()


def test_a_runs_page_shows_the_report_of_its_folder(tmp_path: Path) -> None:
    config: Config = small_config(tmp_path)
    folder = config.run_dir
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(dump_config(config))
    assert "<h2>Memory</h2>" not in write_report(folder).read_text()
    (folder / "memory.json").write_text(json.dumps({"report": example().to_json(), "choice": []}))
    page = write_report(folder).read_text()
    assert "<h2>Memory</h2>" in page and "blocks.0 to blocks.27, each" in page
    (folder / "memory.json").write_text(json.dumps({"choice": []}))
    assert read_report(folder) is None
    (folder / "memory.json").write_text('{"report": {"peak": 3}}')
    with pytest.raises(UserError, match=r"memory\.json cannot be read"):
        write_report(folder)
