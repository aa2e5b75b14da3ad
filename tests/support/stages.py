"""A model in two pipeline stages, and a runner that drives them: all forward passes, then all backward passes.

Legend: I items of a micro-batch, E width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mmspeed import rng
from mmspeed.axes import AxisName
from mmspeed.loop.runner import Forward, RunRecord, SequentialRunner
from mmspeed.mesh import Mesh
from mmspeed.protocols import Batch, Divisors, Item, MicroBatches, Models, Term, Terms
from mmspeed.shapes import Bucket

E = 4


def stage_model(stages: Sequence[int], frozen: bool) -> nn.Sequential:
    """The chosen stages of the model, by their global numbers; with `frozen` nothing of the first trains."""
    model = nn.Sequential()
    for stage in stages:
        layer = nn.Linear(E, E)
        with torch.no_grad():
            layer.weight.copy_(rng.normal((E, E), 0, "weight", stage))
            layer.bias.copy_(rng.normal((E,), 0, "bias", stage))
        model.add_module(f"stage{stage}", layer.requires_grad_(not (frozen and stage == 0)))
    return model


def items(count: int, broken: bool) -> list[Batch]:
    """Micro-batches of two items each, of weight 1; with `broken` the second item of the first has a target that is not finite."""
    results = []
    for number in range(count):
        names = [f"item {2 * number}", f"item {2 * number + 1}"]
        target_IE = torch.stack([rng.normal((E,), 0, "target", name) for name in names])
        if broken and number == 0:
            target_IE[1, 0] = torch.inf
        x_IE = torch.stack([rng.normal((E,), 0, "x", name) for name in names])
        tensors = {"x": x_IE, "target": target_IE}
        results.append(Batch(tensors, [Item(name, source=name) for name in names], torch.ones(2), Bucket(1, 8, 8)))
    return results


def squared_error(models: Models, batch: Batch) -> Terms:
    """The squared error of each item, and its largest part, which does not train."""
    error_IE = (models["model"](batch["x"]) - batch["target"]).square()
    largest = Term(error_IE.detach().amax(1), batch.weights_I, trains=False)
    return {"loss": Term(error_IE.mean(1), batch.weights_I), "largest": largest}


@dataclass(frozen=True)
class TwoStageRunner:
    """Drives a stage's part of the model; what the first gives is what the second's batches hold as `x`."""

    model: nn.Module
    mesh: Mesh

    def run(self, forward: Forward, batches: MicroBatches, divisors: Divisors, weight: float = 1.0) -> RunRecord:
        group = self.mesh.dense.get_group(AxisName.PP.value)
        peer = dist.get_process_group_ranks(group)[0 if self.mesh.knows_loss else 1]
        if self.mesh.knows_loss:
            record = self._last(forward, batches, divisors, peer, weight)
        else:
            record = self._first(batches, peer)
        replicas = self.mesh.dense.get_group(AxisName.DP_REPLICATE.value)
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=replicas)
        return record

    def _first(self, batches: MicroBatches, peer: int) -> RunRecord:
        outputs: list[Tensor] = [self.model(batch["x"]) for batch in batches]
        for output_IE in outputs:
            dist.send(output_IE.detach(), peer)
        for output_IE in outputs:
            grad_IE = torch.empty_like(output_IE)
            dist.recv(grad_IE, peer)
            if output_IE.requires_grad:
                output_IE.backward(grad_IE)
        return RunRecord()

    def _last(self, forward: Forward, batches: MicroBatches, divisors: Divisors, peer: int, weight: float) -> RunRecord:
        received = []
        for batch in batches:
            x_IE = torch.empty_like(batch["x"])
            dist.recv(x_IE, peer)
            tensors = {**batch.tensors, "x": x_IE.requires_grad_()}
            received.append(Batch(tensors, batch.items, batch.weights_I, batch.shape))
        record = SequentialRunner([self.model], "none").run(forward, received, divisors, weight)
        for batch in received:
            grad_IE = batch["x"].grad
            assert grad_IE is not None
            dist.send(grad_IE, peer)
        return record
