"""The generator of a cache's draws: splits and buckets stay what they were, whatever is added and by whichever mmspeed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from mmspeed.config import Config
from mmspeed.data import DatasetCache
from mmspeed.data.cache.codec_file import codec_facts
from mmspeed.data.cache.tables import cache_generator, read_info, read_samples, write_info, write_samples
from mmspeed.data.maintenance.merge import merge
from mmspeed.errors import UserError
from mmspeed.models.codecs.linear import LinearCodec
from mmspeed.preprocess import CacheBuilder, check
from mmspeed.preprocess.decoding.clips import cache_seed
from mmspeed.rng import Seed, uniform
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


def expected(contents: dict[str, tuple[str, str]], generator: int) -> dict[str, tuple[str, str]]:
    """The draws of a generator for the same contents, but for the one that the manifest holds out."""
    seed, result = Seed(0, generator), {}
    for content in contents:
        split = "val" if uniform(seed, "val_split", content) < HELD_OUT else "train"
        kept = uniform(seed, "bucket_keep", content, WIDE) < KEEP
        result[content] = (split, WIDE if kept else SQUARE)
    return result


def forget_versions(config: Config) -> None:
    """The tables as the mmspeed before wrote them."""
    root = config.cache_dir
    info = {name: value for name, value in read_info(root).items() if name not in ("versions", "seal")}
    write_info(root, info)
    samples, null_key = read_samples(root)
    write_samples(root, samples, null_key)


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a cache of five clips, of before the generator had versions."""
    folder = tmp_path_factory.mktemp("before")
    config = drawing_config(folder, 5)
    write_info(config.cache_dir, {})
    CacheBuilder(config).run()
    forget_versions(config)
    return folder


@pytest.mark.slow
def test_clips_that_are_added_follow_the_cache_of_before(before: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(before, tmp_path / "home"))
    old = drawn(drawing_config(before, 5))
    config = drawing_config(folder, 14)
    numbers = check(config).statistics
    CacheBuilder(config).run()
    actual = drawn(config)
    assert len(actual) == 14 and old.items() <= actual.items()
    moved = [content for content in actual if actual[content] != expected(actual, 1)[content]]
    assert len(moved) <= 1 and all(actual[content][0] == "val" for content in moved), (
        "the one that the manifest holds out"
    )
    assert sum(a != b for a, b in zip(expected(actual, 1).values(), expected(actual, 2).values(), strict=True)) > 3
    assert any(expected(old, 2)[content] != old[content] for content in old), "the newest would have moved some"
    assert read_info(config.cache_dir)["versions"]["generator"] == 1 and cache_seed(config).generator == 1
    splits = [split for split, _ in actual.values()]
    assert {s: sum(numbers.samples(s).values()) for s in ("train", "val")} == {
        s: splits.count(s) for s in ("train", "val")
    }


@pytest.mark.slow
def test_a_new_cache_records_the_newest_and_keeps_it_when_its_description_is_lost(tmp_path: Path) -> None:
    config = drawing_config(tmp_path, 5)
    assert cache_generator(config.cache_dir) == 2, "there is none yet"
    CacheBuilder(config).run()
    actual, description = drawn(config), config.cache_dir / "cache.json"
    assert read_info(config.cache_dir)["versions"]["generator"] == 2
    assert sum(actual[content] != expected(actual, 2)[content] for content in actual) <= 1  # the manifest's
    description.unlink()
    assert cache_generator(config.cache_dir) == 2
    description.write_text("{", encoding="utf-8")  # its error says to delete it
    assert cache_generator(config.cache_dir) == 2
    description.unlink()
    CacheBuilder(config).run()
    assert drawn(config) == actual and read_info(config.cache_dir)["versions"]["generator"] == 2


@pytest.mark.slow
def test_a_cache_of_before_that_lost_its_description_stays_with_the_first(before: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(before / "cache", tmp_path / "cache"))
    assert cache_generator(root) == 1
    (root / "cache.json").unlink()
    assert cache_generator(root) == 1
    (root / "index" / "samples.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError, match=r"nothing says how the cache's splits were drawn; restore one of them"):
        cache_generator(root)


def test_a_version_from_a_newer_mmspeed_is_refused(before: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(before, tmp_path / "home"))
    config = drawing_config(folder, 5)
    write_info(config.cache_dir, {**read_info(config.cache_dir), "versions": {"generator": 3}})
    for run in (lambda: check(config), lambda: CacheBuilder(config).run()):
        with pytest.raises(UserError, match=r"cache\.json draws with generator 3, and this mmspeed has 1 to 2"):
            run()


def test_caches_of_two_generators_are_not_merged_where_it_matters(before: Path, tmp_path: Path) -> None:
    new = Path(shutil.copytree(before / "cache", tmp_path / "new"))
    info = read_info(new)
    write_info(new, {**info, "versions": {"generator": 2}})
    with pytest.raises(UserError, match=r"splits or buckets were drawn with generators 2 and 1 \(versions\.generator"):
        merge(tmp_path / "both", [before / "cache", new])
    merge(tmp_path / "alike", [before / "cache", before / "cache"])
    assert cache_generator(tmp_path / "alike") == 1
    fixed = info["made_for"] | {"val_fraction": 0.0, "buckets": []}  # nothing was drawn
    old = Path(shutil.copytree(before / "cache", tmp_path / "old"))
    for root, version in ((old, 1), (new, 2)):
        write_info(root, {**info, "made_for": fixed, "versions": {"generator": version}})
    merge(tmp_path / "undrawn", [new, old])
    assert cache_generator(tmp_path / "undrawn") == 2
    (tmp_path / "undrawn" / "cache.json").unlink()
    assert cache_generator(tmp_path / "undrawn") == 2


def test_a_linear_codec_is_fitted_with_the_cache_s_generator(
    before: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(before, tmp_path / "home"))
    weights = next((folder / "cache" / "codec").glob("*.safetensors"))
    first = codec_facts(weights)["fingerprint"]
    fitted, fit = [], LinearCodec.fit
    monkeypatch.setattr(
        LinearCodec, "fit", lambda *arguments, **named: fitted.append(named) or fit(*arguments, **named)
    )
    weights.unlink()
    config = drawing_config(folder, 5)
    CacheBuilder(config).run()
    assert fitted == [{"generator": 1}] and codec_facts(weights)["fingerprint"] == first
    assert json.loads((config.cache_dir / "cache.json").read_text())["versions"]["generator"] == 1
