"""Moments of a step: events on the stream of an accelerator, elsewhere readings of a clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from mmspeed.device import Device


class Marks:
    """Makes marks, and tells the seconds between two of them. `clock`: for devices without events."""

    def __init__(self, device: Device, clock: Callable[[], float] = time.perf_counter) -> None:
        self.by_events, self._device, self._clock = device.times_by_events, device.torch_device, clock

    def __call__(self) -> Any:
        """A mark of now, or of when the device has come so far."""
        if not self.by_events:
            return self._clock()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def seconds(self, mark: Any, later: Any) -> float:
        """The seconds from a mark to a later one, once the device has come to it."""
        if not self.by_events:
            return float(later - mark)
        later.synchronize()
        return float(mark.elapsed_time(later)) / 1e3
