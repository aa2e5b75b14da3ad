"""The cache that preprocess makes: every file accounted for, the same entries however it is made, nothing encoded twice."""

from __future__ import annotations

import json
import os
import shutil
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from mmspeed.config import Bucket, make_config
from mmspeed.data import CacheWriter, DatasetCache
from mmspeed.data.loading.collate import first_frame
from mmspeed.device import Device, pick
from mmspeed.errors import UserError
from mmspeed.media.probe import Probe
from mmspeed.media.rejections import Reason, Rejected
from mmspeed.media.source import Source
from mmspeed.models.codecs.linear import LinearCodec
from mmspeed.models.codecs.vae import load_codec
from mmspeed.pipelines import TextToVideo, TrainPipeline
from mmspeed.preprocess import BuildReport, CacheBuilder, check
from mmspeed.preprocess.decoding.clips import Clip
from mmspeed.preprocess.decoding.pool import DecodePool, Failed, Finished, Frames, Selected
from mmspeed.preprocess.decoding.transform import to_model_range
from mmspeed.preprocess.encoding.async_writer import BackgroundWriter
from mmspeed.preprocess.encoding.encode import Encoders
from mmspeed.preprocess.encoding.latent_stage import LatentStage
from mmspeed.preprocess.sources.discover import list_sources
from tests.support.runs import small_config
from tests.support.spawn import run_ranks
from tests.support.tiny_models import save_tiny_text_encoder, save_tiny_vae

PROBE = Probe(
    *("video", 96, 64, 8.0, [frame / 8 for frame in range(9)], "h264", 8, 0),
    *(Fraction(1), "mp4", "pyav", [0.0], 96, 64),
)


def checksums(root: Path) -> dict[tuple[str, str], str]:
    """The checksum of every entry of a cache, by section and key."""
    cache = DatasetCache(root)
    return {
        (section, key): cache.entry(key, section).checksum
        for section in ("latents", "texts", "null")
        for key in cache.keys(section)
    }


def test_a_second_run_encodes_nothing_and_a_changed_caption_one_text(small_cache: Path, tmp_path: Path) -> None:
    shutil.copytree(small_cache, tmp_path, dirs_exist_ok=True)
    config = small_config(tmp_path)
    before = checksums(tmp_path / "cache")
    again = CacheBuilder(config).run()
    assert (again.encoded, again.reused, again.texts) == (0, 8, 0)
    assert checksums(tmp_path / "cache") == before
    manifest = tmp_path / "clips.jsonl"
    rows = [json.loads(line) for line in manifest.read_text().splitlines()]
    rows[2]["caption"] = "Something else"
    manifest.write_text("".join(json.dumps(row) + "\n" for row in rows))
    changed = CacheBuilder(config).run()
    assert (changed.encoded, changed.texts) == (0, 1)


