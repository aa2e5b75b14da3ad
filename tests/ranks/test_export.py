"""A task's tensors leave whole from any layout, one at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.spawn import run_ranks
from tests.support.toy import ToyDiT


def exported(strategy: Any) -> dict[str, np.ndarray[Any, Any]]:
    from mmspeed.axes import AxisSizes
    from mmspeed.device import Device
    from mmspeed.loop.checkpoint.state import whole_tensors
    from mmspeed.mesh import make_mesh
    from mmspeed.parallel import parallelize

    model = parallelize(
        ToyDiT(), make_mesh(Device("cpu", 0), AxisSizes(*((1, -1) if strategy == "fsdp" else (-1, 1)))), strategy
    )
    return {name: tensor.numpy().copy() for name, tensor in whole_tensors(model)}


@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_every_rank_streams_the_whole_model(strategy: str) -> None:
    expected = ToyDiT().state_dict()
    for actual in run_ranks(exported, 2, strategy):
        assert actual.keys() == expected.keys()
        assert all(np.array_equal(actual[name], value.numpy()) for name, value in expected.items())
