"""`mmspeed check`: what is present, missing and stale, and why, in lines and on a page that say the same."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest

from mmspeed.config import Config, make_config
from mmspeed.data import DatasetCache
from mmspeed.errors import UserError
from mmspeed.preprocess import CacheBuilder, check
from mmspeed.preprocess.records import stale_entries
from mmspeed.preprocess.report.check import stale_reasons
from mmspeed.preprocess.report.page import default_path
from tests.support.media import make_zoo, zoo_tree
from tests.support.runs import small_config
from tests.unit.preprocess.test_page import Reader


@pytest.fixture
def home(small_cache: Path, tmp_path: Path) -> Path:
    """A folder with a whole cache, to be changed."""
    return Path(shutil.copytree(small_cache, tmp_path / "home"))


def text_of(config: Config) -> str:
    return "\n".join(check(config).lines())


def page_of(config: Config) -> Reader:
    """The page at its usual place."""
    return Reader(default_path(config).read_text(encoding="utf-8"))


def test_lines_and_page_say_what_is_there_and_what_is_missing(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    report = check(config, schedule=True)
    before = "\n".join(report.lines())
    assert (
        "8 sources, 8 usable, 0 rejected" in before and "not created yet; 8 latents and 8 captions to encode" in before
    )
    assert "encoding missing entries: unknown until the first build" in before
    assert "bucket 5x32x48: 7 training samples" in before and "held out for validation: 1" in before
    assert "schedule: an epoch has 7 uses of 7 samples" in before
    assert "tokens of the model, " in before, "those of a latent are listed by `cache stat`"
    assert not config.cache_dir.exists(), "check writes nothing into the cache"
    assert report.page == default_path(config) and f"page: {report.page}" in before
    page = page_of(config)
    assert (page.keyed["latents-wanted"], page.keyed["latents-missing"], page.keyed["texts-missing"]) == ("8", "8", "8")
    assert (page.keyed["train"], page.keyed["val"], page.keyed["usable"]) == ("7", "1", "8 of 8")
    assert "8 latents and 8 captions are still to be encoded" in page.text
    cells = " ".join(value for name, value in page.keyed.items() if name.startswith("schedule-0-")).split()
    assert len(cells) > 6 and cells in [line.split() for line in before.splitlines()]
    assert sum(tag == "img" for tag, _ in page.tags) == 8

    CacheBuilder(config).run()
    built = page_of(config)
    assert "Done: 8 of 8 sources are in the cache" in built.text
    assert (built.keyed["train"], built.keyed["val"], built.keyed["files"]) == ("7", "1", "8")
    record = json.loads(default_path(config).with_suffix(".json").read_text())
    assert record["build"]["clips"] == 8 and record["build"]["pixels"] == 8 * 5 * 32 * 48
    assert record["statistics"]["sums"]["listed"] == 8

    after = text_of(config)
    assert "cache latents: 8 present, 0 missing, 0 not used" in after and "nothing to encode" in after
    assert page_of(config).keyed["latents-present"] == "8" and "every entry is in the cache" in page_of(config).text
    faster = text_of(small_config(tmp_path, "data.fps=12"))
    assert "encoding missing entries: about" in faster and "as fast as the last build: 8 clips in" in faster


def test_a_cache_that_is_not_finished_damaged_or_of_another_schema_is_no_obstacle(home: Path) -> None:
    config = small_config(home)
    root = config.cache_dir
    info = (root / "cache.json").read_bytes()
    (root / "cache.json").unlink()
    (root / "index" / "samples.parquet").unlink()
    assert "cache latents: 8 present, 0 missing, 0 not used" in text_of(config)
    (table,) = (root / "index").glob("latents-*.parquet")
    table.write_bytes(table.read_bytes()[:100])
    broken = text_of(config)
    assert f"cache table {table} is damaged" in broken and "cache latents: 0 present, 8 missing" in broken
    assert "cache texts: 8 present" in broken
    (root / "cache.json").write_bytes(info.replace(b'"schema": 2', b'"schema": 1'))
    old = text_of(config)
    assert "has schema 1" in old and "cache texts: 0 present, 8 missing" in old


def test_every_file_of_a_zoo_is_in_the_lines_and_on_the_page(tmp_path: Path) -> None:
    zoo = make_zoo(tmp_path / "zoo")
    tree = zoo_tree(tmp_path)
    report = check(make_config(tree))
    numbers, page = report.statistics, page_of(make_config(tree))
    good = sum(expect.good for expect in zoo.values()) + 1  # damaged.mp4: nothing is decoded, so nobody knows yet
    assert "Damage inside a file is detected only when it is encoded" in page.text
    assert numbers.usable == good and numbers.rejected == len(zoo) - good
    assert f"{good} usable, {len(zoo) - good} rejected" in report.lines()[0]
    for reason, count in numbers.reasons.items():
        assert page.keyed[f"reason-{reason}"] == str(count)
        assert any(line.split()[:2] == [reason, str(count)] for line in report.lines())
    counted = ("usable_row", "rejected_sources", "rejected_files", "caption_files", "ignored", "beyond_limit")
    assert sum(int(page.keyed[name]) for name in counted) == int(page.keyed["files"]) == numbers.sums["files"]
    assert "not accounted for" not in page.text and "hint: 1 rejected as too_small" in "\n".join(report.lines())
    assert sum(tag == "img" for tag, _ in page.tags) == len(numbers.shown) == 24
    assert default_path(make_config(tree)).stat().st_size < 2_000_000


def test_nothing_usable_is_a_problem_and_has_a_page(tmp_path: Path) -> None:
    config = small_config(tmp_path, "data.buckets=[{frames: 5, height: 512, width: 512}]")
    report = check(config)
    assert report.problems == ["no source is usable, so there is nothing to train on"]
    page = page_of(config)
    assert "Not ready: 1 problem" in page.text and page.keyed["reason-too_small"] == "8"
    held_out = check(small_config(tmp_path, "data.limit=1"))
    assert "every usable sample is held out" in held_out.problems[0]
    wrong = check(small_config(tmp_path, "data.buckets.0.frames=6"))
    assert wrong.problems and "6 frames do not fit" in wrong.problems[0]


def test_stale_reasons_take_the_nearest_and_say_when_not_all_were_compared(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = [{"content": "a", "codec": "new", "fps": 8}, {"content": "b", "codec": "new", "fps": 8}]
    unused = [{"content": "a", "codec": "old", "fps": 9}, {"content": "a", "codec": "old", "fps": 8}]
    assert stale_reasons(missing, unused, "content") == Counter({"codec": 1})
    monkeypatch.setattr(stale_entries, "EXAMINED", 3)
    assert "stale: 3, made with another fps, frames (of 3 compared)" in text_of(small_config(home, "data.fps=12"))
    assert len(DatasetCache(small_config(home).cache_dir).samples) == 8


def test_a_cache_that_is_a_file_is_reported_before_and_by_the_build(tmp_path: Path) -> None:
    config = small_config(tmp_path, f"data.cache={tmp_path / 'clips.jsonl'}", clips=2)
    assert any("clips.jsonl is a file" in problem for problem in check(config).problems)
    with pytest.raises(UserError, match=r"data\.cache: .*clips.jsonl is a file"):
        CacheBuilder(config).run()
