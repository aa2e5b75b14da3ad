"""The times of a rank's step that its memory is planned by."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mmspeed.parallel.stages import cut_into_stages
from mmspeed.pipelines.tuning.memory_stages import RankEnds, flights
from mmspeed.plan.schedules import Pipeline
from mmspeed.plan.simulate import reckoned
from mmspeed.protocols import blocks_of
from tests.ranks.test_memory_choice import opened, with_experts


@pytest.mark.parametrize("pipeline", [Pipeline(4), Pipeline(4, 2), Pipeline(4, 2, 1), Pipeline(2, 2, schedule="zbv")])
def test_as_many_micro_batches_fly_as_in_the_simulated_step(pipeline: Pipeline) -> None:
    most = reckoned(pipeline, 8).in_flight
    for rank in range(pipeline.ranks):
        places = {stage: range(place, place + 1) for place, stage in enumerate(pipeline.own(rank))}
        found = flights(pipeline, 8, rank, places, RankEnds({}, 0, 0, batch=100, message=1))
        assert max(sum(flight.blocks) for flight in found) == most[rank]
        read = {flight.beside // 100 for flight in found}
        assert max(read) <= most[rank] + pipeline.ranks and min(read) == 0
        assert {flight.at.start for flight in found if flight.sums} == set(range(pipeline.virtual))


def test_overlap_keeps_half_of_the_weights_that_dualpipe_does(tmp_path: Path) -> None:
    """DualPipe's rank r has the stages r and P - 1 - r of P. Blocks are halved on each rank, embedding and head in all: their ranks differ."""
    task = opened(with_experts(str(tmp_path), ("model.num_hidden_layers=8",)))

    def held(pipeline: Pipeline, rank: int) -> tuple[int, int]:
        with torch.device("meta"):
            model = task.build()["model"]
        cut_into_stages(model, None, pipeline, rank)
        of_blocks = sum(weight.numel() for _, block in blocks_of(model) for weight in block.parameters())
        return of_blocks, sum(weight.numel() for weight in model.parameters()) - of_blocks

    ours = [held(Pipeline(4, 2, schedule="overlap"), rank) for rank in range(4)]
    once = [held(Pipeline(4), rank) for rank in range(4)]
    blocks, ends = zip(*ours, strict=True)
    assert list(blocks) == [(of[0] + other[0]) / 2 for of, other in zip(once, reversed(once), strict=True)]
    assert ends == (512 * 256, 0, 0, 512 * 256 + 256)  # of the embedding, of the last norm and the head
    assert [of[1] + other[1] for of, other in zip(once, reversed(once), strict=True)] == [sum(ends), 0, 0, sum(ends)]
