"""Ranks that stop, under small limits; limits of minutes are tested by a clock that is set, in tests/unit/loop/watch."""

from __future__ import annotations

import os
import signal

from mmspeed.preprocess import CacheBuilder
from tests.faults.case import Outcome, Scene, case
from tests.support.launched import reached, start, steps, wait_for, workers
from tests.support.runs import small_config

STEPS = 60


@case("rank under SIGSTOP, limits of 5 and 8 s", 300)
def stopped(scene: Scene) -> Outcome:
    config = small_config(
        scene.folder, f"train.steps={STEPS}", "checkpoint.every=5", "validate.every=100000", "checkpoint.asynchronous=false",
        "train.watchdog.least_seconds=5", "train.watchdog.factor=1", "train.watchdog.silent_seconds=8",
    )  # fmt: skip
    CacheBuilder(config).run()
    launcher = start(scene.folder, config, words=("--nproc", "2", "--max-restarts", "3"))
    wait_for(reached(config, 8 + scene.draw.randrange(8)))
    rank = scene.draw.randrange(2)
    os.kill(workers(launcher.pid)[rank], signal.SIGSTOP)
    code = launcher.wait(250)
    text = (scene.folder / "log.txt").read_text()
    named = f"rank {rank} (" in text and "has given no sign of life for" in text
    stacks = "its limit is 5 s; its threads are at:" in text
    ended = f"rank {rank} is killed" in text and "mmspeed: restart 1 of 3" in text
    whole = steps(config) == list(range(1, STEPS + 1))
    words = [
        word
        for word, true in (("named", named), ("stacks of the one that waits", stacks), ("killed and restarted", ended))
        if true
    ]
    return f"rank {rank}: {', '.join(words)}; exit code {code}, every step once: {whole}", code == 0 and whole and len(
        words
    ) == 3
