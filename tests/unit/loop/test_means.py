"""The means of a row: over its steps, by bucket, and by quarter of the times."""

from __future__ import annotations

import math

import pytest
import torch

from mmspeed.loop.callbacks import StepOutcome
from mmspeed.loop.means import Mean, StepMeans
from mmspeed.loop.runner import RunRecord
from mmspeed.loop.step import StepResult
from mmspeed.protocols import StepData, Term
from mmspeed.shapes import Bucket

VIDEO, IMAGE = Bucket(9, 32, 32), Bucket(1, 32, 32)


def outcome(step: int, parts: dict[Bucket, list[tuple[float, float, float]]], **more: object) -> StepOutcome:
    """A step of micro-batches, a bucket each, of items with (loss, weight, time)."""
    record, items = RunRecord(), [item for each in parts.values() for item in each]
    for bucket, each in parts.items():
        loss_I, weight_I, time_I = torch.tensor(each).T
        record.terms.append({"loss": Term(loss_I, weight_I, time_I=time_I)})
        record.shapes.append(bucket)
    weight = sum(weight for _, weight, _ in items)
    loss = sum(loss * weight for loss, weight, _ in items if weight) / weight
    fields = {"finite": True, "terms": {"loss": loss}, "trained": ("loss",), "record": record} | more
    data = StepData({}, None, [], {bucket: len(each) for bucket, each in parts.items()}, weight=weight)  # type: ignore[arg-type]
    return StepOutcome(step, 0, data, StepResult(loss, 2.0 * step, **fields))  # type: ignore[arg-type]


def same(values: list[float]) -> list[float]:
    """The sum over one rank."""
    return values


def test_a_row_is_the_mean_of_its_items() -> None:
    means = StepMeans(same, window=2)
    means.after_step(outcome(1, {VIDEO: [(1.0, 1.0, 0.1), (2.0, 1.0, 0.3)]}))
    means.after_step(outcome(2, {VIDEO: [(4.0, 1.0, 0.99)], IMAGE: [(0.5, 1.0, 1.0), (math.nan, 0.0, 0.6)]}))
    means.after_step(outcome(3, {IMAGE: [(8.0, 1.0, 0.3)]}))
    row = means.row()
    assert row["steps"] == 3 and row["loss"] == pytest.approx((1 + 2 + 4 + 0.5 + 8) / 5)
    assert row["grad_norm"] == pytest.approx((2 * 2 + 4 * 2 + 6 * 1) / 5)  # a step counts by its weight
    assert row["by_bucket"] == {"1x32x32": 4.25, "9x32x32": pytest.approx(7 / 3)}
    assert row["by_quarter"] == [1.0, 5.0, None, 2.25]  # the filler at 0.6 does not count
    assert "terms" not in row and means.recent == pytest.approx(((4 + 0.5) / 2 + 8) / 2)


def test_the_next_row_begins_again_and_one_step_is_reported_to_the_bit() -> None:
    means, loss = StepMeans(same, window=1), 0.1 + 0.2
    means.after_step(outcome(1, {VIDEO: [(5.0, 3.0, 0.5)]}))
    means.row()
    means.after_step(outcome(2, {IMAGE: [(loss, 0.7, 0.5)]}))
    row = means.row()
    assert row["steps"] == 1 and list(row["by_bucket"]) == ["1x32x32"]
    assert row["grad_norm"] == 4.0
    mean = Mean()
    mean.add(loss, 0.7)
    assert mean.value == loss


def test_steps_that_were_not_finite_do_not_count() -> None:
    means = StepMeans(same, window=4)
    means.after_step(outcome(1, {VIDEO: [(math.nan, 1.0, 0.5)]}, finite=False))
    means.after_step(StepOutcome(2, 0, StepData({}, None, [], {}), None))  # type: ignore[arg-type]
    row = means.row()
    assert row["steps"] == 0 and math.isnan(row["loss"]) and row["by_bucket"] == {} and row["by_quarter"] == []
    means.after_step(outcome(3, {VIDEO: [(2.0, 1.0, 0.5)]}))
    assert means.row()["loss"] == 2.0


def test_ranks_with_other_buckets_add_up_in_one_exchange() -> None:
    parts = [{VIDEO: [(1.0, 1.0, 0.1)]}, {IMAGE: [(3.0, 1.0, 0.9)]}]
    sent: list[list[float]] = []
    for here in parts:
        one = outcome(1, here)
        for bucket in (VIDEO, IMAGE):
            one.data.counts.setdefault(bucket, 1)  # type: ignore[attr-defined]
        means = StepMeans(lambda values: sent.append(values) or values, window=1)  # type: ignore[func-returns-value]
        means.after_step(one)
        means.row()
    assert len(sent) == 2 and len(sent[0]) == len(sent[1])
    total = [first + second for first, second in zip(*sent, strict=True)]
    means = StepMeans(lambda values: total, window=1)
    means.after_step(one)
    row = means.row()
    assert row["by_bucket"] == {"1x32x32": 3.0, "9x32x32": 1.0} and row["by_quarter"] == [1.0, None, None, 3.0]