def test_a_build_of_unchanged_sources_opens_none_of_them(small_cache: Path, tmp_path: Path) -> None:
    shutil.copytree(small_cache, tmp_path, dirs_exist_ok=True)
    manifest = tmp_path / "clips.jsonl"
    rows = [json.loads(line) for line in manifest.read_text().splitlines()]
    clip = tmp_path / "clip.mp4"
    shutil.copy(rows[1]["video"], clip)
    manifest.write_text("".join(json.dumps(row) + "\n" for row in [rows[0], {**rows[1], "video": str(clip)}]))
    places = {"output": "runs", "data.cache": "cache", "data.sources.0.path": "clips.jsonl"}
    config = small_config(tmp_path / "other", *(f"{key}={tmp_path / place}" for key, place in places.items()))
    lines, state = CacheBuilder(config).run().lines(), clip.stat()
    clip.write_bytes(bytes(state.st_size))  # damaged, which nothing tells before it is read
    os.utime(clip, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert CacheBuilder(config).run().lines() == lines
    assert CacheBuilder(make_config(config.model_dump(), ["seed=1"], origin="test")).run().rejected == 1
    (shard,) = (tmp_path / "cache" / "latents").rglob("*.tar")
    shard.write_bytes(shard.read_bytes()[:3000])
    with pytest.raises(UserError, match=r"000000.tar is damaged: cut short; delete it"):
        CacheBuilder(config).run()


def build(folder: str, *overrides: str) -> None:
    CacheBuilder(small_config(Path(folder), *overrides)).run()


def test_two_processes_make_the_same_entries_as_one(small_cache: Path, tmp_path: Path) -> None:
    shutil.copytree(small_cache, tmp_path / "one")
    one = small_config(tmp_path / "one")
    run_ranks(build, 2, str(tmp_path / "two"), f"data.sources.0.path={one.data.sources[0].path}")
    assert checksums(tmp_path / "two" / "cache") == checksums(tmp_path / "one" / "cache")
    keys = [[s.key for s in DatasetCache(tmp_path / name / "cache").samples] for name in ("one", "two")]
    assert keys[0] == keys[1]


@pytest.mark.slow
def test_variants_of_a_clip_are_samples_or_latents_of_one(tmp_path: Path) -> None:
    overrides = ("data.windows=3", "data.crops=2", "data.buckets.0.width=32", "preprocess.encode_batch=4")
    each = small_config(tmp_path, *overrides, clips=3)
    report = CacheBuilder(each).run()
    assert (report.encoded, report.clips_encoded, report.clips_failed) == (3, 18, 0)
    assert "  clips: 18 encoded now, 0 already there" in report.lines()
    assert report.latent_batches["checked"] >= 1 and sum(report.splits.values()) == 18
    cache = DatasetCache(each.cache_dir)
    samples = list(cache.samples)
    assert len(samples) == 18 == len(cache.keys("latents")) and all(len(s.latent_keys) == 1 for s in samples)
    names = {sample.source for sample in samples}
    assert len(names) == 3
    # the same entries, used in another way: nothing is encoded
    draw = small_config(tmp_path, *overrides, "data.variants=draw", clips=3)
    again = CacheBuilder(draw).run()
    assert (again.encoded, again.clips_encoded, again.clips_reused, again.texts) == (0, 0, 18, 0)
    drawn = list(DatasetCache(draw.cache_dir).samples)
    assert sorted(len(sample.latent_keys) for sample in drawn) == [6, 6, 6]
    assert {sample.source for sample in drawn} == names
    assert {key for s in drawn for key in s.latent_keys} == {key for s in samples for key in s.latent_keys}


def test_clips_that_fail_are_counted_and_the_others_of_their_source_kept(small_cache: Path, tmp_path: Path) -> None:
    shutil.copytree(small_cache, tmp_path, dirs_exist_ok=True)  # for its codec
    config = small_config(tmp_path, clips=2)
    report = BuildReport(tmp_path, sources=3)
    bad = Rejected(Reason.UNDECODABLE, "damaged there")
    frames_FHWC = np.zeros((5, 32, 48, 3), np.uint8)
    with CacheWriter(tmp_path / "other") as writer, BackgroundWriter(writer) as store:
        stage = LatentStage(config, Encoders(config, Device("cpu", 0)), store, report)
        for number, failing in enumerate(([], [1], [0, 1])):
            source = Source(f"{number}.mp4", f"{number}.mp4", None, None, "video", ("a rabbit",), "train")
            clips = tuple(
                Clip(source, Bucket(5, 32, 48), (window,) * 5, (0, 0, 9, 6), f"c{number}", 8.0, 0.6, "pyav", window)
                for window in (0, 1)
            )
            stage.take(Selected(source, clips, PROBE))
            for clip in clips:
                stage.take(Failed(source, clip, bad) if clip.window in failing else Frames(source, clip, frames_FHWC))
            stage.take(Finished(source))
        stage.flush()
        rows = stage.rows()
    assert [(row.source, row.window) for row in rows] == [("0.mp4", 0), ("0.mp4", 1), ("1.mp4", 0)]
    assert (report.encoded, report.reused, report.rejected, report.partial) == (2, 0, 1, 1)
    assert (report.clips_encoded, report.clips_failed) == (3, 3)
    assert [r.source for r in report.rejections] == ["1.mp4 [5x32x48, window 1]", "2.mp4"]
    assert "  clips: 3 encoded now, 0 already there, 3 failed" in report.lines()
    # a codec that breaks: the sources are rejected, and said to be
    broken = LinearCodec.load(config.codec_weights or Path())
    broken.video.mean_P.fill_(float("nan"))
    LinearCodec(broken.image, broken.video, broken.whitening).save(tmp_path / "broken.safetensors")
    with pytest.raises(UserError, match=r"none of the 2 files could be encoded \(2 encode_failed\)"):
        CacheBuilder(small_config(tmp_path, f"vae.weights={tmp_path / 'broken.safetensors'}", clips=2)).run()


@pytest.mark.parametrize(("vae", "text"), [pytest.param("wan", "t5", marks=pytest.mark.slow), ("kl", "clip")])
def test_diffusers_and_transformers_folders_go_the_whole_way(tmp_path: Path, vae: str, text: str) -> None:
    vae_folder = save_tiny_vae(tmp_path / "vae", vae)
    text_folder = save_tiny_text_encoder(tmp_path / "text", text)
    config = small_config(
        tmp_path,
        f"vae={{kind: diffusers, pretrained: {vae_folder}}}",
        f"text={{kind: transformers, pretrained: {text_folder}, max_tokens: 16}}",
        "train.steps=3",
        clips=3,
    )
    assert not check(config).problems
    report = CacheBuilder(config).run()
    assert report.encoded == 3
    cache = DatasetCache(config.cache_dir)
    stored = cache.latent(cache.samples[0].latent_keys[0])
    assert set(stored) == {"mean", "logvar"}
    assert TrainPipeline(config).run().finished
    video = TextToVideo.from_run(config.run_dir)("a rabbit")[0]
    assert video.frames_FHWC.shape == (5, 32, 48, 3)


@pytest.mark.slow
def test_the_first_frame_is_stored_apart_where_it_is_asked_for(tmp_path: Path) -> None:
    """HunyuanVideo's norms see all frames, so the first latent frame of a clip is not that of its first picture."""
    vae = f"vae={{kind: diffusers, pretrained: {save_tiny_vae(tmp_path / 'vae', 'hunyuan')}}}"
    config = small_config(tmp_path, vae, "preprocess.first_frame=true", clips=2)
    plain = small_config(tmp_path, vae, clips=2)
    assert CacheBuilder(plain).run().encoded == 2 and CacheBuilder(config).run().encoded == 2  # other entries
    cache = DatasetCache(config.cache_dir)
    codec = load_codec(config.vae, pick("cpu"), None)
    with DecodePool(config, list_sources(config.data).sources) as pool:
        frames = [event for event in pool.run(lambda clip: True) if isinstance(event, Frames)]
    for event in frames:
        sample = next(sample for sample in cache.samples if sample.source == event.source.name)
        stored = cache.latent(sample.latent_keys[0])
        video = to_model_range(event.frames_FHWC)[None]
        assert torch.equal(first_frame(stored), codec.encode(video[:, :, :1]).mean_BCThw[0])
        assert not torch.equal(first_frame(stored), stored["mean"][:, :1])


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("data.sources.0.path=nowhere", "nowhere"),
        ("data.buckets.0.frames=6", "6 frames do not fit"),
        ("vae={kind: diffusers, pretrained: missing-folder/vae}", "vae.pretrained"),
        ("text={kind: transformers, pretrained: ./missing}", "text.pretrained"),
        ("vae.weights=missing.safetensors", "missing.safetensors"),
        ("data.buckets=[{frames: 5, height: 512, width: 512}]", "none of the"),
    ],
)
def test_what_cannot_be_done_is_one_clear_error(tmp_path: Path, override: str, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        CacheBuilder(small_config(tmp_path, override)).run()
    assert len(str(caught.value).splitlines()) <= 2


def test_a_shard_that_was_cut_short_is_noticed_and_made_again(small_cache: Path, tmp_path: Path) -> None:
    shutil.copytree(small_cache, tmp_path, dirs_exist_ok=True)
    config = small_config(tmp_path)
    before = checksums(tmp_path / "cache")
    (shard,) = (tmp_path / "cache" / "latents").rglob("*.tar")
    shard.write_bytes(shard.read_bytes()[:3000])
    with pytest.raises(UserError, match=r"000000.tar is damaged: cut short; delete it"):
        CacheBuilder(config).run()
    shard.unlink()
    assert CacheBuilder(config).run().encoded == 8
    assert checksums(tmp_path / "cache") == before
