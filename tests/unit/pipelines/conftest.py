"""Fixtures of runs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def home(small_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished cache of clips of 5 frames, with its codec."""
    return Path(shutil.copytree(small_cache, tmp_path_factory.mktemp("home") / "home"))
