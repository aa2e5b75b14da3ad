"""A model with its adapters switched off is its base, bit for bit, and trains on afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mmspeed.config.published import PublishedModelConfig
from mmspeed.initialize import materialize, read_weights
from mmspeed.models.adapters import disabled
from mmspeed.models.sections import with_weights
from mmspeed.protocols import source_of
from tests.support.tiny_repositories import save_wan
from tests.support.video_transformers import loss_of, make_inputs
from tests.unit.models.test_frozen_linear import adapted


def test_a_model_without_its_adapters_is_its_base(tmp_path: Path) -> None:
    folder = save_wan(tmp_path / "wan", in_channels=4, out_channels=4, text_dim=8)
    model, inputs = adapted(folder, "float32"), make_inputs("wan")
    base = with_weights(PublishedModelConfig(kind="diffusers", pretrained=str(folder)), 1, 1, "meta")
    materialize(base, torch.device("cpu"))
    source = source_of(base)
    assert source is not None
    read_weights(base, source)
    under = loss_of(model, inputs)
    with pytest.raises(KeyError), disabled(model):
        assert torch.equal(loss_of(model, inputs), loss_of(base, inputs))
        raise KeyError
    again = loss_of(model, inputs)
    again.backward()
    assert torch.equal(again, under) and not torch.equal(under, loss_of(base, inputs))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert trained and all(parameter.grad is not None and parameter.grad.any() for parameter in trained)
