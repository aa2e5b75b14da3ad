"""The dataset cache: readable by others, whole after any kill, the same bytes whoever writes it, loud when damaged."""

from __future__ import annotations

import concurrent.futures
import copy
import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import safetensors.numpy
import torch
import webdataset
from hypothesis import given
from hypothesis import strategies as st

from mmspeed.data import (
    CacheWriter,
    DatasetCache,
    Sample,
    canonical_json,
    entry_key,
    latent_tensors,
    number_duplicates,
    read_info,
    repair,
    sample_key,
    text_tensors,
    write_info,
    write_rejects,
    write_samples,
)
from mmspeed.data.tables import index_path
from mmspeed.errors import UserError
from mmspeed.protocol import TextEntry
from mmspeed.shapes import Bucket

BUCKET = Bucket(5, 16, 32)
FOLDER = "latents/005x0016x0032"


def latent_parts(number: int) -> dict:
    return {"kind": "latent", "number": number}


def latent(number: int) -> torch.Tensor:
    return torch.randn(4, 2, 2, 4, generator=torch.Generator().manual_seed(number))


def add_latent(writer: CacheWriter, number: int, source: str | None = None) -> str:
    key = entry_key(latent_parts(number))
    tensors = latent_tensors(latent(number), latent(number) - 5)
    writer.add(
        "latents",
        key,
        tensors,
        latent_parts(number),
        bucket=BUCKET,
        tokens=16,
        content_id=f"c{number}",
        frames=range(0, 10, 2),
        fps=8.0,
        source=source or f"{number}.mp4",
    )
    return key


def add_text(writer: CacheWriter, caption: str, section: str = "texts", pooled: bool = True) -> str:
    key = entry_key({"kind": "text", "caption": caption})
    generator = torch.Generator().manual_seed(len(caption))
    embeds_LD = torch.randn(1 + len(caption), 6, generator=generator).bfloat16()
    entry = TextEntry(embeds_LD, embeds_LD[0].clone() if pooled else None)
    writer.add(section, key, text_tensors(entry), {"caption": caption}, tokens=1 + len(caption))
    return key


def finish(root: Path, latents: list[str], texts: list[str], **kwargs: str) -> None:
    """Describe the data set, as preprocess does at its end."""
    keys = number_duplicates(sample_key(key, texts) for key in latents)
    rows = [
        Sample(key, latent_key, tuple(texts), "val" if row == 0 else "train", BUCKET, f"{row}.mp4", 16, f"c{row}")
        for row, (key, latent_key) in enumerate(zip(keys, latents, strict=True))
    ]
    write_samples(root, rows, **kwargs)
    write_rejects(root, [("bad.mp4", "no_video", "no video stream"), ("a.gif", "too_short", "3 frames")])
    write_info(root, {"encoders": {"vae": {"channels": 4}}, "fps": 8.0})


def build(root: Path, count: int = 4, shard_bytes: int = 10**9) -> tuple[list[str], list[str]]:
    with CacheWriter(root, shard_bytes) as writer:
        latents = [add_latent(writer, number) for number in range(count)]
        texts = [add_text(writer, "a rabbit"), add_text(writer, "an owl in a tree", pooled=False)]
        add_text(writer, "", "null")
    finish(root, latents, texts)
    return latents, texts


def tar_bytes(root: Path) -> dict[str, bytes]:
    """Every member of every shard by its name."""
    members = {}
    for path in sorted(root.rglob("*.tar")):
        with tarfile.open(path) as tar:
            for info in tar:
                file = tar.extractfile(info)
                assert file is not None and info.name not in members
                members[info.name] = file.read()
    return members


# -- keys ---------------------------------------------------------------------------------------------------------


def test_entry_key_is_a_function_of_content() -> None:
    parts = {"frames": (1, 2), "codec": {"weights": "ab", "stride": 4.0}, "text": "ein Käfer 甲虫"}
    shuffled = {"text": "ein Käfer 甲虫", "codec": {"stride": 4.0, "weights": "ab"}, "frames": [1, 2]}
    assert entry_key(parts) == entry_key(shuffled)
    assert len(entry_key(parts)) == 32
    changes = [{"frames": (2, 1)}, {"text": "ein Käfer"}, {"codec": {"weights": "ab", "stride": 4}}, {"new": None}]
    assert len({entry_key({**parts, **change}) for change in [{}, *changes]}) == 5


def test_entry_key_refuses_what_json_would_blur() -> None:
    with pytest.raises(TypeError, match="names in JSON"):
        entry_key({"a": {1: "one"}})
    with pytest.raises(TypeError):
        entry_key({"a": torch.zeros(1)})
    with pytest.raises(ValueError):
        entry_key({"a": float("nan")})


