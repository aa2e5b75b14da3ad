"""A run that goes on reads its weights from the checkpoint alone: the files of its base are not read again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from mmspeed.initialize import materialize, read_weights
from mmspeed.protocols import Part


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
