"""The generator of a cache's draws: splits and buckets stay what they were, whatever is added and by whichever mmspeed."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmspeed.config import Config
from mmspeed.data import DatasetCache
from mmspeed.data.cache.tables import SAMPLES_FILE, cache_versions, read_facts, read_info
from mmspeed.data.cache.versions import OLDEST, VERSIONS
from mmspeed.errors import UserError
from mmspeed.preprocess import CacheBuilder
from tests.support.runs import small_config

HELD_OUT, KEEP = 0.4, 0.5
WIDE, SQUARE = "005x0032x0048", "005x0032x0032"
BUCKETS = f"data.buckets=[{{frames: 5, height: 32, width: 48, keep: {KEEP}}}, {{frames: 5, height: 32, width: 32}}]"


def drawing_config(folder: Path, clips: int) -> Config:
    """Splits and buckets by draws; the first clip's split is in the manifest."""
    return small_config(
        folder, f"data.val_fraction={HELD_OUT}", BUCKETS, "preprocess.latent_dtype=float32", clips=clips
    )


def drawn(config: Config) -> dict[str, tuple[str, str]]:
    """Split and bucket of each content in a cache."""
    samples = DatasetCache(config.cache_dir).samples
    return {sample.content_id: (sample.split, sample.bucket.name) for sample in samples}


@pytest.mark.slow
def test_a_cache_records_its_generator_and_keeps_it_when_its_description_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = drawing_config(tmp_path, 5)
    root = config.cache_dir
    assert cache_versions(root) == VERSIONS, "there is none yet"
    CacheBuilder(config).run()
    actual, description = drawn(config), root / "cache.json"
    assert read_info(root)["versions"]["generator"] == 2
    assert read_facts(root / SAMPLES_FILE)["mmspeed.generator"] == "2"
    description.unlink()
    assert cache_versions(root) == VERSIONS
    with monkeypatch.context() as patch:
        patch.setitem(OLDEST, "generator", 3)  # type: ignore[arg-type]
        with pytest.raises(UserError, match=r"was made by an earlier mmspeed \(generator 2\)"):
            CacheBuilder(config).run()
    CacheBuilder(config).run()
    assert drawn(config) == actual and read_info(root)["versions"]["generator"] == 2
