"""Measured steps of pipelines: those of the simulator come out as they went in, and clocks that differ are set by messages."""

from __future__ import annotations

import json
import random

import pytest

from mmspeed.plan.measured_pipeline import MeasuredNode, MeasuredStep, Pass, measured_nodes, measured_step, spans_of
from mmspeed.plan.overlap import Node, StageNodes
from mmspeed.plan.schedules import Action, Pair, Pipeline
from mmspeed.plan.simulate import Simulated, simulate


def simulated(pipeline: Pipeline, batches: int, seed: int, message: float) -> Simulated:
    drawn, took = random.Random(seed), dict[Action, float]()
    for action in sorted((p for row in pipeline.table(batches) for e in row for p in e.parts), key=str):
        took[action] = drawn.uniform(0.5, 1.5)
    return simulate(pipeline.table(batches), pipeline, took.__getitem__, message)


def measured(step: Simulated, pipeline: Pipeline, batches: int, late: list[float], own: float = 0.0) -> MeasuredStep:
    """As ranks measure it that begin a step so late, and whose passes each open with so much work of their own."""
    ranks = []
    for row, shift in zip(step.spans, late, strict=True):
        passes = [
            Pass(part.kind, part.stage, part.batch, begin + own - shift, end - shift, own)
            for entry, begin, end in row
            for part in entry.parts
        ]
        ranks.append((passes, step.step - shift))
    return measured_step(ranks, pipeline, batches)


PIPELINES = [
    Pipeline(2), Pipeline(2, 2), Pipeline(4, 2, more=1), Pipeline(1, 3), Pipeline(4, schedule="zb_h1"), Pipeline(2, 2, schedule="zbv"),
    Pipeline(2, 2, schedule="dualpipe_v"), Pipeline(4, 2, more=1, schedule="overlap"),
]  # fmt: skip


@pytest.mark.parametrize("pipeline", PIPELINES, ids=str)
@pytest.mark.parametrize("batches", [1, 3, 8])
@pytest.mark.parametrize("message", [0.0, 0.4])
def test_a_simulated_step_is_measured_as_it_is(pipeline: Pipeline, batches: int, message: float) -> None:
    step, free = (simulated(pipeline, batches, 1, each) for each in (message, 0.0))
    own = 0.0 if pipeline.overlaps else 0.1  # pairs: of both passes
    found = measured(step, pipeline, batches, [0.0] * pipeline.ranks, own)
    assert found.step.step == pytest.approx(step.step)
    assert found.exposed == {"messages": pytest.approx(step.step - free.step, abs=1e-9)}
    works = [own * len(row) for row in step.spans]
    assert found.waits["own"] == pytest.approx(works)
    assert found.step.busy == pytest.approx([busy - work for busy, work in zip(step.busy, works, strict=True)])
    for rank, busy in enumerate(found.step.busy):
        assert busy + sum(of[rank] for of in found.waits.values()) == pytest.approx(step.step)
    assert found.waits["end"] == pytest.approx([step.step - row[-1][2] for row in step.spans])
    assert (sum(found.waits["activations"]) > 0) is (sum(found.waits["gradients"]) > 0) is (pipeline.ranks > 1)


def test_waits_are_of_what_a_pass_needs() -> None:
    """1F1B of two equal stages: the last rank waits for the first activations, the first one for both gradients."""
    pipeline = Pipeline(2)
    step = simulate(pipeline.table(2), pipeline, lambda action: 2.0 if action.kind == "backward" else 1.0)
    waits = measured(step, pipeline, 2, [0.0, 0.0]).waits
    assert waits == {"activations": [0, 1], "gradients": [3, 0], "own": [0, 0], "end": [0, 2]}


def test_clocks_are_moved_as_far_as_messages_say() -> None:
    pipeline, late = Pipeline(4, 2), [0.3, 0.0, 2.0, 1.0]
    step = simulated(pipeline, 8, 2, 0.01)
    found = measured(step, pipeline, 8, late)
    ends = {entry.parts[0]: end for row in found.step.spans for entry, _, end in row}
    for row in found.step.spans:
        for entry, begin, _ in row:
            (part,) = entry.parts
            if part.kind == "forward" and part.stage:
                assert begin >= ends[Action("forward", part.stage - 1, part.batch)] - 1e-9
    assert found.step.busy == pytest.approx(step.busy)
    assert found.step.step == pytest.approx(step.step, rel=0.05)


def test_nodes_come_from_passes_by_themselves_and_weights_from_where_they_fill() -> None:
    """Exchanges of pairs are hidden, so that their waits say nothing; an exchange that came while it was filled is at most as long as a forward one."""
    pipeline, experts = Pipeline(1, 2, schedule="overlap"), "experts"
    passes = []
    for action in (part for row in pipeline.table(4) for entry in row for part in entry.parts):
        alone = action not in {
            part for row in pipeline.table(4) for entry in row if isinstance(entry, Pair) for part in entry.parts
        }
        waited = 0.3 if alone else 0.0
        nodes = [MeasuredNode(1.0, 0.0, waited, experts), MeasuredNode(0.5)]
        if action.kind == "backward":
            nodes = [
                MeasuredNode(0.1, 0.4, 0.0, experts),
                MeasuredNode(1.0, 0.2, waited / 3, experts),
                MeasuredNode(2.0),
            ]
        passes.append(Pass(action.kind, action.stage, action.batch, 0.0, 1.0, 0.0, nodes))
    found = measured_nodes(passes, pipeline.table(4))
    back = (Node(0.1, 0.3, 0.0), Node(1.0, 0.3, 0.2), Node(2.0, 0.0, 0.4))
    assert found == {stage: StageNodes((Node(1.0, 0.3), Node(0.5)), back) for stage in (0, 1)}
    assert measured_nodes([each for each in passes if each.kind == "forward"], pipeline.table(4)) == {}
    assert [Pass.of(each) for each in json.loads(json.dumps(passes))] == passes


def test_spans_come_back_from_the_file() -> None:
    step = simulated(Pipeline(2, 2), 3, 3, 0.1)
    found = measured(step, Pipeline(2, 2), 3, [0.0, 0.0])
    for row, own in zip(spans_of(found.to_json()), found.step.spans, strict=True):
        assert [entry for entry, _, _ in row] == [entry for entry, _, _ in own]
        assert [time for _, *times in row for time in times] == pytest.approx([t for _, *times in own for t in times])
