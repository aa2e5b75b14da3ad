"""Tasks: the interface between a trainer and a domain (video, language, preferences).

The trainer, the order of steps, checkpoints, budgets, self-checks and planners know tasks and no domain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch import Tensor, nn

from .batch import Batch, Terms
from .data import Data, Divisors, OrderedSample, StepData
from .shapes import ShapeClass

if TYPE_CHECKING:
    from mmspeed.config import RunConfig
    from mmspeed.device import Device

Models = Mapping[str, nn.Module]  # by role: "model", and such as "reference", "reward", "critic"
LossFunction = Callable[[Models, Batch], Terms]


@dataclass(frozen=True)
class RunPlace:
    """The place of this process in a run; made from the mesh.

    Args:
        device: the device that it computes on.
        rank, world: of all processes.
        strategy: how data-parallel ranks share the model: none, ddp or fsdp.
        groups, group: how many groups of ranks compute items of their own, and the number of this rank's.
        leads: True for the rank that reports for its group; the others of the group know the same.
        dealt, number: over how many ranks the items of a step are dealt (those of a pipeline stage), and this rank's number.
        folder: the run's folder.
        resumed: True where the run goes on from a saved state.
    """

    device: Device
    rank: int = 0
    world: int = 1
    strategy: str = "none"
    groups: int = 1
    group: int = 0
    leads: bool = True
    dealt: int = 1
    number: int = 0
    folder: Path = field(default_factory=Path)
    resumed: bool = False


@dataclass(frozen=True)
class Work:
    """Floating-point operations by kind; a multiply-add counts as two."""

    products: float = 0.0  # matrix products of linear layers
    attention: float = 0.0  # scores and values
    elementwise: float = 0.0

    @property
    def matmul(self) -> float:
        """Operations in matrix products, those of attention included: what MFU counts."""
        return self.products + self.attention

    def __add__(self, other: Work) -> Work:
        return Work(
            self.products + other.products, self.attention + other.attention, self.elementwise + other.elementwise
        )

    def __mul__(self, times: float) -> Work:
        return Work(self.products * times, self.attention * times, self.elementwise * times)


@dataclass(frozen=True)
class StepUsage:
    """The usage of all devices in a step: items, real tokens, and the work of its forward passes."""

    items: int
    tokens: int
    forward: Work


@dataclass(frozen=True)
class MicroBatchSize:
    """The size of micro-batches of a shape class, and whether a step has several of them on a device."""

    shape: ShapeClass
    items: int
    accumulates: bool


@dataclass(frozen=True)
class OptimizerSetting:
    """The settings in which an update's optimizer differs from the config's; None: the same.

    Args:
        lr_factor: factor of the config's learning rate, over its whole course.
        betas, eps, weight_decay: as in the config's `train` section.
    """

    lr_factor: float = 1.0
    betas: tuple[float, float] | None = None
    eps: float | None = None
    weight_decay: float | None = None


@dataclass(frozen=True)
class Update:
    """An update within a step: the roles that learn by it, and their loss.

    A step makes its updates in order. Models of other roles are present, and do not learn.

    Args:
        loss: the named terms of a micro-batch, of all models.
        roles: the roles that learn together: one gradient norm, by which all are clipped. Each has an optimizer for all its updates.
        name: unique among the updates of a task.
        optimizer: None: the config's settings. The same in all updates of a role.
        every: it is made at steps 0, `every`, 2 `every` and so on. At least one update is made at every step.
        when: instead of `every`, True for the steps at which it is made: a pure function of the step's number, the same on all ranks.
        rests: at other steps the weights, moments and averages of its roles lie in the host's memory, where the device is not the host:
            so no loss of another update, and no callback after a step, reads them.
        baseline: about the loss of a model that knows nothing; None: not known. The first losses of a run are judged by it.
    """

    loss: LossFunction
    roles: tuple[str, ...] = ("model",)
    name: str = "model"
    optimizer: OptimizerSetting | None = None
    every: int = 1
    when: Callable[[int], bool] | None = None
    rests: bool = False
    baseline: float | None = None

    def due(self, step: int) -> bool:
        """True where it is made at step number `step`, from 0."""
        return step % self.every == 0 if self.when is None else self.when(step)


class Validation(Protocol):
    """The measurements and samples that are taken while a run trains."""

    def measure(self, models: Models) -> Terms:
        """The terms of held-out items on this rank, each with its divisor's value known to `divisors`; empty without such items."""
        ...

    def row(self, values: Mapping[str, float]) -> dict[str, Any]:
        """The fields of metrics.jsonl, from the values of the terms over all ranks; `loss` decides which checkpoint is best."""
        ...

    def divisors(self) -> Divisors:
        """The divisors of the terms of `measure`."""
        ...

    def sample(self, models: Models, step: int) -> None:
        """Write samples of the present weights into the run's folder, where the config asks for any."""
        ...


