"""The mapped index: finds what the Parquet files hold, is compiled again when they change, is shared, and copies no payload."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmspeed.data import CacheWriter, DatasetCache, Entry, Sample
from mmspeed.data.cache import reader as cache_reader
from mmspeed.data.cache import writer as cache_writer
from mmspeed.data.cache.index import compile_index
from mmspeed.data.cache.index_reader import SampleTable, open_tables
from mmspeed.data.cache.keys import number_duplicates
from mmspeed.data.cache.payloads import LocalStore
from mmspeed.data.cache.seals import is_sealed
from mmspeed.data.cache.tables import index_path, read_samples, write_index, write_info, write_samples
from mmspeed.errors import UserError
from mmspeed.shapes import Bucket
from tests.support.caches import FOLDER, add_latent, build, finish, flip, latent

BUCKETS = (Bucket(1, 64, 64), Bucket(17, 64, 96), Bucket(1000, 64, 64))
SECTIONS = ("latents", "texts", "null")
DATASETS = ("web", "ä set", "")

# few different first halves, so that the search has to look on
keys = st.builds(lambda a, b: f"{a:016x}{b:016x}", st.sampled_from([0, 1, 2**64 - 1]), st.integers(0, 5))
placed = st.lists(st.tuples(st.sampled_from(SECTIONS), keys, st.integers(0, 3)), max_size=30)


def an_entry(section: str, key: str, shard: str, number: int) -> Entry:
    bucket = BUCKETS[number % 3].name if section == "latents" else None
    meta = f'{{"number":{number}}}'
    return Entry(
        key,
        section,
        shard,
        number * 512,
        number,
        f"{number:032x}",
        bucket,
        number,
        f"c{number}",
        (0, 3),
        8.0,
        None,
        meta,
    )


@settings(max_examples=12, deadline=None)
@given(placed, placed)
def test_lookups_equal_a_dict_over_the_rows(
    rows: list[tuple[str, str, int]], asked: list[tuple[str, str, int]]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        shards: dict[str, list[Entry]] = {}
        for number, (section, key, shard) in enumerate(dict.fromkeys(rows)):
            name = f"{section}/{shard:06d}.tar"
            shards.setdefault(name, []).append(an_entry(section, key, name, number))
        truth: dict[tuple[str, str], Entry] = {}
        for name in sorted(shards, key=lambda name: index_path(root, name)):
            write_index(root, name, shards[name], 0, "")
            for entry in shards[name]:
                truth.setdefault((entry.section, entry.key), entry)
        write_samples(root, [])
        write_info(root, {})
        cache = DatasetCache(root)
        for section in SECTIONS:
            assert cache.keys(section) == {key for where, key in truth if where == section}
        for section, key in {(section, key) for section, key, _ in [*rows, *asked]}:
            entry = truth.get((section, key))
            assert cache.has(section, key) == (entry is not None)
            if entry is not None:
                assert cache.entry(key, section) == entry
                table = open_tables(root).entries
                place = table.place(table.row(section, key) or 0)
                assert place == (entry.shard, entry.offset, entry.bytes, bytes.fromhex(entry.checksum))
        assert cache.duplicates == sum(map(len, shards.values())) - len(truth)


def make_samples(count: int) -> list[Sample]:
    generator = np.random.default_rng(0)
    contents = number_duplicates(f"{number:032x}" for number in generator.integers(0, max(1, count // 2), count))
    return [
        Sample(
            key,
            tuple(f"{number + extra:032x}" for extra in range(1 + number % 3)),
            tuple(f"{number:032x}" for _ in range(number % 2)),
            "val" if number % 5 == 0 else "train",
            BUCKETS[number % 3],
            f"clip ä {number}.mp4",
            number,
            f"c{number}",
            number % 7 == 0,
            DATASETS[number % 4 % 3],
        )
        for number, key in enumerate(contents)
    ]


def test_samples_are_those_of_the_table_and_lazy(tmp_path: Path) -> None:
    write_samples(tmp_path, make_samples(50))
    table, (truth, _) = open_tables(tmp_path).samples, read_samples(tmp_path)
    assert isinstance(table, SampleTable) and list(table) == truth and len(table) == 50
    assert [table[number] for number in (0, 7, -1)] == [truth[0], truth[7], truth[-1]]
    for part in (slice(3, 20), slice(None, None, -2), slice(40, 99), slice(5, 5)):
        assert list(table[part]) == truth[part]
    with pytest.raises(IndexError, match="there are 50 samples"):
        table[50]
    train = table.split("train")
    assert list(train) == [sample for sample in truth if sample.split == "train"]
    assert list(train[2:9].split("val")) == [] and list(table[:9].split("val")) == [
        s for s in truth[:9] if s.split == "val"
    ]
    assert table.buckets() == sorted(BUCKETS)
    for bucket, places in train.by_bucket().items():
        assert [train[int(place)] for place in places] == [s for s in train if s.bucket == bucket]


@given(st.integers(0, 60), st.integers(-3, 3).filter(bool), st.integers(-60, 60), st.booleans())
@settings(deadline=None, max_examples=25)
def test_groups_are_the_samples_of_each_bucket_and_data_set(count: int, step: int, start: int, train: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_samples(Path(folder), make_samples(count))
        table = open_tables(Path(folder)).samples
        part = (table.split("train") if train else table)[start::step]
        groups, samples = part.by_group(), list(part)
        assert list(groups) == sorted({(sample.bucket, sample.dataset) for sample in samples})
        for (bucket, dataset), places in groups.items():
            inside = [place for place, s in enumerate(samples) if (s.bucket, s.dataset) == (bucket, dataset)]
            assert places.tolist() == sorted(inside, key=lambda place: samples[place].key)
        for bucket, places in part.by_bucket().items():
            of_bucket = [places for (other, _), places in groups.items() if other == bucket]
            assert sorted(np.concatenate(of_bucket).tolist()) == sorted(places.tolist())


def test_samples_that_lack_entries_are_decided_when_compiling(tmp_path: Path) -> None:
    latents, _ = build(tmp_path)
    finish(tmp_path, [*latents, "f" * 32], [])
    with pytest.raises(UserError, match=r"1 of 5 samples have no stored encoding \(such as 4\.mp4\)"):
        DatasetCache(tmp_path)
    cache = DatasetCache(tmp_path, partial=True)
    assert not cache.has("latents", "f" * 32) and cache.has("latents", latents[0])
    with pytest.raises(UserError, match="no entry f"):
        cache.latent("f" * 32)
    write_samples(tmp_path, [replace(s, lost=s.latent_keys == ("f" * 32,)) for s in cache.samples])
    assert sum(sample.lost for sample in DatasetCache(tmp_path).samples) == 1  # a lost sample lacks nothing


def compiled(root: Path) -> dict[str, int]:
    return {path.name: path.stat().st_ino for path in (root / "index").glob("*.arrow")}


def test_compiled_files_are_sealed_kept_and_made_again_when_the_index_changes(tmp_path: Path) -> None:
    latents, texts = build(tmp_path)
    compile_index(tmp_path)
    first = compiled(tmp_path)
    assert set(first) == {"entries.arrow", "samples.arrow"}
    assert all(is_sealed((tmp_path / "index" / name).read_bytes()) for name in first)
    old = DatasetCache(tmp_path)
    assert compiled(tmp_path) == first
    with CacheWriter(tmp_path) as writer:
        latents.append(add_latent(writer, 9))
    assert torch.equal(DatasetCache(tmp_path).latent(latents[-1])["mean"], latent(9))
    assert set(first.values()).isdisjoint(compiled(tmp_path).values())
    assert not old.has("latents", latents[-1]) and len(old.samples) == 4
    finish(tmp_path, latents, texts)
    old.refresh()
    assert old.has("latents", latents[-1]) and len(old.samples) == 5


def test_damaged_compiled_files_are_made_again(tmp_path: Path) -> None:
    latents, _ = build(tmp_path)
    samples = list(DatasetCache(tmp_path).samples)
    for path in (tmp_path / "index" / "entries.arrow", tmp_path / "index" / "samples.arrow"):
        good = path.read_bytes()
        for bad in (b"", good[:-9], good[:700] + b"\1" + good[701:], b"ARROW1\0\0" * 99):
            path.write_bytes(bad)
            cache = DatasetCache(tmp_path)
            assert is_sealed(path.read_bytes()) and list(cache.samples) == samples
            assert torch.equal(cache.latent(latents[2])["mean"], latent(2))


def test_a_damaged_parquet_file_is_named_before_it_is_parsed(tmp_path: Path) -> None:
    build(tmp_path)
    for path in (index_path(tmp_path, f"{FOLDER}/000000.tar"), tmp_path / "index/samples.parquet"):
        good = path.read_bytes()
        for bad in (b"", good[:-5], good[:50] + bytes([good[50] ^ 1]) + good[51:]):
            path.write_bytes(bad)
            with pytest.raises(UserError, match=rf"{path.name} is damaged \(not as it was written\)"):
                DatasetCache(tmp_path)
        path.write_bytes(good)


def open_and_count(root: Path) -> tuple[int, dict[str, int]]:
    cache = DatasetCache(root)
    return len(cache.keys("latents")), compiled(root)


def test_several_processes_at_once_make_one_index(tmp_path: Path) -> None:
    build(tmp_path)
    with concurrent.futures.ProcessPoolExecutor(4, mp_context=multiprocessing.get_context("fork")) as pool:
        actual = list(pool.map(open_and_count, [tmp_path] * 4))
    assert actual == [(4, compiled(tmp_path))] * 4  # the same files: one made them, the others waited


def in_child(action: object) -> int:
    """The exit status of a forked child that runs `action`."""
    if (child := os.fork()) == 0:
        try:
            action()  # type: ignore[operator]
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitpid(child, 0)[1]


def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    root = Path(tempfile.mkdtemp())  # pytest's own folders are closed to other users
    try:
        latents, _ = build(root)
        root.chmod(0o755)
        for folder in root.rglob("*"):
            folder.chmod(0o555 if folder.is_dir() else 0o444)
        before, held = compiled(root), set(os.listdir(tempfile.gettempdir()))

        def use() -> None:
            if os.getuid() == 0:
                os.setuid(65534)
            assert torch.equal(DatasetCache(root).latent(latents[1])["mean"], latent(1))

        assert in_child(use) == 0
        assert compiled(root) == before == {}
        left = {name for name in set(os.listdir(tempfile.gettempdir())) - held if name.startswith("mmspeed-")}
        assert not left
    finally:
        for folder in [root, *(path for path in root.rglob("*") if path.is_dir())]:
            folder.chmod(0o755)
        shutil.rmtree(root)


def test_tensors_are_views_of_one_mapping(tmp_path: Path) -> None:
    latents, _ = build(tmp_path)
    cache = DatasetCache(tmp_path)
    first, second = cache.latent(latents[0]), cache.latent(latents[0])
    assert first["mean"].data_ptr() == second["mean"].data_ptr()
    entry, other = cache.entry(latents[0]), cache.entry(latents[3])
    far = cache.latent(latents[3])["mean"].data_ptr() - first["mean"].data_ptr()
    assert far == other.offset - entry.offset  # as far apart as in the file
    assert isinstance(cache._store, LocalStore) and cache._store.mapped == 1
    first["mean"].zero_()
    assert not second["mean"].any()  # the same pages, and private ones
    assert torch.equal(cache.latent(latents[0])["mean"], latent(0))  # which a later read finds out
    assert torch.equal(DatasetCache(tmp_path).latent(latents[0])["mean"], latent(0))


def test_bytes_that_change_under_an_open_cache_are_noticed_at_the_next_read(tmp_path: Path) -> None:
    """They went into training unnoticed: each process looked at an entry's checksum once."""
    latents, texts = build(tmp_path)
    cache = DatasetCache(tmp_path)
    for key in latents:
        cache.latent(key)
    cache.text(texts[0])

    def change(key: str, byte: int) -> None:
        flip(tmp_path / cache.entry(key).shard, cache.entry(key).offset + byte)

    changed = "its bytes have changed since this process first read them"
    change(latents[0], cache.entry(latents[0]).bytes - 1)
    change(latents[1], 20)  # in the header
    change(texts[0], cache.entry(texts[0]).bytes - 1)
    for key, read in ((latents[0], cache.latent), (latents[1], cache.latent), (texts[0], cache.text)):
        with pytest.raises(UserError, match=f"shard .*[.]tar is damaged at entry {key}: {changed}; delete that file"):
            read(key)
    assert torch.equal(cache.latent(latents[2])["mean"], latent(2))
    change(latents[0], cache.entry(latents[0]).bytes - 1)
    assert torch.equal(cache.latent(latents[0])["mean"], latent(0))  # it was mended
    with pytest.raises(UserError, match=f"damaged at entry {latents[1]};"):
        DatasetCache(tmp_path).latent(latents[1])


