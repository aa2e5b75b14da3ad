"""Callbacks of users: their calls and the order of these, and that their mistakes end a run."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from mmspeed.pipelines import TrainCallback, TrainPipeline
from mmspeed.pipelines.domains.video.domain import VideoDomain
from mmspeed.pipelines.training.events import CheckpointEvent, EndEvent, StepEvent, ValidationEvent
from tests.support.runs import losses
from tests.support.toy_runs import build_toy, toy_config, train_toy, write_toy_cache


class Recorder(TrainCallback):
    """Notes every event."""

    def __init__(self) -> None:
        self.notes: list[tuple[str, int]] = []
        self.losses: list[float | None] = []

    def on_step(self, event: StepEvent) -> None:
        self.notes.append(("step", event.step))
        self.losses.append(event.loss)
        assert event.models["model"].training and event.outcome.step == event.step and event.world == 1

    def on_validation(self, event: ValidationEvent) -> None:
        self.notes.append(("validation", event.step))
        assert event.row["loss"] > 0

    def on_checkpoint(self, event: CheckpointEvent) -> None:
        self.notes.append(("checkpoint", event.step))
        assert (event.path / "meta.json").is_file()

    def on_end(self, event: EndEvent) -> None:
        self.notes.append(("end", event.step))
        assert event.finished and event.loss == self.losses[-1]


class Ends(TrainCallback):
    """Notes the ends of runs."""

    def __init__(self) -> None:
        self.events: list[tuple[int, bool]] = []

    def on_end(self, event: EndEvent) -> None:
        self.events.append((event.step, event.finished))


class Failing(TrainCallback):
    """Fails at the second step."""

    def on_step(self, event: StepEvent) -> None:
        if event.step == 2:
            raise ZeroDivisionError("of the user")


def test_callbacks_are_called_with_what_happens(tmp_path: Path) -> None:
    config = toy_config(tmp_path, "checkpoint.every=2", "checkpoint.asynchronous=false")
    write_toy_cache(config)
    recorder = Recorder()
    TrainPipeline(config, task=VideoDomain(config, build=build_toy), callbacks=[recorder]).run()
    each = [note for note in recorder.notes if note[0] != "checkpoint"]
    assert each == [
        *[("step", 1), ("step", 2), ("step", 3), ("validation", 3), ("step", 4), ("step", 5), ("step", 6)],
        *[("validation", 6), ("end", 6)],
    ]
    written = [step for kind, step in recorder.notes if kind == "checkpoint"]
    assert written == [2, 4, 6] and recorder.notes[-1] == ("end", 6)
    assert recorder.losses == losses(config)


def test_an_error_in_a_callback_ends_the_run_and_tells_no_more(tmp_path: Path) -> None:
    config = toy_config(tmp_path)
    write_toy_cache(config)
    recorder = Recorder()
    pipeline = TrainPipeline(config, task=VideoDomain(config, build=build_toy), callbacks=[recorder, Failing()])
    with pytest.raises(ZeroDivisionError, match="of the user"):
        pipeline.run()
    assert recorder.notes == [("step", 1), ("step", 2)]


@pytest.mark.parametrize(("method", "last"), [("on_step", 1), ("on_validation", 4), ("on_checkpoint", 3)])
def test_a_callback_stops_a_run_which_then_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, method: str, last: int
) -> None:
    """After the step of `on_step`, else after the next."""
    monkeypatch.setattr(logging.getLogger("mmspeed"), "propagate", True)
    config = toy_config(tmp_path, "checkpoint.every=2", "checkpoint.asynchronous=false")
    write_toy_cache(config)
    stops, recorder = TrainCallback(), Ends()
    setattr(stops, method, lambda event: event.stop())
    with caplog.at_level(logging.INFO, logger="mmspeed"):
        result = TrainPipeline(config, task=VideoDomain(config, build=build_toy), callbacks=[stops, recorder]).run()
    assert (result.step, result.finished, recorder.events) == (last, False, [(last, False)])
    assert (config.run_dir / "checkpoints" / f"step-{last:08d}" / "meta.json").is_file()
    assert "a callback stops the run" in caplog.text
    train_toy(str(tmp_path), ("checkpoint.every=2", "checkpoint.asynchronous=false"))
    assert len(losses(config)) == 6


def test_callbacks_are_of_their_class(tmp_path: Path) -> None:
    config = toy_config(tmp_path)
    with pytest.raises(TypeError, match="derived from TrainCallback"):
        TrainPipeline(config, callbacks=[print])  # type: ignore[list-item]
