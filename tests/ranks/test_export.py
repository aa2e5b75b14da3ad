"""A task's tensors leave whole from any layout, one at a time."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.support.spawn import run_ranks
from tests.support.toy import ToyDiT


def exported() -> list[dict[str, np.ndarray[Any, Any]]]:
    from mmspeed.axes import AxisSizes
    from mmspeed.device import Device
    from mmspeed.loop.checkpoint.state import whole_tensors
    from mmspeed.mesh import make_mesh
    from mmspeed.parallel import parallelize

    sharded = parallelize(ToyDiT(), make_mesh(Device("cpu", 0), AxisSizes(1, -1)), "fsdp")
    copied = parallelize(ToyDiT(), make_mesh(Device("cpu", 0), AxisSizes(-1, 1)), "ddp")
    return [{name: tensor.numpy().copy() for name, tensor in whole_tensors(model)} for model in (sharded, copied)]


def test_every_rank_streams_the_whole_model() -> None:
    expected = ToyDiT().state_dict()
    for actual in (each for rank in run_ranks(exported, 2) for each in rank):
        assert actual.keys() == expected.keys()
        assert all(np.array_equal(actual[name], value.numpy()) for name, value in expected.items())
