"""float32 in two halves: back bit for bit, rounded half up, and what is not a number stays so."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mmspeed.memory.optimizer.split_bits import join, rounded, split


def values_of(bits: np.ndarray) -> Tensor:
    return torch.from_numpy(bits.astype(np.uint32).view(np.int32)).view(torch.float32)


def there_and_back(values_Z: Tensor) -> tuple[Tensor, Tensor]:
    """(bfloat16 half, what comes back)."""
    hi_Z, lo_Z = torch.empty_like(values_Z, dtype=torch.bfloat16), torch.empty_like(values_Z, dtype=torch.int16)
    split(values_Z, hi_Z, lo_Z)
    back_Z = torch.full_like(values_Z, 7.0)
    join(hi_Z, lo_Z, back_Z)
    return hi_Z, back_Z


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=64))
def test_every_bit_pattern_comes_back(bits: list[int]) -> None:
    values_Z = values_of(np.array(bits))
    hi_Z, back_Z = there_and_back(values_Z)
    assert same_bits(back_Z, values_Z)
    assert torch.equal(rounded(values_Z).view(torch.int16), hi_Z.view(torch.int16))


@pytest.mark.parametrize("high", [0x0000, 0x3F80, 0x7F7F, 0x7F80, 0x7FBF, 0xFFC0, 0xFFFF])
def test_all_low_halves_of_telling_high_halves(high: int) -> None:
    bits = np.arange(1 << 16) + (high << 16)
    values_Z = values_of(bits)
    hi_Z, back_Z = there_and_back(values_Z)
    assert same_bits(back_Z, values_Z)
    finite = torch.isfinite(values_Z)
    plain = (bits + 0x8000) >> 16 & 0xFFFF
    assert np.array_equal(hi_Z.view(torch.int16).numpy().view(np.uint16)[finite.numpy()], plain[finite.numpy()])
    infinite = torch.isinf(values_Z)
    assert torch.equal(hi_Z[infinite].float(), values_Z[infinite])
    quiet = torch.from_numpy((bits & 0x7FFFFFFF) >= 0x7FC00000)
    assert bool(hi_Z[quiet].isnan().all())
    assert torch.equal(torch.signbit(hi_Z[quiet]), torch.signbit(values_Z[quiet]))


def test_which_nans_cannot_show_as_nan() -> None:
    """The figures of the module's text, by counting all NaNs of one sign."""
    hidden = {"inf": 0, "zero": 0, "number": 0}
    for start in range(0x7F800001, 0x80000000, 1 << 20):
        bits = np.arange(start, min(start + (1 << 20), 0x80000000))
        hi_Z = rounded(values_of(bits))
        odd = ~hi_Z.isnan().numpy()
        assert (bits[odd] & 0x007FFFFF < 0x10000).all()  # quiet bit clear, payload small
        hidden["inf"] += int(hi_Z.isinf().sum())
        hidden["zero"] += int((hi_Z == 0).sum())
        hidden["number"] += int((torch.isfinite(hi_Z) & (hi_Z != 0)).sum())
    assert hidden == {"inf": 32767, "zero": 32768, "number": 0}


def test_rounds_to_the_nearest_and_ties_away_from_zero() -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(100_000, generator=generator)
    ours, torchs = rounded(values), values.to(torch.bfloat16)
    tie = (values.view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(ours[~tie], torchs[~tie])
    ties = (torch.arange(0x3F80, 0x4080, dtype=torch.int32) << 16 | 0x8000).view(torch.float32)
    assert torch.equal(rounded(ties).view(torch.int16).int(), torch.arange(0x3F81, 0x4081, dtype=torch.int32))
    assert torch.equal(rounded(-ties), -rounded(ties))


@pytest.mark.parametrize("count", [0, 6, 23])
def test_parts_are_made_one_after_another(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmspeed.memory.optimizer.split_bits.CPU_CHUNK", 6)
    values_Z = torch.randn(count, generator=torch.Generator().manual_seed(count))
    hi_Z, back_Z = there_and_back(values_Z)
    assert same_bits(back_Z, values_Z)
    monkeypatch.undo()
    assert torch.equal(hi_Z, rounded(values_Z))