def test_a_shard_cut_off_while_it_is_mapped_is_reported(tmp_path: Path) -> None:
    latents, _ = build(tmp_path)
    cache = DatasetCache(tmp_path)
    cache.latent(latents[0])
    entry = cache.entry(latents[3])
    os.truncate(tmp_path / entry.shard, entry.offset + 3)
    with pytest.raises(UserError, match=f"damaged at entry {latents[3]}"):
        cache.latent(latents[3])
    for name in ("entries", "samples"):
        os.truncate(tmp_path / "index" / f"{name}.arrow", 100)
        with pytest.raises(UserError, match=rf"{name}\.arrow is damaged"):
            _ = cache.latent(latents[0]) if name == "entries" else cache.samples[0]


def test_overlay_reads_shards_in_progress_and_follows_them_when_sealed(tmp_path: Path) -> None:
    latents, texts = build(tmp_path)
    coming = [add_latent(CacheWriter(tmp_path / "elsewhere"), number) for number in (7, 8)]
    finish(tmp_path, [*latents, *coming], texts)
    cache = DatasetCache(tmp_path, partial=True)
    with CacheWriter(tmp_path, mend=False) as writer:
        for number, key in zip((7, 8), coming, strict=True):
            assert not cache.has("latents", key)
            add_latent(writer, number)
            place = writer.place("latents", key)
            assert place is not None and ".tmp" in place.shard
            cache.overlay([place])
            assert cache.has("latents", key) and cache.entry(key) == place  # the file has grown since it was mapped
            assert torch.equal(cache.latent(key)["mean"], latent(number))
    cache._store = LocalStore(tmp_path)  # a reader that has not mapped it: the name that it knows is gone
    assert torch.equal(cache.latent(coming[0])["mean"], latent(7))
    assert cache.entry(coming[0]).shard == f"{FOLDER}/000001.tar"
    cache.complete()
    assert not cache.partial and cache.has("latents", coming[1])
    cache.overlay([replace(place, key="e" * 32)])
    with pytest.raises(UserError, match="no entry e"):
        cache.latent("e" * 32)


