"""`mmspeed cache show KEY`: the stored latent decoded, beside the very frames that it was made from."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from mmspeed.__main__ import main
from mmspeed.data import DatasetCache
from mmspeed.errors import UserError
from mmspeed.preprocess import CacheBuilder
from mmspeed.preprocess.report.show import _codec as codec_of
from mmspeed.preprocess.report.show import _psnr, contact_sheet, decode_latent, draw_entry, source_frames, stored_config
from tests.support.runs import small_config


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> DatasetCache:
    config = small_config(tmp_path_factory.mktemp("show"), "vae.channels=64", clips=4)
    CacheBuilder(config).run()
    return DatasetCache(config.cache_dir)


def test_decoded_frames_stand_beside_their_source(cache: DatasetCache) -> None:
    config = stored_config(cache)
    codec = codec_of(cache, config)
    taken, decoded = {}, {}
    for sample in cache.samples:
        entry = cache.entry(sample.latent_keys[0], "latents")
        frames = source_frames(config, entry.source, entry)
        assert isinstance(frames, np.ndarray), frames
        taken[sample.key], decoded[sample.key] = frames, decode_latent(cache, codec, entry)
        assert frames.shape == decoded[sample.key].shape == (5, 32, 48, 3)
    for key in taken:  # each is nearest to its own source
        near = {other: _psnr(decoded[key], taken[other]) for other in taken}
        assert max(near, key=lambda name: near[name]) == key and near[key] > 22


def test_the_picture(
    cache: DatasetCache, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sample = next(iter(cache.samples))
    assert main(["cache", "show", str(cache.root), sample.key]) == 0
    said = capsys.readouterr().out
    assert f"{sample.key}.png: 5 frames of {sample.latent_keys[0]}" in said and "dB from the source" in said
    with Image.open(tmp_path / f"{sample.key}.png") as picture:
        assert picture.format == "PNG" and picture.width > 5 * 200
    assert main(["cache", "show", str(cache.root), sample.latent_keys[0], "-o", "other.png"]) == 0
    assert (tmp_path / "other.png").read_bytes() == (tmp_path / f"{sample.key}.png").read_bytes()


def test_sections_that_no_entry_depends_on_need_not_be_known(cache: DatasetCache) -> None:
    info = {**cache.info, "config": cache.info["config"].replace("memory:", "memory:\n  a_key_of_another_mmspeed: 1")}
    assert stored_config(SimpleNamespace(root=cache.root, info=info)) == stored_config(cache)  # type: ignore[arg-type]


def test_why_there_are_no_source_frames(cache: DatasetCache, tmp_path: Path) -> None:
    config = stored_config(cache)
    entry = cache.entry(next(iter(cache.samples)).latent_keys[0], "latents")
    for name, change, why in (
        (None, {}, "does not record the source"),
        ("none.mp4", {}, "no longer among the config's sources"),
        (entry.source, {"frames": (0, 1, 2, 3, 4)}, "selects other frames"),
        (entry.source, {"content_id": "0" * 32}, "the file has changed"),
    ):
        said = source_frames(config, name, dataclasses.replace(entry, **change))
        assert isinstance(said, str) and why in said
    sheet = contact_sheet([("a", np.zeros((5, 32, 48, 3), np.uint8)), ("b", "gone")], ["a caption " * 30])
    grey = np.asarray(sheet)
    assert (grey == 211).all(-1).sum() > 100_000  # the strip


def test_another_codec_is_refused(cache: DatasetCache, tmp_path: Path) -> None:
    config = stored_config(cache)
    codec = codec_of(cache, config)
    entry = cache.entry(next(iter(cache.samples)).latent_keys[0], "latents")
    meta = json.dumps({**json.loads(entry.meta), "codec": "f" * 64})
    with pytest.raises(UserError, match="was encoded with the codec ffffffffffff"):
        decode_latent(cache, codec, dataclasses.replace(entry, meta=meta))
    with pytest.raises(UserError, match="no entry nonsense"):
        draw_entry(cache, "nonsense", tmp_path / "x.png")


def test_a_sheet_is_as_wide_as_its_frames() -> None:
    clip = np.zeros((6, 48, 48, 3), np.uint8)
    clip[-1] = 255  # the last frame
    sheet = contact_sheet([("source", clip)], ["a meadow"])
    row = np.asarray(sheet.convert("L"))[100]
    assert sheet.width > 6 * 208 and (row[: 5 * 208] == 0).any() and (row[-200:-30] == 255).all()
    assert contact_sheet([("source", clip[:1])], ["a meadow"]).width >= 640
