"""Batches: tensors by name, and their items.

Legend: I items of a micro-batch (samples, packs).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from mmspeed.errors import UserError

from .shapes import ShapeClass

# The dtype and device of a tensor on its way to the model: "compute" casts it to the number type of the computation, "keep" moves it
# and never rounds (masks, token ids, weights), "host" leaves it on the CPU as it is (quantiles of times, lengths).
NumberRule = Literal["compute", "keep", "host"]


UseName = tuple[str, int, int]  # key of a sample, epoch, and the number of its earlier uses in the epoch


@dataclass(frozen=True)
class Item:
    """The name of one use of a sample: the key of its random draws, and its name in messages and metrics."""

    sample: str  # key
    epoch: int = 0
    repeat: int = 0  # of the epoch's uses of this sample
    source: str = ""  # for messages
    shape: str = ""  # name of its shape class
    quantile: float | None = None  # place in the training distribution of times, where the task has one
    left_out: bool = False  # by a roll-back: it counts nothing

    @property
    def name(self) -> UseName:
        """The names that key every random draw of this use (law 1)."""
        return self.sample, self.epoch, self.repeat


@dataclass
class Batch:
    """A micro-batch: items of one shape class.

    `tensors` may hold any number of latents, texts, masks and conditions under any names. One without a rule in `rules` is moved and
    never rounded. Those of further entries of the samples have the entry's role before their names: `chosen.latents`. `before`: what a
    method has asked for the batch before its forward pass.
    """

    tensors: dict[str, Tensor]
    items: list[Item]
    weights_I: Tensor  # over all ranks an item's weights sum to 1; 0 for fillers that keep ranks in step
    shape: ShapeClass
    rules: Mapping[str, NumberRule] = field(default_factory=dict)
    before: Mapping[str, Tensor] = field(default_factory=dict)

    def rule(self, name: str) -> NumberRule | None:
        """The rule of a tensor; one of an entry has that of the samples' own."""
        return self.rules.get(name.rpartition(".")[2])

    def entry(self, role: str) -> Batch:
        """The batch with the tensors of an entry in the place of the samples' own. Raises UserError for one that it lacks."""
        require_entry(role, self.tensors)
        mark = f"{role}."
        own = {name.removeprefix(mark): tensor for name, tensor in self.tensors.items() if name.startswith(mark)}
        return replace(self, tensors={**self.tensors, **own})

    def with_entries(self, roles: Collection[str]) -> Batch:
        """The batch with its own tensors as those of each entry, for measuring a step of synthetic samples."""
        further = {f"{role}.{name}": tensor for role in roles for name, tensor in self.tensors.items()}
        return replace(self, tensors={**self.tensors, **further})

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    @property
    def size(self) -> int:
        """Number of items, fillers included."""
        return len(self.items)

    @property
    def names(self) -> list[UseName]:
        """Names of the items' draws."""
        return [item.name for item in self.items]

    @property
    def sources(self) -> list[str]:
        """Sources of the items, for messages."""
        return [item.source for item in self.items]

    def to(self, device: torch.device, dtype: torch.dtype, non_blocking: bool = False) -> Batch:
        """The batch on `device`, each tensor by its rule; a tensor that needs no change is not copied.

        With `non_blocking` the copies may still be under way when this returns.
        """

        def move(name: str, tensor: Tensor) -> Tensor:
            rounded = self.rule(name) == "compute" and tensor.is_floating_point()
            return tensor.to(device, dtype if rounded else tensor.dtype, non_blocking=non_blocking)

        return self._each(move, self.weights_I.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """The batch in page-locked memory, from which an accelerator copies beside its computation."""
        return self._each(lambda _, tensor: tensor.pin_memory(), self.weights_I.pin_memory())

    def movable(self) -> dict[str, Tensor]:
        """The tensors that go to the device, by name."""
        moved = {name: tensor for name, tensor in self.tensors.items() if self.rule(name) != "host"}
        return {**moved, "weights": self.weights_I}

    def _each(self, change: Callable[[str, Tensor], Tensor], weights_I: Tensor) -> Batch:
        tensors = {
            name: tensor if self.rule(name) == "host" else change(name, tensor) for name, tensor in self.tensors.items()
        }
        return replace(self, tensors=tensors, weights_I=weights_I)


def require_entry(role: str, names: Collection[str]) -> None:
    """Raise UserError where no tensor of these names is one of an entry."""
    known = sorted({name.split(".")[0] for name in names if "." in name})
    if role not in known:
        raise UserError(f"the samples have no entry '{role}'; they have {', '.join(known) or 'none beside their own'}")


class MicroBatches(Protocol):
    """The micro-batches of a step on this rank: their number is known beforehand; they are iterated over once, in order."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Batch]: ...


class TrackedBatches(MicroBatches, Protocol):
    """Micro-batches that remember the sizes of those that were yielded."""

    @property
    def extents(self) -> Mapping[str, tuple[int, ...]]:
        """The largest size along each dim of each tensor, so far."""
        ...


@dataclass(frozen=True)
class Term:
    """A named part of a loss, item by item.

    Its value in a step is the sum over all items of all ranks of `loss_I * weight_I`, divided by the step's divisor of the name
    `divisor`. The sum of the losses of all terms that train is differentiated, times the step's weight. Terms whose divisor is known only
    afterwards share their weights, and the divisor is the sum of these. `time_I`: each item's time from 0 (data) to 1 (noise), where the
    task has one; losses are reported by its quarters. `units_I`: the units of the divisor in each item, such as tokens, where its loss
    is a sum over them; losses by shape class are reported for a unit.
    """

    loss_I: Tensor  # float32
    weight_I: Tensor
    divisor: str = "samples"
    trains: bool = True  # False: logged alone
    time_I: Tensor | None = None
    units_I: Tensor | None = None

    def total(self) -> Tensor:
        """The weighted sum over the items, a scalar on the device of the losses."""
        return (self.loss_I * self.weight_I.to(self.loss_I.device)).sum()

    def detached(self) -> Term:
        """The term without the graph of its losses."""
        return replace(self, loss_I=self.loss_I.detach())


Terms = Mapping[str, Term]
