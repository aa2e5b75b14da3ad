"""The data set of every sample: from every format to the reader, and in merged caches."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mmspeed.config import Config
from mmspeed.config.schema import DataConfig
from mmspeed.data import DatasetCache
from mmspeed.data.cache.index import ENTRIES_SCHEMA, FACTS, SAMPLES_SCHEMA, VERSION, IndexFacts, write_batch
from mmspeed.data.cache.tables import SAMPLES_FILE, read_info, write_info
from mmspeed.data.maintenance.merge import merge
from mmspeed.data.maintenance.verify import verify
from mmspeed.errors import UserError
from mmspeed.pipelines.domains.open_cache import check_cache
from mmspeed.preprocess import CacheBuilder
from mmspeed.preprocess.sources.discover import list_sources
from tests.support.care_caches import build_whole
from tests.support.media import write_tar
from tests.support.runs import small_config


def media(folder: Path, *names: str) -> Path:
    """A folder of files that end like media, with captions; nothing opens them when sources are listed."""
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).write_bytes(b"media")
        (folder / name).with_suffix(".txt").write_text("words")
    return folder


def test_sources_of_every_format_know_their_data_set(tmp_path: Path) -> None:
    plain = media(tmp_path / "plain", "a.mp4", "b.mp4")
    listed = media(tmp_path / "listed", "c.mp4")
    rows = [{"video": "c.mp4", "caption": "words"}]
    (listed / "m.jsonl").write_text(json.dumps(rows[0]) + "\n")
    (listed / "m.csv").write_text("video,caption\nc.mp4,words\n")
    pq.write_table(pa.Table.from_pylist(rows), listed / "m.parquet")
    described = media(tmp_path / "described", "d.mp4")
    (described / "metadata.jsonl").write_text(json.dumps({"video": "d.mp4", "caption": "words"}) + "\n")
    for number in range(2):
        write_tar(tmp_path / f"{number}.tar", [(f"e{number}.mp4", b"media"), (f"e{number}.txt", b"words")])
    sources = [
        {"path": str(plain), "name": "my clips"},
        *({"path": str(listed / f"m.{kind}")} for kind in ("jsonl", "csv", "parquet")),
        {"path": str(described)},
        {"path": str(tmp_path / "*.tar"), "name": "tars"},
        {"path": str(plain)},
    ]
    data = DataConfig.model_validate({"sources": sources, "buckets": [{"frames": 5, "height": 32, "width": 32}]})
    actual = list_sources(data).sources
    assert [(source.name, source.dataset) for source in actual] == [
        ("a.mp4", "my clips"),
        ("b.mp4", "my clips"),
        ("c.mp4", "m.jsonl"),
        ("m.csv/c.mp4", "m.csv"),
        ("m.parquet/c.mp4", "m.parquet"),
        ("d.mp4", "described"),
        ("0.tar!e0.mp4", "tars"),
        ("1.tar!e1.mp4", "tars"),
        ("plain/a.mp4", "plain"),
        ("plain/b.mp4", "plain"),
    ]
    assert actual[0].dataset is actual[1].dataset, "ten million sources share the names"


def two_sets(folder: Path, *overrides: str, names: tuple[str, str] = ("cats", "dogs")) -> Config:
    """`small_config`, its clips in two data sets of 5 and 3."""
    config = small_config(folder)
    manifest = Path(config.data.sources[0].path)
    rows = manifest.read_text(encoding="utf-8").splitlines(keepends=True)
    sources = []
    for name, some in zip(names, (rows[:5], rows[5:]), strict=True):
        (folder / f"{len(some)}.jsonl").write_text("".join(some), encoding="utf-8")
        sources.append({"path": str(folder / f"{len(some)}.jsonl"), "name": name})
    return small_config(folder, f"data.sources={json.dumps(sources)}", *overrides)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A cache of two data sets. Not to be changed."""
    config = two_sets(tmp_path_factory.mktemp("built"))
    CacheBuilder(config).run()
    return config


def copied(built: Config, folder: Path) -> Config:
    """A copy of that cache, with its sources."""
    config = two_sets(folder)
    shutil.copytree(built.cache_dir, config.cache_dir)
    return config


