"""Memory during training: freeing unused memory, and advice when it runs out."""

from __future__ import annotations

import gc
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch import nn

from mmspeed.config import RunConfig
from mmspeed.device import Device, is_out_of_memory
from mmspeed.errors import UserError
from mmspeed.log import format_bytes, get_logger
from mmspeed.loop.averages import EMA
from mmspeed.loop.callbacks import BaseCallback, StepOutcome
from mmspeed.memory.planning.peak import local_bytes
from mmspeed.memory.planning.report import optimizer_bytes
from mmspeed.pipelines.run.run_folder import write_text

IN_PIECES = 0.15  # least unused share of the allocator's memory that counts as fragmented
WORTH = 0.15  # least share of the memory held by a category that is worth advice
FRAMES = 8  # innermost Python lines by which blocks are summed
GROUPS = 50  # of blocks that are recorded

log = get_logger("memory")


class OomAdvisor(BaseCallback):
    """A context around the training loop. When memory runs out inside, the error names the keys of the config that save memory.

    With `memory.snapshot` on an accelerator each block of memory is recorded with the Python lines that allocated it, and the blocks in
    use are then written to `oom-rankN.json` in the run's folder.
    """

    def __init__(
        self, config: RunConfig, device: Device, folder: Path, model: nn.Module, optimizer: Any, ema: EMA | None
    ) -> None:
        self.config, self.device, self.folder = config, device, folder
        self.model, self.optimizer, self.ema = model, optimizer, ema
        self._notes = config.memory.snapshot and device.kind != "cpu"

    def __enter__(self) -> OomAdvisor:
        if self._notes:
            self.device.record_allocations(True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Raises UserError in place of an out-of-memory error."""
        try:
            if error is not None and is_out_of_memory(error):
                raise self._explained(error) from error
        finally:
            if self._notes:
                self.device.record_allocations(False)

    def after_step(self, outcome: StepOutcome) -> None:
        """Return unused memory to the device every `memory.empty_cache` steps."""
        every = self.config.memory.empty_cache
        if every is not None and outcome.step % every == 0:
            self.device.empty_cache()

    @contextmanager
    def around_validation(self) -> Iterator[None]:
        """Return unused memory to the device before a validation and after it, since its shapes differ from a step's."""
        self.device.empty_cache()
        try:
            yield
        finally:
            if self.device.kind != "cpu":  # the CPU's allocator keeps no unused memory
                gc.collect()
                self.device.empty_cache()

    def held(self) -> dict[str, int]:
        """Bytes in use now, by category; on CPU `activations` is the rest of the process's memory beside the other categories."""
        parameters = list(self.model.parameters())
        held = {
            "parameters": local_bytes(parameters),
            "gradients": local_bytes(p.grad for p in parameters if p.grad is not None),
            "optimizer": optimizer_bytes(self.optimizer),
            "average": local_bytes([] if self.ema is None or self.ema.on_host else self.ema.tensors.values()),
        }
        now = self.device.memory_bytes()
        held["activations"] = max(0, now - sum(held.values()))
        return held | {"reserved": max(now, self.device.reserved_bytes()), "total": self.device.total_memory_bytes()}

    def _explained(self, error: BaseException) -> UserError:
        held, rank = self.held(), dist.get_rank() if dist.is_initialized() else 0
        world = dist.get_world_size() if dist.is_initialized() else 1
        advice = advise(held, self.config, world=world, growing_segments=self.device.growing_segments)
        lines = [
            f"memory of {self.device.name} is full on rank {rank}: {_first_line(error)}",
            f"held: {_held_line(held)}",
        ]
        if self._notes:
            lines.append(self._write_record(rank, lines[0], held, advice))
        return UserError("\n  ".join([*lines, *advice]))

    def _write_record(self, rank: int, reason: str, held: Mapping[str, int], advice: Sequence[str]) -> str:
        """Write a record of the blocks in use and the lines that allocated them. Returns a line with its path, or why writing failed."""
        path = self.folder / f"oom-rank{rank}.json"
        record = {"reason": reason, "held": held, "advice": advice, "blocks": summed_blocks(self.device.allocations())}
        try:
            write_text(path, json.dumps(record, indent=1) + "\n")
        except (OSError, UserError) as error:  # must not hide that memory is full
            return f"the blocks in use could not be written: {_first_line(error)}"
        return f"blocks in use, and the lines that allocated them: {path}"


def advise(held: Mapping[str, int], config: RunConfig, *, world: int = 1, growing_segments: str = "") -> list[str]:
    """Advice on keys of the config that save memory, in sentences, those that save most first; never empty.

    Args:
        held: bytes by category (those of `OomAdvisor.held`); `reserved` and `total` may be missing.
        world: devices of the run.
        growing_segments: the environment setting against fragmentation in the device's allocator; empty where there is none.
    """
    shares = {"parameters": held.get("parameters", 0) + held.get("gradients", 0)}
    shares |= {name: held.get(name, 0) for name in ("optimizer", "average", "activations")}
    whole = max(1, sum(shares.values()))
    advice: list[str] = []
    reserved = held.get("reserved", 0)
    if growing_segments and reserved - whole > IN_PIECES * reserved:
        advice.append(
            f"{format_bytes(reserved - whole)} are taken but unused, in pieces too small: set {growing_segments} in the environment, "
            "or memory.empty_cache: 1"
        )
    by_category = {
        "activations": _less_activations,
        "optimizer": _less_optimizer,
        "parameters": _less_parameters,
        "average": _less_average,
    }
    for name, count in sorted(shares.items(), key=lambda item: -item[1]):
        if count >= WORTH * whole:
            advice += by_category[name](config, count, world)
    return advice or ["use smaller buckets, a smaller model, or more devices"]


def _less_activations(config: RunConfig, count: int, world: int) -> list[str]:
    memory, advice = config.memory, []
    size = format_bytes(count)
    ways = {name for name, way in memory.activation_policy.items() if way != "save"}
    if not (ways or memory.chooses):
        advice.append(
            f"activations take {size} and all are kept: set memory.fraction: 0.9, which chooses what to recompute and offload, or "
            "memory.activation_policy: {block: offload_selective} or {block: recompute}"
        )
    elif memory.chooses:
        advice.append(
            f"activations take {size}: lower memory.budget or memory.fraction, so that more is recomputed and offloaded"
        )
    elif memory.activation_policy.get("block") == "recompute":
        if memory.mlp_chunk is None and config.train.compile is not True:
            advice.append(f"activations take {size} while a block is computed again: set memory.mlp_chunk: 4096")
    else:
        advice.append(
            f"activations take {size}: set memory.activation_policy: {{block: recompute}}, which keeps least on the device"
        )
    advice += _fewer_samples(config, world)
    if config.parallel.group == 1:
        advice.append(
            "split each video over several devices (parallel.dsp, parallel.ulysses or parallel.ring), or use smaller buckets"
        )
    return advice or [f"activations take {size}: use smaller buckets"]


def _fewer_samples(config: RunConfig, world: int) -> list[str]:
    train, lanes = config.train, config.parallel.groups(world)
    if config.batching.by != "samples":
        return ["lower batching.budget, and raise batching.accumulate for the same step"]
    at_once = min(-(-train.samples_per_step // lanes), train.micro_batch_size or train.samples_per_step)
    if at_once == 1:
        return []
    return [
        f"lower train.micro_batch_size to {at_once // 2}: a device computes {at_once} samples at a time, and can add up parts"
    ]


def _less_optimizer(config: RunConfig, count: int, world: int) -> list[str]:
    advice = []
    if config.memory.states == "device":
        advice.append(f"optimizer states take {format_bytes(count)}: set memory.states: host")
    elif config.memory.master == "float32":
        advice.append(
            f"the optimizer's copy of the weights takes {format_bytes(count)}: set memory.master: split or host"
        )
    return advice + _shard(config, world)


def _less_parameters(config: RunConfig, count: int, world: int) -> list[str]:
    advice = _shard(config, world)
    if config.memory.master == "parameters" and config.device.dtype == "bfloat16":
        advice.append(
            f"parameters and gradients take {format_bytes(count)}: set memory.master: split, for bfloat16 parameters"
        )
    if not config.memory.release_gradients and config.train.clip_norm is None:
        advice.append("set memory.release_gradients: true, which frees gradients as they come")
    return advice or ["the weights alone take most: use a smaller model or more devices"]


def _less_average(config: RunConfig, count: int, world: int) -> list[str]:
    if config.memory.ema == "device":
        return [f"the moving average takes {format_bytes(count)}: set memory.ema: host"]
    return []


def _shard(config: RunConfig, world: int) -> list[str]:
    if world == 1:
        return ["shard weights and states over more devices (--nproc, with parallel.strategy: fsdp)"]
    if config.parallel.strategy in ("ddp", "none"):
        return [f"shard weights and states over the {world} devices: parallel.strategy: fsdp"]
    return []


def summed_blocks(segments: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Blocks in use in an allocator's segments, summed by the Python lines that allocated them, the most bytes first."""
    sums: dict[tuple[str, ...], list[int]] = defaultdict(lambda: [0, 0])
    for segment in segments:
        for block in segment.get("blocks", ()):
            if block.get("state") == "active_allocated":
                entry = sums[_lines_of(block.get("frames") or ())]
                entry[0] += int(block.get("size", 0))
                entry[1] += 1
    ordered = sorted(sums.items(), key=lambda item: -item[1][0])
    return [{"bytes": size, "blocks": count, "lines": list(lines)} for lines, (size, count) in ordered[:GROUPS]]


def _lines_of(frames: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """The innermost frames that have a file, as "folder/file.py:12 name", the innermost first."""
    lines = []
    for frame in frames:
        place = str(frame.get("filename", ""))
        if place.endswith(".py"):
            lines.append(f"{'/'.join(Path(place).parts[-3:])}:{frame.get('line', 0)} {frame.get('name', '')}")
    return tuple(lines[:FRAMES])


def _held_line(held: Mapping[str, int]) -> str:
    """Bytes by category in one line, without zeros."""
    return ", ".join(f"{name} {format_bytes(count)}" for name, count in held.items() if count)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
