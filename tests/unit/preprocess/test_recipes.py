"""The recipe of a cache: an older one goes on with its own, `check` counts what an upgrade would change, and only that is remade.

The property that has two versions here is made up: `matrix` 1 takes all untagged video to be BT.601.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mmspeed.cli.app import run
from mmspeed.config import Config, make_config
from mmspeed.data import DatasetCache
from mmspeed.data.cache.tables import SAMPLES_FILE, cache_versions, read_facts, read_info, write_info
from mmspeed.data.cache.versions import OLDEST, VERSIONS, info_versions, upgraded
from mmspeed.data.maintenance.merge import merge
from mmspeed.data.maintenance.verify import verify
from mmspeed.errors import UserError
from mmspeed.preprocess import CacheBuilder, check
from mmspeed.preprocess.decoding.recipe import Recipe
from mmspeed.rng import VERSION
from tests.support.caches import entries_of
from tests.support.media import write_image, write_video
from tests.support.runs import small_config
from tests.support.zone_plates import write_plate

TODAY = dict(VERSIONS)


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


def sources_upgraded(config: Config, upgrade: list[str]) -> set[str]:
    """The sources whose latents a build makes, with these properties upgraded."""
    before = {entry.key for entry in entries_of(config.cache_dir)}
    CacheBuilder(config, upgrade=upgrade).run()
    return {str(e.source) for e in entries_of(config.cache_dir) if e.key not in before}


def plant(patch: pytest.MonkeyPatch) -> None:
    """Make recipes obey the made-up property; a cache that does not record it has its version 1."""
    at = Recipe.at.__func__  # type: ignore[attr-defined]

    def planted(cls: type[Recipe], versions: Mapping[str, int], config: Config, *rest: Any, **options: Any) -> Recipe:
        recipe: Recipe = at(cls, versions, config, *rest, **options)
        if recipe.rules.untagged == "auto" and versions.get("matrix", 1) == 1:
            return replace(recipe, rules=replace(recipe.rules, untagged="bt601"))
        return recipe

    patch.setattr(Recipe, "at", classmethod(planted))


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A config whose cache was begun when the made-up property had no name yet."""
    config = folder_of(tmp_path_factory.mktemp("recipes") / "old")
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        CacheBuilder(config).run()
    return config


