"""`mmspeed bench memory CONFIG`: the memory of a config's training step by use, as a table, a plot, and in the run's folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from mmspeed import comm
from mmspeed.config import load_config
from mmspeed.data.cache.files import write_whole
from mmspeed.device import pick
from mmspeed.memory.planning.report import MemoryReport
from mmspeed.mesh import process_group
from mmspeed.pipelines.report.memory_page import measure_report, report_figure
from mmspeed.pipelines.tasks import make_task
from mmspeed.pipelines.tuning.memory_search import MEMORY_NAME
from mmspeed.pipelines.tuning.synthetic_step import SyntheticStep


def report_config(config_path: Path, overrides: Sequence[str] = (), output: Path | None = None) -> MemoryReport:
    """Measure the step of the bucket with the most tokens; write memory.json and memory.png into `output`, or the run's folder.

    With a budget, the ways are those that `mmspeed train` chose and wrote there. A collective call where a launcher started several
    processes. Raises UserError as `SyntheticStep`.
    """
    config = load_config(config_path, overrides)
    if config.train.compile == "auto":  # the memory of compiled blocks cannot be told apart
        config = config.model_copy(update={"train": config.train.model_copy(update={"compile": False})})
    device = pick(config.device.kind)
    device.activate()
    folder = output or config.run_dir
    with process_group(device):
        rank, world = dist.get_rank(), dist.get_world_size()
        known = _read(folder / MEMORY_NAME)
        choice = known.get("blocks") if config.memory.chooses else None
        task = make_task(config)
        task.domain.open_without_data()
        trial = SyntheticStep(config, task, device, choice=comm.broadcast_object(choice))
        bucket = max(task.domain.shapes(), key=task.domain.tokens)
        share = -(-config.train.samples_per_step // world)
        batch = min(share, config.train.micro_batch_size or share)
        report = measure_report(trial, bucket, batch)
        if rank == 0:
            known["report"] = report.to_json()
            write_whole(folder / MEMORY_NAME, (json.dumps(known, indent=1) + "\n").encode())
            report_figure(report).savefig(folder / "memory.png", dpi=120)
        return report


def _read(path: Path) -> dict[str, object]:
    """The present contents of memory.json; empty where there is none, or an unrelated file of that name."""
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return contents if isinstance(contents, dict) else {}
