"""Check that a layout computes what one process computes (`mmspeed check CONFIG --parallel LAYOUT`), on CPU processes, without data.

A config is made small (`Domain.small`), with synthetic items in files, and the first steps of that run are taken on the processes of the
layout and on one (`worker.py`); here the two are started and compared (`verdict.py`). Nothing in these files knows a domain.
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

from mmspeed.config import RunConfig, make_config
from mmspeed.config.parallel import AXES, UNSPLIT, ParallelConfig
from mmspeed.config.tasks import task_class, task_entry
from mmspeed.errors import UserError
from mmspeed.log import get_logger
from mmspeed.parallel import check_division
from mmspeed.pipelines.check.children import Child, run_children
from mmspeed.pipelines.check.verdict import SelfCheck, compare, named, processes
from mmspeed.pipelines.check.worker import WorkerReport
from mmspeed.pipelines.tasks import Task, as_task, make_task
from mmspeed.protocols import Domain, SmallRun

__all__ = ["SelfCheck", "selfcheck", "with_layout"]

log = get_logger("check")

MOST_PROCESSES = 16  # on one machine, whose cores they share
TIMEOUT_SECONDS = 600.0

AnyConfig = TypeVar("AnyConfig", bound=RunConfig)


def selfcheck(config: RunConfig, layout: str, make: Callable[[Any], Domain | Task] = make_task) -> SelfCheck:
    """Run a config, made small, at a layout such as "ulysses=2,ring=2" and on one process, and compare.

    `layout` sets fields of the config's parallel section; axes that it does not name are 1. make: makes the task of a config, where the
    config does not name it, such as `lambda config: MyTask(config, load)`. Raises UserError for a layout that does not fit the
    model or is too large, as training would, when a process fails, and for a task that other processes cannot make.
    """
    started = time.monotonic()
    config = with_layout(config, layout)
    domain, world = as_task(make(config), config).domain, processes(config.parallel)
    require_fit(config, domain)
    log.info(f"{named(config.parallel)}: {world} processes and one, on this machine's CPU")
    with tempfile.TemporaryDirectory(prefix="mmspeed-check-") as folder:
        small = compared_run(domain, Path(folder) / "small")
        runs = {"layout": small.config, "alone": alone(small.config)}
        if small.config.device.dtype != "float32":
            runs["exact"] = exact(small.config)
        children = [child for run, own in runs.items() for child in _children(run, own, small.kinds, Path(folder))]
        run_children(children, max(1, (os.cpu_count() or 1) // len(children)))
        reports = {run: WorkerReport.load(Path(folder) / run) for run in runs}
    result = compare(small, reports["layout"], reports["alone"], reports.get("exact"))
    return dataclasses.replace(result, seconds=time.monotonic() - started)


def require_fit(config: RunConfig, domain: Domain) -> None:
    """Raise UserError where the processes of a config's layout cannot divide the experts or the blocks of its models."""
    if config.parallel.divides_models:
        for model in domain.outlines().values():
            check_division(model, config.parallel, processes(config.parallel))


def compared_run(domain: Domain, folder: Path) -> SmallRun:
    """The small run of a domain, with an optimizer that leaves gradients whole. Raises UserError for one that other processes cannot open."""
    small = domain.small(folder)
    name = small.config.task
    if small.named and type(domain) is not task_class(name):
        raise UserError(
            f"check --parallel: other processes make the task that the config names, {name}, and this is a {type(domain).__name__}; "
            "register it (pipelines.tasks.register) and name it in the config"
        )
    return dataclasses.replace(small, config=with_plain_optimizer(small.config))


def with_plain_optimizer(config: AnyConfig) -> AnyConfig:
    """The config with float32 parameters that AdamW updates after backward: this leaves the gradients whole, to be compared."""
    memory = {"master": "parameters", "states": "device", "release_gradients": False, "ema": "device"}
    train = {"optimizer": "adamw", "loader_workers": 0}
    changes = {"memory": config.memory.model_copy(update=memory), "train": config.train.model_copy(update=train)}
    return config.model_copy(update=changes)


def alone(config: AnyConfig) -> AnyConfig:
    """The config on one process."""
    return config.model_copy(update={"parallel": ParallelConfig()})


def exact(config: AnyConfig) -> AnyConfig:
    """The config on one process in float32."""
    device = config.device.model_copy(update={"dtype": "float32"})
    return alone(config).model_copy(update={"device": device})


def _children(run: str, config: RunConfig, kinds: Sequence[str], root: Path) -> list[Child]:
    """The processes of a run: those of the layout, one process alone, or one in float32."""
    world = processes(config.parallel) if run == "layout" else 1
    (root / run).mkdir()
    job = {
        "config": config.model_dump(mode="json", by_alias=True),
        "classes": task_entry(config.task).to_json(),  # the task may be registered in this process only
        "kinds": list(kinds),
        "world": world,
        "store": str(root / f"{run}.store"),
        "folder": str(root / run),
        "timeout": TIMEOUT_SECONDS,
    }
    command = [sys.executable, "-m", "mmspeed.pipelines.check.worker"]
    names = [
        f"process {rank} of {world}" if run == "layout" else "the process to compare with" for rank in range(world)
    ]
    return [Child(name, command, {**job, "rank": rank}) for rank, name in enumerate(names)]


# -- the layout --------------------------------------------------------------------------------------------------------


def with_layout(config: AnyConfig, layout: str) -> AnyConfig:
    """The config with the fields of its parallel section that `layout` names; axes that are not named are 1.

    Raises UserError for words that are not key=value, unknown keys, values that do not fit, and for one process or too many.
    """
    values: dict[str, str] = {}
    for word in re.sub(r"\s*=\s*", "=", layout.replace(",", " ")).split():
        key, sign, value = word.partition("=")
        key = key.removeprefix("parallel.")
        if not (sign and key and value):
            raise UserError(f"--parallel {layout!r}: {word!r} is no key=value; write for example ulysses=2,ring=2")
        if key in values:
            raise UserError(f"--parallel {layout!r} names {key} twice")
        values[key] = value
    dump = config.model_dump(mode="json", by_alias=True)
    dump["parallel"].update(UNSPLIT)
    changed = make_config(dump, [f"parallel.{key}={value}" for key, value in values.items()], origin="--parallel")
    assert isinstance(changed, type(config))
    changed = changed.model_copy(update={"parallel": changed.parallel.with_experts(values)})
    for axis, size in changed.parallel.sizes().items():
        if size < 1 or isinstance(yaml.safe_load(values.get(axis, "1")), bool):
            raise UserError(
                f"--parallel: {axis} is {values[axis]}; write a number from 1 on, since nothing else determines it"
            )
    world = processes(changed.parallel)
    if world == 1:
        raise UserError(
            f"--parallel {layout!r} is one process, with nothing to compare; name an axis: {', '.join(AXES)}"
        )
    if world > MOST_PROCESSES:
        raise UserError(
            f"--parallel {layout!r} makes {world} processes, and at most {MOST_PROCESSES} are tried on one machine; "
            "smaller axes take the same code"
        )
    changed.parallel.check_world(world)
    return changed
