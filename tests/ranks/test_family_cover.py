"""Every family of published models through the training pipeline: a pairwise cover of processes, layouts, sparse attention and memory.

Loss, every gradient and their norm against one process in float32, whose attention is dense; where 30 % of the keys are kept, it is dense
under the mask of the plan. Tolerance: 1e-5 of a gradient's largest entry, since sums over tokens, heads and processes are taken in another
order; an entry further off must be as near to float64, within a factor of 2, as that one process is.
"""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.covers import pairwise
from tests.support.foreign_training import Combination, differences, take_step, take_steps
from tests.support.published import PUBLISHED, STILLS, prepare, published_config, write_cache
from tests.support.spawn import run_ranks

MOST = 10  # combinations of one spawn
JOINT = ("cogvideox", "hunyuan", "hunyuan15", "mochi")
LAYOUTS = {
    1: ("alone",),
    2: ("fsdp", "ddp", "ulysses", "ring", "ulysses ddp", "ring ddp"),
    4: ("hsdp", "ulysses x ring", "ulysses x ring ddp", "ring4", "ulysses hsdp"),
}
SETTINGS = {
    "family": [*PUBLISHED],
    "layout": [layout for layouts in LAYOUTS.values() for layout in layouts],
    "sparse": ["no", "all kept", "30 %"],
    "keeping": ["all", "block", "offload", "budget"],
}
FIXED = {"shape": "video", "text": "some", "micro": "2"}
# of two processes, in every run
DEFAULT: list[Combination] = [
    {"family": "mochi", "layout": "fsdp", "sparse": "30 %", "keeping": "offload"},
    {"family": "hunyuan15", "layout": "ring", "sparse": "no", "keeping": "all"},
]


def split(layout: str) -> bool:
    return "ulysses" in layout or "ring" in layout


def allowed(combination: Combination) -> bool:
    """Joint attention of videos is sparse or split. Over a ring plans are others than one process's, unless all is kept.

    A budget asks for a choice, which two blocks that are split do not leave.
    """
    family, layout, sparse = (combination[name] for name in ("family", "layout", "sparse"))
    if family in STILLS:  # images are dealt to single processes, so that nothing is split
        return combination["keeping"] != "budget" or not split(layout)
    if sparse != "no" and split(layout) and (family in JOINT or (sparse == "30 %" and "ring" in layout)):
        return False
    return combination["keeping"] != "budget" or not split(layout)


def world_of(layout: str) -> int:
    return next(world for world, layouts in LAYOUTS.items() if layout in layouts)


def spawns() -> list[tuple[int, list[Combination]]]:
    """The cover in spawns of so many processes, without what every run computes."""
    results = [each for each in pairwise(SETTINGS, allowed) if each not in DEFAULT]
    by_world = {world: [each for each in results if world_of(each["layout"]) == world] for world in LAYOUTS}
    return [(world, own[start : start + MOST]) for world, own in by_world.items() for start in range(0, len(own), MOST)]


def data_of(folder: Path, family: str) -> tuple[str, ...]:
    """The keys of the config that name a family's cache and buckets."""
    if family in STILLS:
        return "data.buckets=[{frames: 1, height: 48, width: 112}]", f"data.cache={folder / 'stills'}"
    buckets = "data.buckets=[{frames: 9, height: 48, width: 48}, {frames: 1, height: 48, width: 48}]"
    return buckets, f"data.cache={folder / ('glyphs' if family == 'hunyuan15' else 'videos')}"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("families")
    prepare(folder, PUBLISHED)
    for family in ("wan", "flux", "hunyuan15"):
        write_cache(published_config(folder, family, *data_of(folder, family)), glyphs=family == "hunyuan15")
    return folder


@cache
def alone(folder: str, family: str, sparse: str, dtype: torch.dtype = torch.float32) -> Any:
    """The step of one process, with dense attention or, for 30 %, with dense attention under the mask of the plan."""
    mask = "30 %, by the mask" if sparse == "30 %" else "no"
    settings = {**FIXED, "layout": "alone", "sparse": mask, "keeping": "all"}
    return take_step(folder, family, settings, [*settings], dtype, data_of(Path(folder), family))


