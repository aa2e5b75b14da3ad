"""Gradients under tensor parallelism: those of parameters that all processes hold are summed once, parts are left alone."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from mmspeed.axes import AxisName, AxisSizes
from mmspeed.comm import Axis
from mmspeed.device import Device
from mmspeed.mesh import make_mesh
from mmspeed.parallel import sum_shared_gradients
from tests.support.spawn import run_ranks


def summed() -> dict[str, list[float]]:
    """Gradients after the sum, where rank r has r + 1 before it, of each kind of parameter."""
    mesh = make_mesh(Device("cpu", 0), AxisSizes(tp=2))
    axis = mesh.dense[AxisName.TP.value]
    own = torch.full((2,), dist.get_rank() + 1.0)
    parameters = {
        "plain": nn.Parameter(torch.zeros(2)),
        "half": nn.Parameter(torch.zeros(2, dtype=torch.bfloat16)),
        "replicated": nn.Parameter(DTensor.from_local(torch.zeros(2), axis, [Replicate()], run_check=False)),
        "split": nn.Parameter(DTensor.from_local(torch.zeros(2), axis, [Shard(0)], run_check=False)),
        "without": nn.Parameter(torch.zeros(2)),
    }
    for name, parameter in parameters.items():
        if isinstance(parameter, DTensor):
            parameter.grad = DTensor.from_local(own.clone(), axis, parameter.placements, run_check=False)
        elif name != "without":
            parameter.grad = own.to(parameter.dtype)
    sum_shared_gradients(parameters.values(), Axis.of(mesh.dense, AxisName.TP.value))
    assert parameters["without"].grad is None
    grads = {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}
    return {name: (g.to_local() if isinstance(g, DTensor) else g).tolist() for name, g in grads.items()}


def test_shared_gradients_are_summed_once_and_parts_are_left() -> None:
    for rank, grads in enumerate(run_ranks(summed, 2)):
        own = [rank + 1.0] * 2
        assert grads == {"plain": [3.0] * 2, "half": [3.0] * 2, "replicated": [3.0] * 2, "split": own}
