"""Mirror images of crops: as more crops, with the flipped clip's latents, keys of their own, and never against a caption."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from mmspeed.config.schema import DataConfig
from mmspeed.data import DatasetCache
from mmspeed.device import pick
from mmspeed.preprocess import CacheBuilder, check
from mmspeed.preprocess.decoding.clips import names_a_side, select_clips
from mmspeed.preprocess.decoding.pool import DecodePool, Frames
from mmspeed.preprocess.encoding.encode import Encoders, TrustedBatches, encode_latents
from mmspeed.preprocess.records.keys import latent_parts
from mmspeed.preprocess.report.show import source_frames
from mmspeed.preprocess.sources.discover import list_sources
from tests.support.decoding import probed
from tests.unit.preprocess.test_keep import a_file
from tests.unit.preprocess.test_keys import World, make_world

WORDS = DataConfig.model_fields["mirror_words"].default


def mirrored_world(folder: Path) -> World:
    """Three clips, the last of which has a side in its caption, with a tiny Wan autoencoder."""
    world = make_world(folder)
    (world.media / "2.txt").write_text("a rabbit turns LEFT, then runs")
    world.tree["data"]["mirror"] = True
    return world


def test_entries_of_mirror_images_are_those_of_flipped_clips(tmp_path: Path) -> None:
    config = mirrored_world(tmp_path / "world").config
    report = CacheBuilder(config).run()
    assert (report.encoded, report.clips_encoded, report.unmirrored) == (3, 5, 1)
    assert "  sources not mirrored for their captions (data.mirror_words): 1" in report.lines()
    assert check(config).statistics.sums["unmirrored"] == 1
    encoders = Encoders(config, pick("cpu"))
    decoded: dict[str, Any] = {}
    with DecodePool(config, list_sources(config.data).sources) as pool:
        for event in pool.run(lambda _: True):
            if isinstance(event, Frames):
                decoded[encoders.latent_key(event.clip)] = event.clip, event.frames_FHWC
    plain = {clip.content_id: frames for clip, frames in decoded.values() if not clip.mirrored}
    cache = DatasetCache(config.cache_dir)
    mirrored = {key: clip for key, (clip, _) in decoded.items() if clip.mirrored}
    assert len(mirrored) == 2
    for key, clip in mirrored.items():
        flipped = np.ascontiguousarray(plain[clip.content_id][:, :, ::-1])
        np.testing.assert_array_equal(decoded[key][1], flipped)
        assert not np.array_equal(flipped, plain[clip.content_id])
        (expected,) = encode_latents(encoders, TrustedBatches(1), [(clip, flipped)])
        assert isinstance(expected, dict)
        stored = cache.latent(key)
        assert all(torch.equal(stored[name], tensor) for name, tensor in expected.items())
        shown = source_frames(config, clip.source.name, cache.entry(key, "latents"))
        assert isinstance(shown, np.ndarray)
        np.testing.assert_array_equal(shown, flipped)


def test_keys_of_what_is_not_mirrored_are_those_without_the_option(tmp_path: Path) -> None:
    world = mirrored_world(tmp_path / "world")
    mirroring, before = world.config, world.config
    before = before.model_copy(update={"data": before.data.model_copy(update={"mirror": False})})
    keys: list[list[Any]] = []
    for config in (before, mirroring):
        source, probe = a_file(tmp_path, 0), probed(96, 64, 40, 8)
        clips = select_clips(source, probe, config.data, False, 0)
        keys.append([latent_parts(config, "codec", clip) for clip in clips])
    (plain,), (first, second) = keys
    assert plain == first and "mirrored" not in plain
    assert second == {**plain, "mirrored": True}
    assert before.sample_settings() != mirroring.sample_settings()


def test_crops_come_before_their_mirror_images(tmp_path: Path) -> None:
    buckets = [{"frames": 5, "height": 64, "width": 64}]
    data = DataConfig.model_validate(
        {"sources": [{"path": "x"}], "buckets": buckets, "fps": 8, "crops": 3, "windows": 2, "mirror": True}
    )
    clips = select_clips(a_file(tmp_path, 0), probed(96, 64, 40, 8), data, False, 0)
    assert [(clip.window, clip.crop_number, clip.mirrored) for clip in clips] == [
        (window, number, number > 2) for window in (0, 1) for number in range(6)
    ]
    assert [clip.crop for clip in clips[:3]] == [clip.crop for clip in clips[3:6]]


SIDES = ["turns left.", "Left-handed", "the RIGHT bank", "biegt rechts ab", "à gauche de la rue", "汽车向左转", "右手"]


def test_sides_are_whole_words_of_any_case() -> None:
    for caption in SIDES:
        assert names_a_side([caption], WORDS) and names_a_side(["a cat", caption], WORDS), caption
        assert not names_a_side([caption], ())
    for caption in ("leftover food, brightly lit", "uprightness", ""):
        assert not names_a_side([caption], WORDS), caption
    assert names_a_side(["see C++ (a.b)"], ["C++"])
