"""A full model learns; in a file of its own, since processes of the suite take whole files and it takes half an hour."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.claims.overfit import overfit
from tests.unit.bench.test_overfit import hold


@pytest.mark.slow
def test_each_caption_brings_its_own_clip_back(tmp_path: Path) -> None:
    hold(overfit(tmp_path, "full", "ddpm"))
