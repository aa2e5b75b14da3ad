"""The schedule that `mmspeed check` tells: what is forecast is what the order does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mmspeed.cli.app import numbers_of, run
from mmspeed.config import Bucket, Config, dump_config
from mmspeed.data.sampling.assignment import BucketBatch, assign_slots
from mmspeed.data.sampling.batch_sizes import SampleCosts, make_batching, make_stages
from mmspeed.data.sampling.order import Order
from mmspeed.errors import UserError
from mmspeed.preprocess import check
from mmspeed.preprocess.records.statistics import DataStatistics
from mmspeed.preprocess.report.costs import estimate
from mmspeed.preprocess.report.schedule import forecast_schedule, usual_worlds
from mmspeed.shapes import Strides
from tests.support.runs import small_config
from tests.unit.preprocess.test_page import Reader

IMAGE, SHORT, LONG = Bucket(1, 32, 48), Bucket(5, 32, 48), Bucket(9, 32, 48)
COSTS = SampleCosts(tokens=lambda b: 6 * (1 + b.frames // 4), flops=lambda b: 1e12 * (1 + b.frames // 4))
BUCKETS = "data.buckets=[{frames: 1, height: 32, width: 48}, {frames: 5, height: 32, width: 48}, {frames: 9, height: 32, width: 48}]"
FLOPS = ("train.batch_size=null", "batching.by=flops")


def config_of(folder: Path, *overrides: str) -> Config:
    return small_config(folder, BUCKETS, *overrides)


def two_sets(folder: Path, *overrides: str) -> Config:
    """Data sets `a` and `b`."""
    return config_of(
        folder, "data.sources=[{path: a, name: a, weight: 3}, {path: b, name: b, weight: 1}]", *FLOPS, *overrides
    )


def groups_of(*counts: int, name: str = "clips.jsonl") -> dict[tuple[Bucket, str], int]:
    return {(bucket, name): count for bucket, count in zip((IMAGE, SHORT, LONG), counts, strict=False)}


def statistics_of(groups: dict[tuple[Bucket, str], int]) -> DataStatistics:
    numbers = DataStatistics()
    for (bucket, dataset), count in groups.items():
        for _ in range(count):
            numbers.add_sample(bucket, "train", dataset)
    return numbers


def replayed(config: Config, groups: dict[tuple[Bucket, str], int], world: int) -> list[dict[str, float]]:
    """The work of each step of the training, from the order, step by step."""
    places = {group: np.arange(count) for group, count in groups.items() if count}
    batching = make_batching(config.batching, config.train, {b for b, _ in places}, COSTS, world)
    order = Order(places, batching, config.seed, make_stages(config.data, config.curriculum))
    steps = []
    for step in range(config.train.steps):
        pieces = order.pieces(step)
        lots = tuple(BucketBatch(count, batching.cost(b), batching.at_a_time(b)) for b, _, count in pieces)
        rows = [
            [0.0 if cell is None else lots[cell.lot].cost.of(cell.size) for cell in row]
            for row in assign_slots(lots, world)
        ]
        steps.append(
            {
                "stage": order.locate(step).stage,
                "samples": sum(count for _, _, count in pieces),
                "tokens": sum(count * COSTS.tokens(b) for b, _, count in pieces),
                "flops": sum(count * COSTS.flops(b) for b, _, count in pieces),
                "idle": sum(cost == 0 for row in rows for cost in row),
                "lockstep": sum(map(max, rows)) / (sum(map(sum, rows)) / world),
                "window": max(map(sum, zip(*rows, strict=True))) / (sum(map(sum, rows)) / world),
            }
        )
    return steps


STAGES = "curriculum=[{steps: 3, max_frames: 1}, {steps: 7, max_frames: 5, weights: {a: 1, b: 1}}, {}]"


@pytest.mark.parametrize("world", [1, 3, 4])
@pytest.mark.parametrize("mix", ["same", "window"])
def test_what_is_forecast_is_what_training_does(tmp_path: Path, world: int, mix: str) -> None:
    groups = groups_of(40, 11, 9, name="a") | groups_of(6, 0, 5, name="b")
    config = two_sets(tmp_path, STAGES, "train.steps=25", "batching.accumulate=2", f"batching.mix={mix}")
    schedule = forecast_schedule(config, groups, COSTS, [world])
    steps = replayed(config, groups, world)
    for number, (stage,) in enumerate(schedule.stages):
        own = [step for step in steps if step["stage"] == number]
        assert stage.end - stage.begin == len(own) and stage.epoch.unmet == 0
        assert stage.flops == pytest.approx(sum(step["flops"] for step in own))
        assert stage.epoch.samples == stage.order.uses(number)
        if len(own) >= stage.epoch.steps:
            first = own[: stage.epoch.steps]
            assert stage.epoch.idle == sum(step["idle"] for step in first)
            assert stage.epoch.samples == sum(step["samples"] for step in first)
            assert stage.epoch.tokens == sum(step["tokens"] for step in first)
            assert stage.imbalance == pytest.approx([step["lockstep"] for step in first])
    assert schedule.epochs == [sum(stage.epochs for (stage,) in schedule.stages)]


def test_ddp_waits_once_a_step_and_sharded_ranks_in_every_micro_batch(tmp_path: Path) -> None:
    groups = groups_of(21, 15, 18)
    options = (*FLOPS, "train.steps=40", "batching.accumulate=3", "batching.mix=window", "batching.budget=5")
    results = {}
    for strategy in ("fsdp", "ddp"):
        config = config_of(tmp_path, *options, f"parallel.strategy={strategy}")
        ((stage,),) = forecast_schedule(config, groups, COSTS, [3]).stages
        first = replayed(config, groups, 3)[: stage.epoch.steps]
        results[strategy] = [step["lockstep" if strategy == "fsdp" else "window"] for step in first]
        assert stage.imbalance == pytest.approx(results[strategy])
    assert np.mean(results["ddp"]) < np.mean(results["fsdp"])


def test_a_line_tells_the_share_of_each_data_set(tmp_path: Path) -> None:
    groups = {(SHORT, "a"): 20, (SHORT, "b"): 80}
    ((_, notes),) = forecast_schedule(two_sets(tmp_path), groups, COSTS, [1]).parts()
    assert notes[1:] == [
        "data set a: 75.00% of an epoch's uses (75.00% asked)",
        "data set b: 25.00% of an epoch's uses (25.00% asked)",
    ]


def test_a_line_tells_the_batches_of_each_bucket(tmp_path: Path) -> None:
    """A step has 4 device batches, by 2 TFLOP: of 2 images, or a video; the images are fewer than a step holds."""
    config = config_of(tmp_path, *FLOPS, "batching.slots=4", "batching.budget=2")
    ((_, notes),) = forecast_schedule(config, groups_of(6, 30), COSTS, [1, 8]).parts()
    assert notes == [
        "bucket 1x32x48: 6 uses, 9.1% of the cost, 16.7% of the gradients; 6 a full step, 2 / 1 a device at a time",
        "bucket 5x32x48: 30 uses, 90.9% of the cost, 83.3% of the gradients; 4 a full step, 1 a device at a time",
    ]


def test_hints_name_the_setting(tmp_path: Path) -> None:
    def warning(config: Config, groups: dict[tuple[Bucket, str], int], *worlds: int) -> str:
        return "\n".join(forecast_schedule(config, groups, COSTS, worlds).hints())

    plain = config_of(tmp_path)
    assert warning(plain, groups_of(0, 30), 1, 3) == ""
    assert "train.batch_size 3 cannot be divided evenly by 2 and 8 devices (some compute nothing at all)" in warning(
        plain, groups_of(0, 30), 1, 2, 8
    )
    flops = config_of(tmp_path, *FLOPS)
    few = warning(flops, groups_of(0, 3, 2), 1, 8)
    assert "an epoch has 5 uses of samples, fewer than 8 devices" in few and "data.repeats" in few and "wait" not in few
    assert "batching.slots 4 cannot be divided evenly by 3 devices;" in warning(
        config_of(tmp_path, *FLOPS, "batching.slots=4"), groups_of(0, 30), 2, 3
    )
    wait = warning(config_of(tmp_path, *FLOPS, "batching.mix=window"), groups_of(9, 9, 9), 1, 4)
    assert "on 4 devices the busiest computes up to 1." in wait and "batching.mix: same" in wait
    over = warning(config_of(tmp_path, *FLOPS, "batching.budget=2.5"), groups_of(9, 9, 9), 1)
    assert (
        "one sample of bucket 9x32x48 costs 3 TFLOP, more than batching.budget (2.5)" in over and "5x32x48" not in over
    )


def test_a_stage_without_samples_and_missing_measurements_are_problems_in_one_line(tmp_path: Path) -> None:
    numbers = statistics_of(groups_of(0, 30))
    costs, problems = estimate(
        config_of(tmp_path, "curriculum=[{steps: 2, max_frames: 1}, {}]"), numbers, 3, 4, Strides(4, 8)
    )
    assert costs is not None and costs.schedule is None and costs.seconds(1e12) == ()
    (problem,) = problems
    assert "stage 1 has no training sample" in problem and "\n" not in problem
    config = small_config(tmp_path, "train.batch_size=null", "batching.by=time")
    report = check(config)
    (problem,) = report.problems
    assert problem.startswith("the schedule is not known: batching.by: time needs") and "bench buckets" in problem
    assert any(line.startswith("cache latents: 0 present, 8 missing") for line in report.lines())
    assert report.page is not None and "Not ready: 1 problem" in Reader(report.page.read_text(encoding="utf-8")).text


def test_the_command_shows_the_numbers_of_devices_it_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(dump_config(small_config(tmp_path)))
    assert run(["check", str(file), "--ranks", "4, 1", "--schedule"]) == 0
    out = capsys.readouterr().out
    assert "schedule: an epoch has 7 uses of 7 samples" in out and "by 4 devices (some compute nothing at all)" in out
    rows = [line.split() for line in out.splitlines() if line.startswith("    ")]
    assert ["1", "2.00", "3", "2.3"] in [row[:4] for row in rows] and ["4", "2.00", "3", "2.3"] in [
        row[:4] for row in rows
    ]
    assert "training on 1 device: 6 steps, 2 epochs of 7 training samples" in out
    assert run(["check", str(file)]) == 0
    out = capsys.readouterr().out
    assert "schedule: an epoch has 7 uses of 7 samples" in out and "imbalance" not in out
    assert run(["check", str(file), "--schedule"]) == 0
    here = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("    ")]
    assert ["1", "2.00", "3", "2.3"] in [row[:4] for row in here] and ["8"] not in [row[:1] for row in here]
    assert usual_worlds(small_config(tmp_path, "parallel.ulysses=2")) == (2,), "as many as the layout needs"
    assert run(["check", str(file), "--ranks", "4,none"]) == 1
    assert "--ranks is '4,none'" in capsys.readouterr().err
    assert numbers_of("64,8,8") == [8, 64]
    for wrong in ("0", "", "8,", "-1", "1e3", "1000000"):
        with pytest.raises(UserError, match="--ranks"):
            numbers_of(wrong)


def test_the_time_is_that_of_the_busiest(tmp_path: Path) -> None:
    costs, _ = estimate(small_config(tmp_path), statistics_of(groups_of(0, 30)), 3, 4, Strides(4, 8), [1, 6])
    assert costs is not None
    one, six = costs.seconds(1e12)
    assert six == pytest.approx(one / 3), "3 of the 6 have nothing to do: a step of 3 samples"


def test_a_share_that_comes_out_another_is_reported(tmp_path: Path) -> None:
    """A data set of one clip in each bucket is met in every epoch, however small its share; a stage without the other is no news."""
    config = two_sets(tmp_path, "data.sources.0.weight=1000", "data.sources.1.weight=1")
    few = forecast_schedule(config, groups_of(9, 9, 9, name="a") | groups_of(1, 1, 1, name="b"), COSTS, [1])
    assert any("data set b makes 9.09%" in hint and "not 0.10%" in hint for hint in few.hints())
    alone = forecast_schedule(config, groups_of(9, 9, 9, name="b"), COSTS, [1])
    assert not any("data set b" in hint for hint in alone.hints())
