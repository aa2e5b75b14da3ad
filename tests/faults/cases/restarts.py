"""Kills of ranks under a launcher that restarts them, and of the launcher itself."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

from mmspeed.pipelines import TrainPipeline
from mmspeed.preprocess import CacheBuilder
from tests.faults.case import Outcome, Scene, case
from tests.faults.processes import descendants
from tests.support.killed_runs import KilledRun, Moment, Recovery, same_losses, summary
from tests.support.launched import losses_by_step, reached, start, wait_for, workers
from tests.support.runs import small_config
from tests.support.spikes import Recorder, enlarged, rows

EVERY = 5  # steps between checkpoints
SECONDS = 30.0  # after which training goes on
CLIPS = 41  # one is held out: ten steps of four make an epoch
PLAIN = ("train.batch_size=4", f"checkpoint.every={EVERY}", "validate.every=7", "checkpoint.asynchronous=false")


def kill_ranks(
    scene: Scene, ranks: int, moments: list[Moment], online: bool = False, *more: str, torchrun: bool = False
) -> tuple[list[Recovery], list[str]]:
    """The recoveries of a run in which ranks are killed at `moments`, and the faults of it. `online`: its first epoch makes its cache."""
    count = 16 if online else 16 + 14 * len(moments)
    names = ("killed", "whole")
    homes = [scene.folder / f"{name}-{ranks}" if online else scene.folder for name in names]
    killed, whole = (
        small_config(home, f"name={name}-{ranks}", *PLAIN, f"train.steps={count}", *more, clips=CLIPS)
        for home, name in zip(homes, names, strict=True)
    )
    if not online and not killed.cache_dir.exists():
        CacheBuilder(killed).run()
    run = KilledRun(scene.folder / f"launch-{ranks}-{online}", killed, ranks, len(moments) + 1, scene.draw, torchrun)
    faults = []
    try:
        for moment in moments:
            run.kill(moment)
        if (code := run.end()) != 0:
            faults.append(f"exit code {code} at the end")
    except AssertionError as error:
        print(f"{error}\n{run.log()}", flush=True)
        faults.append(f"kill {len(run.recoveries) + 1}: {str(error).splitlines()[0][:150]}")
        return run.recoveries, faults
    reference = start(scene.folder / f"launch-{ranks}-{online}", whole, words=("--nproc", str(ranks)))
    assert reference.wait(900) == 0
    if not same_losses(killed, whole):
        faults.append(f"losses of {ranks} ranks differ from a run without kills")
    return run.recoveries, faults


def verdict(recoveries: list[Recovery], faults: list[str], kills: int, most_lost: int = EVERY) -> Outcome:
    """The figure of a case of kills."""
    if not recoveries:
        return "; ".join(faults), False
    slow = [one for one in recoveries if one.seconds > SECONDS]
    lost = [one for one in recoveries if one.lost > most_lost]
    passed = len(recoveries) == kills and not faults and not slow and not lost
    words = ["losses bitwise those of a run without kills"] if not faults else faults
    return "; ".join([summary(recoveries), *words]), passed


def mixed(scene: Scene, count: int) -> list[Moment]:
    """Moments in a shuffled order: two of five in steps, and the others in checkpoints and validations."""
    kinds: list[Moment] = ["step", "checkpoint", "validation", "step", "checkpoint"]
    moments = [kinds[number % 5] for number in range(count)]
    scene.draw.shuffle(moments)
    return moments


@case("random ranks of 2 killed, under --max-restarts", 300, 2400)
def two_ranks(scene: Scene) -> Outcome:
    moments = mixed(scene, scene.count(3, 22))
    return verdict(*kill_ranks(scene, 2, moments), len(moments))


@case("random ranks of 2 killed, under torchrun's --max-restarts", 300, 1800)
def torchruns_own(scene: Scene) -> Outcome:
    moments = mixed(scene, scene.count(2, 10))
    return verdict(*kill_ranks(scene, 2, moments, torchrun=True), len(moments))


@case("random ranks of 4 killed, under --max-restarts", 300, 2400, only_full=True)
def four_ranks(scene: Scene) -> Outcome:
    moments = mixed(scene, scene.count(2, 18))
    return verdict(*kill_ranks(scene, 4, moments), len(moments))


@case("random ranks of 2 and 4 killed in the first epoch", 300, 1800, only_full=True)
def first_epoch(scene: Scene) -> Outcome:
    recoveries, faults, kills = [], [], 0
    for ranks, count in ((2, scene.count(1, 5)), (4, scene.count(1, 5))):
        moments: list[Moment] = ["first epoch"] * count
        kills += count
        ours, errors = kill_ranks(scene, ranks, moments, True, "checkpoint.every=1")
        recoveries += ours
        faults += errors
    return verdict(recoveries, faults, kills, 1)


@case("ranks killed while checkpoints are written in the background", 300, 1200, only_full=True)
def asynchronous(scene: Scene) -> Outcome:
    moments: list[Moment] = ["checkpoint"] * scene.count(2, 6)
    recoveries, faults = kill_ranks(scene, 2, moments, False, "checkpoint.asynchronous=true")
    return verdict(recoveries, faults, len(moments), 2 * EVERY - 1)


@case("random ranks of 2 killed, with copies on a local disk", 300, 1200, only_full=True)
def local_copies(scene: Scene) -> Outcome:
    moments: list[Moment] = ["step", "checkpoint"] * scene.count(1, 4)
    local = f"checkpoint.local={scene.folder / 'local'}"
    return verdict(*kill_ranks(scene, 2, moments, False, local), len(moments))


EPOCH = 6  # steps of four: the samples of a spike come once
ROLLING = (
    *("train.batch_size=4", f"train.steps={EPOCH}", "train.ema_decay=null", "checkpoint.every=1"),
    *("validate.samples=0", "validate.every=100", "checkpoint.asynchronous=false"),
    "train.divergence={action: roll_back, factor: 50, steps: 1, window: 2}",
)


@case("random rank killed in the midst of a roll-back", 300, 1200)
def in_a_roll_back(scene: Scene) -> Outcome:
    count, clips = scene.count(1, 5), 4 * EPOCH + 1
    order, whole = (small_config(scene.folder, f"name={name}", *ROLLING, clips=clips) for name in ("order", "whole"))
    CacheBuilder(order).run()
    recorder = Recorder()
    TrainPipeline(order, callbacks=[recorder]).run()
    spike = scene.draw.randrange(4, EPOCH + 1)
    shutil.rmtree(order.cache_dir)
    with enlarged(recorder.steps[spike - 1][1]):
        CacheBuilder(order).run()
    assert start(scene.folder, whole, words=("--nproc", "2")).wait(200) == 0
    recoveries, faults = [], []
    for number in range(count):
        killed = small_config(scene.folder, f"name=killed-{number}", *ROLLING, clips=clips)
        run = KilledRun(scene.folder / f"launch-{number}", killed, 2, 1, scene.draw)

        def rolls_back(run: KilledRun = run) -> bool:
            """True while the first attempt is at it: no checkpoint is written after the step of the spike before."""
            return run.place() == (0, spike, "checkpoint") and "Going back" not in run.log()

        if not run.kill_when(rolls_back, "roll-backs"):
            faults.append(f"kill {number + 1} came when the roll-back was done")
        if (code := run.end()) != 0:
            faults.append(f"exit code {code} at the end")
        recoveries += run.recoveries
        if losses_by_step(killed) != losses_by_step(whole) or len(losses_by_step(whole)) != EPOCH - 1:
            faults.append("losses differ from a run without kills")
        if [len(rows(scene.folder, one.name, "roll_back")) for one in (killed, whole)] != [1, 1]:
            faults.append("the run is not rolled back once")
    return verdict(recoveries, faults, count, EPOCH)


def gone(processes: list[int]) -> bool:
    """True where none of these processes is left."""
    return not any(Path(f"/proc/{process}/exe").exists() for process in processes)


@case("launcher killed", 200)
def launcher(scene: Scene) -> Outcome:
    killed, whole = (
        small_config(scene.folder, f"name={name}", *PLAIN, "train.steps=60", clips=CLIPS)
        for name in ("killed", "whole")
    )
    CacheBuilder(killed).run()
    words = ("--nproc", "2", "--max-restarts", "2")
    first = start(scene.folder, killed, words=words)
    wait_for(reached(killed, scene.draw.randrange(6, 20)))
    processes = list(workers(first.pid).values()) + descendants(first.pid)
    os.kill(first.pid, signal.SIGKILL)
    began = time.monotonic()
    first.wait()
    wait_for(lambda: gone(processes), 60)
    seconds = time.monotonic() - began
    code = start(scene.folder, killed, words=words).wait(200)
    assert start(scene.folder, whole, words=("--nproc", "2")).wait(200) == 0
    same = same_losses(killed, whole)
    figure = (
        f"its ranks end after {seconds:.1f} s; the same command goes on, exit code {code}, "
        f"losses {'bitwise the same' if same else 'differ'}"
    )
    return figure, same and code == 0 and seconds < SECONDS
