"""A cache behind a URL: the same samples and tensors, each payload asked for once, and the local folder within its limit."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from mmspeed.config import make_config
from mmspeed.data import CacheWriter, DatasetCache
from mmspeed.data.cache.index import compile_index
from mmspeed.errors import UserError
from tests.support.caches import FOLDER, add_latent, build, finish, latent

URL = "memory://bucket/my-set"


@pytest.fixture
def memory() -> Iterator[Any]:
    filesystem = fsspec.filesystem("memory")
    filesystem.store.clear()
    yield filesystem
    filesystem.store.clear()


def upload(root: Path) -> None:
    """Make the remote cache what the local folder is."""
    filesystem = fsspec.filesystem("memory")
    present = {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}
    for name in [*filesystem.store]:
        if name.removeprefix("/bucket/my-set/") not in present:
            filesystem.rm(name)
    for name in present:
        data = (root / name).read_bytes()
        path = f"/bucket/my-set/{name}"
        if not filesystem.exists(path) or filesystem.cat_file(path) != data:
            filesystem.pipe_file(path, data)


def open_remote(tmp_path: Path, **arguments: Any) -> DatasetCache:
    return DatasetCache(URL, local_cache=tmp_path / "here", **arguments)


def counts(cache: DatasetCache) -> tuple[int, int]:
    assert cache.remote is not None
    return cache.remote.requests, cache.remote.hits


@pytest.mark.parametrize("with_compiled", [True, False])
def test_a_remote_cache_reads_as_the_local_one(tmp_path: Path, memory: Any, with_compiled: bool) -> None:
    latents, texts = build(tmp_path / "a", shard_bytes=3000)
    if with_compiled:
        compile_index(tmp_path / "a")
    upload(tmp_path / "a")
    local, remote = DatasetCache(tmp_path / "a"), open_remote(tmp_path)
    assert list(remote.samples) == list(local.samples) and remote.rejects() == local.rejects()
    assert remote.info == local.info and remote.keys("texts") == set(texts)
    assert [path.suffix for path in remote.root.glob("index/*.parquet")] == [] if with_compiled else True
    sizes = [local.entry(key).bytes for key in latents]
    for _ in range(3):
        for number, key in enumerate(latents):
            assert torch.equal(remote.latent(key)["mean"], latent(number))
    assert remote.remote is not None
    assert (counts(remote), remote.remote.fetched_bytes) == ((4, 8), sum(sizes))  # ranges of entries, not shards
    assert remote.entry(latents[1]) == local.entry(latents[1])
    again = open_remote(tmp_path)
    assert torch.equal(again.latent(latents[3])["mean"], latent(3)) and counts(again) == (0, 1)
    assert torch.equal(again.null_text().embeds_LD, local.null_text().embeds_LD) and counts(again) == (1, 1)


def test_what_changed_is_fetched_again(tmp_path: Path, memory: Any) -> None:
    latents, texts = build(tmp_path / "a")
    upload(tmp_path / "a")
    cache = open_remote(tmp_path)
    with CacheWriter(tmp_path / "a") as writer:
        latents.append(add_latent(writer, 9))
    finish(tmp_path / "a", latents, texts)
    upload(tmp_path / "a")
    assert not cache.has("latents", latents[-1]) and len(cache.samples) == 4
    cache.refresh()
    assert len(cache.samples) == 5 and torch.equal(cache.latent(latents[-1])["mean"], latent(9))
    assert len(open_remote(tmp_path).samples) == 5
    compile_index(tmp_path / "a")
    finish(tmp_path / "a", latents[:2], texts)  # the compiled index there is now of other samples
    upload(tmp_path / "a")
    assert len(open_remote(tmp_path).samples) == 2


def test_the_local_folder_keeps_within_its_limit(tmp_path: Path, memory: Any) -> None:
    latents, _ = build(tmp_path / "a", count=12)
    upload(tmp_path / "a")
    size = DatasetCache(tmp_path / "a").entry(latents[0]).bytes
    cache = open_remote(tmp_path, local_bytes=5 * size)
    assert cache.remote is not None
    for number, key in enumerate(latents):
        cache.latent(key)
        cache.latent(latents[0])  # in use all the time, so it stays
        kept = list((cache.root / "payloads").rglob("*-*"))
        assert sum(path.stat().st_size for path in kept) <= 5 * size and len(kept) >= min(number + 1, 4)
    assert counts(cache) == (12, 12)
    cache.latent(latents[1])  # had to go
    assert counts(cache) == (13, 12)


def test_a_payload_damaged_here_is_fetched_again_and_one_damaged_there_is_named(tmp_path: Path, memory: Any) -> None:
    latents, _ = build(tmp_path / "a")
    upload(tmp_path / "a")
    cache = open_remote(tmp_path)
    cache.latent(latents[0])
    (kept,) = (cache.root / "payloads").rglob("*-*")
    kept.write_bytes(kept.read_bytes()[:-1] + b"?")
    cache = open_remote(tmp_path)
    assert torch.equal(cache.latent(latents[0])["mean"], latent(0)) and counts(cache) == (1, 1)
    kept.write_bytes(kept.read_bytes()[:-1] + b"!")  # after this process has verified it
    assert torch.equal(cache.latent(latents[0])["mean"], latent(0)) and counts(cache)[0] == 2
    shard = f"/bucket/my-set/{FOLDER}/000000.tar"
    entry = cache.entry(latents[1])
    data = bytearray(memory.cat_file(shard))
    data[entry.offset + entry.bytes - 1] ^= 1
    memory.pipe_file(shard, bytes(data))
    with pytest.raises(UserError, match=f"damaged at entry {latents[1]}"):
        cache.latent(latents[1])
    assert len(list((cache.root / "payloads").rglob("*-*"))) == 1  # what is damaged is not kept


def test_failures_name_url_and_key_after_three_tries(tmp_path: Path, memory: Any) -> None:
    latents, _ = build(tmp_path / "a")
    upload(tmp_path / "a")
    cache = open_remote(tmp_path)
    shard = f"/bucket/my-set/{FOLDER}/000000.tar"
    memory.pipe_file(shard, memory.cat_file(shard)[:600])
    with pytest.raises(UserError, match=rf"cannot fetch latents {latents[2]} of the cache {URL}"):
        cache.latent(latents[2])
    assert counts(cache) == (3, 0)
    memory.rm(shard)
    with pytest.raises(UserError, match=f"cannot fetch latents {latents[0]}.*no such file"):
        cache.latent(latents[0])
    for url, message in (
        ("memory://nothing", "no dataset cache"),
        ("nosuch://x/y", "nosuch"),
        ("file:///nothing/x", "no dataset cache"),
    ):
        with pytest.raises(UserError, match=message):
            DatasetCache(url, local_cache=tmp_path / "here")


def test_a_store_that_fails_now_and_then(tmp_path: Path) -> None:
    """Read from a real file system whose file comes back between two tries."""
    latents, _ = build(tmp_path / "a")
    cache = DatasetCache((tmp_path / "a").as_uri(), local_cache=tmp_path / "here")
    shard = tmp_path / "a" / FOLDER / "000000.tar"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:600])
    if (child := os.fork()) == 0:
        import time

        time.sleep(0.05)
        shard.write_bytes(whole)
        os._exit(0)
    assert torch.equal(cache.latent(latents[1])["mean"], latent(1))
    os.waitpid(child, 0)
    assert 2 <= counts(cache)[0] <= 3


def test_a_config_with_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: Any) -> None:
    monkeypatch.setenv("MMSPEED_CACHE", str(tmp_path / "here"))
    tree = {"data": {"sources": [{"path": "x"}], "cache": URL, "buckets": [{"frames": 1, "height": 64, "width": 64}]}}
    config = make_config(tree, base=tmp_path)
    assert config.cache_root == URL and config.cache_dir.parent == tmp_path / "here"
    with pytest.raises(UserError, match=f"data.cache is {URL}.*build it there and copy it"):
        config.local_cache_dir()
    build(tmp_path / "a")
    (tmp_path / "a/codec").mkdir()
    (tmp_path / "a/codec/linear-16.safetensors").write_bytes(b"weights")
    upload(tmp_path / "a")
    cache = DatasetCache(config.cache_root)
    assert cache.root == config.cache_dir and config.codec_weights is not None
    assert config.codec_weights.read_bytes() == b"weights"
    shutil.rmtree(tmp_path / "here")
    local = make_config({**tree, "data": {**tree["data"], "cache": "c"}}, base=tmp_path)
    assert local.cache_root == local.cache_dir == local.local_cache_dir() == tmp_path / "c"
