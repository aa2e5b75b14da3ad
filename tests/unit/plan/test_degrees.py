"""Traffic of each degree of sequence parallelism, the recommended one, and the output of `mmspeed check`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mmspeed.config.parallel import ParallelConfig
from mmspeed.log import format_bytes
from mmspeed.plan.degrees import degree_costs, degree_lines, recommended
from mmspeed.plan.traffic import AttentionWorkload, places, step_traffic
from mmspeed.preprocess import check
from mmspeed.preprocess.report import costs
from tests.support.runs import small_config

CLIP = AttentionWorkload(1, (8, 16, 16), 96, 8, ("spatial", "temporal") * 3, 16, 12)
FULL = replace(CLIP, spans=("full",) * 6)


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_degrees_are_those_of_the_traffic_and_dsp_sends_least_of_a_factorised_model(devices: int) -> None:
    ways = degree_costs(CLIP, ParallelConfig(), devices)
    assert [cost.name for cost in ways] == [f"ulysses {devices}", f"ring {devices}", f"dsp {devices}"]
    for cost in ways:
        parallel = ParallelConfig(**{cost.name.split()[0]: devices})  # type: ignore[arg-type]
        assert cost.sent == max(step_traffic(CLIP, parallel, place).total() for place in places(parallel))
        assert not cost.idle and not cost.refused
    best = recommended(ways)
    assert best is not None and best.name == f"dsp {devices}"


def test_a_full_model_has_no_dsp_and_more_devices_than_heads_take_a_ring_too() -> None:
    results = {cost.name: cost for cost in degree_costs(FULL, ParallelConfig(), 16)}
    assert list(results) == ["ulysses 16", "ring 16", "dsp 16", "ring 2 x ulysses 8"]
    assert results["ulysses 16"].refused == "a device has 8 heads" and results["dsp 16"].refused
    best = recommended(list(results.values()))
    assert best is not None and best.name == "ring 2 x ulysses 8"
    assert {cost.name: cost for cost in degree_costs(FULL, ParallelConfig(tp=4), 2)}["ulysses 2"].refused == ""


def test_few_frames_are_split_by_space_too() -> None:
    """With 4 frames over 8 devices re-sharding leaves half of them without a frame; a product leaves none."""
    short = replace(CLIP, grid=(4, 16, 16))
    results = {cost.name: cost for cost in degree_costs(short, ParallelConfig(), 8)}
    assert results["dsp 8"].idle == 4 and results["ulysses 8"].idle == 4
    best = recommended(list(results.values()))
    assert best is not None and best.name == "dsp 4 x ulysses 2 with shard: space" and not best.idle


def test_the_sections_own_product_is_there_and_lines_mark_one() -> None:
    parallel = ParallelConfig(dsp=2, ring=2)
    lines = degree_lines(CLIP, parallel, 4, "video 5x32x48")
    assert lines[0].startswith("video 5x32x48 split over 4 devices")
    sent = step_traffic(CLIP, parallel, next(places(parallel))).total()
    assert f"  dsp 2 x ring 2: {format_bytes(sent)}" in lines
    assert [line for line in lines if "recommended" in line] == [line for line in lines if line.startswith("  dsp 4: ")]


def test_check_says_it_for_the_configs_devices_or_those_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(*overrides: str, ranks: list[int] | None = None) -> list[str]:
        lines = check(small_config(tmp_path, *overrides, clips=2), ranks=ranks).lines()
        start = next((place for place, line in enumerate(lines) if " split over " in line), len(lines))
        return lines[start : start + 4]

    assert said() == []  # a machine without accelerators has no devices to split a video over
    head, ulysses, ring, dsp = said("parallel.dsp=2")
    assert head.startswith("video 5x32x48 split over 2 devices: bytes that one sends")
    assert ulysses.startswith("  ulysses 2: ") and ring.startswith("  ring 2: ")
    assert dsp.startswith("  dsp 2: ") and dsp.endswith("(recommended)")
    assert said("parallel.tp=2", ranks=[1, 4, 8])[0] == head  # 2 of 4 devices share each matrix
    full = said("parallel.ulysses=2", "model.arrangement=full")
    assert full[1].endswith("(recommended)") and full[3] == "  dsp 2: not here (it is for factorised models)"
    monkeypatch.setattr(costs, "accelerators", lambda kind: 2)
    assert said()[0] == head
