"""Captions that a text encoder cannot encode: each is counted and named, and takes nothing else along."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mmspeed.config import Config
from mmspeed.data import DatasetCache
from mmspeed.pipelines import TrainPipeline
from mmspeed.preprocess import CacheBuilder, OnlineBuilder
from tests.support.runs import losses, small_config
from tests.support.tiny_models import save_spoiled_text_encoder

CAPTIONS = (
    ["a person walks", "the rabbit"],  # held out
    ["a rabbit runs"],  # the only one
    ["two birds sing", "the rabbit sits", "a green meadow"],
    ["a rabbit", "the rabbit"],
    ["the morning sun"],
    ["a rabbit runs", "the beach at sunset"],  # shares one with another source
)


def spoiled_config(folder: Path, *overrides: str) -> Config:
    """Six clips with `CAPTIONS`, and an encoder that knows no finite numbers for "rabbit"."""
    text = f"text={{kind: transformers, pretrained: {save_spoiled_text_encoder(folder)}, max_tokens: 12}}"
    config = small_config(folder, text, *overrides, clips=len(CAPTIONS))
    manifest = Path(config.data.sources[0].path)
    rows = [json.loads(line) for line in manifest.read_text(encoding="utf-8").splitlines()]
    for row, captions in zip(rows, CAPTIONS, strict=True):
        row["caption"] = captions
    manifest.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return config


def captions_of(cache: DatasetCache) -> dict[str, list[str]]:
    """The captions of each source whose samples are there, by the beginning of its file's name."""
    return {
        Path(sample.source).stem: [json.loads(cache.entry(key, "texts").meta)["caption"] for key in sample.text_keys]
        for sample in cache.samples
        if not sample.lost
    }


KEPT = {
    "bbb_000": ["a person walks"],
    "bbb_002": ["two birds sing", "a green meadow"],
    "bbb_004": ["the morning sun"],
    "bbb_005": ["the beach at sunset"],
}
NAMED = ["bbb_000.mp4 [caption 2]", "bbb_001.mp4", "bbb_002.mp4 [caption 2]", "bbb_003.mp4", "bbb_005.mp4 [caption 1]"]


def names(cache: DatasetCache) -> list[str]:
    """What the cache's table of rejections lists for captions."""
    rows = [row for row in cache.rejects() if row["reason"] == "caption_failed"]
    assert all("not finite" in row["detail"] and "rabbit" in row["detail"] for row in rows)
    return sorted(Path(row["path"]).name for row in rows)


def test_preprocess_rejects_and_counts_them_and_keeps_the_rest(tmp_path: Path) -> None:
    config = spoiled_config(tmp_path)
    report = CacheBuilder(config).run()
    assert (report.encoded, report.reused, report.rejected) == (4, 0, 2) and report.sources == 6
    assert (report.texts, report.texts_failed) == (6, 4)  # the empty caption among the former
    lines = "\n".join(report.lines())
    assert "captions: 6 encoded now, 0 already there, 4 failed" in lines and "caption_failed       5  " in lines
    cache = DatasetCache(config.cache_dir)
    assert captions_of(cache) == KEPT and names(cache) == NAMED
    again = CacheBuilder(config).run()
    assert (again.encoded, again.reused, again.rejected, again.texts_failed) == (0, 4, 2, 4)
    assert names(DatasetCache(config.cache_dir)) == NAMED
    page = (Path(config.output) / "small-data.html").read_text(encoding="utf-8")
    assert "caption_failed" in page and "3 are single captions of sources." in page
    TrainPipeline(config).run()
    assert len(losses(config)) == 6


@pytest.mark.slow
def test_the_first_epoch_goes_on_without_them_also_after_a_stop(tmp_path: Path) -> None:
    runs = {}
    for name in ("whole", "stopped"):
        steps = ("train.batch_size=1", "train.steps=9", "checkpoint.every=1")
        config = spoiled_config(tmp_path / name, *steps)
        if name == "stopped":
            shorter = config.model_copy(update={"train": config.train.model_copy(update={"steps": 3})})
            TrainPipeline(shorter, OnlineBuilder(shorter)).run()
        TrainPipeline(config, OnlineBuilder(config)).run()
        cache = DatasetCache(config.cache_dir)
        assert captions_of(cache) == KEPT and names(cache) == NAMED
        assert sum(sample.lost for sample in cache.samples) == 2
        runs[name] = losses(config)
    assert runs["whole"] == runs["stopped"] and len(runs["whole"]) >= 5
