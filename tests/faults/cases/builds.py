"""Kills of builds and of trainings in one process: the same command goes on and ends as if nothing had happened."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from mmspeed.config import Config
from mmspeed.loop.checkpoint.manager import steps_in
from mmspeed.pipelines import TrainPipeline
from mmspeed.preprocess import CacheBuilder, OnlineBuilder
from tests.faults.case import Outcome, Scene, case
from tests.support.caches import tar_bytes
from tests.support.forks import ended, fork, kill, wait
from tests.support.killed_builds import kill_builds, whole_build
from tests.support.launched import wait_for
from tests.support.runs import losses, small_config

LONG = ("train.steps=40", "checkpoint.every=3", "validate.every=7")


def latest_step(config: Config) -> int:
    """The step of a run's newest checkpoint; 0 without one."""
    return max(steps_in(config.run_dir / "checkpoints"), default=0)


@case("preprocess killed at random moments", 120, 600)
def preprocess(scene: Scene) -> Outcome:
    config, seconds = whole_build(scene.folder)
    kills = scene.count(4, 50)
    kill_builds(config, seconds, scene.folder / "killed", scene.draw, kills)
    return f"{kills} of {kills} kills: the same bytes as a build without", True


def kill_runs(
    scene: Scene,
    count: int,
    seconds: float,
    config_of: Callable[[int], Config],
    train: Callable[[Config], object],
    same: Callable[[Config], bool],
) -> Outcome:
    """Kill runs of `seconds` at `count` random moments, until each has ended, `same` as one without kills."""
    kills = runs = right = 0
    while kills < count:
        config, code = config_of(runs), None
        runs += 1
        while code is None:
            child = fork(lambda config=config: train(config), scene.folder / "log.txt")  # type: ignore[misc]
            if kills == count:
                code = wait(child)
                break
            time.sleep(scene.draw.uniform(0.0, seconds))
            if (code := ended(child)) is None:
                kill(child)
                kills += 1
        right += code == 0 and same(config)
    return f"{kills} kills in {runs} runs: {right} of {runs} are bitwise those without kills", right == runs


@case("training killed at random moments, one process", 120, 900)
def training(scene: Scene) -> Outcome:
    whole = small_config(scene.folder, "name=whole", *LONG)
    CacheBuilder(whole).run()
    began = time.monotonic()
    TrainPipeline(whole).run()
    return kill_runs(
        scene,
        scene.count(4, 20),
        time.monotonic() - began,
        lambda number: small_config(scene.folder, f"name=killed-{number}", *LONG),
        lambda config: TrainPipeline(config).run(),
        lambda config: losses(config) == losses(whole) and len(losses(whole)) == 40,
    )


@case("training killed in its first epoch, one process", 120, 900)
def first_epoch(scene: Scene) -> Outcome:
    """The three steps of an epoch whose cache is made on the way."""
    epoch = ("checkpoint.every=1", "preprocess.shard_mb=0.01", "train.steps=3")

    def train(config: Config) -> None:
        TrainPipeline(config, OnlineBuilder(config)).run()

    train(whole := small_config(scene.folder / "whole", *epoch))
    began = time.monotonic()
    train(small_config(scene.folder / "timed", *epoch))  # all is imported now
    return kill_runs(
        scene,
        scene.count(3, 20),
        time.monotonic() - began,
        lambda number: small_config(scene.folder / f"killed-{number}", *epoch),
        train,
        lambda config: losses(config) == losses(whole) and tar_bytes(config.cache_dir) == tar_bytes(whole.cache_dir),
    )


@case("SIGTERM and SIGUSR1 at random moments, one process", 120, 600)
def asked_to_stop(scene: Scene) -> Outcome:
    """Each stop saves the step that it meets: nothing is computed twice."""
    whole, stopped = (small_config(scene.folder, f"name={name}", *LONG) for name in ("whole", "stopped"))
    CacheBuilder(whole).run()
    TrainPipeline(whole).run()
    stops, saved, count = 0, 0, scene.count(3, 20)
    for _ in range(count):
        done = len(losses(stopped))
        child = fork(TrainPipeline(stopped).run, scene.folder / "log.txt")
        wait_for(lambda done=done: len(losses(stopped)) > done)  # type: ignore[misc]
        time.sleep(scene.draw.uniform(0.0, 0.05))
        os.kill(child, scene.draw.choice((signal.SIGTERM, signal.SIGUSR1)))
        code = wait(child)
        stops += code == 0
        saved += latest_step(stopped) == len(losses(stopped))
        if len(losses(stopped)) == 40:
            count = stops
            break
    code = wait(fork(TrainPipeline(stopped).run, scene.folder / "log.txt"))
    same = losses(stopped) == losses(whole)
    figure = f"{stops} stops with exit code 0, {saved} with their last step saved; losses {'bitwise the same' if same else 'differ'}"
    return figure, same and code == 0 and stops == saved == count
