"""The one place that names a vendor: cpu, cuda and npu behind one small object (law 6).

`torch.accelerator` comes first; functions that it lacks are called on the vendor's module by its name, in this file alone.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import re
import resource
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import flash3
from .errors import UserError
from .torch_internals import memory_segments, record_memory_history

BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl", "mps": "gloo"}

_UNRECORDED = ("cpu", "mps")  # kinds whose allocator keeps no record, and that have one stream

# Names of a device of each kind in cluster schedulers; cores need no name.
SCHEDULER_NAMES = {"cpu": "", "cuda": "GPU", "npu": "NPU", "mps": ""}

# Dense peak FLOP/s of one device from the vendors' data sheets, without sparsity: (bf16, tf32 or float32 matrix units).
# The first label found in the device's name counts, so longer ones come first.
# MFU is measured against the named figure; `peak_tflops` in the config overrides it.
PEAK_FLOPS = {
    "H200": (989e12, 494e12),
    "H100 PCIe": (756e12, 378e12),
    "H100 NVL": (835e12, 417e12),
    "H100": (989e12, 494e12),
    "H800": (989e12, 494e12),
    "A100": (312e12, 156e12),
    "A800": (312e12, 156e12),
    "L40S": (362e12, 183e12),
    "L40": (181e12, 90e12),
    "L4": (121e12, 60e12),
    "RTX 4090": (165e12, 82.6e12),
    "RTX 3090": (71e12, 35.6e12),
    "910B1": (378e12, 94e12),
    "910B2": (353e12, 88e12),
    "910B3": (313e12, 78e12),
    "910B4": (280e12, 70e12),
}
UTILISATION = 0.4  # share of a device's peak that well-tuned training of transformers reaches


@dataclass(frozen=True)
class Device:
    """The device of one process. Tensors are moved to `torch_device`."""

    kind: str  # cpu, cuda, npu or mps (Apple)
    index: int  # index on this host; 0 on CPU

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu") if self.kind == "cpu" else torch.device(self.kind, self.index)

    @property
    def backend(self) -> str:
        """Name of the collective backend: gloo, nccl or hccl (with gloo beside it for CPU tensors)."""
        return "gloo" if self.kind in ("cpu", "mps") else f"cpu:gloo,{self.kind}:{BACKENDS[self.kind]}"

    @property
    def name(self) -> str:
        """The device's product name."""
        if self.kind == "cpu":
            return _cpu_name()
        if self.kind == "mps":
            return f"Apple {platform.machine()}"
        return str(getattr(torch, self.kind).get_device_name(self.index))

    @property
    def decodes_video(self) -> bool:
        """True for a device that torchcodec decodes on, beside the CPU."""
        return self.kind == "cuda"

    @property
    def times_by_events(self) -> bool:
        """True for a device whose work is timed by events on its streams; on others the processor's clock serves."""
        return self.kind in ("cuda", "npu")

    def library_versions(self) -> list[str]:
        """Versions of the vendor's libraries that processes of one run must share; none on CPU."""
        if self.kind == "cuda":
            nccl = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else ()
            flash = [flash.words] if (flash := self.flash()) and flash.state != "absent" else []
            return [f"cuda {torch.version.cuda}", "nccl " + ".".join(map(str, nccl)), *flash]
        if self.kind == "npu":
            return [f"torch_npu {importlib.import_module('torch_npu').__version__}"]
        return []

    def let_exchanges_last(self, seconds: float) -> None:
        """Raise the vendor's own limit of an exchange to that of the process group, before one is made; one that is set is kept.

        nccl has no other limit than the group's; hccl has.
        """
        if self.kind == "npu":
            os.environ.setdefault("HCCL_EXEC_TIMEOUT", str(int(seconds)))

    def activate(self) -> None:
        """Make this the process's current device, with the attention kernels that it has."""
        if self.kind != "cpu":
            torch.accelerator.set_device_index(self.index)
        self.flash()

    def flash(self) -> flash3.Flash | None:
        """The version of FlashAttention that serves this process from now on; None where a device has none."""
        if self.kind != "cuda":
            return None
        return flash3.activate(self.torch_device, torch.cuda.get_device_capability(self.index)[0])

    def synchronize(self) -> None:
        """Wait for all queued work of the device. Nothing to do on CPU."""
        if self.kind != "cpu":
            torch.accelerator.synchronize(self.index)

    def empty_cache(self) -> None:
        """Return unused cached device memory to the driver."""
        if self.kind != "cpu":
            getattr(torch, self.kind).empty_cache()

    def reserved_bytes(self) -> int:
        """Bytes that the allocator has taken from the device, in use or not; on CPU those of the process."""
        if self.kind == "cpu":
            return self.memory_bytes()
        if self.kind == "mps":
            return int(torch.mps.driver_allocated_memory())
        return int(getattr(torch, self.kind).memory_reserved(self.index))

    def record_allocations(self, on: bool) -> None:
        """Start, or stop, recording for each block of memory the Python lines that allocated it. CPU and mps memory is not recorded."""
        if self.kind not in _UNRECORDED:
            noted = {"enabled": "state", "context": "state", "stacks": "python"} if on else {"enabled": None}
            record_memory_history(getattr(torch, self.kind).memory, **noted)

    def allocations(self) -> list[dict[str, Any]]:
        """The allocator's segments of this device, each with its recorded `blocks`; none on CPU and mps."""
        if self.kind in _UNRECORDED:
            return []
        segments = memory_segments(getattr(torch, self.kind).memory)
        return [segment for segment in segments if segment.get("device", self.index) == self.index]

    @property
    def growing_segments(self) -> str:
        """The environment variable that reduces fragmentation of the allocator's memory; empty on CPU."""
        variable = {"cuda": "PYTORCH_ALLOC_CONF", "npu": "PYTORCH_NPU_ALLOC_CONF"}.get(self.kind)
        return "" if variable is None else f"{variable}=expandable_segments:True"

    def memory_bytes(self) -> int:
        """Bytes in use now: allocated tensors on an accelerator, resident memory of the process on CPU."""
        if self.kind == "cpu":
            return _resident_bytes()
        if self.kind == "mps":
            return int(torch.mps.current_allocated_memory())
        return int(getattr(torch, self.kind).memory_allocated(self.index))

    def peak_memory_bytes(self) -> int:
        """Highest `memory_bytes` since the start (or since `reset_peak_memory` on an accelerator); the present ones on mps."""
        if self.kind == "mps":
            return self.reserved_bytes()
        if self.kind == "cpu":
            scale = 1 if sys.platform == "darwin" else 1024
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale
        return int(getattr(torch, self.kind).max_memory_allocated(self.index))

    def reset_peak_memory(self) -> None:
        """Reset `peak_memory_bytes`. The CPU's peak is the operating system's and cannot be reset; mps has none."""
        if self.kind not in _UNRECORDED:
            getattr(torch, self.kind).reset_peak_memory_stats(self.index)

    def total_memory_bytes(self) -> int:
        """Bytes of memory the device has."""
        if self.kind == "cpu":
            return _host_memory()[0]
        if self.kind == "mps":
            return int(torch.mps.recommended_max_memory())
        return int(getattr(torch, self.kind).get_device_properties(self.index).total_memory)

    def free_memory_bytes(self) -> int:
        """Bytes that could still be allocated; on CPU, of the machine or of the container that this process is in."""
        if self.kind == "cpu":
            return min(_host_memory()[1], _container_free())
        if self.kind == "mps":
            return max(0, self.total_memory_bytes() - self.reserved_bytes())
        return int(getattr(torch, self.kind).mem_get_info(self.index)[0])

    def supports_bf16(self) -> bool:
        """True where bfloat16 arithmetic works (CPUs emulate it where they lack the instructions)."""
        if self.kind == "cuda":
            return bool(torch.cuda.is_bf16_supported())
        if self.kind == "mps":
            return torch.backends.mps.is_macos_or_newer(14, 0)
        return True

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` on this device. The copy is asynchronous from pinned memory alone: another source may be freed before it is read.

        Raises UserError for float64 on mps, which has none.
        """
        if self.kind == "mps" and tensor.dtype == torch.float64:
            raise UserError("device.kind: mps has no float64 arithmetic; use float32, or device.kind: cpu")
        return tensor.to(self.torch_device, non_blocking=tensor.is_pinned() if self.kind != "cpu" else False)

    def side_stream(self) -> torch.Stream:
        """A stream beside the one that computes; on CPU and mps, which have a single one, that one."""
        return torch.Stream(device="cpu" if self.kind == "mps" else self.torch_device)

    def mark(self, stream: torch.Stream) -> torch.Event | None:
        """An event after all work queued on a stream so far; None on CPU and mps, where work is in order."""
        return None if self.kind in _UNRECORDED else stream.record_event()

    def take_over(self, tensors: Iterable[torch.Tensor], written: torch.Event | None) -> None:
        """Let the work queued from now on use `tensors` that a side stream has written by the event `written`.

        The computation waits for them, not this thread; their memory is not used again before it is done with them.
        """
        if written is None:
            return
        stream = torch.accelerator.current_stream(self.torch_device)
        stream.wait_event(written)
        for tensor in tensors:
            tensor.record_stream(stream)

    def swapped_empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """A tensor of this device in the host's memory, mapped: kernels read and write it there. None where there is no such memory.

        It is not for copies: values are set and read by arithmetic, as `fill_(1).mul_(values)`.
        """
        if self.kind != "npu":
            return None
        make = getattr(importlib.import_module("torch_npu"), "empty_with_swapped_memory", None)
        return None if make is None else make(list(shape), dtype=dtype, device=self.torch_device)

    def peak_flops(self, dtype: torch.dtype) -> tuple[float, str]:
        """(FLOP/s, where the figure is from): the data sheet for known devices, a short matmul measurement otherwise."""
        for label, (bf16, fp32) in PEAK_FLOPS.items():
            if self.kind != "cpu" and label in self.name:
                return (bf16 if dtype == torch.bfloat16 else fp32), f"{label} data sheet"
        return self._measured_flops(dtype), f"measured matmul on {self.name}"

    def _measured_flops(self, dtype: torch.dtype) -> float:
        """FLOP/s of the best of square matrix products, of 256 to 1024 rows: larger ones only where the smaller take less than 10 ms."""
        best, size = 0.0, 256
        while True:
            a = torch.randn(size, size, device=self.torch_device).to(dtype)
            b = torch.randn(size, size, device=self.torch_device).to(dtype)
            begun, seconds = time.perf_counter(), float("inf")
            for _ in range(8):
                self.synchronize()
                start = time.perf_counter()
                a @ b
                self.synchronize()
                seconds = min(seconds, time.perf_counter() - start)
                if start - begun > 0.1:
                    break
            best = max(best, 2 * size**3 / seconds)
            if seconds > 0.01 or size == 1024:
                return best
            size *= 2


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _resident_bytes() -> int:
    """Bytes of this process in memory; from Linux itself where psutil is not installed, as on machines that are only qualified."""
    try:
        import psutil
    except ModuleNotFoundError:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    return int(psutil.Process().memory_info().rss)


def _host_memory() -> tuple[int, int]:
    """Bytes of the host's memory, and of what could still be allocated; without psutil as Linux says."""
    try:
        import psutil
    except ModuleNotFoundError:
        known = dict(re.findall(r"^(\w+):\s+(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE))
        return int(known["MemTotal"]) * 1024, int(known["MemAvailable"]) * 1024
    memory = psutil.virtual_memory()
    return int(memory.total), int(memory.available)


def _container_free() -> int:
    """Bytes that a container's limit leaves (version 2 of Linux's control groups); very many where there is none."""
    folder = Path("/sys/fs/cgroup")
    try:
        limit, used = ((folder / name).read_text().strip() for name in ("memory.max", "memory.current"))
        if limit == "max":
            return sys.maxsize
        # cached pages of files that no process uses count as used, and are freed on demand
        idle = re.search(r"^inactive_file (\d+)$", (folder / "memory.stat").read_text(), re.MULTILINE)
        return max(0, int(limit) - int(used) + (int(idle[1]) if idle else 0))
    except (OSError, ValueError):
        return sys.maxsize


def host_room(like: torch.Tensor) -> torch.Tensor:
    """An empty tensor in the host's memory to copy `like` into: pinned where the device of `like` copies into it by itself."""
    pinned = like.device.type not in _UNRECORDED and like.numel() > 0
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=pinned)


def without_waiting(tensor: torch.Tensor, where: torch.device) -> torch.Tensor:
    """A tensor on another device; from the CPU to an accelerator it is copied out of pinned memory while the host goes on."""
    if tensor.device.type != "cpu" or where.type in _UNRECORDED:
        return tensor.to(where)
    return (tensor if where.type == "meta" else tensor.pin_memory()).to(where, non_blocking=True)


def fuses_updates(kind: str) -> bool:
    """True where AdamW has one kernel for its whole update of many tensors, with the last bits of a number its own.

    The CPU has one too, twice as fast as tensor by tensor; there a run's bits are compared with those of plain loops of torch.
    """
    return kind == "cuda"


def tries_graphs(device: Device) -> bool:
    """True for a device that torch.compile makes kernels for, by Triton; on others it is left to those who ask for it."""
    found = device.kind == "cuda" and importlib.util.find_spec("triton") is not None
    return found and torch.cuda.get_device_capability(device.index) >= (8, 0)


def copy_mark(device: torch.device) -> torch.Event:
    """An event after all work queued so far on the stream that this thread computes on."""
    return torch.accelerator.current_stream(device).record_event()


def available(kind: str) -> bool:
    """True where this process can use a device of this kind."""
    if kind == "cpu":
        return True
    if kind == "npu" and importlib.util.find_spec("torch_npu") is not None:
        importlib.import_module("torch_npu")  # registers torch.npu
    if kind == "mps":
        return bool(torch.backends.mps.is_available())
    module = getattr(torch, kind, None)
    return module is not None and bool(module.is_available())


def pick(kind: str = "auto", local_rank: int | None = None) -> Device:
    """The device of this process. `auto`: npu, else cuda, else cpu; mps must be named.

    `local_rank` defaults to the launcher's LOCAL_RANK. Raises UserError when the requested kind is not available.
    """
    if local_rank is None:
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if kind == "auto":
        kind = next(k for k in ("npu", "cuda", "cpu") if available(k))
    elif kind not in BACKENDS:
        raise UserError(f"device.kind is {kind!r}: use auto, {', '.join(BACKENDS)}")
    elif not available(kind):
        raise UserError(
            f"device.kind is {kind!r}, but torch {torch.__version__} sees no such device; `mmspeed doctor` tells more"
        )
    if kind == "cpu":
        return Device("cpu", 0)
    count = torch.accelerator.device_count()
    if local_rank >= count:
        raise UserError(
            f"process {local_rank} of this host has no {kind} device: only {count} are visible; lower --nproc"
        )
    return Device(kind, local_rank)


def accelerators(kind: str = "auto") -> int:
    """Accelerators of a kind (a name of `device.kind`) that this machine shows; 0 where there are none."""
    try:
        return 0 if pick(kind).kind == "cpu" else torch.accelerator.device_count()
    except UserError:  # the machine that reads a config need not have its device
        return 0


def devices_here(kind: str = "auto", group: int = 1) -> int:
    """The devices of this machine that a run in groups of `group` devices uses: whole groups, at least one; a CPU counts as one."""
    return max(1, accelerators(kind) // group) * group


def is_device_fault(error: BaseException) -> bool:
    """True for an error that comes from the device (memory full, a broken context) and not from the computation."""
    kinds = tuple(kind for name in ("OutOfMemoryError", "AcceleratorError") if (kind := getattr(torch, name, None)))
    return isinstance(error, (MemoryError, *kinds)) or str(error).startswith(("CUDA error", "NPU", "HCCL", "NCCL"))


def is_out_of_memory(error: BaseException) -> bool:
    """True for an error that says that the memory of a device or of the host is full."""
    kind = getattr(torch, "OutOfMemoryError", None)
    if isinstance(error, MemoryError) or (kind is not None and isinstance(error, kind)):
        return True
    return isinstance(error, RuntimeError) and any(
        words in str(error) for words in ("out of memory", "can't allocate memory", "not enough memory")
    )


def parse_dtype(name: str) -> torch.dtype:
    """float32 or bfloat16 by name. Raises UserError for others."""
    try:
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
    except KeyError:
        raise UserError(f"dtype {name!r} is not one of float32, bfloat16") from None
