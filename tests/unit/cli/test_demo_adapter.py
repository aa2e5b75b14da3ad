"""The demo of adapters: its file is applied by diffusers to every layer it was trained on, and it lowers the held-out loss."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mmspeed.cli.app import app
from mmspeed.cli.demo_adapter import EMPTY


@pytest.mark.slow
@pytest.mark.parametrize("short", [True, False])
def test_the_adapters_file_works_in_diffusers_and_lowers_the_held_out_loss(
    tmp_path: Path, short: bool, caplog: pytest.LogCaptureFixture
) -> None:
    from diffusers import WanPipeline

    result = CliRunner().invoke(app, ["demo", "--adapter", *["--short"] * short, "--output", str(tmp_path)])
    assert result.exit_code == 0, result.output
    videos = [(tmp_path / name).read_bytes() for name in ("base.mp4", "adapter.mp4")]
    assert videos[0] != videos[1] and (tmp_path / "adapter.png").read_bytes()[:4] == b"\x89PNG"
    base, adapted = map(float, re.findall(r"base ([\d.]+), with the adapter ([\d.]+)", result.output)[0])
    assert adapted < base
    name = "short" if short else "demo"
    pipe = WanPipeline.from_pretrained(tmp_path / f"{name}-base-export", **dict.fromkeys(EMPTY))
    pipe.load_lora_weights(tmp_path / f"{name}-adapter-export")
    layers = [layer for layer in pipe.transformer.modules() if hasattr(layer, "lora_A")]
    assert len(layers) == 4 * (4 + 4 + 2)
    assert all(layer.lora_B[pipe.get_active_adapters()[0]].weight.abs().max() > 0 for layer in layers)


def test_the_adapter_demo_is_of_videos() -> None:
    result = CliRunner().invoke(app, ["demo", "--adapter", "--task", "language"])
    assert result.exit_code != 0 and "leave --task out" in str(result.exception or result.output)
