"""`mmspeed bench step CONFIG`: what a training step asks of its device and of its host, counted, or its time on this device.

With an accelerator, the operators of a real step are counted. Without one, its launches and bytes are counted on fake tensors, as CUDA
would compute them, and its waits and copies in a second pass, in which the meta device stands for the accelerator.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mmspeed.config import RunConfig, load_config
from mmspeed.device import Device, parse_dtype, pick
from mmspeed.log import format_bytes
from mmspeed.loop.optimizers.make_optimizer import make_optimizer
from mmspeed.loop.step import train_step
from mmspeed.memory.planning.measure import nbytes, place_of
from mmspeed.mesh import process_group
from mmspeed.parallel import autocast, make_half
from mmspeed.pipelines.tasks import Task, make_task
from mmspeed.pipelines.tuning.memory_estimate import without_values
from mmspeed.pipelines.tuning.synthetic_step import SyntheticStep
from mmspeed.protocols import MicroBatchSize, RunPlace, shape_words
from mmspeed.torch_internals import (
    MATMUL_NAMES,
    OPERATOR_STARTS,
    TO_COPY,
    TO_NUMBER,
    WAITING_NAMES,
    FakeTensorMode,
    TorchDispatchMode,
    packet_of,
    parameters_of,
    tree_leaves,
)

from .buckets import table

META = torch.device("meta")
KINDS = ("products", "attention", "casts and copies", "elementwise", "reductions", "gather and scatter", "optimizer")
_EMPTY = ("empty", "new_empty", "record_stream", "resize_", "lift_fresh")  # they start no kernel
_UNREAD = ("copy_", "zero_", "fill_")  # they write over their first argument


@dataclass
class Traffic:
    """The launches of a kind of operators, and the bytes that these read and write."""

    launches: int = 0
    read: int = 0
    written: int = 0


@dataclass(frozen=True)
class StepCount:
    """A micro-batch's forward and backward and the optimizer's step after it. Waits and copies hold up the host, by operator."""

    step: MicroBatchSize
    how: str
    kinds: Mapping[str, Traffic]
    waits: Mapping[str, int]
    copies: Mapping[str, int]

    def lines(self) -> list[str]:
        """The count as a table for a terminal."""
        rows = [
            [kind, f"{each.launches:,}", format_bytes(each.read), format_bytes(each.written)]
            for kind, each in {**self.kinds, "all": total(self.kinds)}.items()
        ]
        return [
            f"step of {shape_words(self.step.shape)} x {self.step.items}, {self.how}",
            *table(["operators", "launches", "read", "written"], rows),
            f"host waits: {_words(self.waits)}; blocking copies to the device: {_words(self.copies)}",
        ]

    def to_json(self) -> str:
        """The count as JSON."""
        kinds = {kind: asdict(each) for kind, each in self.kinds.items()}
        return json.dumps({"how": self.how, "kinds": kinds, "waits": self.waits, "copies": self.copies}, indent=2)


def total(kinds: Mapping[str, Traffic]) -> Traffic:
    """The sum of all kinds."""
    each = kinds.values()
    return Traffic(sum(k.launches for k in each), sum(k.read for k in each), sum(k.written for k in each))


def _words(counts: Mapping[str, int]) -> str:
    named = ", ".join(f"{number} x {name}" for name, number in sorted(counts.items()))
    return f"{sum(counts.values())}" + (f" ({named})" if named else "")


@dataclass
class StepCounter(TorchDispatchMode):
    """Counts operators on `device`: launches and bytes by kind, and what makes the host wait. It answers for values of meta tensors."""

    device: torch.device
    kinds: dict[str, Traffic] = field(default_factory=lambda: {kind: Traffic() for kind in KINDS})
    waits: Counter[str] = field(default_factory=Counter)
    copies: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, packet_of(func).__name__
        source = next((each for each in reversed(args[:2]) if isinstance(each, Tensor)), None)
        if source is not None and self.device.type != "cpu":
            to = torch.device(kwargs.get("device") or source.device) if name == TO_COPY else source.device
            to = args[0].device if name == "copy_" else to
            blocks = name in (TO_COPY, "copy_") and not kwargs.get("non_blocking") and (*args, False)[2:3] != (True,)
            leaves, stays = source.device.type == self.device.type, to.type == self.device.type
            self.copies[name] += blocks and stays and source.device.type == "cpu"
            masks = name.startswith("index") and any(_is_mask(each) for each in tree_leaves(args[1:2]))
            if leaves and (name in WAITING_NAMES or masks or (blocks and to.type == "cpu")):
                self.waits[name] += 1
                if source.is_meta:
                    return _stand_in(name, source, args)
        result = func(*args, **kwargs)
        self._count(func, name, args, kwargs, result)
        return result

    def _count(self, func: Any, name: str, args: Any, kwargs: Any, result: Any) -> None:
        """Add the launch of an operator that computes something on the device; views are none."""
        given = [*zip(parameters_of(func), args, strict=False)]
        given += [(each, kwargs[each.name]) for each in parameters_of(func) if each.name in kwargs]
        changed = [(each, value) for each, value in given if each.alias_info is not None and each.alias_info.is_write]
        unread = name in _UNREAD or any(each.is_out for each, _ in changed)
        over = {place_of(tensor) for tensor in _tensors([value for _, value in changed])}
        read = {place_of(t): t for t in _tensors((args, kwargs)) if not (unread and place_of(t) in over)}
        written = [t for t in _tensors(result) if place_of(t) not in read and place_of(t) not in over]
        written += _tensors([value for _, value in changed])
        if written and written[0].device.type == self.device.type and not name.startswith(_EMPTY):
            kind = self.kinds[kind_of(name)]
            kind.launches += 1
            kind.read += sum(map(nbytes, read.values()))
            kind.written += sum(map(nbytes, written))


def kind_of(name: str) -> str:
    """The kind of an operator, by its name."""
    if name in MATMUL_NAMES:
        return "products"
    if "attention" in name:
        return "attention"
    return next((kind for kind, starts in OPERATOR_STARTS.items() if name.startswith(starts)), "elementwise")


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _is_mask(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in (torch.bool, torch.uint8)


def _stand_in(name: str, source: Tensor, args: Any) -> Any:
    """A result of an operator that reads values, of a tensor that has none: ones, all that there may be."""
    if name == "nonzero":
        return source.new_empty(source.numel(), source.dim(), dtype=torch.int64)
    if name == "copy_":
        return args[0]
    ones = torch.ones(source.shape, dtype=source.dtype)
    return ones.item() if name == TO_NUMBER else ones if name == TO_COPY else source.flatten()


class _Calls(TorchFunctionMode):
    """Sees the calls that dispatch hides: tensors made of numbers, which are copied; norms, which CUDA computes in one launch, in float32."""

    def __init__(self, counter: StepCounter) -> None:
        super().__init__()
        self.counter = counter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, device = kwargs or {}, self.counter.device
        if func in (torch.tensor, torch.as_tensor) and not isinstance(args[0], Tensor) and device.type != "cpu":
            self.counter.copies["tensor"] += torch.device(kwargs.get("device") or "cpu").type == device.type
        if func in (F.rms_norm, F.layer_norm) and device.type == "cpu":
            if torch.is_autocast_enabled("cpu"):
                args = tuple(each.float() if isinstance(each, Tensor) else each for each in args)
            return F.layer_norm(*args[:3])  # of the same launches
        return func(*args, **kwargs)


@contextmanager
def counting(device: torch.device) -> Iterator[StepCounter]:
    """Count the operators on a device."""
    counter = StepCounter(device)
    with _Calls(counter), counter:
        yield counter


def count_step(config: RunConfig, device: Device) -> StepCount:
    """Count the step of a config's largest micro-batch on one device. Raises UserError as `Domain.open_without_data`."""
    task = make_task(config)
    task.domain.open_without_data()
    step = task.domain.largest_micro_batch(RunPlace(Device("cpu", 0)))
    if device.kind != "cpu":
        with process_group(device):
            trial = SyntheticStep(config, task, device)
            trial.run(step.shape, step.items)
            batch, parts = trial.batch(step.shape, step.items), trial.parts
            divisors, clip = task.domain.synthetic_divisors(batch, 1), config.train.clip_norm
            with counting(device.torch_device) as counter:
                train_step(parts.models, parts.learners, [batch], divisors, clip_norm=clip, mesh=trial.placement.mesh)
        return StepCount(step, f"counted on {device.kind}", counter.kinds, +counter.waits, +counter.copies)
    task.domain.shapes()
    kinds, host = _launches(config, task, step), _held_up(config, task, step)
    return StepCount(step, "counted from shapes", kinds, +host.waits, +host.copies)


