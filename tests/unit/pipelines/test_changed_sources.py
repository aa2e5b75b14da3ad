"""A complete cache is compared with the listing of its sources, and a run with the encoders that it began with."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from mmspeed.config import Config, make_config
from mmspeed.config.schema import SourceConfig
from mmspeed.data import DatasetCache
from mmspeed.data.cache.codec_file import codec_facts
from mmspeed.data.cache.made_from import DIGEST, ListedSource, MadeFrom, SourceChanges
from mmspeed.data.cache.tables import read_info, read_samples, write_info, write_samples
from mmspeed.data.maintenance.merge import merge
from mmspeed.data.maintenance.verify import verify
from mmspeed.errors import UserError
from mmspeed.pipelines import TrainPipeline
from mmspeed.preprocess import CacheBuilder
from mmspeed.preprocess.sources.made_from import listed_now
from tests.support.http_files import served
from tests.support.runs import CLIPS, losses, small_tree

VIDEOS = sorted((CLIPS.parent / "videos").iterdir())


def put(home: Path, name: str, clip: int, caption: str) -> None:
    """A clip of the package with a caption, under a name."""
    (home / "media").mkdir(parents=True, exist_ok=True)
    shutil.copy(VIDEOS[clip], home / "media" / f"{name}.mp4")
    (home / "media" / f"{name}.txt").write_text(caption)


def config(home: Path, name: str, *overrides: str) -> Config:
    tree = small_tree(home)
    tree["data"]["sources"] = [{"path": str(home / "media")}]
    tree["train"]["steps"] = 2
    return make_config(tree, [f"name={name}", *overrides], origin="test")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder of four clips, and their cache."""
    for number in range(4):
        put(tmp_path, f"c{number}", number, f"caption {number}")
    CacheBuilder(config(tmp_path, "made")).run()
    return tmp_path


def change(home: Path) -> None:
    """One goes, one comes, one has other words, one other bytes; a part of a name says nothing."""
    for ending in ("mp4", "txt"):
        (home / "media" / f"c0.{ending}").unlink()
    put(home, "new", 5, "a new clip")
    (home / "media" / "c1.txt").write_text("quite other words")
    put(home, "c2", 6, "caption 2")


CHANGED = "1 new, 1 gone, 1 of another size, 1 with other captions or another split"


def train(home: Path, name: str, *overrides: str, online: bool = False) -> Config:
    run = config(home, name, *overrides)
    TrainPipeline(run, online=online).run()
    return run


def test_a_change_is_told_offline_and_brought_in_online(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "mmspeed")
    before = train(home, "before")
    assert "changed" not in caplog.text
    change(home)
    told = train(home, "told")
    assert f"({CHANGED}): it is trained on as it is; `mmspeed preprocess` brings the change in" in caplog.text
    assert losses(told) == losses(before)
    caplog.clear()
    brought = train(home, "brought", online=True)
    assert f"made ({CHANGED}): the missing entries are encoded" in caplog.text
    assert losses(brought) != losses(before)
    cache, fresh = DatasetCache(home / "cache"), config(home, "fresh", f"data.cache={home / 'fresh'}")
    assert {sample.source for sample in cache.samples} == {"c1.mp4", "c2.mp4", "c3.mp4", "new.mp4"}
    (home / "fresh").mkdir()
    shutil.copytree(home / "cache" / "codec", home / "fresh" / "codec")
    CacheBuilder(fresh).run()
    assert [sample.key for sample in DatasetCache(home / "fresh").samples] == [sample.key for sample in cache.samples]
    caplog.clear()
    train(home, "again", online=True)
    assert "changed" not in caplog.text and not verify(home / "cache").damage


def gone(home: Path) -> None:
    shutil.rmtree(home / "media")


def emptied(home: Path) -> None:
    gone(home)
    (home / "media").mkdir()


