"""The times of a rank's step that its memory is planned by."""

from __future__ import annotations

import pytest

from mmspeed.pipelines.tuning.memory_stages import RankEnds, flights
from mmspeed.plan.schedules import Pipeline
from mmspeed.plan.simulate import reckoned


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
