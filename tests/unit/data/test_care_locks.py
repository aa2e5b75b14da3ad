"""Care commands and readers keep out of each other's way."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmspeed.data import CacheWriter, DatasetCache
from mmspeed.data.maintenance.prune_pack import care_lock, pack, prune
from mmspeed.data.maintenance.repair import mend
from mmspeed.errors import UserError
from tests.support.caches import build


def test_nothing_is_taken_away_from_a_cache_that_is_open(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    build(root)
    cache = DatasetCache(root)
    for command in (lambda: prune(root), lambda: pack(root, 10**9), lambda: mend(root)):
        with pytest.raises(UserError, match="is open for training or another command"):
            command()
    second = DatasetCache(root)  # readers do not keep each other out
    del cache, second
    with care_lock(root), pytest.raises(UserError, match="running on"):
        DatasetCache(root)
    assert prune(root).empty and len(DatasetCache(root).samples) == 4


def test_nothing_is_added_while_something_is_taken_away(tmp_path: Path) -> None:
    build(tmp_path)
    with care_lock(tmp_path), pytest.raises(UserError, match="running on"):
        CacheWriter(tmp_path)
    with CacheWriter(tmp_path), pytest.raises(UserError, match="is open for"):
        prune(tmp_path)
    assert prune(tmp_path).empty
