"""Check that a layout computes what one process computes (`mmspeed check CONFIG --parallel LAYOUT`), on CPU processes, without data.

A config's task is made small (`Task.shrunk`) and takes training steps of synthetic items, once on the processes of the layout and
once on one (`worker.py`); here the two are started and compared (`verdict.py`). Nothing in these files knows a domain.
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import yaml

from mmspeed.config import RunConfig, make_config
from mmspeed.config.parallel import AXES
from mmspeed.config.tasks import task_class, task_entry
from mmspeed.errors import UserError
from mmspeed.log import get_logger
from mmspeed.pipelines.check.children import Child, run_children
from mmspeed.pipelines.check.verdict import SelfCheck, compare, named, processes
from mmspeed.pipelines.check.worker import WorkerReport
from mmspeed.pipelines.tasks import Task, make_task
from mmspeed.protocols import CheckTask, RebuildableCheck

__all__ = ["SelfCheck", "selfcheck", "with_layout"]

log = get_logger("check")

MOST_PROCESSES = 16  # on one machine, whose cores they share
TIMEOUT_SECONDS = 600.0

AnyConfig = TypeVar("AnyConfig", bound=RunConfig)


def selfcheck(config: RunConfig, layout: str, make: Callable[[Any], Task] = make_task) -> SelfCheck:
    """Run a config, made small, at a layout such as "ulysses=2,ring=2" and on one process, and compare.

    `layout` sets fields of the config's parallel section; axes that it does not name are 1. make: makes the task of a config, where the
    config does not name it, such as `lambda config: MyTask(config, load)`. Raises UserError for a layout that does not fit the
    model or is too large, as training would, when a process fails, and for a task that other processes cannot make.
    """
    started = time.monotonic()
    config = with_layout(config, layout)
    check = _small_task(config, make)
    world = processes(config.parallel)
    log.info(f"{named(config.parallel)}: {world} processes and one, on this machine's CPU")
    runs = {"layout": world, "alone": 1}  # the number of processes of each
    if config.device.dtype != "float32":
        runs["exact"] = 1
    with tempfile.TemporaryDirectory(prefix="mmspeed-check-") as folder:
        children = [child for run, size in runs.items() for child in _children(run, size, config, check, Path(folder))]
        run_children(children, max(1, (os.cpu_count() or 1) // len(children)))
        reports = {run: WorkerReport.load(Path(folder) / run) for run in runs}
    result = compare(check, reports["layout"], reports["alone"], reports.get("exact"))
    return dataclasses.replace(result, seconds=time.monotonic() - started)


def _small_task(config: RunConfig, make: Callable[[Any], Task]) -> CheckTask:
    """The small task of a config. Raises UserError for a task that other processes cannot make."""
    task = make(config)
    check = task.domain.shrunk()
    if not isinstance(check, RebuildableCheck) and type(task) is not task_class(config.task):
        raise UserError(
            f"check --parallel: other processes make the task that the config names, {config.task}, and this is a "
            f"{type(task).__name__}; register it (pipelines.tasks.register) and name it in the config, or give its CheckTask `builder`"
        )
    return check


def _children(run: str, world: int, config: RunConfig, check: CheckTask, root: Path) -> list[Child]:
    """The processes of a run: those of the layout, one process alone, or one in float32."""
    (root / run).mkdir()
    job = {
        "config": config.model_dump(mode="json", by_alias=True),
        "classes": task_entry(config.task).to_json(),  # the task may be registered in this process only
        "known": dict(check.known),
        "builder": check.builder if isinstance(check, RebuildableCheck) else None,
        "run": run,
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
    dump["parallel"].update(dict.fromkeys(AXES, 1), ring_window=None)
    changed = make_config(dump, [f"parallel.{key}={value}" for key, value in values.items()], origin="--parallel")
    assert isinstance(changed, type(config))
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
    return changed
