"""Combinations of layouts, kinds of decoders, memory ways and packs, for `tests/support/language_steps.py`, and a cover of them."""

from __future__ import annotations

import itertools
import random
from functools import cache
from typing import Any

from tests.support.covers import Combination, greedy, pairs

WORLDS = (1, 2, 4, 8)
EXPERTS, KEY_HEADS = 8, 4
# lengths of the documents of packs; the rest of a pack, whose length no group divides, is padding
PACKS: dict[str, tuple[tuple[int, ...], ...]] = {
    "odd": ((7, 13, 11), (5, 9, 17), (3, 19, 8), (23, 6)),
    "one token": ((1, 17, 2, 9), (1, 1, 29), (30, 1), (1,)),
    "whole": ((31,),) * 4,
    "many": ((2,) * 15 + (1,), (1,) * 31, (3,) * 10, (5, 4, 3, 2, 1, 6, 7)),
    "two tokens": ((2,),) * 4,  # processes that share them have few or none
    "one pair": ((2,),),
}
WAYS: dict[str, tuple[dict[str, Any], ...]] = {  # of all blocks, or of each
    "kept": ({},),
    "recomputed": ({"block": "recompute"},),
    "exchanged again": ({"block": "recompute"},),
    "offloaded": ({"block": "offload"},),
    "by regions": ({"attention": "recompute", "mlp": "offload"},),
    "rows of experts": ({"attention": "offload", "dispatch": "offload_recompute", "experts": "recompute"},),
    "budget": (
        {"attention": "selective", "mlp": "offload_selective"}, {"block": "offload_recompute"}, {"mlp": "recompute"}, {},
    ),
}  # fmt: skip
# "data": other items are of shards, of two replicas of them, or of processes that hold all
DEGREES = {
    "tp": ["1", "2", "4"],
    "ulysses": ["1", "2", "4"],
    "ring": ["1", "2", "4"],
    "data": ["shards", "replicas", "ddp"],
    "ep": ["1", "2", "4", "8"],
    "inner": ["none", "1", "2", "4"],
    "etp": ["1", "2", "4"],
}
SETTINGS = {
    "attention": ["grouped", "latent"],
    "top": ["none", "1", "2", str(EXPERTS)],  # experts of a token; none: there are no experts
    "shared": ["0", "1"],
    "balance": ["none", "sequence", "micro_batch", "global_batch"],
    "bias": ["0", "1"],
    "mtp": ["0", "1"],
    "memory": [*WAYS],
    "packs": [*PACKS][:5],
    "windows": ["none", "short"],
}
DRAWN = 2000  # combinations, of which a cover is made


@cache
def layouts(world: int) -> list[Combination]:
    """All layouts of so many processes; "edp": the processes that their degrees leave for each expert."""
    results = []
    for values in itertools.product(*DEGREES.values()):
        each = dict(zip(DEGREES, values, strict=True))
        tp, ulysses, ring, ep, etp = (int(each[name]) for name in ("tp", "ulysses", "ring", "ep", "etp"))
        copies, data = {"shards": 1, "replicas": 2, "ddp": world}[each["data"]], 1 if each["data"] == "ddp" else None
        held, inner = world // copies, 1 if each["inner"] == "none" else int(each["inner"])
        split = tp * ulysses * ring * (data or copies)
        fits = held and world % split == 0 and held % (ep * etp) == 0 and ep % inner == 0 and tp * ulysses <= KEY_HEADS
        named = (ep > 1 or each["inner"] == "none") and (each["data"] != "ddp" or world > tp == 1)
        if fits and named:
            results.append(each | {"world": str(world), "edp": str(held // (ep * etp))})
    return results


def possible(case: Combination) -> bool:
    """False where a model without experts has settings of them, and where a router's gradient is 0 but for rounding.

    That is of a token behind the last one whose tokens go to all experts: no loss weighs them, and balance has nothing to choose.
    """
    if case["top"] == "none" and case["memory"] == "rows of experts":
        return False
    without = {"ep": "1", "etp": "1", "shared": "0", "balance": "none", "bias": "0"}
    still = case["top"] == str(EXPERTS) and case["mtp"] == "1" and case["packs"] == "two tokens"
    return not still and (case["top"] != "none" or all(case[name] == value for name, value in without.items()))


@cache
def cover(world: int) -> list[Combination]:
    """Combinations on so many processes in which all pairs of values meet that meet in any of many drawn ones."""
    draws = random.Random(world)
    known = layouts(world)
    drawn = [
        draws.choice(known) | {name: draws.choice(values) for name, values in SETTINGS.items()} for _ in range(DRAWN)
    ]
    cases = [case for case in drawn if possible(case)]
    return [cases[place] for place in greedy([pairs(case) for case in cases])]


def few(world: int) -> list[Combination]:
    """Combinations of the cover in which each value is met."""
    return [cover(world)[place] for place in greedy([set(case.items()) for case in cover(world)])]


PLAIN = dict.fromkeys(("tp", "ulysses", "ring", "ep", "etp", "edp", "top"), "1") | {
    "data": "shards", "inner": "none", "world": "4", "attention": "grouped", "shared": "1", "balance": "none", "bias": "0", "mtp": "0",
    "memory": "recomputed", "packs": "two tokens", "windows": "none",
}  # fmt: skip
KINDS = {
    "flat": {"ep": "4"},
    "by node": {"ep": "4", "inner": "2"},
    "parts": {"ep": "2", "etp": "2"},
    "parts by node": {"ep": "2", "etp": "2", "inner": "1"},
}
# (settings, the fewest tokens of a process, True where experts get none)
EDGES: dict[str, tuple[Combination, int, bool]] = {
    "processes without tokens": ({"ulysses": "4"}, 0, True),
    "one token of a process": ({"ulysses": "2", "packs": "one pair"}, 1, True),
    "all experts": ({"top": str(EXPERTS), "tp": "2", "packs": "odd"}, 30, False),
}
