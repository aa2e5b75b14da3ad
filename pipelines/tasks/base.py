"""Answers that most tasks give alike. A task may derive from `TaskDefaults` and say only what is its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from mmspeed.config import RunConfig
from mmspeed.loop.checkpoint.state import whole_tensors
from mmspeed.protocols import Data, Models, Preparation, RunPlace, Validation


class TaskDefaults:
    """A task whose data is at hand, with no text beside an item, no kernel to try out and nothing held out.

    What a step's time and memory depend on (`setting`) has no default: a wrong one would let figures of another model be used again.
    """

    # read where an installed package declares the task by its class alone (mmspeed/config/tasks.py)
    config_class: ClassVar[type[RunConfig] | None] = None
    preparation_class: ClassVar[type[Preparation] | None] = None

    def open(self, place: RunPlace) -> None:
        """Nothing is to be opened."""

    def open_without_data(self) -> None:
        """Sizes are the config's."""

    def prepare(self, models: Models, place: RunPlace) -> None:
        """Nothing is to be tried out."""

    def notes(self) -> tuple[list[str], list[str]]:
        """None."""
        return [], []

    def longest_text(self) -> int | None:
        """None: there is no text beside an item."""
        return None

    def validation(self, models: Models, data: Data, place: RunPlace) -> Validation | None:
        """None: nothing is held out."""
        return None

    def info(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def files(self) -> Mapping[str, Path]:
        """None."""
        return {}

    def compare_start(self, start: str) -> list[str]:
        """No difference that names and sizes of weights do not show."""
        return []

    def export(self, models: Models) -> Iterator[tuple[str, Tensor]]:
        """The parameters and saved buffers of the role "model"."""
        return whole_tensors(models["model"])
