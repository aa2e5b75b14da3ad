"""A run that goes on reads its weights from the checkpoint alone: the files of its base are not read again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from mmspeed.cli.init import write_config
from mmspeed.config import load_config
from mmspeed.initialize import materialize, read_weights
from mmspeed.models.diffusers.loading import RepositoryWeights
from mmspeed.pipelines import TrainPipeline
from mmspeed.protocols import Part
from tests.support.runs import losses
from tests.support.tiny_repositories import save_wan
from tests.unit.pipelines.test_fine_tuning import SMALL


@pytest.fixture
def empty_is_nan() -> Iterator[None]:
    """Memory without values holds NaN, so that a weight which nothing fills is seen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.slow
def test_the_files_of_a_base_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty_is_nan: None) -> None:
    read: list[int] = []
    own = RepositoryWeights.read

    def counted(self: RepositoryWeights, parts: Mapping[str, Part]) -> Iterator[tuple[str, Tensor]]:
        for name, part in own(self, parts):
            read.append(part.nbytes)
            yield name, part

    monkeypatch.setattr(RepositoryWeights, "read", counted)
    save_wan(tmp_path / "tiny-wan")
    write_config(tmp_path / "own.yaml", model=str(tmp_path / "tiny-wan"))

    def run(*overrides: str) -> int:
        """Bytes of the base that a run reads."""
        read.clear()
        TrainPipeline(load_config(tmp_path / "own.yaml", (*SMALL, *overrides)), online=True).run()
        return sum(read)

    whole = run("name=whole", "train.ema_decay=0.9")
    assert whole > 100_000
    assert run("name=parts", "train.ema_decay=0.9", "train.steps=2") == whole
    assert run("name=parts", "train.ema_decay=0.9") == 0
    one, other = (losses(load_config(tmp_path / "own.yaml", (*SMALL, f"name={name}"))) for name in ("whole", "parts"))
    assert one == other and len(one) == 3


class Files:
    """Weights of 1 in any number of tensors, and the names that were asked for."""

    fingerprint = "ones"

    def __init__(self, model: nn.Module) -> None:
        self.shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
        self.names: list[str] = []

    def read(self, parts: Mapping[str, Part]) -> Iterator[tuple[str, Tensor]]:
        self.names += parts
        for name, part in parts.items():
            yield name, torch.ones(self.shapes[name])[part]


def test_weights_that_do_not_train_are_read_from_the_base() -> None:
    """A checkpoint does not hold them, but it holds saved buffers."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    model[0].requires_grad_(False)
    files = Files(model)
    materialize(model, torch.device("cpu"))
    read_weights(model, files, frozen_alone=True)
    assert files.names == ["0.weight", "0.bias"] and bool((model[0].weight == 1).all())
    model.requires_grad_(True)
    read_weights(model, files, frozen_alone=True)
    assert len(files.names) == 2
    read_weights(model, files)
    assert len(files.names) == 2 + len(files.shapes)
