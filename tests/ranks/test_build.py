"""Several processes build one cache, and know of each other through its files only: the same bytes as from one."""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

from mmspeed.config import Config
from mmspeed.config.schema import SourceConfig
from mmspeed.data import DatasetCache
from mmspeed.errors import UserError
from mmspeed.preprocess import BuildReport, CacheBuilder
from mmspeed.preprocess.build.coordination import ProcessRecord, WorkShare, read_part, write_part
from mmspeed.preprocess.records.sample_table import ClipRow
from tests.support.caches import tar_bytes
from tests.support.forks import ended, fork, kill, ranks, wait
from tests.support.runs import small_config

VARIANTS = (
    *("data.windows=2", "data.variants=draw", "data.val_fraction=0.3"),
    *("preprocess.encode_batch=2", "preprocess.decode_workers=1"),
)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A cache of two data sets that one process has made, of which one source is damaged."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("one")
    config = small_config(folder, *VARIANTS)
    manifest = Path(config.data.sources[0].path)
    rows = manifest.read_text(encoding="utf-8").splitlines()
    (folder / "bad.mp4").write_bytes(b"this is no video")
    rows.insert(3, json.dumps({"video": "bad.mp4", "caption": "A broken thing"}))
    for name, some in (("clips.jsonl", rows[:6]), ("more.jsonl", rows[6:])):
        (folder / name).write_text("".join(f"{row}\n" for row in some), encoding="utf-8")
    two = config.data.sources[0].model_copy(update={"name": "first"}), SourceConfig(path=str(folder / "more.jsonl"))
    config = config.model_copy(update={"data": config.data.model_copy(update={"sources": two})})
    report = CacheBuilder(config).run()
    assert (report.sources, report.encoded, report.rejected) == (9, 8, 1)
    counts = Counter(sample.dataset for sample in DatasetCache(config.cache_dir).samples)
    assert counts == {"first": 5, "more.jsonl": 3}
    return config


def another(one: Config, folder: Path, *overrides: str) -> Config:
    """The same sources, into a new cache."""
    sources = json.dumps([source.model_dump(mode="json") for source in one.data.sources])
    return small_config(folder, *VARIANTS, f"data.sources={sources}", *overrides)


def assert_same(config: Config, one: Config) -> None:
    assert tar_bytes(config.cache_dir) == tar_bytes(one.cache_dir)
    for table in ("index/samples.parquet", "rejects/rejects.parquet"):
        assert (config.cache_dir / table).read_bytes() == (one.cache_dir / table).read_bytes()
    assert not (config.cache_dir / "parts").exists()
    cache = DatasetCache(config.cache_dir)
    for sample in cache.samples:
        assert all(cache.latent(key) for key in sample.latent_keys) and all(cache.text(key) for key in sample.text_keys)


def build(config: Config, result: Path, shard: str | None = None) -> None:
    """What a process of its own does: build, and leave the report."""
    report = CacheBuilder(config, shard).run()
    result.write_text(json.dumps(report.to_json() | {"lines": report.lines()}))


def launch(config: Config, folder: Path, count: int, seconds: float = 120.0) -> list[dict]:
    """The reports of `count` launched processes."""
    files = [folder / f"report-{rank}.json" for rank in range(count)]
    log = folder / "log.txt"
    pids = [
        fork(lambda file=file: build(config, file), log, environment)
        for file, environment in zip(files, ranks(count), strict=True)
    ]
    assert [wait(pid, seconds) for pid in pids] == [0] * count, log.read_text()
    return [json.loads(file.read_text()) for file in files]


@pytest.mark.slow
def test_launched_processes_make_the_same_bytes_as_one(one: Config, tmp_path: Path) -> None:
    config = another(one, tmp_path)
    reports = launch(config, tmp_path, 3)
    for report in reports:  # every process has the counts of all
        assert (report["encoded"], report["reused"], report["rejected"], report["texts"]) == (8, 0, 1, 10)
        assert "8 of 9 sources in it" in report["lines"][0]
    assert_same(config, one)
    again = launch(config, tmp_path, 3)[0]
    assert (again["encoded"], again["reused"], again["texts"], again["texts_reused"]) == (0, 8, 0, 10)
    assert_same(config, one)


@pytest.mark.slow
def test_parts_of_an_array_run_in_any_order_and_the_last_finishes(one: Config, tmp_path: Path) -> None:
    config = another(one, tmp_path)
    first = CacheBuilder(config, "3/3").run()
    assert (first.part, first.parts_missing) == ((2, 3), 2)
    assert "part 3 of 3 is done; 2 parts are missing" in first.lines()[-1]
    assert not (config.cache_dir / "index" / "samples.parquet").exists()
    pids = [fork(CacheBuilder(config, shard).run, tmp_path / "log.txt") for shard in ("1/3", "2/3")]
    assert [wait(pid) for pid in pids] == [0, 0], (tmp_path / "log.txt").read_text()
    assert_same(config, one)
    # one part once more, when all is done: nothing to do, and nothing is waited for
    again = CacheBuilder(config, "2/3").run()
    assert again.encoded == 0 and "the cache was complete before" in again.lines()[-1]
    assert_same(config, one)