def proofs(combination: Combination, counters: dict[str, Any]) -> dict[str, bool]:
    """What must have happened, by technique."""
    layout, keeping, micro = combination["layout"], combination["keeping"], counters["micro-batches"]
    ledger, calls = counters["ledger"], sum(counters["calls"].values())
    results = {
        "replicas": counters["replicated"] == ("ddp" in layout),
        "every boundary is crossed": counters["uncrossed"] == [],
        "calls": keeping in ("budget", "block") or calls == counters["attentions"] * micro,
    }
    for axis in ("ulysses", "ring"):
        if axis in layout:
            sent = sum(sent for kind, sent in ledger.items() if kind.endswith(f" {axis}"))
            results[axis] = (sent == 0) == (combination["family"] in STILLS)
    if combination["sparse"] != "no":
        results["sparse"] = counters["sparse"].get("sparse", 0) > 0 and not counters["sparse"].get("dense")
    if keeping == "block":
        results["block"] = calls == 2 * counters["attentions"] * micro
    if keeping == "offload":
        results["offload"] = counters["offloaded"] > 0
    if "budget" in counters:  # there was something to choose
        # the first step of DDP holds its buckets twice: later ones may fit as they are
        results["budget"] = bool(set(counters["budget"]) - {"save"}) or "ddp" in layout
    return results


def floor(key: str) -> float:
    """The share of the largest gradient below which a gradient is not looked at.

    A bias of all keys moves all scores alike, which softmax forgets: its gradient is rounding.
    """
    return 1e-2 if "k_proj.bias" in key or "to_k.bias" in key else 1e-3


def hold(folder: Path, combination: Combination, ranks: list[Any]) -> list[str]:
    """What is wrong with a combination."""
    family, sparse = combination["family"], combination["sparse"]
    truth = alone(str(folder), family, sparse)
    wrong = [f"{what} is not proven: {ranks[0][3]}" for what, ok in proofs(combination, ranks[0][3]).items() if not ok]
    wrong += differences(truth, ranks, floor, partial(alone, str(folder), family, sparse, torch.float64))
    return [f"{combination}: {what}" for what in wrong]


def check(folder: Path, world: int, combinations: list[Combination]) -> None:
    wanted = [(each["family"], settings_of(each), data_of(folder, each["family"])) for each in combinations]
    ranks = run_ranks(partial(take_steps_of_families, str(folder), wanted), world, timeout=900)
    wrong = []
    for combination, *actual in zip(combinations, *ranks, strict=True):
        wrong += hold(folder, combination, actual)
    assert not wrong, "\n".join(wrong)


def settings_of(combination: Combination) -> Combination:
    """The settings of the run that a combination asks for."""
    return {name: value for name, value in combination.items() if name != "family"} | FIXED


def take_steps_of_families(folder: str, wanted: list[tuple[str, Combination, tuple[str, ...]]]) -> list[Any]:
    return [take_steps(folder, family, [each], data)[0] for family, each, data in wanted]


def test_two_processes_and_one_agree(home: Path) -> None:
    check(home, 2, DEFAULT)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(spawns())))
def test_a_step_of_a_family_is_that_of_one_process(home: Path, number: int) -> None:
    check(home, *spawns()[number])


def test_the_cover_meets_every_family_in_every_layout() -> None:
    actual = [each for _, own in spawns() for each in own] + DEFAULT
    for name, values in SETTINGS.items():
        assert {each[name] for each in actual} == set(values)
    assert {(each["family"], each["layout"]) for each in actual} == {
        (f, o) for f in PUBLISHED for o in SETTINGS["layout"]
    }
    sparse = {(each["family"], each["sparse"]) for each in actual}
    assert sparse == {(family, share) for family in PUBLISHED for share in SETTINGS["sparse"]}
