"""The recipe of a cache: its rules are parts of the keys that they change, and a cache of another recipe is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from mmspeed.config import Config, make_config
from mmspeed.data import DatasetCache
from mmspeed.data.cache.tables import SAMPLES_FILE, read_facts, read_info, write_info
from mmspeed.data.cache.versions import VERSIONS
from mmspeed.data.maintenance.verify import verify
from mmspeed.errors import UserError
from mmspeed.preprocess import CacheBuilder, check
from tests.support.caches import entries_of
from tests.support.media import write_image, write_video
from tests.support.runs import small_config
from tests.support.zone_plates import write_plate


def folder_of(folder: Path) -> Config:
    """Six sources: chroma sited left and centred, cut through a sample and not, untagged HD, alpha, a picture."""
    media = folder / "media"
    media.mkdir(parents=True)
    write_plate(media / "left.mp4", "yuv420p", "left", 96, 64, frames=5)
    write_plate(media / "centred.mp4", "yuv420p", "center", 96, 64, frames=5)
    write_plate(media / "odd.mp4", "yuv420p", "center", 102, 64, frames=5)  # the crop begins at column 3
    write_video(media / "hd.mkv", "ffv1", frames=5, fps=8, width=1080, height=720, pix_fmt="yuv444p")
    write_video(media / "clear.mov", "qtrle", frames=5, fps=8, pix_fmt="argb")
    write_image(media / "still.png", "RGBA")
    for path in list(media.iterdir()):
        path.with_suffix(".txt").write_text(f"a picture named {path.stem}")
    buckets = "data.buckets=[{frames: 1, height: 32, width: 48}, {frames: 5, height: 32, width: 48}]"
    return small_config(folder, f"data.sources.0.path={media}", buckets, clips=1)


def moved(config: Config, folder: Path) -> Config:
    """A copy of a config's folder, and the config there."""
    home = Path(config.output).parent
    shutil.copytree(home, folder / "old")
    return make_config(
        json.loads(config.model_dump_json(by_alias=True).replace(str(home), str(folder / "old"))), origin="test"
    )


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A config with its cache."""
    config = folder_of(tmp_path_factory.mktemp("recipes") / "old")
    CacheBuilder(config).run()
    return config


def test_background_and_matrix_are_parts_of_the_keys_that_they_change(old: Config, tmp_path: Path) -> None:
    config = moved(old, tmp_path)
    for changes, sources in (({"background": "navy"}, {"still.png", "clear.mov"}), ({"untagged": "bt601"}, {"hd.mkv"})):
        tree = json.loads(config.model_dump_json(by_alias=True))
        tree["data"] |= changes
        before = {entry.key for entry in entries_of(config.cache_dir)}
        CacheBuilder(make_config(tree, origin="test")).run()
        assert {str(e.source) for e in entries_of(config.cache_dir) if e.key not in before} == sources


@pytest.mark.parametrize(
    ("versions", "said"),
    [
        ({**VERSIONS, "alpha": 1}, "alpha 1"),
        ({**VERSIONS, "generator": 1}, "generator 1"),
        ({name: version for name, version in VERSIONS.items() if name != "untagged"}, "untagged 1"),
        ({**VERSIONS, "chroma": 9}, "chroma 9"),
        (None, "alpha 1"),
    ],
)
def test_a_cache_by_a_rule_that_is_gone_is_named_in_one_line(
    versions: dict[str, int] | None, said: str, old: Config, tmp_path: Path
) -> None:
    config = moved(old, tmp_path)
    root = config.cache_dir
    info = {name: value for name, value in read_info(root).items() if name not in ("versions", "seal")}
    write_info(root, info | ({} if versions is None else {"versions": versions}))
    words = rf"^cache {root} was made by another mmspeed \({said}\): name another folder under data\.cache and run mmspeed preprocess$"
    for ask in (lambda: CacheBuilder(config).run(), lambda: DatasetCache(root), lambda: verify(root)):
        with pytest.raises(UserError, match=words):
            ask()
    assert any(f"made by another mmspeed ({said})" in line for line in check(config).lines())


@pytest.mark.slow
def test_a_cache_keeps_its_generator_when_its_description_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(tmp_path, "data.val_fraction=0.4", clips=5)
    root = config.cache_dir
    CacheBuilder(config).run()
    samples = list(DatasetCache(root).samples)
    assert read_info(root)["versions"]["generator"] == 2
    assert read_facts(root / SAMPLES_FILE)["mmspeed.generator"] == "2"
    (root / "cache.json").unlink()
    with monkeypatch.context() as patch:
        patch.setitem(VERSIONS, "generator", 3)  # type: ignore[arg-type]
        with pytest.raises(UserError, match=r"was made by another mmspeed \(generator 2\)"):
            CacheBuilder(config).run()
    CacheBuilder(config).run()
    assert list(DatasetCache(root).samples) == samples and read_info(root)["versions"]["generator"] == 2
