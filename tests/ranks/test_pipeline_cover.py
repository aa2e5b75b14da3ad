"""Models in pipeline stages beside one process: covers of models, layouts, schedules, numbers of micro-batches, shapes and memory ways.

Tolerance: 1e-5 of a gradient's largest entry, since sums over processes and stages are taken in another order. Where only stages divide a
model, gradients of all that one stage alone holds are equal bit for bit, and so are all of a decoder whose embedding only its first feeds.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.covers import Combination
from tests.support.pipeline_steps import LAYOUTS, SETTINGS, cover, steps
from tests.support.spawn import run_ranks

TOLERANCE = 1e-5
WAITING = ("zb_h1", "zbv", "dualpipe_v", "overlap")  # schedules whose gradients of weights wait
FEW: list[Combination] = [
    {"world": "2", "layout": "stages", "kind": kind, "schedule": schedule, "count": count, "shapes": "of micro-batches", "memory": memory}
    for kind, schedule, count, memory in (
        ("sora", "interleaved, one more", "P", "recomputed"), ("dense", "1f1b", "3P + 1", "kept"), ("latent", "interleaved", "2P", "offloaded"),
        ("hunyuan", "1f1b, one more", "2P", "kept"), ("experts", "dualpipe_v", "3P + 1", "kept"), ("sora full", "zb_h1", "2P", "kept"),
        ("tied", "1f1b", "2P", "kept"),
    )
]  # fmt: skip


def wrong(case: Combination, ranks: list[dict[str, Any]]) -> list[str]:
    """What is wrong with a case."""
    first = ranks[0]
    free = case["memory"] != "states on the host"  # its weights move
    apart = set(first["shared"]) if case["kind"] != "dense" and case["kind"] != "experts" else set()
    waits = case["schedule"] in WAITING  # another product gives gradients of weights that wait
    exact = case["layout"] in ("stages", "four stages") and free and not waits and case["memory"] != "compiled"
    held = {
        "the same gradients": not first["missing"] and not first["more"] and not first["apart"],
        "losses": max(first["losses"], first["terms"]) <= TOLERANCE,
        "norms": first["norms"] <= TOLERANCE,
        "gradients": first["gap"] <= TOLERANCE,
        "loads of experts": first["counted"],
        "bits": not exact or not set(first["other"]) - apart,
        "contributions": all(of_weights(rank["computed"], waits) for rank in ranks),
        "boundaries": not any(rank["uncrossed"] for rank in ranks),
    }
    facts = {name: value for name, value in first.items() if name not in ("counts", "shared")}
    return [f"{case}: {what}: {facts}, {[r['uncrossed'] for r in ranks]}" for what, holds in held.items() if not holds]


def of_weights(computed: tuple[dict[str, int], int], waits: bool) -> bool:
    """True where each weight that waits, and has a name, had its gradient once a micro-batch."""
    counts, batches = computed
    return bool(counts) == waits and all(count == batches for name, count in counts.items() if name)


def hold(world: int, wanted: list[Combination]) -> None:
    results = zip(*run_ranks(steps, world, world, wanted, timeout=550), strict=True)
    found = [line for case, ranks in zip(wanted, results, strict=True) for line in wrong(case, list(ranks))]
    assert not found, "\n".join(found)


@pytest.mark.slow
def test_the_covers_have_many_combinations_of_all_values() -> None:
    cases = [case for world in LAYOUTS for case in cover(world)]
    assert len(cases) >= 60
    for name, values in SETTINGS.items():
        assert {case[name] for case in cases} == {*values}, name
    waiting = [case for world in (2, 4) for case in cover(world) if case["schedule"] in WAITING]
    assert len(waiting) >= 40
    for name, values in (SETTINGS | {"schedule": WAITING, "layout": [*LAYOUTS[2], *LAYOUTS[4]]}).items():
        assert {case[name] for case in waiting} == {*values}, name


def test_a_few_compute_what_one_process_does() -> None:
    hold(2, FEW)


PIECES = [(world, part) for world, parts in ((2, 8), (4, 12), (8, 2)) for part in range(parts)]


@pytest.mark.slow
@pytest.mark.parametrize("world, part", PIECES)
def test_all_compute_what_one_process_does(world: int, part: int) -> None:
    hold(world, cover(world)[part :: sum(each == world for each, _ in PIECES)])