class Task(Protocol):
    """The definition of a domain. Made from a config; methods before `open` need no data."""

    name: str

    def open(self, place: RunPlace) -> None:
        """Open the data that the config names: its sizes are needed to build models. A collective call.

        Raises UserError when there is none, or it was made for something else.
        """
        ...

    def open_without_data(self) -> None:
        """Take sizes from the config's encoders instead of stored data, for measuring and checking."""
        ...

    # -- models -----------------------------------------------------------------------------------------------------------

    def build(self) -> dict[str, nn.Module]:
        """The models by role: on the meta device if they can fill themselves later (`InitializesWeights`), else with their weights."""
        ...

    def updates(self) -> Sequence[Update]:
        """The updates of a step, in order; the same at every call. Samples and exports are made of the first role of the first one."""
        ...

    def prepare(self, models: Models, place: RunPlace) -> None:
        """Try out on the device the operators that the models will call, before the first step. Raises UserError where one fails."""
        ...

    def notes(self) -> tuple[list[str], list[str]]:
        """(lines, warnings) for the start of a run."""
        ...

    # -- data -------------------------------------------------------------------------------------------------------------

    def data(self, place: RunPlace) -> Data:
        """The order of the run's steps, and this rank's share of them."""
        ...

    def shapes(self) -> Sequence[ShapeClass]:
        """The shape classes that may occur in the run, in order. Raises UserError for one that does not fit the models."""
        ...

    def synthetic_batch(self, shape: ShapeClass, items: int, place: RunPlace, tokens: int | None = None) -> Batch:
        """A synthetic batch on the device, in the form of training; `tokens` of the longest text beside it, where there is one."""
        ...

    def longest_text(self) -> int | None:
        """Tokens of the longest text beside an item; None where there is no text beside it."""
        ...

    def sketch(
        self, model: nn.Module, shape: ShapeClass, items: int
    ) -> tuple[Callable[[], Any], Callable[[Any], Tensor]]:
        """(a function that makes a batch, the loss of one) with the tensors of a step, for counting bytes of fake tensors."""
        ...

    def synthetic_divisors(self, batch: Batch, batches: int) -> Divisors:
        """The divisors of a step of `batches` such batches, over all ranks."""
        ...

    def largest_micro_batch(self, place: RunPlace) -> MicroBatchSize:
        """The micro-batch with the most tokens in a run at this place."""
        ...

    # -- work -------------------------------------------------------------------------------------------------------------

    def tokens(self, shape: ShapeClass) -> int:
        """Tokens of one item, as the model counts them."""
        ...

    def work(self, shape: ShapeClass, text_tokens: int | None = None) -> Work:
        """Work of the forward pass of one item; `text_tokens` of a text beside it, where there is one (None: the usual).

        Used by tasks themselves so far, for `usage` and `cost`; kept for the planner, which needs the kinds of work separately.
        """
        ...

    def cost(self, shape: ShapeClass) -> float:
        """The cost of training on one item, in FLOPs; it determines steps and sizes of batches."""
        ...

    def sample_cost(self, sample: OrderedSample) -> float:
        """The cost of training on this sample, by which ranks are balanced; that of its shape class where no other is known."""
        ...

    def usage(self, step: StepData) -> StepUsage:
        """The usage of a step; called after it."""
        ...

    # -- looking at a run --------------------------------------------------------------------------------------------------

    def describe(self, step: StepData) -> dict[str, Any]:
        """The fields of metrics.jsonl that describe a step's data."""
        ...

    def validation(self, models: Models, data: Data, place: RunPlace) -> Validation | None:
        """The validation during the run; None where there is none."""
        ...

    def info(self) -> dict[str, Any]:
        """The entries of run.json about the data and encoders, so that the run can be used without them."""
        ...

    def files(self) -> Mapping[str, Path]:
        """The files to copy into the run's folder, by their names there."""
        ...

    def compare_start(self, start: str) -> list[str]:
        """The differences between the model of `start` (a run or a checkpoint) and this task's that the weights do not show."""
        ...

    def setting(self) -> dict[str, Any]:
        """The settings that a step's time and memory depend on beside shape, batch, device and layout; flat, in JSON's types."""
        ...

    def export(self, models: Models) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors by name, one at a time, from any layout. A collective call.

        Used by tests so far: `mmspeed export` reads checkpoints. Kept for exports in other tools' layouts, of any task.
        """
        ...

    # -- checking ---------------------------------------------------------------------------------------------------------

    def small(self, folder: Path) -> SmallRun:
        """A small run of the same models and method on synthetic items, whose files are written into `folder`, a new one.

        The layout of heads and sequences is the same, and sizes are what a laptop computes in a moment. Needs no data and is called
        before `open`. Raises UserError for a config that cannot be trained.
        """
        ...


@dataclass(frozen=True)
class SmallRun:
    """A small run for checks, and what the report on it says.

    Args:
        config: an ordinary config, by which other processes open the run; its parallel section names the layout with numbers only.
        model: the sizes of the models, in a few words.
        kinds: names of its first steps, such as images, videos, mixed; each is compared.
        settings: further settings taken from the config, beside number type, strategy, checkpointing and compilation.
        items: lines about the synthetic items.
        remarks: lines about differences from training.
        named: False where it is of another task than the config names, which the ordinary one of its config stands for.
    """

    config: RunConfig
    model: str
    kinds: Sequence[str] = ("step",)
    settings: Sequence[str] = ()
    items: Sequence[str] = ()
    remarks: Sequence[str] = ()
    named: bool = True


@runtime_checkable
class OutlinesModels(Protocol):
    """A task that shows its models before there is data."""

    def outlines(self) -> dict[str, nn.Module]:
        """The models by role, for their classes and plans alone; sizes that data give may be others."""
        ...