@pytest.fixture
def newer(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An mmspeed that has version 2 of the made-up property."""
    plant(monkeypatch)
    monkeypatch.setitem(VERSIONS, "matrix", 2)  # type: ignore[arg-type]
    yield


@pytest.mark.usefixtures("newer")
def test_an_older_cache_goes_on_with_its_own_recipe_and_takes_additions(old: Config, tmp_path: Path) -> None:
    config = moved(old, tmp_path)
    assert sources_upgraded(config, []) == set()
    media = Path(config.data.sources[0].path)
    write_video(media / "more.mkv", "ffv1", frames=6, fps=8, width=1080, height=720, pix_fmt="yuv444p")
    (media / "more.txt").write_text("a picture named hd")
    assert sources_upgraded(config, []) == {"more.mkv"}
    assert cache_versions(config.cache_dir) == TODAY | {"matrix": 1}
    parts = [json.loads(entry.meta) for entry in entries_of(config.cache_dir) if entry.section == "latents"]
    assert len(parts) == 7 and not any("untagged" in part for part in parts)


@pytest.mark.slow
@pytest.mark.usefixtures("newer")
def test_an_upgrade_remakes_exactly_the_entries_that_differ(old: Config, tmp_path: Path) -> None:
    config = moved(old, tmp_path)
    (said,) = (line for line in check(config).lines() if line.startswith("cache recipe: "))
    assert said.startswith("cache recipe: matrix is of version 1; 1 of 6 stored latents would differ")
    assert "`mmspeed preprocess --upgrade matrix`" in said
    assert sources_upgraded(config, ["matrix"]) == {"hd.mkv"}
    assert cache_versions(config.cache_dir) == VERSIONS == TODAY | {"matrix": 2}
    assert not any("recipe" in line for line in check(config).lines())
    with pytest.raises(
        UserError, match=r"versions.matrix 2 and 1; .*`mmspeed preprocess --upgrade` brings the older one up"
    ):
        merge(tmp_path / "merged", [config.cache_dir, old.cache_dir])
    samples = DatasetCache(config.cache_dir).samples
    assert len(samples) == 6 and sources_upgraded(config, []) == set()


@pytest.mark.slow
@pytest.mark.usefixtures("newer")
def test_a_new_cache_equals_an_upgraded_one(old: Config, tmp_path: Path) -> None:
    """With the codec of the old one: the same keys and the same bytes."""
    text = old.model_dump_json(by_alias=True)
    text = text.replace(str(old.cache_dir), str(tmp_path / "cache")).replace(old.output, str(tmp_path / "runs"))
    tree = json.loads(text)
    tree["vae"]["weights"] = str(old.codec_weights)
    config = make_config(tree, origin="test")
    CacheBuilder(config).run()
    assert read_info(config.cache_dir)["versions"] == {**VERSIONS, "generator": VERSION}
    upgraded_config = moved(old, tmp_path)
    CacheBuilder(upgraded_config, upgrade=sorted(VERSIONS)).run()
    one, other = (DatasetCache(c.cache_dir) for c in (config, upgraded_config))
    assert [sample.key for sample in one.samples] == [sample.key for sample in other.samples]
    for sample in one.samples:
        (key,) = sample.latent_keys
        assert one.entry(key, "latents").checksum == other.entry(key, "latents").checksum


@pytest.mark.usefixtures("newer")
def test_background_and_matrix_are_parts_of_the_keys_that_they_change(old: Config, tmp_path: Path) -> None:
    """The keys of the config are obeyed in an older cache too."""
    config = moved(old, tmp_path)
    for changes, sources in (({"background": "navy"}, {"still.png", "clear.mov"}), ({"untagged": "bt709"}, {"hd.mkv"})):
        tree = json.loads(config.model_dump_json(by_alias=True))
        tree["data"] |= changes
        assert sources_upgraded(make_config(tree, origin="test"), []) == sources


@pytest.mark.parametrize(
    ("versions", "said"),
    [
        ({**TODAY, "alpha": 1, "generator": VERSION}, "alpha 1"),
        ({**TODAY, "generator": 1}, "generator 1"),
        ({"generator": VERSION, "alpha": 2, "chroma": 2, "content": 2, "untagged": 1}, "untagged 1"),
        (None, "generator 1"),
    ],
)
def test_a_cache_by_a_rule_that_is_gone_is_named_in_one_line(
    versions: dict[str, int] | None, said: str, old: Config, tmp_path: Path
) -> None:
    config = moved(old, tmp_path)
    root = config.cache_dir
    info = {name: value for name, value in read_info(root).items() if name not in ("versions", "seal")}
    write_info(root, info | ({} if versions is None else {"versions": versions}))
    words = rf"^cache {root} was made by an earlier mmspeed \({said}\): name another folder under data\.cache and run mmspeed preprocess$"
    for ask in (lambda: CacheBuilder(config).run(), lambda: DatasetCache(root), lambda: verify(root)):
        with pytest.raises(UserError, match=words):
            ask()
    assert any(f"made by an earlier mmspeed ({said})" in line for line in check(config).lines())


def test_a_cache_of_a_newer_mmspeed_is_not_added_to(old: Config, tmp_path: Path) -> None:
    config = moved(old, tmp_path)
    root = config.cache_dir
    for name, known in (("generator", 2), ("chroma", 2)):
        info = {name: value for name, value in read_info(root).items() if name != "seal"}
        write_info(root, {**info, "versions": {**TODAY, "generator": VERSION, name: 9}})
        words = f"has version 9 of {name}, this mmspeed knows {known}: install a newer mmspeed"
        with pytest.raises(UserError, match=words):
            CacheBuilder(config).run()
        assert any(words in line for line in check(config).lines())


def test_bad_values_name_the_key(old: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = json.loads(old.model_dump_json(by_alias=True))
    with pytest.raises(UserError, match="--upgrade colour: there is no such property"):
        upgraded(VERSIONS, ["colour"])
    with pytest.raises(UserError, match="version 9 of chroma, this mmspeed knows 2: install a newer mmspeed"):
        info_versions({"versions": {**TODAY, "generator": VERSION, "chroma": 9}}, "c")
    (tmp_path / "c.json").write_text(json.dumps(tree))
    for arguments, message in (
        (["--upgrade", "colour"], "no such property"),
        (["--upgrade", "chroma", "--ray", "1"], "without --ray"),
    ):
        code = run(["preprocess", str(tmp_path / "c.json"), *arguments])
        assert code == 1 and message in capsys.readouterr().err


@pytest.mark.slow
def test_a_cache_keeps_its_generator_when_its_description_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(tmp_path, "data.val_fraction=0.4", clips=5)
    root = config.cache_dir
    assert cache_versions(root) == VERSIONS, "there is none yet"
    CacheBuilder(config).run()
    samples = list(DatasetCache(root).samples)
    assert read_info(root)["versions"]["generator"] == 2
    assert read_facts(root / SAMPLES_FILE)["mmspeed.generator"] == "2"
    (root / "cache.json").unlink()
    assert cache_versions(root) == VERSIONS
    with monkeypatch.context() as patch:
        patch.setitem(OLDEST, "generator", 3)  # type: ignore[arg-type]
        with pytest.raises(UserError, match=r"was made by an earlier mmspeed \(generator 2\)"):
            CacheBuilder(config).run()
    CacheBuilder(config).run()
    assert list(DatasetCache(root).samples) == samples and read_info(root)["versions"]["generator"] == 2
