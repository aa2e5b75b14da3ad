"""Passes end their nodes where the planner says: exchanges that give way in steps of two processes, as many as were counted from shapes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mmspeed.device import Device
from mmspeed.pipelines.report.pipeline_plan import PipelinePlanner, Rates
from mmspeed.pipelines.tasks import make_task
from mmspeed.pipelines.tuning.synthetic_step import SyntheticStep
from tests.support.spawn import run_ranks
from tests.unit.pipelines.test_expert_balance import EXPERTS
from tests.unit.pipelines.test_language_start import config

AGAIN = ("memory.activation_policy={block: recompute}", "memory.exchange_again=true")
CASES = {"kept": (), "exchanged again": AGAIN, "by node": (*AGAIN, "parallel.ep_inner=1")}


def exchanges(folder: str) -> dict[str, tuple[int, int]]:
    """(exchanges of a step of one micro-batch, those counted from shapes) of each case."""
    found = {}
    for name, keys in CASES.items():
        settings = config(Path(folder), *EXPERTS, "parallel.ep=2", "train.batch_size=2", *keys)
        task, given = make_task(settings), list[str | None]()
        task.domain.open_without_data()
        planner = PipelinePlanner(settings, Rates.of(settings, 1.0, None, None), 2, task=task)
        size = planner.size(settings.parallel)
        work = planner.work(size)
        whole = work.stage(range(len(work.blocks)))

        def counted(place: str | None, wait: Callable[[], None]) -> None:
            given.append(place)  # noqa: B023
            wait()

        trial = SyntheticStep(settings, task, Device("cpu", 0))
        trial.placement.layout.ledger.gives_way = counted
        trial.run(size.shape, size.items)
        assert set(given) == {"experts"}
        found[name] = len(given), sum(bool(node.sent) for node in (*whole.forward, *whole.backward))
    return found


def test_a_run_exchanges_as_often_as_planned(tmp_path: Path) -> None:
    for rank in run_ranks(exchanges, 2, str(tmp_path)):
        assert all(run == planned > 0 for run, planned in rank.values()), rank
        assert rank["exchanged again"] > rank["kept"]
