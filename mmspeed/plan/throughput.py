"""Throughput of a run: samples and tokens per second, model FLOPs utilisation, and the share of time spent on data.

MFU is that of Chowdhery et al., "PaLM" (2022): only the model's own arithmetic counts, recomputation does not. Where attention is sparse,
the arithmetic of kept pairs counts, and planning and padding do not; the effective MFU counts as if all of it had been dense.
"""

from __future__ import annotations

from dataclasses import dataclass


def training_flops(forward_flops: float) -> float:
    """FLOPs of one training step without recomputation: backward costs two forwards."""
    return 3 * forward_flops


def mfu(forward_flops: float, seconds: float, peak_flops: float, devices: int = 1) -> float:
    """Model FLOPs utilisation in 0..1: 3 x `forward_flops` (of all devices together) over the peak of the devices.

    `peak_flops` is FLOP/s of one device. 0 when no time has passed or the peak is unknown (0).
    """
    possible = seconds * peak_flops * devices
    return training_flops(forward_flops) / possible if possible > 0 else 0.0


@dataclass(frozen=True)
class Throughput:
    """Rates over an interval."""

    samples_per_s: float
    tokens_per_s: float
    data_wait: float  # share of the wall time, 0..1
    mfu: float
    effective_mfu: float


class ThroughputMeter:
    """A meter that sums steps and returns the rates since the last `read`. Counts are of all devices together."""

    def __init__(self, peak_flops: float, devices: int = 1) -> None:
        self.peak_flops, self.devices = peak_flops, devices
        self._clear()

    def _clear(self) -> None:
        self.samples = self.tokens = self.forward_flops = self.wait_s = self.wall_s = 0.0

    def add(self, *, samples: int, tokens: int, forward_flops: float, data_wait_s: float, wall_s: float) -> None:
        """Count a step; `wall_s` is its whole duration, including the wait for data."""
        self.samples += samples
        self.tokens += tokens
        self.forward_flops += forward_flops
        self.wait_s += data_wait_s
        self.wall_s += wall_s

    def read(self, saved_flops: float = 0.0) -> Throughput:
        """The rates since the last `read`; zeros when nothing was added. `saved_flops`: of the forward FLOPs, those not computed."""
        wall = self.wall_s
        computed = max(0.0, self.forward_flops - saved_flops)
        result = Throughput(
            samples_per_s=self.samples / wall if wall > 0 else 0.0,
            tokens_per_s=self.tokens / wall if wall > 0 else 0.0,
            data_wait=self.wait_s / wall if wall > 0 else 0.0,
            mfu=mfu(computed, wall, self.peak_flops, self.devices),
            effective_mfu=mfu(self.forward_flops, wall, self.peak_flops, self.devices),
        )
        self._clear()
        return result
