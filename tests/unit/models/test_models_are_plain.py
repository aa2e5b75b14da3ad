"""SoraDiT is tensor code and nothing else: what it imports, how long it is, what its modules hold, how its parameters are called."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mmspeed.config.schema import ModelConfig
from mmspeed.models.sora.model import on_meta
from mmspeed.models.sora.sizes import resolve_config
from tests.unit.models.test_sora_dit import ARRANGEMENTS

NAMES = Path(__file__).with_name("sora_parameters.txt")


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_names_order_and_shapes_of_parameters_are_those_of_checkpoints(arrangement: str) -> None:
    """Checkpoints are read by these names, and optimizers count in this order."""
    model = on_meta(resolve_config(ModelConfig(size="nano", arrangement=arrangement), 4, 16))  # type: ignore[arg-type]
    sections = dict(
        section.split("\n", 1) for section in NAMES.read_text(encoding="utf-8").removeprefix("# ").split("\n# ")
    )
    results = [f"{name} {'x'.join(map(str, parameter.shape))}" for name, parameter in model.named_parameters()]
    assert results == sections[arrangement].split("\n")[: len(results)] and len(results) == 58
    state = [name for name in model.state_dict() if not name.endswith("tau")]
    assert state == [line.split()[0] for line in results]
    assert not any(isinstance(buffer, torch.Tensor) for buffer in model.buffers())
