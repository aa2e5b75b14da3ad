"""Choose how the frozen base of adapters is kept on a device of so much memory, from the figures of `check`: shapes alone, no weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from mmspeed.config import Config, RunConfig
from mmspeed.config.adapters import BaseConfig
from mmspeed.config.language import LanguageConfig
from mmspeed.errors import UserError
from mmspeed.log import format_bytes
from mmspeed.memory.planning.options import StepFigures
from mmspeed.pipelines.tasks import Task, make_task
from mmspeed.pipelines.tuning.memory_estimate import MemoryPlan, plan_memory, spread

# the least slow first: int8 is multiplied out in each product, and swapped weights wait for the host
BASES: tuple[tuple[Literal["bfloat16", "int8"], Literal["device", "host"]], ...] = (
    ("bfloat16", "device"),
    ("int8", "device"),
    ("bfloat16", "host"),
    ("int8", "host"),
)
CONTEXT = 500_000_000  # bytes of a device that its driver and libraries take before the first tensor
HOST = 2  # times a device's memory that its blocks' tensors take of the host's, where less time asks for more
GAPS = 0.05  # share of the rest between tensors: the allocator's fragmentation, and workspaces of operations


def for_tensors(size: int) -> int:
    """Bytes of tensors that fit on a device of so many bytes."""
    return max(0, int((size - CONTEXT) * (1 - GAPS)))


def device_for(tensors: int) -> int:
    """Bytes of the least device on which so many bytes of tensors fit."""
    return CONTEXT + int(tensors / (1 - GAPS)) + 1


@dataclass(frozen=True)
class BaseChoice:
    """How a base is kept on a device of `size` bytes.

    plan: with the budget and what is chosen under it. memory: the config's section. models: that take turns on the device. refused: the
    faster ways that do not fit, each with the least device that would do.
    """

    size: int
    base: BaseConfig
    plan: MemoryPlan
    memory: Mapping[str, Any]
    models: int
    refused: tuple[tuple[BaseConfig, int], ...]

    @property
    def chosen(self) -> list[int]:
        """The options of the blocks."""
        assert self.plan.chosen is not None
        return self.plan.chosen

    @property
    def host(self) -> int:
        """Bytes in the host's memory: of the blocks' tensors, a base that is kept there, and the models whose turn it is not."""
        figures = self.plan.figures
        kept = sum(options[option].host for options, option in zip(figures.blocks(), self.chosen, strict=True))
        base = sum(figures.frozen) if self.base.place == "host" else 0
        return kept + self.models * base + (self.models - 1) * figures.static.between

    def line(self) -> str:
        """The choice, its reason and what does not fit, as a line."""
        figures, budget = self.plan.figures, for_tensors(self.size)
        others = "; ".join(f"{_words(base)} needs at least {format_bytes(least)}" for base, least in self.refused)
        return (
            f"a base of {_words(self.base)}, the least slow that fits: expected {format_bytes(figures.peak(self.chosen))} of the "
            f"{format_bytes(budget)} that {format_bytes(self.size)} leave for tensors, {figures.added_share(self.chosen):+.0%} time of "
            f"the blocks for what is not kept, {format_bytes(self.host)} of the host's memory"
            + (f" ({others})" if others else "")
        )


def _words(base: BaseConfig) -> str:
    where = "on the device" if base.place == "device" else "in the host's memory"
    return f"{base.dtype} {where}"


class BaseChooser:
    """The choice of a config's base, from figures that are made once for all sizes of devices.

    opened: makes the task of a config, opened without data; None: by its name.
    """

    def __init__(self, config: Config | LanguageConfig, opened: Callable[[RunConfig], Task] | None = None) -> None:
        self.config, self._opened = config, opened or _opened
        self._plans: dict[str, MemoryPlan] = {}

    @cached_property
    def models(self) -> int:
        """The number of models that learn; two experts take turns. A budget chooses for one, so blocks of several get the same ways."""
        return len({update.role for update in self._opened(self.config).updates()})

    def choose(self, size: int) -> BaseChoice:
        """The first of the ways to keep the base in which a step fits on a device of `size` bytes.

        Raises UserError where none fits, with the least device that would do.
        """
        budget, refused = for_tensors(size), list[tuple[BaseConfig, int]]()
        for dtype, place in BASES:
            plan, base = self.plan(dtype, place), BaseConfig(dtype=dtype, place=place)
            chosen, least = self._chosen(plan.figures, budget, HOST * size)
            if chosen is not None:
                memory: dict[str, Any] = {"budget": f"{budget // 10**6}MB"}
                if self.models > 1:
                    ways = dict(plan.figures.ways(chosen)[0])
                    memory = {"activation_policy": ways, "keep_last": False} if ways else {}
                return BaseChoice(
                    size, base, replace(plan, budget=budget, chosen=chosen), memory, self.models, tuple(refused)
                )
            refused.append((base, device_for(least)))
        base, least = min(refused, key=lambda one: one[1])
        raise UserError(
            f"--memory {format_bytes(size)}: no step fits; the least is a base of {_words(base)}, which needs a device of "
            f"{format_bytes(least)}: use smaller buckets, or shorter ones, or several devices (parallel)"
        )

    def plan(self, dtype: Literal["bfloat16", "int8"], place: Literal["device", "host"]) -> MemoryPlan:
        """The plan of a step with the base kept so, without a budget."""
        base = BaseConfig(dtype=dtype, place=place)
        config = self.config.model_copy(update={"model": self.config.model.model_copy(update={"base": base})})
        plan = self._plans.get(dtype)
        if plan is None:
            plan = self._plans[dtype] = plan_memory(config, task=self._opened(config))
        figures = spread(plan.alone, config, config.parallel.least_devices)
        return replace(plan, figures=replace(figures, keep_last=figures.keep_last and self.models == 1))

    def _chosen(self, figures: StepFigures, budget: int, host: int) -> tuple[list[int] | None, int]:
        """The options of the blocks under a budget, and within the host's room if any are; and the least bytes that a step takes."""
        if self.models == 1:
            return figures.choose(budget, host) or figures.choose(budget), figures.least()
        # at checkpoints and validations all models are on the device
        peaks = [(max(self.models * figures.static.between, figures.peak(each)), each) for each in figures.alike()]
        fitting = (each for peak, each in peaks if peak <= budget)
        return min(fitting, key=figures.seconds, default=None), min(peak for peak, _ in peaks)


def _opened(config: RunConfig) -> Task:
    task = make_task(config)
    task.domain.open_without_data()
    return task
