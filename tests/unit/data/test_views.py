"""Tensors as views of stored bytes: no copy, no byte beyond the payload; and compiled files too large to be checked whole."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmspeed.data import DatasetCache
from mmspeed.data.cache import index_reader
from mmspeed.data.cache.index_reader import open_tables, try_open
from mmspeed.data.cache.payloads import tensors_of
from mmspeed.errors import UserError
from tests.support.caches import build, flip


@settings(deadline=None)
@given(st.binary(max_size=80), st.integers(0, 200))
def test_hostile_payloads_are_refused(noise: bytes, at: int) -> None:
    header = b'{"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}'
    whole = bytearray(len(header).to_bytes(8, "little") + header + bytes(24))
    assert tensors_of(memoryview(whole))["a"].shape == (2, 3)
    whole[at % len(whole) : at % len(whole) + len(noise)] = noise
    try:
        tensors = tensors_of(memoryview(whole))
    except (ValueError, RuntimeError, OverflowError):
        return
    assert all(tensor.nbytes <= len(whole) for tensor in tensors.values())


def test_an_unaligned_payload_is_read_all_the_same() -> None:
    header = (
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[1,9]},"e":{"dtype":"F16","shape":[0,3],"data_offsets":[0,0]}}'
    )
    data = bytearray(len(header).to_bytes(8, "little") + header + b"\0" + np.array([1, 2], "<f4").tobytes())
    contents = tensors_of(memoryview(data))
    assert contents["a"].tolist() == [1, 2] and contents["e"].shape == (0, 3)


@pytest.mark.parametrize("name", ["entries.arrow", "samples.arrow"])
def test_damage_that_no_seal_shows_leads_to_the_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    build(tmp_path, count=8, shard_bytes=4000)
    open_tables(tmp_path)
    monkeypatch.setattr(index_reader, "_CHECKED_BYTES", 0)  # as for files too large to be read whole each time
    folder, draw = tmp_path / "index", random.Random(0)
    good = (folder / name).read_bytes()
    refused = 0
    for number in range(150):
        bad = bytearray(good)
        at = draw.randrange(len(bad))
        if number % 3:
            bad[at : at + 8] = draw.choice([bytes(8), b"\xff" * 8, b"\xff" * 7 + b"\x7f", draw.randbytes(8)])
        else:
            bad = bad[:at]
        (folder / "other").write_bytes(bad)
        (folder / "other").replace(folder / name)
        try:
            tables = try_open(folder, None)
            if tables is None:
                refused += 1
                continue
            for key in tables.entries.keys("latents"):
                tables.entries.place(tables.entries.row("latents", key) or 0)
            assert len(list(tables.samples)) == sum(map(len, tables.samples.sorted_keys()))
            tables.samples.by_bucket()
        except UserError:
            refused += 1
    assert 50 < refused < 150


@pytest.mark.parametrize("name", ["entries.arrow", "samples.arrow"])
def test_a_large_index_is_compared_with_its_seal_before_the_first_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    latents, _ = build(tmp_path)
    monkeypatch.setattr(index_reader, "_CHECKED_BYTES", 0)
    DatasetCache(tmp_path).latent(latents[0])
    path, other = tmp_path / "index" / name, tmp_path / "index" / "other"
    other.write_bytes(path.read_bytes())
    flip(other, other.read_bytes().index(bytes.fromhex(latents[1])))
    other.replace(path)
    with pytest.raises(UserError, match=f"the compiled index .*{name} is damaged"):
        DatasetCache(tmp_path).latent(latents[0])
