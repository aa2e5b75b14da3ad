"""A published model some of whose weights are never reached: replicated and sharded runs on two processes are that of one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.checkpoints import whole_checkpoint
from tests.support.published import load, prepare, published_config, train_published, write_cache
from tests.support.runs import losses
from tests.support.spawn import run_ranks

FLOOR = "data.buckets=[{frames: 1, height: 32, width: 48}]"


def overrides(folder: Path, name: str) -> tuple[str, ...]:
    return FLOOR, f"name={name}", f"data.cache={folder / 'images'}", "train.steps=3", "train.weight_decay=0.1"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unused")
    prepare(folder)
    write_cache(published_config(folder, "qwen", *overrides(folder, "alone")))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_both_strategies_train_without_them(home: Path, strategy: str) -> None:
    alone = published_config(home, "qwen", *overrides(home, "alone"))
    if not alone.run_dir.exists():
        train_published(str(home), "qwen", overrides(home, "alone"))
    own = (*overrides(home, strategy), f"parallel.strategy={strategy}")
    run_ranks(train_published, 2, str(home), "qwen", own)
    config = published_config(home, "qwen", *own)
    assert losses(config) == pytest.approx(losses(alone), rel=1e-5) and len(losses(config)) == 3
    before, after = load(home, "qwen").state_dict(), whole_checkpoint(config.run_dir)
    trained = [name.removeprefix("model.") for name in after if name.startswith("model.")]
    assert (
        "transformer_blocks.1.txt_mlp.net.2.weight" not in trained
    )  # neither moved nor decayed: not in the checkpoint
    assert not torch.equal(
        after["model.transformer_blocks.0.txt_mlp.net.2.weight"], before["transformer_blocks.0.txt_mlp.net.2.weight"]
    )
