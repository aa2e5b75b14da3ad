"""A factorised model learns: four clips, four captions, and each caption brings its own clip back."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.claims.overfit import OverfitResult, overfit


def hold(result: OverfitResult) -> None:
    print("\n".join(result.lines()))
    assert result.right == result.total == 12
    assert result.right_psnr >= result.codec_psnr - 3.0
    assert result.right_psnr >= result.other_psnr + 6.0
    assert result.empty_right < 8  # of 12 draws among 4 clips, 8 or more have a chance of 0.3 %
    assert result.empty_right_psnr < result.empty_other_psnr + 6.0
    assert result.passed()


@pytest.mark.slow
def test_each_caption_brings_its_own_clip_back(tmp_path: Path) -> None:
    hold(overfit(tmp_path, "factorised", "flow"))