@pytest.mark.parametrize("moment", ["before the index", "while a reader opens the index"])
def test_an_entry_is_readable_at_every_moment_of_sealing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Another rank may read a step's last entries while their writer closes: the cache is never without them."""
    latents, texts = build(tmp_path)
    key = add_latent(CacheWriter(tmp_path / "elsewhere"), 7)
    finish(tmp_path, [*latents, key], texts)
    cache = DatasetCache(tmp_path, partial=True)
    writer = CacheWriter(tmp_path, mend=False, defer=True)
    add_latent(writer, 7)
    row = writer.place("latents", key)
    assert row is not None
    cache.overlay([row])
    met: list[bool] = []

    def read() -> None:
        cache._store = LocalStore(tmp_path)  # one that has not mapped the shard in progress
        met.append(torch.equal(cache.latent(key)["mean"], latent(7)))

    if moment == "before the index":
        whole = cache_writer.write_index
        monkeypatch.setattr(cache_writer, "write_index", lambda *args: (read(), whole(*args)))
        writer.close()
    else:
        whole_tables = cache_reader.open_tables

        def tables_then_seal(root: Path) -> object:
            tables = whole_tables(root)
            writer.close()
            return tables

        monkeypatch.setattr(cache_reader, "open_tables", tables_then_seal)
        cache.refresh()
        assert cache.has("latents", key)  # listed neither in these tables nor under its first name, it stays known
        monkeypatch.undo()
    read()
    assert all(met) and met


def test_threads_read_while_the_index_is_looked_at_again(tmp_path: Path) -> None:
    latents, _ = build(tmp_path, shard_bytes=1)
    cache = DatasetCache(tmp_path)
    cache._store = LocalStore(tmp_path, mappings=2)

    def read(_: int) -> None:
        for number in range(200):
            assert torch.equal(cache.latent(latents[number % 4])["mean"], latent(number % 4))

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        reads = [pool.submit(read, number) for number in range(4)]
        for _ in range(10):
            cache.refresh()
        for each in reads:
            each.result()
