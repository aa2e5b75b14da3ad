"""A callback on one rank ends a run on all of them, by a mistake or by `stop`."""

from __future__ import annotations

from pathlib import Path

from mmspeed.pipelines import TrainCallback, TrainPipeline
from mmspeed.pipelines.domains.video.domain import VideoDomain
from mmspeed.pipelines.training.events import StepEvent
from tests.support.spawn import run_ranks
from tests.support.toy_runs import build_toy, toy_config, write_toy_cache


class FailsOnOne(TrainCallback):
    """Fails on rank 1 at the second step, while a checkpoint is under way."""

    def on_step(self, event: StepEvent) -> None:
        if (event.rank, event.step) == (1, 2):
            raise ZeroDivisionError("of the user")


class StopsOnOne(TrainCallback):
    """Stops the run on rank 1 at the second step."""

    def on_step(self, event: StepEvent) -> None:
        if (event.rank, event.step) == (1, 2):
            event.stop()


def end_of_run(folder: str, *overrides: str, callback: type[TrainCallback] = FailsOnOne) -> str:
    config = toy_config(Path(folder), *overrides)
    try:
        result = TrainPipeline(config, task=VideoDomain(config, build=build_toy), callbacks=[callback()]).run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return result.lines()[0]


def stop_and_go_on(folder: str) -> list[str]:
    """The ends of a run that is stopped, and of the same that goes on."""
    return [end_of_run(folder, callback=StopsOnOne) for _ in range(2)]


def test_a_callback_that_fails_on_one_rank_ends_the_run_on_all(tmp_path: Path) -> None:
    write_toy_cache(toy_config(tmp_path))
    errors = run_ranks(end_of_run, 2, str(tmp_path), "checkpoint.every=1")
    assert errors == [
        "UserError: a callback failed on rank 1: ZeroDivisionError: of the user",
        "ZeroDivisionError: of the user",
    ]
    assert (tmp_path / "runs" / "small" / "checkpoints" / "step-00000001" / "meta.json").is_file()


def test_a_callback_that_stops_on_one_rank_stops_the_run_on_all_at_one_step(tmp_path: Path) -> None:
    write_toy_cache(toy_config(tmp_path))
    for stopped, finished in run_ranks(stop_and_go_on, 2, str(tmp_path)):
        assert "stopped and saved; the same command goes on at step 2, loss" in stopped
        assert "finished at step 6, loss" in finished
    assert (tmp_path / "runs" / "small" / "checkpoints" / "step-00000002" / "meta.json").is_file()
