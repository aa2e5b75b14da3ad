"""Policy gradients on a flow's samples, as a method: Flow-GRPO (Liu et al., 2025). Data roll out by the policy when a step is taken.

Legend: I items of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from mmspeed import rng
from mmspeed.pipelines.methods.base import MethodDefaults
from mmspeed.protocols import (
    Ask,
    Batch,
    BatchShape,
    Data,
    DataSize,
    Domain,
    Given,
    Inputs,
    RunPlace,
    StepData,
    Tensors,
    Terms,
    Update,
    UseName,
    Values,
)
from mmspeed.protocols.data import Location

TIMES = (0.9, 0.6, 0.0)
MEMBERS, NOISE, CLIP = 2, 0.7, 1e-4  # of a sample's group; of a step; of the ratio
EACH = MEMBERS * (len(TIMES) - 1)  # micro-batches of one


@dataclass(frozen=True)
class Rollouts(MethodDefaults):
    """Every part learns by the rewards of its own samples, twice a step: their means. `seed`: of the noise."""

    seed: int = 0
    name = "rollouts"
    needs, asks = ("prediction",), True

    def updates(self, domain: Domain) -> Sequence[Update]:
        (update,) = super().updates(domain)
        return [update, replace(update, name="again")]

    def data(self, domain: Domain, place: RunPlace, ask: Ask) -> Data:
        return RolledOut(super().data(domain, place, ask), self, ask, place)

    def noise(self, like: Tensor, batch: Batch, *purpose: object) -> Tensor:
        """Noise of the size of a tensor, drawn by the names of items."""
        size = tuple(like.shape[1:])
        return torch.stack([rng.normal(size, self.seed, self.name, *purpose, *name) for name in batch.names]).to(like)

    def rolled(self, ask: Ask, batch: Batch) -> Iterator[Batch]:
        """The batch at each step of the path of each member of a group, with the advantage of the member over the others."""
        update = self.updates(ask.domain)[0]
        like = ask(update.role, ask.inputs(batch, update), batch).prediction()
        paths: list[list[dict[str, Tensor]]] = []
        for member in range(MEMBERS):
            x, path = self.noise(like, batch, "start", member).float(), list[dict[str, Tensor]]()
            for time, then in pairwise(TIMES):
                times = torch.tensor([[time, then]] * len(x), dtype=torch.float64)
                values = ask(update.role, ask.inputs(batch, update, given=given(x, times)), batch)
                mean, spread = next_of(values.prediction(), x, times)
                there = mean + spread * self.noise(x, batch, "step", member, time)
                path.append({"x": x, "there": there, "times": times, "log_p_I": log_p(there, mean, spread)})
                x = there
            paths.append(path)
        rewards_MI = torch.stack([path[-1]["there"].flatten(1).mean(1) for path in paths])
        advantages_MI = (rewards_MI - rewards_MI.mean(0)) / (rewards_MI.std(0) + 1e-6)
        for path, advantage_I in zip(paths, advantages_MI, strict=True):
            for place in path:
                yield replace(batch, before={**place, "advantage_I": advantage_I})

    def before(self, ask: Ask, batch: Batch, update: Update) -> Tensors:
        return batch.before

    def calls(self, ask: Ask, batch: Batch, update: Update) -> Sequence[Inputs]:
        return [ask.inputs(batch, update, given=given(batch.before["x"], batch.before["times"]))]

    def terms(self, values: Sequence[Values], before: Tensors, ask: Ask, batch: Batch, update: Update) -> Terms:
        mean, spread = next_of(values[0].prediction(), before["x"], before["times"])
        ratio_I = (log_p(before["there"], mean, spread) - before["log_p_I"]).exp()
        gains = [ratio_I * before["advantage_I"], ratio_I.clamp(1 - CLIP, 1 + CLIP) * before["advantage_I"]]
        off = values[0].term((ratio_I.detach() - 1).abs(), trains=False)
        return {"loss": values[0].term(-torch.minimum(*gains) / EACH), "ratio_off": off}


def given(x: Tensor, times_I2: Tensor) -> Given:
    """The input at the earlier one of two times."""
    return Given(x, times_I2[:, 0].float())


def next_of(prediction: Tensor, x: Tensor, times_I2: Tensor) -> tuple[Tensor, Tensor]:
    """(mean, deviation) of the next place on a path: of the flow's velocity, with noise that keeps its marginals."""
    t, then = (each.to(x).view(-1, *[1] * (x.ndim - 1)) for each in times_I2.unbind(1))
    spread, velocity = NOISE * (t / (1 - t)).sqrt(), prediction.float()
    mean = x + (velocity + spread**2 / (2 * t) * (x + (1 - t) * velocity)) * (then - t)
    return mean, spread * (t - then).sqrt()


def log_p(there: Tensor, mean: Tensor, spread: Tensor) -> Tensor:
    """The logarithm of the density of a place (I,), over its numbers, but for a constant."""
    return -((there - mean) ** 2 / (2 * spread**2)).flatten(1).mean(1)


@dataclass(frozen=True)
class Listed:
    """Micro-batches that are made, with the sizes of those that they are made of."""

    batches: list[Batch]
    extents: Mapping[str, tuple[int, ...]]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)


@dataclass(frozen=True)
class RolledOut:
    """A domain's data, whose samples are rolled out when a step is taken."""

    whole: Data
    method: Rollouts
    ask: Ask
    place: RunPlace

    def steps(self, start: int, stop: int) -> Generator[StepData, None, None]:
        device = self.place.device.torch_device
        for step in self.whole.steps(start, stop):
            read = [batch.to(device, torch.float32) for batch in step.batches]
            batches = [each for batch in read for each in self.method.rolled(self.ask, batch)]
            yield replace(step, batches=Listed(batches, step.batches.extents))

    @property
    def waited_seconds(self) -> float:
        return self.whole.waited_seconds

    @property
    def fingerprint(self) -> str:
        return self.whole.fingerprint

    @property
    def size(self) -> DataSize:
        return self.whole.size

    def again(self, step: int, without: Collection[UseName]) -> None:
        """None: rolled out samples have no names of uses to read a step again without."""

    def leave_out(self, steps: range) -> list[str]:
        return self.whole.leave_out(steps)

    def shapes(self, step: int) -> list[BatchShape]:
        return [shape for shape in self.whole.shapes(step) for _ in range(EACH)]

    def locate(self, step: int) -> Location:
        return self.whole.locate(step)

    def state(self, step: int) -> dict[str, Any]:
        return self.whole.state(step)

    def resume(self, state: Mapping[str, Any]) -> str | None:
        return self.whole.resume(state)

    def summary(self) -> dict[str, Any] | None:
        return self.whole.summary()

    def close(self) -> None:
        self.whole.close()
