"""A callback's mistake on one rank ends a run on all of them."""

from __future__ import annotations

from pathlib import Path

from mmspeed.pipelines import TrainCallback, TrainPipeline
from mmspeed.pipelines.tasks.video import VideoTask
from mmspeed.pipelines.training.events import StepEvent
from tests.support.spawn import run_ranks
from tests.support.toy_runs import build_toy, toy_config, write_toy_cache


class FailsOnOne(TrainCallback):
    """Fails on rank 1 at the second step, while a checkpoint is under way."""

    def on_step(self, event: StepEvent) -> None:
        if (event.rank, event.step) == (1, 2):
            raise ZeroDivisionError("of the user")


def end_of_run(folder: str) -> str:
    config = toy_config(Path(folder), "checkpoint.every=1")
    try:
        TrainPipeline(config, task=VideoTask(config, build=build_toy), callbacks=[FailsOnOne()]).run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "ended"


def test_a_callback_that_fails_on_one_rank_ends_the_run_on_all(tmp_path: Path) -> None:
    write_toy_cache(toy_config(tmp_path))
    errors = run_ranks(end_of_run, 2, str(tmp_path))
    assert errors == [
        "UserError: a callback failed on rank 1: ZeroDivisionError: of the user",
        "ZeroDivisionError: of the user",
    ]
    assert (tmp_path / "runs" / "small" / "checkpoints" / "step-00000001" / "meta.json").is_file()