def _launches(config: RunConfig, task: Task, step: MicroBatchSize) -> dict[str, Traffic]:
    """Launches and bytes of a step by fake tensors, without recomputation, clipping, and the update of optimizers in tiers."""
    model = task.build()[task.updates()[0].role]
    make, loss = task.sketch(model, step.shape, step.items)
    if config.memory.master != "parameters":
        make_half(model)
    with FakeTensorMode():
        without_values(model)
        if config.device.dtype != "float32":
            autocast(model, parse_dtype(config.device.dtype))
        batch, host = make(), torch.device("cpu")
        with counting(host) as counter:
            loss(batch).backward()
        if config.memory.tiered:
            return counter.kinds
        optimizer = make_optimizer(model, config.train)
        for group in optimizer.param_groups:  # as on a device
            group["foreach"] = not group.get("fused")
        for _ in range(2):  # the first makes the optimizer's states
            with counting(host) as update:
                optimizer.step()
    return counter.kinds | {"optimizer": total(update.kinds)}


def _held_up(config: RunConfig, task: Task, step: MicroBatchSize) -> StepCounter:
    """What holds up the host in a micro-batch, whose models and data are on the meta device."""
    models, update = {role: model.to(META) for role, model in task.build().items()}, task.updates()[0]
    batch = task.domain.synthetic_batch(step.shape, step.items, RunPlace(Device("cpu", 0)))
    divisors, there = task.domain.synthetic_divisors(batch, 1), batch.to(META, torch.float32)
    with counting(META) as counter:
        optimizers = {update.role: make_optimizer(models[update.role], config.train)}
        (learner,) = task.learners([update], models, "none", optimizers, META)
        learner.run([there], divisors, 1.0)
    return counter


def bench_step(path: Path, overrides: Sequence[str], *, count: bool, rounds: int = 5) -> StepCount | list[float]:
    """The count of the step of a config's largest micro-batch, or its time in seconds on this device, of each round."""
    config = load_config(path, overrides)
    device = pick(config.device.kind)
    device.activate()
    if count:
        return count_step(config, device)
    task = make_task(config)
    task.domain.open_without_data()
    with process_group(device):
        trial = SyntheticStep(config, task, device)
        step = task.domain.largest_micro_batch(trial.place)
        trial.run(step.shape, step.items)
        return [trial.seconds(step.shape, step.items) for _ in range(rounds)]


def median_line(seconds: Sequence[float]) -> str:
    """A line about timed steps."""
    return (
        f"a step takes {statistics.median(seconds):.4g} s, {min(seconds):.4g} to {max(seconds):.4g} in {len(seconds)}"
    )
