"""Ranks that stop: for real under small limits, and for ten minutes by a clock that is set."""

from __future__ import annotations

import logging
import os
import signal

from mmspeed.config.watchdog import WatchdogConfig
from mmspeed.loop.watch.heartbeats import SilenceRule
from mmspeed.loop.watch.phases import RunPhase
from mmspeed.loop.watch.watchdog import Watchdog
from mmspeed.preprocess import CacheBuilder
from tests.faults.case import Outcome, Scene, case
from tests.support.launched import reached, start, steps, wait_for, workers
from tests.support.runs import small_config
from tests.support.standing_clock import Clock

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


@case("rank silent for 10 minutes, by a clock that is set", 20)
def silent(scene: Scene) -> Outcome:
    clock, said = Clock(), []
    rule = SilenceRule(60, 600, clock)
    rule.look("1")
    while len(said) < 2 and clock.now < 2000:
        clock.now += 10
        if (verdict := rule.look("1")) is not None:
            said.append(verdict)
    return f"named after {said[0][0]:.0f} s, to be killed after {said[-1][0]:.0f} s", said == [(70, False), (610, True)]


@case("step, checkpoint and validation past their limits, by a clock that is set", 20)
def overrun(scene: Scene) -> Outcome:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("mmspeed").addHandler(handler)
    os.environ["RANK"] = "1"
    endings = 0
    for phase in (RunPhase.STEP, RunPhase.CHECKPOINT, RunPhase.VALIDATION):
        clock, codes = Clock(), []
        dog = Watchdog(WatchdogConfig(limits={phase.value: 60}), 1, 2, clock, codes.append)
        dog.enter(phase, 12)
        for _ in range(13):
            clock.now += 10
            dog.look(None)
        endings += codes == [70]
    warnings = sum("has taken 70 s, and its limit is 60 s; its threads are at:" in line for line in lines)
    return (
        f"{warnings} of 3 named with their stacks after 70 s, {endings} of 3 ended after 130 s",
        warnings == endings == 3,
    )
