"""Models in two pipeline stages, and a runner that drives them: all forward passes, then all backward passes.

A stage is a whole model in which stand-ins take the places of the other stage's blocks. The last block of the first stage hands its
result over, and the call of the model ends there; in the second stage it takes the place of what the first blocks give.

Legend: E width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mmspeed import rng
from mmspeed.axes import AxisName
from mmspeed.loop.runner import Call, RunRecord, TermsOf, noted
from mmspeed.mesh import Mesh
from mmspeed.protocols import Batch, Divisors, Item, MicroBatches, Term, Terms, blocks_of
from mmspeed.shapes import Bucket

E = 4
DIMS = 8  # at most, of what is handed over


class HandedOver(BaseException):  # noqa: N818 -- no error: nothing between here and the runner may take it
    """Ends the call of the first stage's model."""

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.x = x


class StandIn(nn.Module):
    """In the place of a block of another stage. `pair`: blocks return a second value beside the tokens, of which there is none."""

    def __init__(self, pair: bool = False) -> None:
        super().__init__()
        self.pair = pair

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return (x, None) if self.pair else x


class HandOver(StandIn):
    """The first block behind a stage: it ends the call."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        raise HandedOver(x)


class TakeOver(StandIn):
    """The last block before a stage: it gives what has come from the stage before."""

    come: Tensor | None = None

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        assert self.come is not None
        return super().forward(self.come)


def halved(model: nn.Module, stage: int, pair: bool = False) -> nn.Module:
    """The model with the blocks of one of two stages alone, changed in place."""
    names = [name for name, _ in blocks_of(model)]
    middle = len(names) // 2
    stands = {names[middle]: HandOver(pair)} if stage == 0 else {names[middle - 1]: TakeOver(pair)}
    for name in names[middle:] if stage == 0 else names[:middle]:
        parent, _, child = name.rpartition(".")
        model.get_submodule(parent).register_module(child, stands.get(name, StandIn(pair)))
    return model


def stage_model(stages: Sequence[int], frozen: bool) -> nn.Sequential:
    """The chosen stages of a model of two layers, by their global numbers; with `frozen` nothing of the first trains."""
    model = nn.Sequential()
    if 0 not in stages:
        model.append(TakeOver())
    for stage in stages:
        layer = nn.Linear(E, E)
        with torch.no_grad():
            layer.weight.copy_(rng.normal((E, E), 0, "weight", stage))
            layer.bias.copy_(rng.normal((E,), 0, "bias", stage))
        model.add_module(f"stage{stage}", layer.requires_grad_(not (frozen and stage == 0)))
    if 1 not in stages:
        model.append(HandOver())
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


def squared_error(passed: tuple[Tensor, Batch]) -> Terms:
    """The squared error of each item, and its largest part, which does not train."""
    predicted_IE, batch = passed
    error_IE = (predicted_IE - batch["target"]).square()
    largest = Term(error_IE.detach().amax(1), batch.weights_I, trains=False)
    return {"loss": Term(error_IE.mean(1), batch.weights_I), "largest": largest}


@dataclass(frozen=True)
class TwoStageRunner:
    """Drives a stage's part of the calls of a model; it knows no task."""

    model: nn.Module
    mesh: Mesh

    def run(
        self, call: Call, terms: TermsOf, batches: MicroBatches, divisors: Divisors, weight: float = 1.0
    ) -> RunRecord:
        peers = dist.get_process_group_ranks(self.mesh.dense.get_group(AxisName.PP.value))
        record = RunRecord()
        if self.mesh.knows_loss:
            self._last(record, call, terms, batches, divisors, peers[0], weight)
        else:
            self._first(call, batches, peers[1])
        replicas = self.mesh.dense.get_group(AxisName.DP_REPLICATE.value)
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=replicas)
        return record

    @staticmethod
    def _first(call: Call, batches: MicroBatches, peer: int) -> None:
        outputs: list[Tensor] = []
        for batch in batches:
            try:
                call(batch)
            except HandedOver as over:
                outputs.append(over.x)
        for x in outputs:
            dist.send(torch.tensor([*x.shape, *[0] * (DIMS - x.ndim)]), peer)
            dist.send(x.detach().contiguous(), peer)
        for x in outputs:
            grad = torch.empty_like(x, memory_format=torch.contiguous_format)
            dist.recv(grad, peer)
            if x.requires_grad:
                x.backward(grad)

    def _last(
        self,
        record: RunRecord,
        call: Call,
        terms: TermsOf,
        batches: MicroBatches,
        divisors: Divisors,
        peer: int,
        weight: float,
    ) -> None:
        (place,) = (module for module in self.model.modules() if isinstance(module, TakeOver))
        losses, received = list[Tensor](), list[Tensor]()
        for batch in batches:
            dist.recv(shape := torch.empty(DIMS, dtype=torch.int64), peer)
            dist.recv(x := torch.empty([size for size in shape.tolist() if size]), peer)
            place.come = x.requires_grad_()
            losses.append(noted(record, batch, terms(call(batch)), divisors, weight))
            received.append(x)
        for loss, x in zip(losses, received, strict=True):
            loss.backward()
            assert x.grad is not None
            dist.send(x.grad, peer)
