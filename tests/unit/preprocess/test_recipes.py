"""The recipe of a cache: an older one goes on with its own, `check` counts what an upgrade would change, and only that is remade."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mmspeed.cli.app import run
from mmspeed.config import Config, make_config
from mmspeed.data import DatasetCache
from mmspeed.data.cache.tables import read_info, write_info
from mmspeed.data.cache.versions import VERSIONS, cache_versions, info_versions, upgraded
from mmspeed.data.maintenance.merge import merge
from mmspeed.errors import UserError
from mmspeed.preprocess import CacheBuilder, check
from mmspeed.rng import NEWEST
from tests.support.media import write_image, write_video
from tests.support.zone_plates import write_plate

OLDEST = dict.fromkeys(VERSIONS, 1)


def older(root: Path, **versions: int) -> None:
    """Rewrite `cache.json` as an mmspeed before recipes wrote it; `versions` are of properties that it has."""
    info = {name: value for name, value in read_info(root).items() if name not in ("versions", "seal")}
    write_info(root, info | ({"versions": versions} if versions else {}))


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
    buckets = [{"frames": frames, "height": 32, "width": 48} for frames in (1, 5)]
    tree: dict[str, Any] = {
        "output": str(folder / "runs"),
        "data": {"sources": [{"path": str(media)}], "cache": str(folder / "cache"), "buckets": buckets, "fps": None},
        "vae": {"kind": "linear", "channels": 4},
        "preprocess": {"decode_workers": 1},
        "device": {"kind": "cpu", "peak_tflops": 0.1},
    }
    return make_config(tree, origin="test")


def sources_upgraded(config: Config, upgrade: list[str]) -> set[str]:
    """The sources whose latents a build makes, with these properties upgraded."""
    before = {entry.key for entry in DatasetCache(config.cache_dir).entries()}
    CacheBuilder(config, upgrade=upgrade).run()
    return {str(e.source) for e in DatasetCache(config.cache_dir).entries() if e.key not in before}


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A config whose cache was begun with version 1 of everything."""
    folder = tmp_path_factory.mktemp("recipes") / "old"
    config = folder_of(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mmspeed.data.cache.versions.VERSIONS", OLDEST)
        CacheBuilder(config).run()
    older(config.cache_dir)
    return config


@pytest.mark.slow
def test_an_upgrade_remakes_exactly_the_entries_that_differ(old: Config, tmp_path: Path) -> None:
    shutil.copytree(Path(old.output).parent, tmp_path / "old")
    text = old.model_dump_json(by_alias=True).replace(str(Path(old.output).parent), str(tmp_path / "old"))
    config = make_config(json.loads(text), origin="test")
    said = [line for line in check(config).lines() if line.startswith("cache recipe: ")]
    counts = {line.split()[2]: int(line.split(";")[1].split()[0]) for line in said}
    assert counts == {"alpha": 1, "chroma": 2, "content": 0, "untagged": 1}
    assert sources_upgraded(config, ["chroma"]) == {"left.mp4", "odd.mp4"}
    assert sources_upgraded(config, ["alpha", "untagged"]) == {"clear.mov", "hd.mkv"}
    assert sources_upgraded(config, ["content"]) == set()
    assert cache_versions(config.cache_dir) == VERSIONS
    assert not any("recipe" in line for line in check(config).lines())
    with pytest.raises(
        UserError, match=r"versions.alpha 2 and 1; .*`mmspeed preprocess --upgrade` brings the older one up"
    ):
        merge(tmp_path / "merged", [config.cache_dir, old.cache_dir])
    samples = DatasetCache(config.cache_dir).samples
    assert len(samples) == 6 and sources_upgraded(config, []) == set()


@pytest.mark.slow
def test_a_new_cache_equals_an_upgraded_one(old: Config, tmp_path: Path) -> None:
    """With the codec of the old one: the same keys and the same bytes."""
    text = old.model_dump_json(by_alias=True)
    text = text.replace(str(old.cache_dir), str(tmp_path / "cache")).replace(old.output, str(tmp_path / "runs"))
    tree = json.loads(text)
    tree["vae"]["weights"] = str(old.codec_weights)
    config = make_config(tree, origin="test")
    CacheBuilder(config).run()
    assert read_info(config.cache_dir)["versions"] == {**VERSIONS, "generator": NEWEST}
    shutil.copytree(Path(old.output).parent, tmp_path / "old")
    text = old.model_dump_json(by_alias=True).replace(str(Path(old.output).parent), str(tmp_path / "old"))
    upgraded_config = make_config(json.loads(text), origin="test")
    CacheBuilder(upgraded_config, upgrade=sorted(VERSIONS)).run()
    one, other = (DatasetCache(c.cache_dir) for c in (config, upgraded_config))
    assert [sample.key for sample in one.samples] == [sample.key for sample in other.samples]
    for sample in one.samples:
        (key,) = sample.latent_keys
        assert one.entry(key, "latents").checksum == other.entry(key, "latents").checksum


def test_background_and_matrix_are_parts_of_the_keys_that_they_change(old: Config, tmp_path: Path) -> None:
    """The keys of the config are obeyed in a cache of before too."""
    shutil.copytree(Path(old.output).parent, tmp_path / "old")
    text = old.model_dump_json(by_alias=True).replace(str(Path(old.output).parent), str(tmp_path / "old"))
    for changes, sources in (({"background": "navy"}, {"still.png"}), ({"untagged": "bt709"}, {"hd.mkv"})):
        tree = json.loads(text)
        tree["data"] |= changes
        assert sources_upgraded(make_config(tree, origin="test"), []) == sources


def test_bad_values_name_the_key(old: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = json.loads(old.model_dump_json(by_alias=True))
    for key, value, message in (
        ("background", "octarine", "data.background.*'octarine' is no colour: write #rrggbb"),
        ("untagged", "bt2020", "data.untagged"),
        ("max_repeated", 1.5, "data.max_repeated"),
    ):
        with pytest.raises(UserError, match=message):
            make_config(tree | {"data": tree["data"] | {key: value}}, origin="test")
    with pytest.raises(UserError, match="--upgrade colour: there is no such property"):
        upgraded(OLDEST, ["colour"])
    with pytest.raises(UserError, match="version 9 of chroma, this mmspeed knows 2: install a newer mmspeed"):
        info_versions({"versions": {"chroma": 9}})
    (tmp_path / "c.json").write_text(json.dumps(tree))
    for arguments, message in (
        (["--upgrade", "colour"], "no such property"),
        (["--upgrade", "chroma", "--ray", "1"], "without --ray"),
    ):
        code = run(["preprocess", str(tmp_path / "c.json"), *arguments])
        assert code == 1 and message in capsys.readouterr().err
