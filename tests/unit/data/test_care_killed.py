"""Care commands killed at random moments: readers get everything at once after the kill, and a second run ends clean."""

from __future__ import annotations

import os
import random
import shutil
import signal
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mmspeed.data import CacheWriter
from mmspeed.data.cache.tables import index_files, shard_of_index
from mmspeed.data.maintenance.merge import merge
from mmspeed.data.maintenance.prune_pack import pack
from mmspeed.data.maintenance.repair import mend
from mmspeed.data.maintenance.stats import census
from mmspeed.data.maintenance.stored_entries import trusted_rows
from mmspeed.data.maintenance.verify import verify
from tests.support.caches import FOLDER, add_latent, flip, tar_bytes
from tests.support.care_caches import build_whole, contents

KILLS = 10


def run_and_kill(command: Callable[[], object], after: float | None) -> bool:
    """Run in a forked child, killed `after` seconds; whether it was still at work then."""
    child = os.fork()
    if child == 0:
        try:
            command()
        finally:
            os._exit(0)
    if after is not None:
        time.sleep(after)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def kill_often(base: Path, root: Path, command: Callable[[], object], check: Callable[[], None]) -> None:
    """Kill `command` so often on copies of a cache at moments spread over its run; `check` what is there, then run it to its end."""

    def copy() -> None:
        shutil.rmtree(root, ignore_errors=True)
        if base.exists():
            shutil.copytree(base, root)

    copy()
    started = time.monotonic()
    run_and_kill(command, None)
    length, moments, killed = time.monotonic() - started, random.Random(0), 0
    for _ in range(5 * KILLS):
        copy()
        landed = run_and_kill(command, moments.uniform(0.05, 1.0) * length)
        killed += landed
        length *= 1.0 if landed else 0.7  # the first run may have met a busy machine
        check()
        command()
        check()
        findings = verify(root)
        assert (findings.damage, findings.left, findings.live) == ([], [], [])
        assert census(root)["duplicates"] == 0
        if killed == KILLS:
            return
    raise AssertionError(f"only {killed} of {5 * KILLS} were still at work when they were killed")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    build_whole(tmp_path / "base", range(24), shard_bytes=2000)  # a shard for every latent
    return tmp_path / "base"


@pytest.mark.slow
def test_pack(tmp_path: Path, base: Path) -> None:
    right, root = contents(base), tmp_path / "cache"

    def check() -> None:
        assert contents(root) == right

    kill_often(base, root, lambda: pack(root, 30_000), check)
    assert len(tar_bytes(root)) == 2 * 27


@pytest.mark.slow
def test_merge(tmp_path: Path, base: Path) -> None:
    other, root = tmp_path / "other", tmp_path / "cache"
    build_whole(other, range(12, 36), shard_bytes=9000)
    right, rest = contents(base), contents(other)
    bodies = set(tar_bytes(base))

    def check() -> None:
        assert bodies <= {name for path in [root] for name in tar_names(path)}
        now = contents(root)
        assert {name: now.get(name) for name in right if name != "rejects"} == {
            name: value for name, value in right.items() if name != "rejects"
        }
        assert contents(other) == rest

    kill_often(base, root, lambda: merge(root, [other]), check)
    assert len(contents(root)) == 3 + 2 * 36 + 2 and len(tar_bytes(root)) == 2 * 39


@pytest.mark.slow
def test_repair(tmp_path: Path, base: Path) -> None:
    root = tmp_path / "cache"
    with CacheWriter(base, 20_000) as writer:
        for number in range(100, 130):
            add_latent(writer, number)
    everything = {entry.key for path in index_files(base) for entry in trusted_rows(base, shard_of_index(path))}
    lost = set()
    for path in sorted((base / FOLDER).glob("*.tar"))[24:]:
        first, *_ = trusted_rows(base, f"{FOLDER}/{path.name}")
        lost.add(first.key)
        flip(path, first.offset)
    for path in index_files(base)[:5]:
        path.write_bytes(path.read_bytes()[:-10])

    def check() -> None:
        assert everything - lost <= {name.removesuffix(".json") for name in tar_names(root) if name.endswith(".json")}

    kill_often(base, root, lambda: mend(root), check)
    listed = {entry.key for path in index_files(root) for entry in trusted_rows(root, shard_of_index(path))}
    assert listed == everything - lost


def tar_names(root: Path) -> set[str]:
    """The names of the members of all shards."""
    names: set[str] = set()
    for path in root.rglob("[!.]*.tar"):
        with tarfile.open(path) as tar:
            names |= set(tar.getnames())
    return names
