"""The bench of the loader: every format gives back the tensors it was given, and every row has a rate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmspeed.data import DatasetCache
from mmspeed.data.loading.collate import VideoCollate
from mmspeed.errors import UserError
from mmspeed.protocols import Batch
from tests.claims.formats import contents, make_samples, ours_reader, write_others, write_ours
from tests.claims.loader import (
    FIRST,
    LATER,
    RAW,
    TRAINED,
    VIEW,
    LoaderBench,
    bench_loader,
    one_epoch,
    parse_shape,
)

SHAPE = "4x2x3x5"
OTHERS = [
    ".pt a sample",
    "Parquet zstd, 8 rows a group",
    "Parquet plain, 8 rows a group",
    "Parquet plain, 1 row a group",
    "safetensors a clip",
]


def test_every_format_gives_the_same_bits(tmp_path: Path) -> None:
    samples = make_samples(19, parse_shape(SHAPE))  # two full groups of rows, and a short one
    keys = write_ours(tmp_path / "ours", samples)
    readers = {"ours": ours_reader(DatasetCache(tmp_path / "ours"), *keys)}
    readers |= {format.name: format.open() for format in write_others(tmp_path, samples)}
    assert list(readers) == ["ours", *OTHERS]
    for name, reader in readers.items():
        for number, sample in enumerate(samples):
            read = reader(number)
            for field, expected in sample._asdict().items():
                actual = getattr(read, field)
                assert actual.dtype == np.float32 and actual.shape == expected.shape, (name, number, field)
                assert actual.tobytes() == expected.tobytes(), (name, number, field)
    assert len({contents(reader, len(samples)) for reader in readers.values()}) == 1
    lengths = [len(sample.embeds_LD) for sample in samples]
    assert len(set(lengths)) > 10 and min(lengths) >= 20 and max(lengths) <= 200


def test_formats_that_differ_are_not_measured(tmp_path: Path) -> None:
    bench = LoaderBench(tmp_path, SHAPE, 4)
    bench.check_contents()
    damaged = tmp_path / "safetensors" / "2.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-4] + b"\x00\x00\x80\x3f")
    with pytest.raises(UserError, match="do not give the same tensors"):
        bench.check_contents()


def test_a_pass_of_training_reads_and_draws_each_sample_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_ours(tmp_path, make_samples(9, parse_shape(SHAPE)))
    read: list[tuple[list[tuple[str, int, int]], set[str]]] = []
    make = VideoCollate.__call__

    def noted(self: VideoCollate, draws: list[Any]) -> Batch:
        batch = make(self, draws)
        read.append((batch.names, set(batch.tensors)))
        return batch

    monkeypatch.setattr(VideoCollate, "__call__", noted)
    run = one_epoch(lambda: DatasetCache(tmp_path), 9)
    assert run([]) > 0 and run([]) > 0
    names = [name for batch, _ in read for name in batch]
    assert len(names) == len(set(names)) == 18 and {epoch for _, epoch, _ in names} == {0, 1}
    assert len({sample for sample, _, _ in names}) == 9
    assert all({"latents", "noise", "quantiles", "text", "text_mask"} == tensors for _, tensors in read)
    with pytest.raises(RuntimeError, match="an epoch of 8 samples had 9"):
        one_epoch(lambda: DatasetCache(tmp_path), 8, batch=9)([])


def test_every_row_is_measured_warm_and_cold(tmp_path: Path) -> None:
    (shape,) = bench_loader(tmp_path, [SHAPE], 9, 2)
    assert (shape.latent, shape.samples) == (SHAPE, 9)
    for rates in (shape.rates["warm"], shape.rates["cold"]):
        assert set(rates) == {FIRST, TRAINED, LATER, VIEW, *OTHERS, RAW}
        assert all(rate.samples_s > 0 and rate.mb_s > 0 for rate in rates.values())
    assert not any(tmp_path.iterdir())  # the formats' files are gone
