"""The bench of the loader: every format gives back the tensors it was given, and every row has a rate."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmspeed.data import DatasetCache
from mmspeed.data.loading.collate import VideoCollate
from mmspeed.errors import UserError
from mmspeed.protocols import Batch
from tests.claims.formats import Numbers, contents, files_of, make_samples, ours_reader, write_others, write_ours
from tests.claims.loader import (
    FIRST,
    LATER,
    RAW,
    TRAINED,
    VIEW,
    BatchBuffer,
    LoaderBench,
    bench_loader,
    cached_share,
    forget,
    one_epoch,
    parse_shape,
    read_all,
    read_raw,
    samples_for,
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


def test_other_tensors_have_other_contents() -> None:
    samples = make_samples(3, parse_shape(SHAPE))
    last = samples[2]
    changed = last.mean_CThw.copy()
    changed.reshape(-1)[-1] += 1e-6
    others = [
        [*samples[:2], last._replace(mean_CThw=changed)],
        [samples[1], samples[0], last],
        [*samples[:2], last._replace(logvar_CThw=last.logvar_CThw.reshape(-1))],
        [*samples[:2], Numbers(last.logvar_CThw, last.mean_CThw, last.embeds_LD)],
    ]
    digests = {contents(list_.__getitem__, 3) for list_ in [samples, *others]}
    assert len(digests) == 5


def test_formats_that_differ_are_not_measured(tmp_path: Path) -> None:
    bench = LoaderBench(tmp_path, SHAPE, 4)
    bench.check_contents()
    damaged = tmp_path / "safetensors" / "2.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-4] + b"\x00\x00\x80\x3f")
    with pytest.raises(UserError, match="do not give the same tensors"):
        bench.check_contents()


def test_reading_puts_every_number_into_the_batch() -> None:
    shape = parse_shape(SHAPE)
    samples, buffer = make_samples(6, shape), BatchBuffer(shape)
    assert read_all(samples.__getitem__, [5, 0, 3, 2, 1], buffer) > 0
    for slot, number in enumerate([1, 0, 3, 2]):  # the fifth sample stands where the first one stood
        sample = samples[number]
        assert np.array_equal(buffer.latents_BCThw[slot], [sample.mean_CThw, sample.logvar_CThw])
        assert np.array_equal(buffer.text_BLD[slot, : len(sample.embeds_LD)], sample.embeds_LD)
    before = buffer.memory.copy()
    assert read_all(samples.__getitem__, [4, 4, 4, 4], buffer, touch=False) > 0
    assert np.array_equal(buffer.memory, before)


def test_raw_read_reads_the_files_to_their_end(tmp_path: Path) -> None:
    buffer = BatchBuffer(parse_shape(SHAPE))
    size = buffer.memory.nbytes
    first, last = b"\x01" * (size + 10), b"\x02" * size
    (tmp_path / "a").write_bytes(first)
    (tmp_path / "b").write_bytes(last[:-4] + b"\x00\x00\x80\x3f")
    assert read_raw(files_of(tmp_path), buffer) > 0
    assert buffer.memory[-1] == 1.0  # the last bytes of the last file


def test_forgotten_files_are_out_of_memory(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(1 << 20))
    (tmp_path / "empty").touch()
    assert cached_share(files_of(tmp_path)) == 1.0
    forget(files_of(tmp_path))
    if cached_share([path]) == 1.0:
        pytest.skip("this file system keeps its files in memory")
    assert cached_share([path]) < 0.1
    assert cached_share([]) == 0.0


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


def test_mistakes_are_reported(tmp_path: Path) -> None:
    for shape in ("16x13x60", "16x13x60xb", "0x1x1x1", ""):
        with pytest.raises(UserError, match="no latent shape"):
            parse_shape(shape)
    with pytest.raises(UserError, match="at least 1"):
        bench_loader(tmp_path, [SHAPE], samples=0)
    with pytest.raises(UserError, match="give a smaller --samples"):
        bench_loader(tmp_path, ["16x13x60x106"], samples=10**9)
    assert not any(tmp_path.iterdir())
    assert samples_for("16x13x60x106") == 47 and samples_for("1x1x1x1") == 1024 and samples_for("99x99x99x99") == 16
