"""Kills of builds and of trainings in one process: the same command goes on and ends as if nothing had happened."""

from __future__ import annotations

import os
import signal
import time

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


@case("training killed at random moments, one process", 120, 600)
def training(scene: Scene) -> Outcome:
    whole, killed = (small_config(scene.folder, f"name={name}", *LONG) for name in ("whole", "killed"))
    CacheBuilder(whole).run()
    began = time.monotonic()
    TrainPipeline(whole).run()
    seconds, kills, count = time.monotonic() - began, 0, scene.count(4, 20)
    while kills < count:
        child = fork(TrainPipeline(killed).run, scene.folder / "log.txt")
        time.sleep(scene.draw.uniform(0.0, 1.2 * seconds))
        if ended(child) is None:
            kill(child)
            kills += 1
        elif len(losses(killed)) == 40:
            break
    code = wait(fork(TrainPipeline(killed).run, scene.folder / "log.txt"))
    same = losses(killed) == losses(whole) and len(losses(whole)) == 40
    return (
        f"{kills} kills, then exit code {code}: losses {'bitwise the same' if same else 'differ'}",
        same and code == 0,
    )


@case("training killed in its first epoch, one process", 120, 600)
def first_epoch(scene: Scene) -> Outcome:
    fast = ("checkpoint.every=1", "preprocess.shard_mb=0.01")
    whole, killed = (small_config(scene.folder / name, *fast) for name in ("whole", "killed"))

    def train(config: Config) -> None:
        TrainPipeline(config, OnlineBuilder(config)).run()

    began = time.monotonic()
    train(whole)
    seconds, kills = time.monotonic() - began, 0
    for _ in range(scene.count(3, 20)):
        child = fork(lambda: train(killed), scene.folder / "log.txt")
        time.sleep(scene.draw.uniform(0.1, 0.7) * seconds)
        if ended(child) is None:
            kill(child)
            kills += 1
    code = wait(fork(lambda: train(killed), scene.folder / "log.txt"))
    same = losses(killed) == losses(whole) and tar_bytes(killed.cache_dir) == tar_bytes(whole.cache_dir)
    figure = f"{kills} kills, then exit code {code}: losses and cache {'bitwise the same' if same else 'differ'}"
    return figure, same and code == 0 and kills > 0


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
