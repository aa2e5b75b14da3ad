"""Sizes of small models, which split over processes as those of large ones do, and their weights."""

from __future__ import annotations

import math
import re

import torch
from torch import Tensor

from mmspeed import rng
from mmspeed.config.adapters import AdapterConfig, BaseConfig
from mmspeed.initialize import initial_value

OFF_START = 0.1  # standard deviation of scales and biases around their ones and zeros


def shrunk_size(size: int, parts: int, least: int) -> int:
    """The smallest number from `least` on that is as odd as `size` and leaves the same remainder by `parts`; never above `size`."""
    if size <= least:
        return size
    return least + (size - least) % math.lcm(2, parts)


def value_off_start(name: str, shape: torch.Size, seed: int) -> Tensor:
    """A value of a parameter off its start, drawn by its name: the zeros of a fresh model would hide most gradients."""
    value = initial_value(name, shape, seed, zero=False) if shape else torch.zeros(())
    if len(shape) < 2:  # matrices are drawn already
        value = value + OFF_START * rng.normal(tuple(shape), seed, "off start", name)
    return value


def small_adapter(adapter: AdapterConfig | None) -> AdapterConfig | None:
    """The adapter of a small model: of the same layers, whatever blocks are named, which a small model may lack."""
    if adapter is None or isinstance(adapter.targets, str):
        return adapter
    targets = tuple(re.sub(r"(?<=blocks\.)\d+|(?<=layers\.)\d+", "*", pattern) for pattern in adapter.targets)
    return adapter.model_copy(update={"targets": targets})


def small_base(base: BaseConfig) -> BaseConfig:
    """The base of a small model: in float32, in which layouts are compared."""
    return base.model_copy(update={"dtype": "float32"})