def test_shares_may_change_and_names_may_not(built: Config, tmp_path: Path) -> None:
    cache, folder = DatasetCache(built.cache_dir), tmp_path
    for override in (
        *("data.sources.0.repeats=3", "data.repeats=2", "data.temperature=2.0"),
        "data.sources.0.weight=1 data.sources.1.weight=0.5",
    ):
        other = two_sets(folder, *override.split(), f"data.cache={built.cache_dir}")
        check_cache(cache, other)
        assert other.sample_settings() == built.sample_settings()
    renamed = two_sets(folder, f"data.cache={built.cache_dir}", names=("cats", "birds"))
    with pytest.raises(
        UserError, match=r"made with other data\.sources\.1\.name; run `mmspeed preprocess` again"
    ) as error:
        check_cache(cache, renamed)
    assert "\n" not in str(error.value)
    mine = copied(built, tmp_path / "mine")
    renamed = two_sets(tmp_path / "mine", names=("cats", "birds"))
    report = CacheBuilder(renamed).run()
    assert (report.encoded, report.reused, report.texts) == (0, 8, 0)
    check_cache(DatasetCache(mine.cache_dir), renamed)
    assert {sample.dataset for sample in DatasetCache(mine.cache_dir).samples} == {"cats", "birds"}


def compile_by_another_version(root: Path) -> None:
    """Give a cache the compiled index of another version."""
    for name, schema in (("entries.arrow", ENTRIES_SCHEMA), ("samples.arrow", SAMPLES_SCHEMA)):
        path = root / "index" / name
        with pa.ipc.open_file(path) as reader:
            batch, facts = reader.get_batch(0), IndexFacts(**json.loads(reader.schema.metadata[FACTS]))
            columns = [column.take(pa.array(range(len(column)))) for column in batch]
        write_batch(path, columns, schema, asdict(replace(facts, version=1)))


def test_the_index_of_another_version_is_compiled_again_and_is_no_damage(
    built: Config, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = copied(built, tmp_path).cache_dir
    compile_by_another_version(root)
    monkeypatch.setattr(logging.getLogger("mmspeed"), "propagate", True)  # a command line run earlier turns it off
    caplog.set_level(logging.WARNING)
    assert verify(root).damage == []
    assert list(DatasetCache(root).samples) == list(DatasetCache(built.cache_dir).samples)
    for name in ("entries.arrow", "samples.arrow"):
        with pa.ipc.open_file(root / "index" / name) as reader:
            assert json.loads(reader.schema.metadata[FACTS])["version"] == VERSION
    assert "damaged" not in caplog.text and verify(root).damage == []
    path = root / SAMPLES_FILE
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(UserError, match=r"samples\.parquet is damaged"):
        DatasetCache(root)


def test_merged_data_sets_keep_their_names_and_one_name_has_one_meaning(built: Config, tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    one = small_config(tmp_path / "one", f"data.sources=[{{path: {built.data.sources[0].path}, name: cats}}]")
    assert built.codec_weights is not None
    shutil.copytree(built.codec_weights.parent, one.cache_dir / "codec")
    CacheBuilder(one).run()
    merged = tmp_path / "merged"
    report = merge(merged, [one.cache_dir, built.cache_dir])
    assert report.samples == 8  # the cats of both are the same
    cache = DatasetCache(merged)
    assert list(cache.samples) == list(DatasetCache(built.cache_dir).samples)
    check_cache(cache, built)
    # the same name for other sources
    info = {
        name: value for name, value in read_info(one.cache_dir).items() if name not in ("seal", "schema", "mmspeed")
    }
    info["made_for"]["sources"][0] |= {"path": "lions.jsonl", "format": "csv"}
    write_info(one.cache_dir, info)
    with pytest.raises(UserError, match=r"both have a source named cats, of other sources \(format, path\); ") as error:
        merge(tmp_path / "again", [one.cache_dir, built.cache_dir])
    assert "\n" not in str(error.value) and not (tmp_path / "again").exists()
    # sources of other names stand beside each other
    build_whole(tmp_path / "a", range(2), sources=("x",))
    build_whole(tmp_path / "b", range(2, 4), sources=("y",))
    assert merge(tmp_path / "a", [tmp_path / "b"]).samples == 4
