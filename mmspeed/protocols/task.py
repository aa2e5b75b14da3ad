"""Domains: what the trainer knows of videos, texts or lists of samples; and the updates of a step.

A domain knows data and models, and no second model. A method (`mmspeed.protocols.method`) knows roles and terms, and no tensor of a domain.
The trainer, the order of steps, checkpoints, budgets, checks and planners know both by these protocols.

Legend: I items of a micro-batch, U their units (clips; documents of packs).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch import Tensor, nn

from .batch import Batch, Term, Terms
from .data import Data, Divisors, OrderedSample, StepData
from .shapes import ShapeClass

if TYPE_CHECKING:
    from mmspeed.config import RunConfig
    from mmspeed.device import Device

Models = Mapping[str, nn.Module]  # by role: "model", and such as "reference", "reward", "critic"


class Given(NamedTuple):
    """A noisy input and its times (I,) that are given instead of drawn. `target`: of a prediction from it, for a loss; None: there is none."""

    x: Tensor
    time: Tensor
    target: Tensor | None = None


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
    """The usage of all devices in a step: items, real tokens, and the work of its forward passes.

    frozen: linear layers stay as they are, beside adapters, and backward makes the gradients of their inputs alone.
    """

    items: int
    tokens: int
    forward: Work
    frozen: bool = False

    @property
    def third(self) -> float:
        """A third of the operations that a step makes in matrix products, forward and backward: the unit of MFU."""
        return self.forward.products * 2 / 3 + self.forward.attention if self.frozen else self.forward.matmul


@dataclass(frozen=True)
class MicroBatchSize:
    """The size of micro-batches of a shape class, and whether a step has several of them on a device; `batches`: their number, if known."""

    shape: ShapeClass
    items: int
    accumulates: bool
    batches: int = 1


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
class LearningPart:
    """A model of a domain that learns: all of them, or each of two experts.

    Args:
        role: of the model, as `Domain.build` names it.
        name: unique among the parts, in messages and metrics.
        when: True for the steps at which it learns: a pure function of the step's number, the same on all ranks; None: all.
        rests: at other steps its weights, moments and averages lie in the host's memory, where the device is not the host: so no
            other update, and no callback after a step, reads them.
        baseline: about the loss of a model that knows nothing; None: not known. The first losses of a run are judged by it.
    """

    role: str = "model"
    name: str = "model"
    when: Callable[[int], bool] | None = None
    rests: bool = False
    baseline: float | None = None


@dataclass(frozen=True)
class Update:
    """An update within a step: the role that learns by it, and as which part of the domain.

    A step makes its updates in order. Models of other roles are present, and do not learn.

    Args:
        part: the part of the domain whose inputs it takes.
        role: the role that learns: the part's, or a further one of the method. It has one optimizer for all its updates.
        name: unique among the updates of a step.
        optimizer: None: the config's settings. The same in all updates of a role.
        every: it is made at steps 0, `every`, 2 `every` and so on. At least one update is made at every step.
        when: instead of `every`, as that of a part.
        rests, baseline: as those of a part.
    """

    part: LearningPart = field(default_factory=LearningPart)
    role: str = "model"
    name: str = "model"
    optimizer: OptimizerSetting | None = None
    every: int = 1
    when: Callable[[int], bool] | None = None
    rests: bool = False
    baseline: float | None = None

    @classmethod
    def of(cls, part: LearningPart, baseline: float | None = None) -> Update:
        """The update by which a part learns. `baseline`: None: the part's, of the domain's own loss."""
        return cls(
            part,
            part.role,
            part.name,
            when=part.when,
            rests=part.rests,
            baseline=part.baseline if baseline is None else baseline,
        )

    def due(self, step: int) -> bool:
        """True where it is made at step number `step`, from 0."""
        return step % self.every == 0 if self.when is None else self.when(step)


@dataclass(frozen=True)
class Inputs:
    """The inputs of a forward pass of a part: the arguments of the model, and the tensors by name that `Domain.values` needs too."""

    arguments: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    positional: tuple[Any, ...] = ()  # of models whose arguments have names of their own
    part: LearningPart = field(default_factory=LearningPart)

    def call(self, model: nn.Module) -> Any:
        """The model's output."""
        return model(*self.positional, **self.arguments)


class Values(ABC):
    """The values of a model's output for a micro-batch. Each is computed when it is asked for."""

    @property
    @abstractmethod
    def loss(self) -> Term:
        """The domain's loss of each item, weighted."""

    def own(self, mtp: bool = True) -> Terms:
        """Terms that belong to the model beside the loss, such as the balance of experts. `mtp`: those of further tokens, too."""
        return {}

    @abstractmethod
    def term(self, value_U: Tensor, trains: bool = True) -> Term:
        """The term of a value of each unit, with the domain's weights and divisor."""

    def errors(self) -> tuple[Tensor, Tensor]:
        """(error_U, item_U): of each unit the mean squared error or -log p, unweighted, float32; and the number of its item."""
        raise NotImplementedError

    def prediction(self) -> Tensor:
        """The prediction as a tensor whose first dim is that of the items."""
        raise NotImplementedError

    def made(self, noise_I: Callable[[Sequence[int]], Tensor], quantile_I: Tensor) -> Given | None:
        """What the model has made of its inputs, differentiable, with other noise at another time of the part, and the target there.

        `noise_I(size)` draws (I, *size), `quantile_I` places the time in [0, 1). None in a domain without times.
        """
        return None


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


class Domain(Protocol):
    """The data and the models of a kind of training. Made from a config; methods before `open` need no data.

    `mmspeed.pipelines.domains.base.DomainDefaults` has defaults for all but fourteen of these.
    """

    name: str

    @property
    def gives(self) -> Collection[str]:
        """What its values can tell beside the loss: "errors" of units, the "prediction" as a tensor."""
        ...

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

    def parts(self) -> Sequence[LearningPart]:
        """The parts that learn; the same at every call. Samples and exports are made of the first one."""
        ...

    def outlines(self) -> dict[str, nn.Module]:
        """The models by role before there is data, for their classes and plans alone; sizes that data give may be others."""
        ...

    def inputs(
        self, model: nn.Module, batch: Batch, part: LearningPart, entry: str | None = None, given: Given | None = None
    ) -> Inputs:
        """The inputs of a part for a batch. `model`: that which will be called. `entry`: the role of the samples' entries to take, such as
        "chosen"; None: the samples themselves. `given`: instead of what is drawn; without a target the values have no loss.
        """
        ...

    def values(self, output: Any, inputs: Inputs, batch: Batch) -> Values:
        """The values of the output of a model that was called with `inputs`."""
        ...

    def prepare(self, models: Models, place: RunPlace) -> None:
        """Try out on the device the operators that the models will call, before the first step. Raises UserError where one fails."""
        ...

    def notes(self) -> tuple[list[str], list[str]]:
        """(lines, warnings) for the start of a run."""
        ...

    def exchange_lines(self) -> list[str]:
        """Lines on what the layout sends, by shapes alone."""
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

    def outline_batch(self, shape: ShapeClass, items: int) -> Batch:
        """A synthetic batch on the host whose shapes alone tell what a step computes, for counting bytes of fake tensors."""
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
