"""Writers of a cache under bad luck: full disks, kills at any place, several writers at once; nothing is ever half there."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmspeed.data import CacheWriter, DatasetCache
from mmspeed.data.cache.files import READERS_LOCK, TempFile
from mmspeed.data.cache.keys import KeySet, entry_key
from mmspeed.data.cache.tables import index_path
from mmspeed.data.cache.writer import repair
from mmspeed.errors import UserError
from tests.support.caches import FOLDER, add_latent, build, finish, latent, latent_parts, tar_bytes


def test_disk_full_is_reported_and_leaves_nothing(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    writer = CacheWriter(tmp_path)
    key = add_latent(writer, 0)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(UserError, match=r"disk full while writing .*latents/005x0016x0032"):
            for number in range(1, 9):
                add_latent(writer, number)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not writer.has("latents", key)  # the shard in progress was given up, so this entry must be made again
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [READERS_LOCK]
    add_latent(writer, 0)
    writer.close()
    assert len(tar_bytes(tmp_path)) == 2


def test_a_failed_write_changes_nothing(tmp_path: Path) -> None:
    latents, _ = build(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    temp = TempFile(tmp_path)
    temp.write(b"whole")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(UserError, match=r"disk full while writing .*samples\.parquet"):
            finish(tmp_path, latents[:1], [])
        with pytest.raises(OSError, match="File too large"):
            temp.write(bytes(200))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert temp.path.read_bytes() == b"whole" and temp.size == 5
    temp.write(b" again")
    assert temp.path.read_bytes() == b"whole again"
    temp.discard()
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_an_error_elsewhere_keeps_whole_entries(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), CacheWriter(tmp_path) as writer:
        key = add_latent(writer, 0)
        raise KeyboardInterrupt
    assert CacheWriter(tmp_path).has("latents", key)


WORKER = """
import sys, torch
from mmspeed.data import CacheWriter
from mmspeed.data.cache.keys import entry_key
from mmspeed.shapes import Bucket
root, first, last, size, stop = sys.argv[1], *map(int, sys.argv[2:])
writer = CacheWriter(root, size)
print("ready", flush=True)
sys.stdin.readline()
for number in range(first, last):
    parts = {"kind": "latent", "number": number}
    mean = torch.randn(4, 2, 2, 4, generator=torch.Generator().manual_seed(number))
    writer.add("latents", entry_key(parts), {"mean": mean, "logvar": mean - 5}, parts, bucket=Bucket(5, 16, 32),
               tokens=16, content_id=f"c{number}", frames=range(0, 10, 2), fps=8.0, source=f"{number}.mp4")
    if number == stop:
        print("stopped", flush=True)
        sys.stdin.readline()