@pytest.mark.slow
def test_a_part_whose_entries_are_gone_is_not_trusted(one: Config, tmp_path: Path) -> None:
    config = another(one, tmp_path)
    CacheBuilder(config, "1/2").run()
    for section in ("latents", "index"):
        shutil.rmtree(config.cache_dir / section)
    with pytest.raises(UserError, match=r"of part 1 are not in the cache \(any more\); run part 1 of 2 again"):
        CacheBuilder(config, "2/2").run()
    CacheBuilder(config, "1/2").run()
    assert_same(config, one)


@pytest.mark.slow
def test_two_commands_started_by_mistake_on_one_cache(one: Config, tmp_path: Path) -> None:
    config = another(one, tmp_path)
    log = tmp_path / "log.txt"
    pids = [fork(CacheBuilder(config).run, log) for _ in range(2)]
    assert [wait(pid) for pid in pids] == [0, 0], log.read_text()
    cache, whole = DatasetCache(config.cache_dir), DatasetCache(one.cache_dir)
    assert list(cache.samples) == list(whole.samples)
    for section in ("latents", "texts", "null"):
        assert cache.keys(section) == whole.keys(section)
        for key in cache.keys(section):
            assert cache.entry(key, section).checksum == whole.entry(key, section).checksum
    for sample in cache.samples:  # each payload is read, and checked against its checksum
        assert all(cache.latent(key) for key in sample.latent_keys) and all(cache.text(key) for key in sample.text_keys)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.limit=5", "the processes have different settings: data.limit is 5 in process 1 and null in process 0"),
        ("data.sources.0.path={}", "the processes see different sources (6 in process 1, 9 in process 0)"),
    ],
)
def test_processes_that_see_different_sources_say_so(one: Config, tmp_path: Path, override: str, message: str) -> None:
    fewer = tmp_path / "elsewhere" / Path(one.data.sources[0].path).name
    fewer.parent.mkdir()
    lines = Path(one.data.sources[0].path).read_text(encoding="utf-8").splitlines(keepends=True)
    fewer.write_text("".join(lines[:4]), encoding="utf-8")
    result, other = another(one, tmp_path), another(one, tmp_path, override.format(fewer))
    log = tmp_path / "log.txt"
    zero, first = (
        fork(lambda config=config: build(config, tmp_path / "x.json"), log, environment)
        for config, environment in zip((result, other), ranks(2), strict=True)
    )
    assert wait(first) == 1
    assert message in log.read_text()
    assert ended(zero) is None  # waits for its part; a launcher ends it now
    kill(zero)
    launch(result, tmp_path, 2)  # what it left is no hindrance
    assert_same(result, one)


@pytest.mark.slow
def test_one_that_comes_late_is_waited_for(one: Config, tmp_path: Path) -> None:
    config = another(one, tmp_path)
    log = tmp_path / "log.txt"
    environments = ranks(2)
    last = fork(lambda: build(config, tmp_path / "1.json"), log, environments[1])
    time.sleep(0.5)
    assert not (config.cache_dir / "index").exists()  # nothing is begun before process 0 has shown what it sees
    first = fork(lambda: build(config, tmp_path / "0.json"), log, environments[0])
    assert [wait(first), wait(last)] == [0, 0], log.read_text()
    assert_same(config, one)


def test_a_part_comes_back_from_its_file(tmp_path: Path) -> None:
    rows = [
        ClipRow("a.mp4", "train", "c1", "005x0032x0048", window, 0, f"k{window}", ("t1", "t2")) for window in (0, 1)
    ]
    facts = {"codec": "abc", "report": BuildReport(tmp_path, encoded=2).to_json()}
    write_part(tmp_path / "rank-00000.parquet", ProcessRecord(rows, facts))
    assert read_part(tmp_path / "rank-00000.parquet") == ProcessRecord(rows, json.loads(json.dumps(facts)))


@pytest.mark.parametrize("shard", ["0/8", "9/8", "3"])
def test_a_malformed_shard_is_an_error(shard: str) -> None:
    with pytest.raises(UserError, match="from 1/8 to 8/8"):
        WorkShare.of(shard)


def test_a_shard_under_a_launcher_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    assert WorkShare.of(None) == WorkShare() and WorkShare.of("8/8") == WorkShare(7, 8)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert WorkShare.of(None) == WorkShare(1, 2, launched=True)
    with pytest.raises(UserError, match="use one of them"):
        WorkShare.of("1/2")
