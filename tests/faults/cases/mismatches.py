"""Ranks that were started with something that differs: named before the first step, and nothing is trained."""

from __future__ import annotations

import time

from mmspeed.preprocess import CacheBuilder
from tests.faults.case import Outcome, Scene, case
from tests.support.mismatches import CASES, messages, require_named, write_mismatches
from tests.support.runs import small_config
from tests.support.spawn import run_ranks


@case("last rank with another config, cache, code or weights", 200, 500)
def differing(scene: Scene) -> Outcome:
    """`messages` fails where one takes longer than 10 s."""
    CacheBuilder(small_config(scene.folder / "small")).run()
    home = write_mismatches(scene.folder / "home", scene.folder / "small")
    kinds = scene.draw.sample(sorted(CASES), scene.count(5, len(CASES)))
    named = tried = 0
    began = time.monotonic()
    for world in (2, 4) if scene.full else (2,):
        by_rank = run_ranks(messages, world, str(home), kinds, timeout=90.0 * world)
        for place, kind in enumerate(kinds):
            tried += 1
            try:
                require_named([[texts[place]] for texts in by_rank], [kind])
                named += 1
            except AssertionError as error:
                print(world, error, flush=True)
    seconds = (time.monotonic() - began) / tried
    ranks = "2 and 4 ranks" if scene.full else "2 ranks"
    figure = f"{named} of {tried} named with rank and key on {ranks}, each within 10 s ({seconds:.1f} s on average); none trains"
    return figure, named == tried