def test_sample_keys_and_duplicates() -> None:
    assert sample_key("a", ["b", "c"]) != sample_key("a", ["c", "b"])
    assert sample_key("a", ["b"]) == sample_key("a", ("b",))
    assert number_duplicates(["a", "b", "a", "a"]) == ["a", "b", "a-1", "a-2"]


@given(st.lists(st.sampled_from("abc")))
def test_number_duplicates_makes_distinct(keys: list[str]) -> None:
    numbered = number_duplicates(keys)
    assert len(set(numbered)) == len(keys)
    assert [name.split("-")[0] for name in numbered] == keys


# -- write and read -----------------------------------------------------------------------------------------------


def test_round_trip(tmp_path: Path) -> None:
    latents, texts = build(tmp_path)
    cache = DatasetCache(tmp_path)
    assert cache.info["encoders"] == {"vae": {"channels": 4}} and cache.info["schema"] == 1
    assert cache.keys("latents") == set(latents) and cache.keys("texts") == set(texts)
    stored = cache.latent(latents[2])
    assert torch.equal(stored["mean"], latent(2)) and torch.equal(stored["logvar"], latent(2) - 5)
    stored["mean"].zero_()  # owns its memory: the cache is untouched
    assert torch.equal(cache.latent(latents[2])["mean"], latent(2))
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


def test_writer_refuses_misplaced_entries(tmp_path: Path) -> None:
    with CacheWriter(tmp_path) as writer:
        for section, key, bucket in [
            ("video", "0" * 32, None),
            ("texts", "not a key", None),
            ("latents", "0" * 32, None),
            ("texts", "0" * 32, BUCKET),
        ]:
            with pytest.raises(ValueError, match="no entry of section"):
                writer.add(section, key, {"embeds": torch.zeros(1, 1)}, {}, bucket=bucket)
    assert not list(tmp_path.rglob("*.tar"))


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
    assert sorted(sample.latent_key for sample in cache.samples) == sorted(latents[:2] * 2)
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


# -- what a user sees ---------------------------------------------------------------------------------------------


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
    with pytest.raises(UserError, match="no description of a cache"):
        read_info(tmp_path)


def test_samples_without_entries_are_noticed_at_once(tmp_path: Path) -> None:
    latents, _ = build(tmp_path)
    finish(tmp_path, [*latents, "f" * 32], [])
    with pytest.raises(UserError, match=r"1 of 5 samples have no stored encoding \(such as 4\.mp4\)"):
        DatasetCache(tmp_path)
    finish(tmp_path, latents, ["e" * 32])
    with pytest.raises(UserError, match="4 of 4 samples"):
        DatasetCache(tmp_path)


def test_every_damaged_byte_of_a_payload_is_noticed_and_mended_by_a_new_run(tmp_path: Path) -> None:
    latents, texts = build(tmp_path, shard_bytes=2000)
    entry = DatasetCache(tmp_path).entry(latents[1])
    path = tmp_path / entry.shard
    data = bytearray(path.read_bytes())
    data[entry.offset + entry.bytes - 1] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match=f"shard {entry.shard} is damaged at entry {latents[1]}.*preprocess"):
        DatasetCache(tmp_path).latent(latents[1])
    assert DatasetCache(tmp_path, verify=False).latent(latents[1])["mean"].shape == (4, 2, 2, 4)
    path.write_bytes(bytes(data)[: entry.offset + 10])
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


def test_disk_full_is_told_and_leaves_nothing(tmp_path: Path) -> None:
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
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    add_latent(writer, 0)
    writer.close()
    assert len(tar_bytes(tmp_path)) == 2


def test_an_error_elsewhere_keeps_whole_entries(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), CacheWriter(tmp_path) as writer:
        key = add_latent(writer, 0)
        raise KeyboardInterrupt
    assert CacheWriter(tmp_path).has("latents", key)


# -- kills, repairs, several writers ------------------------------------------------------------------------------

WORKER = """
import sys, torch
from mmspeed.data import CacheWriter, entry_key
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
    say(first, "ready", line=False), say(second, "ready", line=False)
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


def test_handles_survive_fork_spawn_and_copies(tmp_path: Path) -> None:
    latents, _ = build(tmp_path)
    cache = DatasetCache(tmp_path)
    expected = cache.latent(latents[0])["mean"]
    children = []
    for _ in range(2):
        if (child := os.fork()) == 0:
            same = all(torch.equal(cache.latent(latents[0])["mean"], expected) for _ in range(20))
            os._exit(0 if same else 1)
        children.append(child)
    for _ in range(20):
        assert torch.equal(cache.latent(latents[0])["mean"], expected)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    assert torch.equal(copy.deepcopy(cache).latent(latents[0])["mean"], expected)
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        assert pool.submit(DatasetCache.entry, cache, latents[0]).result() == cache.entry(latents[0])


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(), lambda s: st.lists(s) | st.dictionaries(st.text(), s)
    )
)
def test_canonical_json_parses_back(value: object) -> None:
    assert json.loads(canonical_json(value)) == value
