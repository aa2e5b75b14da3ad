"""Each family of published models by the command line, on the demo clips: init, preprocess, train, stop, resume, sample, export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mmspeed.__main__ import main
from mmspeed.config import Config, load_config
from mmspeed.models.families import family_in
from mmspeed.models.families.base import matching
from tests.support.runs import losses, pictures
from tests.support.tiny_repositories import REPOSITORIES

IMAGES = ("flux", "qwen-image")
BUCKETS = {
    "ltx": "{frames: 17, height: 32, width: 64}",
    "hunyuan-video-1.5": "{frames: 13, height: 32, width: 64}",
    **dict.fromkeys(IMAGES, "{frames: 1, height: 32, width: 48}"),
}
VIDEO = "{frames: 13, height: 32, width: 48}"
SHORT = (
    "data.limit=4", "data.val_fraction=0", "validate.prompts=[]", "train.steps=3", "train.log_every=1", "train.lr=1e-3",
    "train.warmup_steps=1", "train.ema_decay=null", "checkpoint.every=100", "preprocess.decode_workers=1", "data.cache=cache",
)  # fmt: skip


def commanded(*arguments: object) -> None:
    assert main([str(argument) for argument in arguments]) == 0, arguments


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder's safetensors."""
    results: dict[str, torch.Tensor] = {}
    for path in sorted(folder.rglob("*.safetensors")):
        results |= load_file(path)
    return results


def trained(config: Config) -> dict[str, torch.Tensor]:
    """The tensors of a run's last checkpoint: weights and states of the optimizer."""
    last = max((config.run_dir / "checkpoints").glob("step-*"), key=lambda path: path.name)
    return weights(last)


@pytest.mark.slow
@pytest.mark.parametrize("family", REPOSITORIES)
def test_from_clips_to_an_exported_repository(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steps are two and, after a stop, one more, to the bit; the official pipeline loads what was exported."""
    from diffusers import DiffusionPipeline

    monkeypatch.chdir(tmp_path)
    base = REPOSITORIES[family](tmp_path / "base")
    of_images = ("--videos", pictures(tmp_path / "pictures")) if family in IMAGES else ()
    commanded("init", "own", "--model", base, *of_images)
    short = (*SHORT, f"data.buckets=[{BUCKETS.get(family, VIDEO)}]")
    commanded("preprocess", "own.yaml", *short)
    commanded("train", "own.yaml", *short, "name=whole")
    commanded("train", "own.yaml", *short, "name=parts", "train.steps=2")
    commanded("train", "own.yaml", *short, "name=parts")
    whole, parts = (load_config(Path("own.yaml"), (*short, f"name={name}")) for name in ("whole", "parts"))
    assert losses(parts) == losses(whole) and len(losses(whole)) == 3
    one, two = trained(whole), trained(parts)
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)

    sample = Path("sample.png" if family in IMAGES else "sample.mp4")
    commanded("sample", parts.run_dir, "-p", "a rabbit on a meadow", "--steps", 2, "-o", sample)
    assert sample.stat().st_size > 0
    commanded("export", parts.run_dir, "-o", "out")
    pipeline: Any = DiffusionPipeline.from_pretrained("out")
    before, after = weights(base / "transformer"), pipeline.transformer.state_dict()
    assert before.keys() == after.keys()
    still = {name for name, tensor in before.items() if torch.equal(tensor, after[name])}
    known = family_in(type(pipeline.transformer))
    assert known is not None
    # no caption here has words in quotation marks, which HunyuanVideo 1.5 embeds by themselves
    of_words = {name for name in before if name.startswith("context_embedder_2.")}
    assert still <= {*matching(known.unused, [*before]), *of_words}, still
