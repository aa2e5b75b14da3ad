"""Protocols of models. A model names no axis of the mesh.

Legend: B batch, C channels, T h w latent, L caption tokens, D text width.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Literal, Protocol, cast, runtime_checkable

from torch import Tensor, nn

from mmspeed.errors import UserError

from .plan import blocks_of


@runtime_checkable
class TrainableModel(Protocol):
    """The methods that the core needs of every model, beside blocks: those of its plan or of its attribute `blocks` (`blocks_of`)."""

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """All parameters."""
        ...

    def modules(self) -> Iterator[nn.Module]:
        """All modules."""
        ...

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Free all gradients."""
        ...


@runtime_checkable
class InitializesWeights(Protocol):
    """A model that can be made without memory and filled later, by the names of its parameters (law 1)."""

    def initial_weights(self, seed: int) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield every parameter with its whole value, float32 on the CPU, from a generator keyed by its name."""
        ...


@runtime_checkable
class BeginsAtZero(Protocol):
    """A model some of whose inputs change nothing at first, so that it can start from the weights of one without them."""

    @property
    def begins_at_zero(self) -> tuple[str, ...]:
        """Names of the parameters of such inputs."""
        ...


Part = tuple[slice, ...]  # a block of a tensor: a span of each of its dimensions


class WeightSource(Protocol):
    """The files that hold the weights of a model which was made without memory."""

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the files, the same on every process, from reading little of them."""
        ...

    def read(self, parts: Mapping[str, Part]) -> Iterator[tuple[str, Tensor]]:
        """Yield the wanted part of each named parameter or saved buffer, on the CPU, in the number type of the files, in any order.

        Only those bytes are read. Raises UserError for files that cannot be read.
        """
        ...


def declare_source(model: nn.Module, source: WeightSource) -> None:
    """Name the files of a model's weights, in place; its parameters are on the meta device, and its buffers have values."""
    vars(model)["weight_source"] = source


def source_of(model: nn.Module) -> WeightSource | None:
    """The files of a model's weights; None where it names none."""
    source: WeightSource | None = getattr(model, "weight_source", None)
    return source


def declare_float32(model: nn.Module, parts: Collection[str]) -> None:
    """Name the modules and parameters, by parts of their dotted names, that stay float32 where others are in half precision."""
    vars(model)["float32_parts"] = frozenset(parts)


def stays_float32(model: nn.Module, name: str) -> bool:
    """True for the name of a module or parameter of `model` that stays float32 where others are in half precision."""
    return not getattr(model, "float32_parts", frozenset()).isdisjoint(name.split("."))


# The treatment of a buffer that a run changes: "averaged": the moving average includes it, and validation uses the average;
# "kept": validation uses it as it is.
StateRule = Literal["averaged", "kept"]


@runtime_checkable
class DeclaredState(Protocol):
    """A module some of whose buffers belong to the state of a run, though no gradient trains them: a threshold, a router's bias.

    Checkpoints hold them whether they are persistent or not, and so restore them in every layout. Every process has the whole of each,
    and all make the same changes. A buffer that a checkpoint lacks, because it was declared later, keeps the model's value.
    """

    @property
    def state_buffers(self) -> Mapping[str, StateRule]:
        """The rule of each such buffer, by its name in this module. Averaged ones are float32."""
        ...


@runtime_checkable
class CountsSteps(Protocol):
    """A module that counts in the forward passes of a step and changes its state by the counts of all processes: a router, whose bias
    follows the loads of its experts.

    Every forward pass counts each item once, recomputed or not. Processes that compute the same items all count them, equally often, so
    sums over processes have a meaning relative to each other alone.
    """

    @property
    def counted(self) -> str:
        """The name of the counts in metrics.jsonl, the same for modules that count alike."""
        ...

    def step_counts(self) -> Tensor:
        """The counts of this process since `begin_counts`: whole numbers, one dim."""
        ...

    def begin_counts(self, total: Callable[[Tensor], Tensor]) -> None:
        """Reset the counts to 0: before a step, and before its updates are computed again.

        total: sums whole numbers over all processes, int64; a collective call, to be made in every micro-batch or in none.
        """
        ...

    def is_finite(self) -> bool:
        """False where values that it counted by since `begin_counts` were not finite; asked after such a step alone."""
        ...

    def end_counts(self) -> None:
        """End the step's micro-batches: counts stay, and later forward passes are those of this process alone."""
        ...

    def after_update(self, counts: Tensor) -> None:
        """Change the state by the sums over all processes, int64, after an update that was applied; the same on every process."""
        ...


class CountsFlops(Protocol):
    """Counts of the work of a diffusion transformer for one sample."""

    def tokens(self, latent: tuple[int, int, int]) -> int:
        """Tokens of one sample whose latent is (T, h, w). Raises ValueError for a latent that does not fit the model."""
        ...

    def flops(self, latent: tuple[int, int, int], text_tokens: int) -> int:
        """Floating-point operations of the forward pass of one sample (a multiply-add counts as two)."""
        ...


class DiffusionModel(TrainableModel, CountsFlops, Protocol):
    """The methods that the video task needs of a diffusion transformer; for a published class, a `ModelCall` has them."""

    def forward(self, x_BCThw: Tensor, t: Tensor, text_BLD: Tensor, text_mask_BL: Tensor) -> Tensor:
        """The prediction, of the shape of `x_BCThw`. `t` (B,) is in [0, 1]: 0 data, 1 noise."""
        ...


@runtime_checkable
class HasHeads(Protocol):
    """A model whose attention heads have one width."""

    @property
    def head_width(self) -> int:
        """Width of an attention head."""
        ...


def trainable(model: nn.Module, task: str | None = None) -> TrainableModel:
    """The module as a model that can be trained. Raises UserError that names what it lacks."""
    check_model(model, TrainableModel, task)
    return cast(TrainableModel, model)


def check_model(model: nn.Module, protocol: type, task: str | None = None) -> None:
    """Raises UserError that names what `model` lacks of a protocol, and blocks where the protocol is one of models that train."""
    lacking = lacking_members(model, protocol)
    if lacking:
        by = f" by the task {task}" if task is not None else ""
        hint = ""
        if "blocks" in lacking:
            hint = (
                "; name blocks in a plan (mmspeed.protocols.declare_plan) or in an attribute `blocks`, an nn.ModuleList"
            )
        raise UserError(
            f"{type(model).__name__} cannot be trained{by}: it lacks {', '.join(lacking)} "
            f"(see mmspeed.protocols.{protocol.__name__}){hint}"
        )


def lacking_members(model: nn.Module, protocol: type) -> list[str]:
    """The members of a protocol that a model lacks, and `blocks` of one that trains and names none.

    Not by `isinstance`: from Python 3.12 on that does not see submodules.
    """
    lacking = {name for name in protocol_members(protocol) if not hasattr(model, name)}
    if TrainableModel in protocol.__mro__ and not blocks_of(model):
        lacking.add("blocks")
    return sorted(lacking)


def protocol_members(protocol: type) -> set[str]:
    """Names of all members that a protocol declares, those of its bases included."""
    members: set[str] = set()
    for base in protocol.__mro__:
        if getattr(base, "_is_protocol", False) and base is not Protocol:
            members |= {name for name in (*vars(base), *vars(base).get("__annotations__", ())) if name[0] != "_"}
    return members
