"""The bench of the loader: every format gives back the tensors it was given, or it would not run, and every row has a rate."""

from __future__ import annotations

from pathlib import Path

from tests.claims.loader import FIRST, LATER, RAW, TRAINED, VIEW, bench_loader

SHAPE = "4x2x3x5"
OTHERS = [
    ".pt a sample",
    "Parquet zstd, 8 rows a group",
    "Parquet plain, 8 rows a group",
    "Parquet plain, 1 row a group",
    "safetensors a clip",
]


def test_every_row_is_measured_warm_and_cold(tmp_path: Path) -> None:
    (shape,) = bench_loader(tmp_path, [SHAPE], 9, 2)
    assert (shape.latent, shape.samples) == (SHAPE, 9)
    for rates in (shape.rates["warm"], shape.rates["cold"]):
        assert set(rates) == {FIRST, TRAINED, LATER, VIEW, *OTHERS, RAW}
        assert all(rate.samples_s > 0 and rate.mb_s > 0 for rate in rates.values())
    assert not any(tmp_path.iterdir())  # the formats' files are gone
