"""The record of attempts: which failure ends a run, and what is left on disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from mmspeed.loop.watch.run_watch import AttemptRecord
from mmspeed.loop.watch.watchdog import Place
from mmspeed.pipelines.run.run_folder import RunFolder
from mmspeed.protocols import StepData


@dataclass(frozen=True)
class Named:
    """An item by its source."""

    source: str


def data(*sources: str) -> StepData:
    return StepData({}, [], [Named(source) for source in sources], {})  # type: ignore[arg-type, list-item]


def fail_at(path: Path, step: int, begin: int = 0, launch: str = "a") -> AttemptRecord:
    record = AttemptRecord(path, launch)
    assert record.begin(begin) is None or not record.last or not record.last.again
    for number in range(begin + 1, step + 1):
        record.at(number, "step", data(f"{number}.mp4", f"{number}b.mp4"))
    return record


def test_the_same_step_twice_ends_the_run_with_its_samples(tmp_path: Path) -> None:
    path = tmp_path / "attempt.json"
    fail_at(path, 7)
    second = fail_at(path, 7, begin=5)
    assert second.last is not None and second.last.place == Place(7, "step") and second.last.attempt == 0
    third = AttemptRecord(path, "a")
    last = third.begin(5)
    assert last is not None and last.again
    assert last.sentence().startswith(
        "step 7 failed in two attempts in a row, so the run ends; its samples: 7.mp4, 7b.mp4. "
    )
    assert not path.exists(), "the same command tries again"
    assert AttemptRecord(path, "a").begin(5) is None


def test_what_a_link_in_its_place_names_is_left_alone(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"\xff precious")
    for name in ("attempt.json", ".lock"):
        (tmp_path / name).symlink_to(other)
    with RunFolder(tmp_path).locked():
        fail_at(tmp_path / "attempt.json", 7)
    assert other.read_bytes() == b"\xff precious"


def test_other_steps_and_other_launches_do_not(tmp_path: Path) -> None:
    path = tmp_path / "attempt.json"
    fail_at(path, 7)
    fail_at(path, 9, begin=5)
    last = AttemptRecord(path, "a").begin(5)
    assert last is not None and not last.again and last.place.step == 9 and last.attempt == 1
    fail_at(path, 9, begin=5)
    assert AttemptRecord(path, "another").begin(5) is None


def test_a_checkpoint_that_fails_twice_is_named(tmp_path: Path) -> None:
    path = tmp_path / "attempt.json"
    for _ in range(2):
        record = AttemptRecord(path, "a")
        record.begin(0)
        record.at(5, "checkpoint")
    last = AttemptRecord(path, "a").begin(0)
    assert last is not None and last.again and "checkpoint at step 5 failed in two attempts" in last.sentence()


@pytest.mark.parametrize("text", ['{"launch": "a", "atte', '{"launch": "a", "before": 3}'])
def test_a_record_that_was_cut_off_says_nothing(tmp_path: Path, text: str) -> None:
    path = tmp_path / "attempt.json"
    path.write_text(text)
    assert AttemptRecord(path, "a").begin(0) is None


def test_runs_that_nobody_restarts_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "attempt.json"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    for restarts, rank in (("0", 0), ("3", 1)):
        monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", restarts)
        record = AttemptRecord.of_launcher(path, rank)
        record.begin(0)
        record.at(1, "step")
        record.end()
        assert not path.exists()
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    AttemptRecord.of_launcher(path, 0).begin(0)
    assert path.exists()
