"""A budget of memory of a published transformer that is spread over processes: met by a real step, between its floor and its peak.

The model has eight blocks: of two, one that is computed again takes as much as both keep, and there is nothing to choose.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mmspeed.device import pick
from mmspeed.mesh import process_group
from mmspeed.models.families.wan import WanCall
from mmspeed.pipelines.run.build import place
from mmspeed.pipelines.tasks.published import PublishedVideoTask
from mmspeed.pipelines.tasks.synthetic import EncoderShapes
from mmspeed.pipelines.tuning.memory_search import MeasuredModel, fastest_within, measured_figures
from mmspeed.shapes import Strides
from tests.support.published import STRIDES, C, D, published_config
from tests.support.spawn import run_ranks
from tests.support.video_transformers import make_model

BLOCKS = 8
BUCKETS = "data.buckets=[{frames: 17, height: 64, width: 64}]"
OFF = 0.1  # how far a real step's peak may be from what was expected of it


def chosen_between(folder: str, layout: str) -> dict[str, Any]:
    """The choice under a budget half-way between the least that a step takes and its peak with all saved."""
    config = published_config(Path(folder), "wan", BUCKETS, "parallel.strategy=fsdp", f"parallel.{layout}")
    device = pick("cpu")
    with process_group(device):
        make = partial(make_model, "wan", num_layers=BLOCKS)
        task = PublishedVideoTask(config, make, call=WanCall(text_tokens=9))
        task.use(EncoderShapes(C, Strides(*STRIDES), D))
        step = task.largest_micro_batch(place(config, device).at(device, config.run_dir))
        figures = measured_figures(config, task, device, step)
        budget = (figures.least() + figures.plain_peak()) // 2
        first = figures.choose(budget)
        assert first is not None
        tried = MeasuredModel(config, task, device, step, figures.ways(first))
        plain = tried.peak([{}] * BLOCKS)
        choice = fastest_within(figures, budget, tried)
        return {
            "budget": budget,
            "measured": choice.measured_peak,
            "expected": choice.expected_peak,
            "plain": plain,
            "plain expected": figures.plain_peak(),
            "ways": [dict(ways) for ways in choice.ways],
            "figures": repr(figures),
        }


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ulysses=2", "tp=2"])
def test_a_budget_between_the_floor_and_the_peak_is_met(tmp_path: Path, layout: str) -> None:
    result, other = run_ranks(chosen_between, 2, str(tmp_path), layout)
    assert result["figures"] == other["figures"]  # else they would choose apart, and wait for each other
    assert result["measured"] <= result["budget"] < result["plain"], result
    assert result["measured"] == pytest.approx(result["expected"], rel=OFF)
    assert result["plain"] == pytest.approx(result["plain expected"], rel=OFF)
    assert len(result["ways"]) == BLOCKS and any(result["ways"])
