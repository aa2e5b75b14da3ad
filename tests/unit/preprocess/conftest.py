"""What several tests of decoding share: files of every kind, and a process that decodes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mmspeed.preprocess.decoding.worker import DecodeWorker
from tests.support.media import Expect, make_zoo


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Expect]]:
    """A folder of good and bad files, and what is expected of each. Not to be changed."""
    folder = tmp_path_factory.mktemp("zoo") / "media"
    return folder, make_zoo(folder)


@pytest.fixture(scope="module")
def worker() -> Iterator[DecodeWorker]:
    with DecodeWorker() as started:
        yield started


@pytest.fixture
def own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of fetched media, of this test alone."""
    monkeypatch.setenv("MMSPEED_CACHE", str(tmp_path / "store"))
    return tmp_path / "store" / "media"
