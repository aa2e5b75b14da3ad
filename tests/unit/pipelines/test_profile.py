"""Measured batches: the limits of a measurement, its file, and a training that uses it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from mmspeed.bench.buckets import parse_memory
from mmspeed.cli.app import run
from mmspeed.config import Config, dump_config
from mmspeed.config.training import BatchingConfig, TrainConfig
from mmspeed.data.sampling.batch_sizes import MEASURED_NAME, Measured, Measurement, SampleCosts, make_batching
from mmspeed.device import Device, is_out_of_memory
from mmspeed.errors import UserError
from mmspeed.log import read_metrics
from mmspeed.memory import peak_bytes
from mmspeed.mesh import process_group
from mmspeed.pipelines import TrainPipeline
from mmspeed.pipelines.domains.video.data import VideoData
from mmspeed.pipelines.domains.video.domain import VideoDomain
from mmspeed.pipelines.run.measured import load_measured
from mmspeed.pipelines.tasks import Task, make_task
from mmspeed.pipelines.tuning.profile import (
    BucketMeasurements,
    BucketProfile,
    ProfileLimits,
    memory_limit,
    next_batch,
    profile,
)
from mmspeed.pipelines.tuning.synthetic_step import SyntheticStep
from mmspeed.protocols import RunPlace
from mmspeed.shapes import Bucket
from tests.support.runs import small_config

SHORT, LONG = Bucket(1, 32, 48), Bucket(5, 32, 48)
BUCKETS = "data.buckets=[{frames: 5, height: 32, width: 48}, {frames: 1, height: 32, width: 48}]"
CPU = Device("cpu", 0)
Memory = Callable[[int], int]

memories = st.builds(
    lambda state, flat, fixed, each: (state, lambda n: state + max(flat, fixed + n * each)),
    state=st.integers(0, 10**6),
    flat=st.integers(0, 10**6),  # of the update: does not grow with the batch
    fixed=st.integers(0, 10**5),
    each=st.integers(1, 10**5),
)


def go(
    memory: Memory, limits: ProfileLimits, state: int, careful: bool, breaks_at: int | None = None
) -> BucketMeasurements:
    """All that `next_batch` asks for, on a machine whose memory is a function."""
    tried = BucketMeasurements()
    for _ in range(200):
        batch = next_batch(tried, limits, state, careful)
        if batch is None:
            return tried
        assert batch > (tried.rows[-1].batch if tried.rows else 0)
        if breaks_at is not None and batch >= breaks_at:
            assert tried.too_large is None or batch < tried.too_large
            tried = replace(tried, too_large=batch)
        else:
            tried = replace(tried, rows=(*tried.rows, Measurement(LONG, batch, 1.0, memory(batch))))
    raise AssertionError("it does not end")


def fits(memory: Memory, limit: int) -> int:
    """The most samples in the limit, by bisection."""
    low, high = 0, 10**8
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if memory(middle) <= limit else (low, middle - 1)
    return low


@given(memories, st.integers(10**4, 10**8))
def test_a_careful_measurement_is_never_over_the_limit(profiled: tuple[int, Memory], limit: int) -> None:
    state, memory = profiled
    rows = go(memory, ProfileLimits(limit), state, careful=True).rows
    assert all(row.peak_bytes <= limit for row in rows if row.batch > 1)


@given(memories, st.integers(10**4, 10**8), st.booleans())
def test_the_most_is_in_the_limit_and_near_it(profiled: tuple[int, Memory], limit: int, careful: bool) -> None:
    state, memory = profiled
    tried = go(memory, ProfileLimits(limit), state, careful)
    most = Measured(tried.rows, limit).most(LONG)
    best, last = fits(memory, limit), max((r.batch for r in tried.rows if r.peak_bytes <= limit), default=0)
    assert (most == 0) == (best == 0)
    assert last <= most < 2 * max(1, last) or most == last
    assert most <= best
    if best >= 1:
        assert 2 * most >= best or memory(most) - state >= 0.5 * (limit - state)


def test_slow_steps_and_wishes_end_a_measurement() -> None:
    row = Measurement(LONG, 4, 2.0, 100)
    assert next_batch(BucketMeasurements((row,)), ProfileLimits(10**6, seconds=1.0), 0, False) is None
    assert next_batch(BucketMeasurements((row,)), ProfileLimits(10**6, seconds=3.0), 0, False) == 8
    assert next_batch(BucketMeasurements((row,)), ProfileLimits(10**6, most=6), 0, False) == 6
    assert next_batch(BucketMeasurements((row,)), ProfileLimits(10**6, most=4), 0, False) is None


def test_limits_of_memory() -> None:
    assert memory_limit(CPU, 5e9) == 5_000_000_000
    assert memory_limit(CPU, 0.5) == int(0.5 * CPU.total_memory_bytes())
    assert 0 < memory_limit(CPU, None) < CPU.total_memory_bytes()
    assert parse_memory("80%") == parse_memory("0.8") == 0.8
    assert parse_memory("2GB") == 2e9 and parse_memory("2 GiB") == 2**31 and parse_memory("1000000") == 1e6
    for wrong in ("", "much", "120%", "3 elephants", "0"):
        with pytest.raises(UserError, match="--memory-limit"):
            parse_memory(wrong)


def rows(bucket: Bucket, *points: tuple[int, float, int]) -> tuple[Measurement, ...]:
    return tuple(Measurement(bucket, *point) for point in points)


def test_most_lies_between_what_fits_and_what_does_not() -> None:
    line = rows(LONG, (1, 1, 100), (2, 1, 200), (4, 1, 400))
    assert Measured(line, 1000).most(LONG) == 7  # less than twice the largest
    assert Measured(line, 550).most(LONG) == 5
    assert Measured(line[1:], 550).most(LONG) == 4  # two points are no line: one may be hidden by what does not grow
    assert Measured(rows(LONG, (1, 1, 190), (2, 1, 200), (4, 1, 400)), 550).most(LONG) == 4
    assert Measured(rows(LONG, (4, 1, 400), (8, 1, 800)), 650).most(LONG) == 6
    assert Measured(rows(LONG, (1, 1, 700)), 650).most(LONG) == 0
    assert Measured(rows(LONG, (4, 1, 400)), 1000, {}, {LONG: 8}).most(LONG) == 4


def test_a_bucket_that_does_not_fit_is_refused() -> None:
    costs = SampleCosts(lambda bucket: bucket.frames, lambda bucket: bucket.frames)
    measured = Measured(rows(SHORT, (1, 1, 10)), 100, {}, {LONG: 1})
    by_time = BatchingConfig(by="time")
    assert make_batching(by_time, TrainConfig(), [SHORT], costs, 1, measured=measured).sizes == {SHORT: 1}
    with pytest.raises(UserError, match="5x32x48 does not fit the device's memory even with one sample"):
        make_batching(by_time, TrainConfig(), [SHORT, LONG], costs, 1, measured=measured)


def test_damaged_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / MEASURED_NAME
    for text in ("", "[]", '{"format": 1}', '{"format": 9}', '{"format": 1, "rows": [], "too_large": {}}'):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(UserError, match=r"buckets.json is not as .*: run it again"):
            Measured.load(path)


def test_memory_of_the_cpu_is_counted_to_the_byte() -> None:
    def work() -> None:
        kept = torch.empty(1000)
        for _ in range(3):
            torch.empty(5000)
        del kept
        torch.empty(250)

    assert peak_bytes(CPU, 0, work) == 4 * 6000
    assert peak_bytes(CPU, 77, lambda: None) == 77


def test_which_errors_say_that_memory_is_full() -> None:
    assert is_out_of_memory(MemoryError()) and is_out_of_memory(torch.OutOfMemoryError("x"))
    assert is_out_of_memory(RuntimeError("NPU out of memory. Tried to allocate 2 GiB"))
    assert not is_out_of_memory(RuntimeError("shapes do not match")) and not is_out_of_memory(
        ValueError("out of memory")
    )


def task_of(config: Config) -> Task:
    task = make_task(config)
    task.domain.open_without_data()
    return task


def trial(config: Config, bucket: Bucket, batch: int) -> tuple[int, int, int]:
    """(state, peak, peak once more) of a step."""
    with process_group(CPU):
        steps = SyntheticStep(config, task_of(config), CPU)
        steps.run(bucket, batch)
        return steps.state_bytes, steps.peak(bucket, batch), steps.peak(bucket, batch)


def test_a_step_takes_weights_gradients_moments_average_and_activations(tmp_path: Path) -> None:
    config = small_config(tmp_path, BUCKETS)
    with process_group(CPU):
        weights = 4 * sum(p.numel() for p in SyntheticStep(config, task_of(config), CPU).model.parameters())
    state, peak, again = trial(config, LONG, 8)
    assert 4 * weights <= state < 4.01 * weights  # weights, two moments (and step counts), the average
    assert peak == again > state + weights
    without = trial(small_config(tmp_path, BUCKETS, "train.ema_decay=null"), LONG, 8)
    assert state - without[0] == weights
    recomputed = trial(small_config(tmp_path, BUCKETS, "memory.activation_policy={block: recompute}"), LONG, 8)
    assert recomputed[1] < peak


@pytest.fixture(scope="module")
def profiled(home: Path) -> BucketProfile:
    return profile(small_config(home, BUCKETS, "name=timed"), most=4, repeats=1)


def test_measurements_are_written_and_read(profiled: BucketProfile) -> None:
    assert not dist.is_initialized()
    measured = Measured.load(profiled.path)
    assert measured == profiled.measured and profiled.path.name == MEASURED_NAME
    assert profiled.path.parent.name == "timed" and [p.name for p in profiled.path.parent.iterdir()] == [MEASURED_NAME]
    assert {(row.bucket, row.batch) for row in measured.rows} == {(b, n) for b in (SHORT, LONG) for n in (1, 2, 4)}
    assert json.loads(profiled.path.read_text(encoding="utf-8"))["setting"]["model.width"] == 64
    for bucket in (SHORT, LONG):
        peaks = [row.peak_bytes for row in measured.rows if row.bucket == bucket]
        assert peaks == sorted(peaks) and peaks[0] > profiled.state_bytes
        assert 0 < measured.cost(bucket).of(1) < measured.cost(bucket).of(4) and measured.most(bucket) >= 4
    # a longer sample takes more
    assert max(r.peak_bytes for r in measured.rows if r.bucket == LONG) > max(
        r.peak_bytes for r in measured.rows if r.bucket == SHORT
    )


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = small_config(tmp_path, BUCKETS)
    file = tmp_path / "small.yaml"
    file.write_text(dump_config(config), encoding="utf-8")
    options = ["--most", "2", "--repeats", "1", "--memory-limit", "1GB"]
    assert run(["bench", "buckets", str(file), "memory.activation_policy={block: recompute}", *options]) == 0
    assert "batching: {by: time, budget: " in capsys.readouterr().out
    measured = Measured.load(config.run_dir / MEASURED_NAME)
    assert measured.limit_bytes == 10**9 and measured.setting["memory.activation_policy"] == {"block": "recompute"}
    assert run(["bench", "buckets", str(file), "--memory-limit", "much"]) == 1
    assert "--memory-limit much: use bytes" in capsys.readouterr().err


class KeepsData(VideoDomain):
    """The video task, which keeps the data that a run was given."""

    def data(self, place: RunPlace) -> VideoData:
        self.data_of_run = super().data(place)
        return self.data_of_run


def test_training_by_time_uses_them(home: Path, profiled: BucketProfile) -> None:
    overrides = ("name=timed", "batching.by=time", "train.batch_size=null", "train.steps=2")
    config = small_config(home, *overrides)
    task = KeepsData(config)
    assert TrainPipeline(config, task=task).run().finished
    most = profiled.measured.most(LONG)
    assert task.data_of_run.sampler.batching.sizes == {LONG: most}
    steps = [row for row in read_metrics(profiled.path.parent / "metrics.jsonl") if row["kind"] == "train"]
    assert max(row["samples"] for row in steps) == min(most, 7)  # the epoch has 7, so one of its steps is full
    cost = profiled.measured.cost(LONG)
    budget = (cost.of(2) + cost.of(3)) / 2
    config = small_config(home, *overrides, f"batching.budget={budget}", "train.steps=3")
    task = KeepsData(config)
    assert TrainPipeline(config, task=task).run().finished and task.data_of_run.sampler.batching.sizes == {LONG: 2}


def test_without_measurements_there_is_no_training_by_time(home: Path) -> None:
    with pytest.raises(
        UserError, match=r"needs .*absent/buckets.json, which does not exist: run `mmspeed bench buckets"
    ):
        TrainPipeline(small_config(home, "name=absent", "batching.by=time", "train.batch_size=null")).run()


def test_what_is_said_of_measurements(profiled: BucketProfile) -> None:
    setting = dict(profiled.measured.setting)
    assert load_measured(profiled.path, setting) == (profiled.measured, None)
    assert load_measured(profiled.path, setting | {"torch": "3.0"})[1] is None
    reason = load_measured(profiled.path, setting | {"devices": 8, "parallel.strategy": "fsdp"})[1]
    assert reason is not None and "parallel.strategy (none, here fsdp)" in reason and "devices (1, here 8)" in reason
    for name, value in {
        "device.dtype": "bfloat16",
        "memory.activation_policy": {"block": "recompute"},
        "train.compile": True,
    }.items():
        with pytest.raises(UserError, match=name):
            load_measured(profiled.path, setting | {name: value})


def test_a_model_that_does_not_fit(tmp_path: Path) -> None:
    config = small_config(tmp_path, BUCKETS)
    with pytest.raises(UserError, match=r"not one sample of any bucket fits in 100.0 kB, of which"):
        profile(config, memory=1e5, most=2, repeats=1)  # not even the weights
    state = trial(config, SHORT, 1)[0]
    with pytest.raises(UserError, match=r"not one sample of any bucket fits in"):
        profile(config, memory=1.25 * state + 1000, most=2, repeats=1)
    assert not (config.run_dir / MEASURED_NAME).exists()
