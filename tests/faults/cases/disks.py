"""Disks that are full or can only be read: a line, nothing half-written, and the same command goes on when there is room."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from mmspeed.cli.failures import describe
from mmspeed.loop.checkpoint.maintenance import verify
from mmspeed.loop.checkpoint.manager import steps_in
from mmspeed.pipelines import TrainPipeline
from mmspeed.preprocess import CacheBuilder
from tests.faults.case import Outcome, Scene, case
from tests.support.caches import tar_bytes
from tests.support.runs import losses, small_config
from tests.support.small_disks import SmallDisk, limited_disk

ROOM = 200_000  # kB


def line_of(command: Callable[[], object]) -> tuple[str, bool]:
    """The line of a command's error, and True where it says what to do; ("", False) where none comes."""
    try:
        command()
    except Exception as error:
        failure = describe(error)
        return failure.line(), failure.known
    return "", False


@case("disk full in preprocess", 120)
def preprocess(scene: Scene) -> Outcome:
    whole = small_config(scene.folder / "whole", "preprocess.shard_mb=0.02", clips=16)
    CacheBuilder(whole).run()
    size = sum(path.stat().st_size for path in whole.cache_dir.rglob("*") if path.is_file()) // 1024
    disk, words = limited_disk(scene.folder / "disk", scene.draw.randrange(size // 3, size), 4)
    cache = f"data.cache={scene.folder / 'disk' / 'cache'}"
    config = small_config(scene.folder / "small", "preprocess.shard_mb=0.02", cache, clips=16)
    line, known = line_of(lambda: CacheBuilder(config).run())
    disk.resize(ROOM)
    CacheBuilder(config).run()
    same = tar_bytes(config.cache_dir) == tar_bytes(whole.cache_dir)
    figure = (
        f"{words}: {'a line' if known else line or 'no error'}; "
        f"with room the same command ends, bytes {'the same' if same else 'differ'}"
    )
    return figure, same and known and "disk" in line


@case("disk full while a checkpoint is saved", 120)
def checkpoint(scene: Scene) -> Outcome:
    overrides = ("train.steps=12", "checkpoint.every=3", "checkpoint.keep_last=9", "validate.every=100")
    whole = small_config(scene.folder / "home", "name=whole", *overrides)
    CacheBuilder(whole).run()
    TrainPipeline(whole).run()
    folder = whole.run_dir / "checkpoints"
    one = sum(path.stat().st_size for path in (folder / "step-00000003").iterdir()) // 1024
    disk, words = limited_disk(scene.folder / "disk", int(one * scene.draw.uniform(1.4, 2.8)) + 100, one // 2)
    config = small_config(scene.folder / "home", "name=full", f"output={scene.folder / 'disk'}", *overrides)
    line, known = line_of(lambda: TrainPipeline(config).run())
    kept = steps_in(config.run_dir / "checkpoints")
    sound = all(verify(config.run_dir / "checkpoints" / f"step-{step:08d}") == [] for step in kept)
    disk.resize(ROOM)
    TrainPipeline(config).run()
    same = losses(config) == losses(whole)
    figure = (
        f"{words}: {'a line' if known else line or 'no error'}, {len(kept)} earlier checkpoints {'sound' if sound else 'damaged'}; "
        f"with room the same command ends, losses {'bitwise the same' if same else 'differ'}"
    )
    return figure, same and known and sound


@case("folders that can only be read", 60)
def read_only(scene: Scene) -> Outcome:
    config = small_config(scene.folder / "home")
    CacheBuilder(config).run()
    try:
        disk = SmallDisk(scene.folder / "disk", 100)
    except OSError:
        return read_only_by_mode(scene, config.cache_dir)
    disk.read_only()
    return tried(scene, config.cache_dir, "a disk that can only be read")


def read_only_by_mode(scene: Scene, cache: Path) -> Outcome:
    """The case by the mode of the folder, which binds all but root."""
    (scene.folder / "disk").mkdir(exist_ok=True)
    os.chmod(scene.folder / "disk", 0o500)
    return tried(scene, cache, "a folder of mode 500")


def tried(scene: Scene, cache: Path, words: str) -> Outcome:
    """The lines of `preprocess` and `train` into the folder `disk`."""
    disk = scene.folder / "disk"
    build = small_config(scene.folder / "home", f"data.cache={disk / 'cache'}")
    train = small_config(scene.folder / "home", f"output={disk / 'runs'}")
    assert train.cache_dir == cache
    lines = [line_of(lambda: CacheBuilder(build).run()), line_of(lambda: TrainPipeline(train).run())]
    clear = [known and str(disk) in line for line, known in lines]
    other = [line or "no error" for (line, _), good in zip(lines, clear, strict=True) if not good]
    return f"{words}: {sum(clear)} of 2 commands end with a line that names it {'; '.join(other)}".strip(), all(clear)
