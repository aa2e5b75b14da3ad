"""The dataset cache: readable by others, whole after any kill, the same bytes whoever writes it, loud when damaged."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import safetensors.numpy
import torch
import webdataset

from mmspeed.data import CacheWriter, DatasetCache
from mmspeed.data.cache.keys import entry_key, number_duplicates, sample_key
from mmspeed.data.cache.tables import SCHEMA_VERSION, index_path, read_info, write_info, write_samples
from mmspeed.errors import UserError
from tests.support.caches import (
    BUCKET,
    FOLDER,
    add_latent,
    add_text,
    build,
    finish,
    flip,
    latent,
    latent_parts,
    tar_bytes,
)


def test_entry_key_is_a_function_of_content() -> None:
    parts: dict[str, Any] = {"frames": (1, 2), "codec": {"weights": "ab", "stride": 4.0}, "text": "ein Käfer 甲虫"}
    shuffled = {"text": "ein Käfer 甲虫", "codec": {"stride": 4.0, "weights": "ab"}, "frames": [1, 2]}
    assert entry_key(parts) == entry_key(shuffled)
    assert len(entry_key(parts)) == 32
    changes: list[dict[str, Any]] = [
        {"frames": (2, 1)},
        {"text": "ein Käfer"},
        {"codec": {"weights": "ab", "stride": 4}},
        {"new": None},
    ]
    assert len({entry_key({**parts, **change}) for change in [{}, *changes]}) == 5


def test_entry_key_refuses_what_json_would_blur() -> None:
    with pytest.raises(TypeError, match="names in JSON"):
        entry_key({"a": {1: "one"}})
    with pytest.raises(TypeError):
        entry_key({"a": torch.zeros(1)})
    with pytest.raises(ValueError):
        entry_key({"a": float("nan")})


def test_sample_keys_and_duplicates() -> None:
    assert sample_key(["a"], ["b", "c"]) != sample_key(["a"], ["c", "b"]) != sample_key(["c"], ["a", "b"])
    assert sample_key(["a"], ["b"]) == sample_key(("a",), ("b",))
    assert number_duplicates(["a", "b", "a", "a"]) == ["a", "b", "a-1", "a-2"]


def test_round_trip(tmp_path: Path) -> None:
    latents, texts = build(tmp_path)
    cache = DatasetCache(tmp_path)
    assert cache.info["encoders"] == {"vae": {"channels": 4}} and cache.info["schema"] == SCHEMA_VERSION
    assert cache.keys("latents") == set(latents) and cache.keys("texts") == set(texts)
    stored = cache.latent(latents[2])
    assert torch.equal(stored["mean"], latent(2)) and torch.equal(stored["logvar"], latent(2) - 5)
    stored["mean"].zero_()  # a private page: the file, and so every other reader, keeps its bytes
    assert torch.equal(DatasetCache(tmp_path).latent(latents[2])["mean"], latent(2))
    entry = cache.entry(latents[2])
    assert (entry.bucket, entry.tokens, entry.frames, entry.fps) == (BUCKET.name, 16, (0, 2, 4, 6, 8), 8.0)
    assert (entry.source, entry.content_id, json.loads(entry.meta)) == ("2.mp4", "c2", latent_parts(2))
    assert [sample.key for sample in cache.samples] == sorted(sample.key for sample in cache.samples)
    assert len(cache.split("train")) == 3 and len(cache.split("val")) == 1
    sample = cache.split("val")[0]
    assert (sample.bucket, sample.text_keys, sample.source, sample.tokens) == (BUCKET, tuple(texts), "0.mp4", 16)
    assert [row["path"] for row in cache.rejects()] == ["a.gif", "bad.mp4"]
    assert cache.rejects()[1] == {"path": "bad.mp4", "reason": "no_video", "detail": "no video stream"}
    assert cache.duplicates == 0


def test_bfloat16_and_pooled_round_trip(tmp_path: Path) -> None:
    _, texts = build(tmp_path)
    cache = DatasetCache(tmp_path)
    rabbit, owl, empty = cache.text(texts[0]), cache.text(texts[1]), cache.null_text()
    expected = torch.randn(9, 6, generator=torch.Generator().manual_seed(8)).bfloat16()
    assert rabbit.embeds_LD.dtype == torch.bfloat16 and torch.equal(rabbit.embeds_LD, expected)
    assert rabbit.pooled_D is not None and torch.equal(rabbit.pooled_D, expected[0])
    assert owl.pooled_D is None and owl.embeds_LD.shape == (17, 6)
    assert empty.embeds_LD.shape == (1, 6) and empty.pooled_D is not None


def test_webdataset_and_safetensors_read_the_shards(tmp_path: Path) -> None:
    latents, _ = build(tmp_path)
    shard = tmp_path / FOLDER / "000000.tar"
    samples = list(webdataset.WebDataset(str(shard), shardshuffle=False, empty_check=False))
    assert [sample["__key__"] for sample in samples] == latents
    for number, sample in enumerate(samples):
        arrays = safetensors.numpy.load(sample["safetensors"])
        assert (arrays["mean"] == latent(number).numpy()).all()
        assert json.loads(sample["json"])["meta"] == latent_parts(number)
    with tarfile.open(shard) as tar:
        for info in tar:
            assert (info.mtime, info.uid, info.gid, info.uname, info.mode) == (0, 0, 0, "", 0o644)
    rows = pq.read_table(tmp_path / "index/samples.parquet").to_pylist()
    assert [row["captions"] for row in rows] == [2, 2, 2, 2]


def test_shards_are_cut_and_a_second_run_adds_only_what_is_new(tmp_path: Path) -> None:
    latents, _ = build(tmp_path, count=3, shard_bytes=1)
    assert [p.name for p in sorted((tmp_path / FOLDER).iterdir())] == ["000000.tar", "000001.tar", "000002.tar"]
    before = {path: path.read_bytes() for path in (tmp_path / FOLDER).iterdir()}
    with CacheWriter(tmp_path) as writer:
        assert writer.repaired.clean
        assert all(writer.has("latents", key) for key in latents) and not writer.has("texts", latents[0])
        assert not writer.add("latents", latents[0], {"mean": torch.zeros(1)}, {}, bucket=BUCKET)
        latents.append(add_latent(writer, 3))
    assert {path: path.read_bytes() for path in before} == before
    assert (tmp_path / FOLDER / "000003.tar").exists()
    finish(tmp_path, latents, [])
    assert torch.equal(DatasetCache(tmp_path).latent(latents[3])["mean"], latent(3))


def test_equal_content_gives_equal_bytes_in_any_order(tmp_path: Path) -> None:
    with CacheWriter(tmp_path / "a") as writer:
        for number in range(4):
            add_latent(writer, number)
    with CacheWriter(tmp_path / "b", shard_bytes=1) as writer:
        for number in reversed(range(4)):
            add_latent(writer, number, source=f"renamed-{number}.mp4")
    assert tar_bytes(tmp_path / "a") == tar_bytes(tmp_path / "b")


def test_samples_are_replaced_without_touching_entries(tmp_path: Path) -> None:
    latents, texts = build(tmp_path)
    before = tar_bytes(tmp_path)
    finish(tmp_path, latents[:2] * 2, texts[:1])
    cache = DatasetCache(tmp_path)
    assert tar_bytes(tmp_path) == before
    assert sorted(sample.latent_keys[0] for sample in cache.samples) == sorted(latents[:2] * 2)
    assert len({sample.key for sample in cache.samples}) == 4
    with pytest.raises(ValueError, match="two samples have the key"):
        write_samples(tmp_path, [cache.samples[0]] * 2)


def test_null_text_of_the_samples_encoder(tmp_path: Path) -> None:
    latents, texts = build(tmp_path)
    with CacheWriter(tmp_path) as writer:
        other = add_text(writer, "other encoder", "null")
    with pytest.raises(UserError, match="which of 2"):
        DatasetCache(tmp_path).null_text()
    finish(tmp_path, latents, texts, null_key=other)
    assert DatasetCache(tmp_path).null_text().embeds_LD.shape == (14, 6)


def test_missing_unfinished_and_foreign_caches_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="run mmspeed preprocess"):
        DatasetCache(tmp_path / "nowhere")
    write_info(tmp_path, {})
    with pytest.raises(UserError, match="no samples yet"):
        DatasetCache(tmp_path)
    (tmp_path / "cache.json").write_text('{"schema": 99, "mmspeed": "9.0"}')
    for attempt in (read_info, CacheWriter, DatasetCache):
        with pytest.raises(UserError, match=r"schema 99 \(made by mmspeed 9\.0\)"):
            attempt(tmp_path)
    (tmp_path / "cache.json").write_text("[]")
    with pytest.raises(UserError, match="not a description of a cache"):
        read_info(tmp_path)


def test_every_damaged_byte_of_a_payload_is_noticed_and_mended_by_a_new_run(tmp_path: Path) -> None:
    latents, texts = build(tmp_path, shard_bytes=2000)
    entry = DatasetCache(tmp_path).entry(latents[1])
    path = tmp_path / entry.shard
    flip(path, entry.offset + entry.bytes - 1)
    with pytest.raises(UserError, match=f"shard {entry.shard} is damaged at entry {latents[1]}.*preprocess"):
        DatasetCache(tmp_path).latent(latents[1])
    assert DatasetCache(tmp_path, verify=False).latent(latents[1])["mean"].shape == (4, 2, 2, 4)
    path.write_bytes(path.read_bytes()[: entry.offset + 10])
    with pytest.raises(UserError, match="is damaged at entry"):
        DatasetCache(tmp_path, verify=False).latent(latents[1])
    path.unlink()
    with pytest.raises(UserError, match=f"shard {entry.shard} is missing"):
        DatasetCache(tmp_path).latent(latents[1])
    with CacheWriter(tmp_path) as writer:
        assert writer.repaired.orphans == [index_path(Path(), entry.shard).as_posix()]
        lost = [number for number, key in enumerate(latents) if not writer.has("latents", key)]
        assert 1 in lost and len(lost) < 4
        for number in lost:
            add_latent(writer, number)
    finish(tmp_path, latents, texts)
    assert torch.equal(DatasetCache(tmp_path).latent(latents[1])["mean"], latent(1))


def test_a_partial_cache_finds_what_others_make_meanwhile(tmp_path: Path) -> None:
    with CacheWriter(tmp_path) as writer:
        latents = [add_latent(writer, 0)]
        add_text(writer, "", "null")
    finish(tmp_path, [*latents, entry_key(latent_parts(1))], [])
    cache = DatasetCache(tmp_path, partial=True)
    with pytest.raises(UserError, match="no entry"):
        cache.latent(entry_key(latent_parts(1)))
    with CacheWriter(tmp_path) as writer:
        key = add_latent(writer, 1)
    assert not cache.has("latents", key) and torch.equal(cache.latent(key)["mean"], latent(1))
