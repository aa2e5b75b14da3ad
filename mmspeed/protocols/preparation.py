"""Preparation of a task's training: a first config, a check of the data, and the data's preprocessing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from .shapes import ShapeClass

if TYPE_CHECKING:
    from mmspeed.config import RunConfig


class CheckOutcome(Protocol):
    """The findings of a check of a config and its data."""

    @property
    def problems(self) -> Sequence[str]:
        """Reasons why the config cannot be trained with; none where it can."""
        ...

    def lines(self) -> list[str]:
        """The findings in lines."""
        ...


@dataclass(frozen=True)
class RunWork:
    """The work of a whole training on `world` devices: its epochs, what one of them has in words, the busiest device's items, and the
    mean number of a step's micro-batches on a device.
    """

    world: int
    epochs: float
    of: str
    items: Mapping[ShapeClass, float]
    micro_batches: float


@runtime_checkable
class ForecastsWork(Protocol):
    """Findings of a check that also say the work of the training."""

    @property
    def works(self) -> Sequence[RunWork]:
        """For each number of devices that the check is asked about; none where it is not known."""
        ...


class Preparation(Protocol):
    """The work of the commands `init`, `check` and `preprocess` for a task, and the maker by which `train` completes its data."""

    def __init__(self, config: RunConfig) -> None:
        """Take a config of the task. Reads nothing."""
        ...

    @classmethod
    def starting_values(cls, name: str, videos: str | None, model: str | None = None) -> Mapping[str, Any]:
        """The sections and keys of the task alone that are set in a new config of a run called `name`.

        videos: the training data, as written in the file; None: the clips that ship with the package.
        model: the published model to fine-tune, by a short name, hub id or folder; None: a model from its beginning.
        Raises UserError for a model that the task cannot train.
        """
        ...

    @classmethod
    def fitted_values(
        cls, name: str, videos: str | None, folder: Path, model: str | None = None
    ) -> tuple[Mapping[str, Any], Sequence[str]]:
        """The sections of `starting_values` fitted to the data, with keys of shared sections if they depend on it; and findings in lines.

        folder: the config file's, from which relative paths are taken. Raises UserError where the data cannot be trained on.
        """
        ...

    def check(
        self,
        page: Path | None = None,
        suggest_buckets: int | None = None,
        ranks: Sequence[int] | None = None,
        schedule: bool = False,
    ) -> CheckOutcome:
        """Read the data set and estimate the run and its cost, without an accelerator. Writes the page (None: its usual place).

        `schedule`: also the tables of the schedule; it is given only if they are asked for. Raises UserError where the data set cannot be found.
        """
        ...

    def build(self, shard: str | None = None) -> list[str]:
        """Make or complete the cache, or one part of it such as `3/8`; returns lines about what was done."""
        ...

    def build_on_ray(self, workers: int | None = None) -> list[str]:
        """Run `build` in `workers` workers of Ray Data; None: one for each device."""
        ...

    def maker(self) -> Any:
        """The object that completes the cache in the first epoch, of the kind that the task takes; None where the config wants none."""
        ...
