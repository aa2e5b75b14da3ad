"""`mmspeed.data.webdataset`: the package's own stages split, read and batch a cache, each sample once over nodes and workers."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import webdataset as wds
from torch.utils.data import DataLoader

from mmspeed.data import DatasetCache, webdataset
from mmspeed.data.cache.tables import read_samples, write_samples
from mmspeed.data.loading.collate import assemble
from mmspeed.errors import UserError
from tests.support.loading import IMAGE, VIDEO, WIDTH, draw_of, make_cache

SHAPES = {VIDEO: (4, 2, 2, 4), IMAGE: (4, 1, 2, 2)}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> DatasetCache:
    """Seven videos and three images; one video is held out."""
    root = tmp_path_factory.mktemp("pipeline")
    make_cache(root)
    samples = [replace(sample, split="val") if sample.source == "6.mp4" else sample for sample in read_samples(root)[0]]
    write_samples(root, samples)
    return DatasetCache(root)


def keys_of(pipeline: Any, workers: int = 0) -> list[str]:
    """The keys of one epoch, read through torch's DataLoader."""
    loader = DataLoader(pipeline, batch_size=None, num_workers=workers)
    return [key for batch in loader for key in batch["__key__"]]


def keys(cache: DatasetCache, split: str) -> list[str]:
    return sorted(sample.key for sample in cache.split(split))


def test_it_is_a_pipeline_of_the_package_with_its_methods(cache: DatasetCache) -> None:
    pipeline = webdataset(cache)
    assert isinstance(pipeline, wds.DataPipeline)
    small = pipeline.select(lambda sample: sample["bucket"][0] > 1).to_tuple("__key__", "caption").slice(3)
    rows = list(small)
    assert len(rows) == 3 and all(caption in ("v", "vv", "vvv") for _, caption in rows)


def test_each_sample_comes_once_over_nodes_and_workers(cache: DatasetCache, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = 3
    monkeypatch.setenv("WORLD_SIZE", str(nodes))
    seen = []
    for rank in range(nodes):
        monkeypatch.setenv("RANK", str(rank))
        for worker in range(2):  # as webdataset reads them in a process of DataLoader
            monkeypatch.setenv("WORKER", str(worker))
            monkeypatch.setenv("NUM_WORKERS", "2")
            seen += [key for batch in webdataset(cache, batch_size=2) for key in batch["__key__"]]
    assert sorted(seen) == keys(cache, "train")


def test_equal_gives_every_node_as_many_batches(cache: DatasetCache) -> None:
    for size in (1, 2, 4):
        pipelines = [webdataset(cache, batch_size=size, equal=True, rank=rank, world=3) for rank in range(3)]
        counts = [len(list(pipeline)) for pipeline in pipelines]
        assert len(set(counts)) == 1 and counts == [pipeline.count() for pipeline in pipelines]
    uneven = [webdataset(cache, batch_size=2, rank=rank, world=3) for rank in range(3)]
    assert [len(list(pipeline)) for pipeline in uneven] == [pipeline.count() for pipeline in uneven] == [2, 2, 1]


def test_batches_are_of_one_bucket_and_as_training_reads_them(cache: DatasetCache) -> None:
    for batch in webdataset(cache, batch_size=4, seed=5, noise=True).set_epoch(3):
        (frames, height, width), *others = batch["bucket"]
        bucket = VIDEO if frames > 1 else IMAGE
        assert set(others) <= {(frames, height, width)} and (frames, height, width) == (
            bucket.frames,
            bucket.height,
            bucket.width,
        )
        expected = assemble(
            cache, [(draw_of(cache, source, 3), 1.0) for source in batch["source"]], 5, 0.0, noise=True, fps=True
        )
        assert batch["latents"].shape[1:] == SHAPES[bucket] and batch["text"].shape[-1] == WIDTH
        for name, tensor in expected.tensors.items():
            assert torch.equal(batch[name], tensor), name
        lengths = batch["text_mask"].sum(1).tolist()
        assert [len(caption) + 1 for caption in batch["caption"]] == lengths


def test_a_sample_alone_has_no_padding_and_its_metadata(cache: DatasetCache) -> None:
    samples = {sample["source"]: sample for sample in webdataset(cache)}
    assert len(samples) == 9
    for source, sample in samples.items():
        bucket = VIDEO if int(source.split(".")[0]) < 7 else IMAGE
        assert sample["latents"].shape == SHAPES[bucket] and sample["latents"].dtype == torch.float32
        assert sample["text"].shape == (len(sample["caption"]) + 1, WIDTH) and "text_mask" not in sample
        assert sample["text_pooled"].shape == (WIDTH,) and sample["fps"].ndim == 0


def test_batch_sizes_by_bucket_and_the_last_ones(cache: DatasetCache) -> None:
    def size(bucket: Any) -> int:
        return 4 if bucket == VIDEO else 2

    sizes = Counter((batch["bucket"][0][0], len(batch["__key__"])) for batch in webdataset(cache, batch_size=size))
    assert sizes == {(5, 4): 1, (5, 2): 1, (1, 2): 1, (1, 1): 1}
    whole = webdataset(cache, batch_size=size, drop_last=True)
    assert Counter(len(batch["__key__"]) for batch in whole) == {4: 1, 2: 1}


def test_epochs_differ_and_come_again(cache: DatasetCache) -> None:
    pipeline = webdataset(cache, batch_size=2, seed=1)
    first, again = keys_of(pipeline), keys_of(pipeline)
    second = keys_of(pipeline.set_epoch(1))
    assert first == again != second and sorted(first) == sorted(second)
    assert keys_of(webdataset(cache, batch_size=2, shuffle=False)) != first


def test_workers_that_persist_see_the_epoch(cache: DatasetCache) -> None:
    pipeline = webdataset(cache, batch_size=2)
    loader = DataLoader(pipeline, batch_size=None, num_workers=1, persistent_workers=True)
    epochs = []
    for epoch in range(2):
        pipeline.set_epoch(epoch)
        epochs.append([batch["__key__"] for batch in loader])
    assert epochs == [[batch["__key__"] for batch in pipeline.set_epoch(epoch)] for epoch in range(2)]
    assert epochs[0] != epochs[1]


def test_lost_samples_are_left_out(tmp_path: Path) -> None:
    make_cache(tmp_path)
    samples = read_samples(tmp_path)[0]
    lost = samples[0].key
    write_samples(tmp_path, [replace(sample, lost=sample.key == lost) for sample in samples])
    seen = keys_of(webdataset(tmp_path, batch_size=2))
    assert sorted([*seen, lost]) == sorted(sample.key for sample in samples)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"split": "test"}, "split 'test' is not train or val"),
        ({"rank": 0}, "give both"),
        ({"batch_size": 0}, "batch size of bucket .* is 0"),
        ({"batch_size": 100, "drop_last": True}, "gives no batch: leave drop_last and equal out"),
    ],
)
def test_bad_arguments_are_one_line(cache: DatasetCache, arguments: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError, match=line):
        webdataset(cache, **arguments)
