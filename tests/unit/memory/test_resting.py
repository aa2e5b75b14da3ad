"""Tensors rest in the host's memory and come back as they were; roles that take turns train to the bit as if they never rested.

The memory of the CPU stands in for that of a device: what rests has empty storages.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from mmspeed.device import Device
from mmspeed.loop.averages import EMA
from mmspeed.loop.resting import Rests, held
from mmspeed.loop.step import train_step
from mmspeed.memory.offload.resting import HostRest
from mmspeed.memory.optimizer.tiered_optimizer import TieredOptimizer
from mmspeed.protocols import Batch, Item, Models, Term, Terms, Update
from tests.support.steps import Loss, learner_of

CPU = torch.device("cpu")
ROLES = {"high": "model", "low": "second"}


def test_tensors_come_back_as_they_were() -> None:
    """Views and tensors that share a storage rest once; the objects and their views stay the same."""
    whole, other = torch.randn(4, 6), torch.arange(5)
    view, values = whole.t()[1:], whole.clone()
    rest = HostRest(CPU, lambda: [whole, view, other, torch.empty(0)])
    rest.rest()
    rest.rest()
    assert rest.nbytes == 4 * 24 + 8 * 5 and whole.untyped_storage().nbytes() == other.untyped_storage().nbytes() == 0
    rest.wake()
    rest.wake()
    assert rest.nbytes == 0 and torch.equal(whole, values) and torch.equal(view, values.t()[1:])
    whole += 1
    rest.rest()
    rest.wake()
    assert torch.equal(whole, values + 1) and torch.equal(other, torch.arange(5))


class Turns:
    """Two models that train in turn, each with its optimizer and average."""

    def __init__(self, tiered: bool) -> None:
        torch.manual_seed(0)
        self.models: dict[str, nn.Module] = {role: nn.Linear(6, 6) for role in ROLES.values()}
        self.optimizers = {role: self.optimizer(model, tiered) for role, model in self.models.items()}
        self.averages = {role: EMA(model, 0.5) for role, model in self.models.items()}
        self.learners = [
            learner_of(
                self.models, self.loss_of(role), self.optimizers[role],
                update=Update(role=role, name=name, when=lambda step, name=name: (step % 3 == 0) == (name == "high"), rests=True),  # type: ignore[misc]
            )
            for name, role in ROLES.items()
        ]  # fmt: skip

    @staticmethod
    def optimizer(model: nn.Module, tiered: bool) -> torch.optim.Optimizer | TieredOptimizer:
        if not tiered:
            return torch.optim.AdamW(model.parameters(), lr=0.01)
        make = lambda groups: torch.optim.AdamW(groups, lr=0.01)  # noqa: E731
        groups = [{"params": list(model.parameters())}]
        return TieredOptimizer(
            groups, make, master="parameters", states="device", bucket_bytes=64, device=Device("cpu", 0)
        )

    @staticmethod
    def loss_of(role: str) -> Loss:
        def loss(models: Models, batch: Batch) -> Terms:
            return {"loss": Term(models[role](batch["x"]).square().mean(1), batch.weights_I)}

        return loss

    def train(self, steps: int, rests: Rests | None) -> None:
        for step in range(steps):
            if rests is not None:
                rests.before_step(step)
                resting = ROLES["low" if step % 3 == 0 else "high"]
                assert all(p.untyped_storage().nbytes() == 0 for p in self.models[resting].parameters())
                assert rests.nbytes[resting] > 0 and sum(rests.nbytes.values()) == rests.nbytes[resting]
            x = torch.randn(3, 6, generator=torch.Generator().manual_seed(step))
            batch = Batch({"x": x}, [Item(str(k)) for k in range(3)], torch.ones(3), "shape")  # type: ignore[arg-type]
            result = train_step(self.models, self.learners, [batch], {"samples": 3.0}, clip_norm=1.0, step=step)
            for role in result.updated:
                self.averages[role].update(self.models[role])

    def state(self) -> dict[str, Tensor]:
        return {
            f"{role} {k}": tensor.clone()
            for role, model in self.models.items()
            for k, tensor in enumerate(held(model, self.optimizers[role], self.averages[role]))
        }


@pytest.mark.parametrize("tiered", [False, True])
def test_roles_that_rest_train_to_the_bit(tiered: bool) -> None:
    """Weights, moments and averages of both roles; nothing of them is left out of the rest but counts of steps and buckets' bounds."""
    plain, resting = Turns(tiered), Turns(tiered)
    plain.train(7, None)
    rests = Rests(resting.learners, resting.models, resting.averages, CPU)
    resting.train(7, rests)
    assert sum(rests.nbytes.values()) >= 4 * 42 * 4  # weights, two moments, the average
    rests.wake()
    actual, truth = resting.state(), plain.state()
    assert actual.keys() == truth.keys() and len(actual) >= 16
    assert all(torch.equal(actual[name], truth[name]) for name in truth)


def test_a_step_without_an_update_is_an_error() -> None:
    turns = Turns(False)
    never: Mapping[str, nn.Module] = turns.models
    update = Update(when=lambda step: False)
    learner = learner_of(never, Turns.loss_of("model"), turns.optimizers["model"], update=update)
    with pytest.raises(ValueError, match="no update is made at step 0"):
        train_step(never, [learner], [], {"samples": 1.0}, clip_norm=None)
