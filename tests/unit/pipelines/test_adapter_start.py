"""What runs with adapters begin with: each kind of place gives the held-out loss of the run that wrote it, or an error says the way."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmspeed.errors import UserError
from mmspeed.log import read_metrics
from mmspeed.pipelines import TrainPipeline
from mmspeed.pipelines.inference.export import export_run
from mmspeed.pipelines.inference.export_adapter import export_adapter
from tests.support.published import published_config
from tests.unit.pipelines.test_adapter_memory import adapted, save_base

STILL = ("train.steps=2", "train.lr=1e-30", "train.warmup_steps=0", "validate.every=2")


def held_out(folder: Path, name: str, *overrides: str) -> float:
    """The loss of held-out clips after a run of adapters."""
    config = adapted(folder, name, *STILL, *overrides)
    TrainPipeline(config).run()
    rows = [row for row in read_metrics(config.run_dir / "metrics.jsonl") if row["kind"] == "validation"]
    return float(rows[-1]["loss"])


def test_runs_begin_with_what_others_wrote(tmp_path: Path) -> None:
    save_base(tmp_path)
    wrote, runs = held_out(tmp_path, "wrote", "train.lr=1e-2"), tmp_path / "runs"
    assert held_out(tmp_path, "fresh") != pytest.approx(wrote, rel=1e-3)
    places = [runs / "wrote", next((runs / "wrote" / "checkpoints").glob("step-*"))]
    for format in ("diffusers", "peft", "original"):
        places.append(export_adapter(runs / "wrote", tmp_path / format, format=format).folder)  # type: ignore[arg-type]
    places.append(tmp_path / "diffusers" / "pytorch_lora_weights.safetensors")
    for number, place in enumerate(places):
        assert held_out(tmp_path, f"begun-{number}", f"train.start_from={place}") == pytest.approx(wrote, rel=1e-6)
    other = "model.adapter.alpha=3"  # whose effect of a file is the same
    assert held_out(tmp_path, "scaled", f"train.start_from={places[2]}", other) == pytest.approx(wrote, rel=1e-6)


def test_a_run_without_adapters_is_a_base_by_its_export(tmp_path: Path) -> None:
    save_base(tmp_path)
    model = f"model={{kind: diffusers, pretrained: {tmp_path / 'base'}}}"
    config = published_config(tmp_path, "wan", model, "name=whole", *STILL, "train.lr=1e-2")
    TrainPipeline(config).run()
    (row,) = [row for row in read_metrics(config.run_dir / "metrics.jsonl") if row["kind"] == "validation"]
    with pytest.raises(
        UserError, match=r"holds no adapters, but whole weights.*mmspeed export RUN -o FOLDER.*model.pretrained"
    ):
        held_out(tmp_path, "refused", f"train.start_from={config.run_dir}")
    repository = export_run(config.run_dir, tmp_path / "repository").folder
    assert held_out(tmp_path, "begun", f"model.pretrained={repository}") == pytest.approx(row["loss"], rel=1e-6)
