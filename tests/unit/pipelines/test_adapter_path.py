"""A newcomer's path to an adapter by the command line: init, train on the demo clips, sample, export, and the file in the official pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mmspeed.config import load_config
from tests.support.runs import losses, pictures
from tests.support.tiny_repositories import REPOSITORIES
from tests.unit.pipelines.test_family_chain import BUCKETS, IMAGES, SHORT, VIDEO, commanded

WITHOUT_LOADER = ("hunyuan-video-1.5",)


@pytest.mark.parametrize(
    "family", [each if each == "wan" else pytest.param(each, marks=pytest.mark.slow) for each in REPOSITORIES]
)
def test_from_clips_to_an_adapter(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from diffusers import DiffusionPipeline
    from peft import PeftModel

    monkeypatch.chdir(tmp_path)
    base = REPOSITORIES[family](tmp_path / "base")
    of_images = ("--videos", pictures(tmp_path / "pictures")) if family in IMAGES else ()
    commanded("init", "own", "--model", base, "--adapter", "lora", "--rank", 4, *of_images)
    short = (*SHORT, f"data.buckets=[{BUCKETS.get(family, VIDEO)}]", "memory.fraction=null")
    commanded("train", "own.yaml", *short)
    config = load_config(Path("own.yaml"), short)
    assert len(losses(config)) == 3
    sample = Path("sample.png" if family in IMAGES else "sample.mp4")
    commanded("sample", config.run_dir, "-p", "a rabbit on a meadow", "--steps", 2, "-o", sample)
    commanded("export", config.run_dir, "-o", "adapter")

    pipe: Any = DiffusionPipeline.from_pretrained(base)
    if family in WITHOUT_LOADER:
        pipe.transformer = PeftModel.from_pretrained(pipe.transformer, "adapter")
    else:
        pipe.load_lora_weights("adapter")
    seconds = [p for name, p in pipe.transformer.named_parameters() if ".lora_B." in name]
    (settings,) = pipe.transformer.peft_config.values()
    assert (settings.r, settings.lora_alpha) == (4, 4) and sample.stat().st_size > 0
    assert seconds and sum(torch.count_nonzero(p).item() > 0 for p in seconds) > len(seconds) // 2
