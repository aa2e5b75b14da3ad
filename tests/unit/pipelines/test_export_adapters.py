"""Exports of adapters: their official readers compute what the run does, and what cannot be read is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mmspeed.errors import UserError
from mmspeed.models.adapters import is_adapter
from mmspeed.pipelines.inference.export import export_run
from tests.support.official_pipelines import made_run
from tests.support.tiny_repositories import save_wan

LORA = {"kind": "lora", "rank": 3, "alpha": 8, "targets": "attention"}


def adapted_run(folder: Path, base: Path, adapter: dict[str, Any] = LORA, **sections: Any) -> tuple[Path, nn.Module]:
    """A run's folder with one checkpoint of adapters of random numbers, and its model."""
    return made_run(
        folder, base, 0, model={"kind": "diffusers", "pretrained": str(base), "adapter": adapter}, **sections
    )


def test_tensors_that_nothing_takes_are_an_error(tmp_path: Path) -> None:
    run, _ = made_run(tmp_path, save_wan(tmp_path / "base"), frozen=2)
    config = run / "config.yaml"
    adapted, _ = adapted_run(tmp_path, tmp_path / "base", name="adapted")
    (adapted / "config.yaml").write_text(config.read_text())  # a run whose config knows no adapter
    with pytest.raises(
        UserError, match=r"holds `blocks.0.attn1.to_k.lora_A.default.weight`.* no tensor of the model takes"
    ):
        export_run(adapted, tmp_path / "out")
    assert not (tmp_path / "out").exists()