@pytest.mark.parametrize("lose", [gone, emptied])
def test_sources_that_are_gone_are_told(
    home: Path, lose: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    lose(home)
    assert len(losses(train(home, "run", online=True))) == 2
    assert "the sources cannot be compared" in caplog.text and str(home / "media") in caplog.text


def test_a_run_that_goes_on_keeps_its_order(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = train(home, "whole", "train.steps=4")
    train(home, "run")
    change(home)
    run = train(home, "run", "train.steps=4", online=True)
    assert (
        "this run keeps its order without them; run `mmspeed preprocess`, and at its next start they enter"
        in caplog.text
    )
    assert losses(run) == losses(whole)
    CacheBuilder(run).run()
    train(home, "run", "train.steps=5", online=True)
    assert "the training data changed since the checkpoint" in caplog.text and "a new epoch begins" in caplog.text


def test_a_cache_without_a_record_and_a_merged_one_are_not_compared(
    home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    merge(home / "merged", [home / "cache"])
    info = read_info(home / "cache")
    write_info(home / "cache", {name: value for name, value in info.items() if name not in (DIGEST, "seal")})
    samples, null_key = read_samples(home / "cache")
    leak = replace(samples[0], split="val"), replace(samples[1], content_id=samples[0].content_id)
    write_samples(home / "cache", [*leak, *samples[2:]], null_key)
    change(home)
    train(home, "run", online=True)
    assert "1 training samples of the cache" in caplog.text and "held out under another name" in caplog.text
    train(home, "other", f"data.cache={home / 'merged'}", online=True)
    assert "changed" not in caplog.text and "compared" not in caplog.text


def test_a_run_keeps_its_codec(home: Path) -> None:
    run = train(home, "run")
    began = (run.run_dir / "codec.safetensors").read_bytes()
    shutil.rmtree(home / "cache")
    put(home, "new", 5, "a new clip")
    train(home, "run", "train.steps=3", online=True)  # a cache is made with it
    for file in (run.run_dir / "codec.safetensors", home / "cache" / "codec" / "linear-4.safetensors"):
        assert file.read_bytes() == began
    shutil.rmtree(home / "cache")
    CacheBuilder(run).run()
    assert codec_facts(home / "cache" / "codec" / "linear-4.safetensors") != codec_facts(
        run.run_dir / "codec.safetensors"
    )
    (run.run_dir / "run.json").write_text("{}", encoding="utf-8")  # the checkpoint says it, too
    for online in (False, True):
        with pytest.raises(UserError, match=r"runs/run was begun with another codec .* than the data in .*cache"):
            train(home, "run", "train.steps=4", online=online)
    (home / "cache" / "cache.json").unlink()  # of another codec all the same
    with pytest.raises(UserError, match="was begun with another codec"):
        train(home, "run", "train.steps=4", online=True)
    assert (run.run_dir / "codec.safetensors").read_bytes() == began
    shutil.rmtree(home / "cache")
    (run.run_dir / "codec.safetensors").unlink()  # then nothing can make a cache of it
    with pytest.raises(UserError, match="was begun with another codec"):
        train(home, "run", "train.steps=4", online=True)


def test_changes_by_kind() -> None:
    before = [ListedSource("a", 1, 10, "x"), ListedSource("b", 2, 20, "x"), ListedSource("c", 3, 30, "x")]
    for now, changes in (
        (before[::-1], SourceChanges()),
        ([one._replace(changed=99) for one in before], SourceChanges(times=3, copied=True)),
        ([before[0]._replace(changed=99), *before[1:]], SourceChanges(times=1)),
        ([before[0]._replace(words="y"), *before[1:]], SourceChanges(words=1)),
        ([before[0]._replace(bytes=5), before[1]._replace(name="d")], SourceChanges(new=1, gone=2, files=1)),
    ):
        found = MadeFrom.of(now).changes_since(MadeFrom.of(before))
        assert found == changes and bool(found) == (
            changes not in (SourceChanges(), SourceChanges(times=3, copied=True))
        )
        assert (MadeFrom.of(now).digest == MadeFrom.of(before).digest) == (changes == SourceChanges())


def test_a_slow_listing_is_left_alone(tmp_path: Path) -> None:
    """Of a store that answers late, and of a folder with more files than the time allows."""
    put(tmp_path, "a", 0, "a clip")
    local = config(tmp_path, "run").data
    with served(tmp_path / "media", delay=3) as server:
        remote = local.model_copy(update={"sources": (SourceConfig(path=f"{server.url}/list.jsonl"),)})
        for data, seconds in ((local, 0.0), (remote, 0.5)):
            began = time.monotonic()
            with pytest.raises(UserError, match=rf"listing them takes longer than {seconds:g} s"):
                listed_now(data, seconds)
            assert time.monotonic() - began < 2.5
    assert list(listed_now(local).sources) == ["a.mp4"]