writer.close()
print("closed", flush=True)
"""


def start_writer(root: Path, first: int, last: int, size: int, stop: int = -1) -> subprocess.Popen[str]:
    arguments = [str(number) for number in (first, last, size, stop)]
    return subprocess.Popen(
        [sys.executable, "-c", WORKER, str(root), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def say(process: subprocess.Popen[str], expect: str, line: bool = True) -> None:
    assert process.stdin is not None and process.stdout is not None
    if line:
        process.stdin.write("\n")
        process.stdin.flush()
    assert process.stdout.readline().strip() == expect


def test_two_writers_beside_each_other_a_kill_and_a_repair(tmp_path: Path) -> None:
    size = 6000
    first, second = start_writer(tmp_path, 0, 20, size), start_writer(tmp_path, 10, 30, size, stop=25)
    say(first, "ready", line=False)
    say(second, "ready", line=False)
    assert first.stdin is not None
    first.stdin.write("\n")
    first.stdin.flush()
    say(second, "stopped")
    say(first, "closed", line=False)
    assert first.wait(30) == 0
    live = repair(tmp_path)  # beside a writer that lives, in the middle of a shard
    assert live.clean and live.live == 1
    os.kill(second.pid, signal.SIGKILL)
    second.wait(30)
    sealed = {path.name for path in (tmp_path / FOLDER).glob("*.tar")}

    with CacheWriter(tmp_path) as writer:
        assert len(writer.repaired.stale) == 1 and not writer.repaired.reindexed
        lost = [number for number in range(26) if not writer.has("latents", entry_key(latent_parts(number)))]
        assert lost == [25]  # what was in the shard in progress, and nothing else
        keys = [add_latent(writer, number) for number in range(30)]
    assert sealed <= {path.name for path in (tmp_path / FOLDER).glob("*.tar")}
    assert not list(tmp_path.rglob("*.tmp"))
    finish(tmp_path, keys, [])
    cache = DatasetCache(tmp_path)
    for number, key in enumerate(keys):
        assert torch.equal(cache.latent(key)["mean"], latent(number))

    members = [info.name for path in tmp_path.rglob("*.tar") for info in tarfile.open(path)]
    assert cache.duplicates == len(members) // 2 - 30
    assert cache.duplicates > 0  # both wrote 10..19; each key is still one entry
    with CacheWriter(tmp_path / "alone") as alone:
        for number in range(30):
            add_latent(alone, number)
    for path in (tmp_path / FOLDER).glob("*.tar"):
        with tarfile.open(path) as tar:
            for info in tar:
                file = tar.extractfile(info)
                assert file is not None and file.read() == tar_bytes(tmp_path / "alone")[info.name]


def test_a_sealed_shard_without_index_is_read_and_listed(tmp_path: Path) -> None:
    latents, _ = build(tmp_path)
    index = index_path(tmp_path, f"{FOLDER}/000000.tar")
    rows = pq.read_table(index).to_pylist()
    index.unlink()  # as if killed between the two
    os.link(tmp_path / FOLDER / "000000.tar", tmp_path / FOLDER / ".1-abc.tmp")  # or even between link and unlink
    report = repair(tmp_path)
    assert report.reindexed == [f"{FOLDER}/000000.tar"] and len(report.stale) == 1
    assert pq.read_table(index).to_pylist() == [{**row, "source": None} for row in rows]
    assert repair(tmp_path).clean
    assert DatasetCache(tmp_path).keys("latents") == set(latents)


def test_a_shard_that_is_being_sealed_is_left_to_its_writer(tmp_path: Path) -> None:
    build(tmp_path)
    shard = f"{FOLDER}/000000.tar"
    index_path(tmp_path, shard).unlink()
    with open(tmp_path / shard, "rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        report = repair(tmp_path)
        assert report.clean and report.live == 1 and not index_path(tmp_path, shard).exists()
    assert repair(tmp_path).reindexed == [shard]


def test_a_shard_that_is_no_whole_one_is_named(tmp_path: Path) -> None:
    build(tmp_path)
    shard = tmp_path / FOLDER / "000000.tar"
    index_path(tmp_path, f"{FOLDER}/000000.tar").unlink()
    whole = shard.read_bytes()
    for length in (3, 700, 1100, 2600):
        shard.write_bytes(whole[:length])
        with pytest.raises(UserError, match=r"000000\.tar is damaged; delete it"):
            CacheWriter(tmp_path)


def test_the_first_shard_wins_among_duplicates(tmp_path: Path) -> None:
    latents, _ = build(tmp_path)
    with CacheWriter(tmp_path / "other") as writer:
        add_latent(writer, 0, source="raced.mp4")
    os.rename(tmp_path / "other" / FOLDER / "000000.tar", tmp_path / FOLDER / "000001.tar")
    repair(tmp_path)
    cache = DatasetCache(tmp_path)
    assert cache.duplicates == 1 and cache.entry(latents[0]).shard.endswith("000000.tar")


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.binary(min_size=16, max_size=16), max_size=40),
    st.lists(st.tuples(st.booleans(), st.binary(min_size=16, max_size=16)), max_size=20),
)
def test_a_key_set_is_a_set(start: list[bytes], changes: list[tuple[bool, bytes]]) -> None:
    """Also with keys that end in zero bytes, which a NumPy string does not show."""
    start = [*start, bytes(16), b"\1" + bytes(15)]
    plain, keys = {key.hex() for key in start}, KeySet(key.hex() for key in start)
    for adding, raw in [*changes, (False, start[0])]:
        (plain.add if adding else plain.discard)(raw.hex())
        (keys.add if adding else keys.discard)(raw.hex())
    for raw in [*start, *(raw for _, raw in changes), b"\2" + bytes(15)]:
        assert (raw.hex() in keys) == (raw.hex() in plain)
