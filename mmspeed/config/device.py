"""The section `device`: what a run computes on, and in which number type."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from .inputs import Section


class DeviceConfig(Section):
    """The device that the run computes on."""

    kind: Literal["auto", "cpu", "cuda", "npu", "mps"] = Field(
        "auto",
        description="Kind of device; `auto` takes npu, else cuda, else cpu. `mps` is the GPU of an Apple machine, one of which one process uses.",
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="Number type of forward and backward. Parameters, optimizer and EMA stay in float32."
    )
    peak_tflops: float | None = Field(
        None,
        gt=0,
        description="Peak TFLOP/s of one device that MFU is measured against; null: the data sheet's, or measured.",
    )
