"""The cache that preprocess makes: every file accounted for, the same entries however it is made, nothing encoded twice."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import webdataset

from mmspeed.config import Bucket, dump_config, make_config
from mmspeed.data import DatasetCache
from mmspeed.errors import UserError
from mmspeed.pipelines import TextToVideo, TrainPipeline
from mmspeed.preprocess import CacheBuilder, check
from mmspeed.preprocess.sources import list_sources
from tests.media import ZOO_BUCKETS, ZOO_FPS, make_zoo
from tests.runs import small_config, small_tree
from tests.tiny_models import save_tiny_text_encoder, save_tiny_vae


def checksums(root: Path) -> dict[tuple[str, str], str]:
    """What stands in a cache: the checksum of every entry, by section and key."""
    cache = DatasetCache(root)
    return {
        (section, key): cache.entry(key, section).checksum
        for section in ("latents", "texts", "null")
        for key in cache.keys(section)
    }


def test_every_file_of_a_zoo_of_media_is_accounted_for(tmp_path: Path) -> None:
    zoo = make_zoo(tmp_path / "zoo")
    assert len(zoo) >= 25
    config = make_config(
        {
            "data": {
                "sources": [{"path": str(tmp_path / "zoo")}],
                "cache": str(tmp_path / "cache"),
                "fps": ZOO_FPS,
                "buckets": [{"frames": b.frames, "height": b.height, "width": b.width} for b in ZOO_BUCKETS],
            },
            "vae": {"kind": "linear", "channels": 4},
            "preprocess": {"time_limit": 20},
        }
    )
    report = CacheBuilder(config).run()
    reasons = {r.source: r.reason for r in report.rejections}
    for name, expect in zoo.items():
        if expect.good:
            assert name not in reasons, (name, reasons.get(name))
        else:
            assert reasons.get(name) in expect.reasons, (name, reasons.get(name))
    not_sources = list_sources(config.data).rejections
    assert report.encoded + report.reused == report.sources - (len(reasons) - len(not_sources))
    assert report.encoded + report.reused == sum(expect.good for expect in zoo.values())
    text = "\n".join(report.lines())
    assert f"rejected: {len(report.rejections)}" in text and "hidden files ignored: 1" in text
    listed = DatasetCache(tmp_path / "cache").rejects()
    assert sorted(row["path"] for row in listed) == sorted(reasons)


def test_other_tools_read_the_shards(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    CacheBuilder(config).run()
    shards = sorted(str(path) for path in (tmp_path / "cache" / "latents").rglob("*.tar"))
    samples = list(webdataset.WebDataset(shards, shardshuffle=False))
    assert len(samples) == 8
    for sample in samples:
        assert set(sample) >= {"__key__", "safetensors", "json"}
        mean_CThw = safetensors.numpy.load(sample["safetensors"])["mean"]
        assert mean_CThw.shape == (4, 2, 4, 6) and mean_CThw.dtype == np.float32
        assert json.loads(sample["json"])["meta"]["bucket"] == "005x0032x0048"


def test_a_second_run_encodes_nothing_and_each_change_only_what_depends_on_it(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    first = CacheBuilder(config).run()
    assert (first.encoded, first.texts) == (8, 9)  # eight captions and the empty one
    before = checksums(tmp_path / "cache")
    again = CacheBuilder(config).run()
    assert (again.encoded, again.reused, again.texts) == (0, 8, 0)
    assert checksums(tmp_path / "cache") == before
    # another caption: one text
    manifest = tmp_path / "clips.jsonl"
    rows = [json.loads(line) for line in manifest.read_text().splitlines()]
    rows[2]["caption"] = "Something else"
    manifest.write_text("".join(json.dumps(row) + "\n" for row in rows))
    changed = CacheBuilder(config).run()
    assert (changed.encoded, changed.texts) == (0, 1)
    # a copy under another name: nothing is encoded, and there is a sample more
    copy = tmp_path / "other" / "renamed.mp4"
    copy.parent.mkdir()
    shutil.copyfile(rows[0]["video"], copy)
    rows.append(rows[0] | {"video": str(copy)})
    manifest.write_text("".join(json.dumps(row) + "\n" for row in rows))
    renamed = CacheBuilder(config).run()
    assert (renamed.encoded, renamed.reused, renamed.texts) == (0, 9, 0)
    samples = DatasetCache(tmp_path / "cache").samples
    assert len(samples) == 9 and len({sample.key for sample in samples}) == 9
    # another frame rate: all latents, no text
    faster = CacheBuilder(small_config(tmp_path / "again", "data.fps=12", f"data.cache={tmp_path / 'cache'}")).run()
    assert (faster.encoded, faster.texts) == (8, 0)


def test_two_processes_make_the_same_entries_as_one(tmp_path: Path) -> None:
    one = small_config(tmp_path / "one")
    CacheBuilder(one).run()
    two = small_config(tmp_path / "two", f"data.sources.0.path={one.data.sources[0].path}")
    file = tmp_path / "two.yaml"
    file.write_text(dump_config(two))
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, "-m", "mmspeed", "preprocess", str(file), "--nproc", "2"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert "8 of 8 sources" in done.stdout + done.stderr
    assert checksums(tmp_path / "two" / "cache") == checksums(tmp_path / "one" / "cache")
    keys = [[s.key for s in DatasetCache(tmp_path / name / "cache").samples] for name in ("one", "two")]
    assert keys[0] == keys[1]


def test_images_and_videos_together(tmp_path: Path) -> None:
    from PIL import Image

    config = small_config(tmp_path)
    folder = tmp_path / "mixed"
    folder.mkdir()
    for index, row in enumerate(map(json.loads, Path(config.data.sources[0].path).read_text().splitlines())):
        if index < 2:
            shutil.copyfile(row["video"], folder / f"{index}.mp4")
        else:
            Image.effect_mandelbrot((96, 64), (-2, -1, 1, 1), 10 + index).convert("RGB").save(folder / f"{index}.png")
        (folder / f"{index}.txt").write_text(row["caption"])
    tree = small_tree(tmp_path)
    tree["data"] |= {
        "sources": [{"path": str(folder)}],
        "buckets": [{"frames": 5, "height": 32, "width": 48}, {"frames": 1, "height": 32, "width": 48}],
    }
    mixed = make_config(tree, ["train.steps=4"])
    report = CacheBuilder(mixed).run()
    assert report.buckets == {str(Bucket(5, 32, 48)): 2, str(Bucket(1, 32, 48)): 6}
    assert TrainPipeline(mixed).run().step == 4


@pytest.mark.parametrize(("vae", "text"), [("wan", "t5"), ("kl", "clip")])
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


def test_check_says_what_will_happen_before_any_work(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    before = "\n".join(check(config).lines())
    assert "8 sources, 8 usable, 0 rejected" in before and "not made yet; 8 latents and 8 captions to encode" in before
    assert "bucket 5x32x48: 7 training samples" in before and "held out for validation: 1" in before
    assert "6 steps of up to 3 samples, 3 steps an epoch" in before
    CacheBuilder(config).run()
    assert "cache latents: 8 present, 0 missing, 0 not used" in "\n".join(check(config).lines())
    other = "\n".join(check(small_config(tmp_path, "data.fps=12", "text.max_tokens=7")).lines())
    assert "cache latents: 0 present, 8 missing, 8 not used" in other
    assert "cache texts: 0 present, 8 missing, 8 not used" in other
    assert "stale: 8, made with another fps, frames" in other and "stale: 8, made with another encoder" in other
    wrong = check(small_config(tmp_path, "data.buckets.0.frames=6"))
    assert wrong.problems and "6 frames do not fit" in wrong.problems[0]


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


def test_a_shard_that_was_cut_short_is_noticed_and_made_anew(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    CacheBuilder(config).run()
    before = checksums(tmp_path / "cache")
    (shard,) = (tmp_path / "cache" / "latents").rglob("*.tar")
    shard.write_bytes(shard.read_bytes()[:3000])
    with pytest.raises(UserError, match=r"000000.tar is damaged: cut short; delete it"):
        CacheBuilder(config).run()
    shard.unlink()
    assert CacheBuilder(config).run().encoded == 8
    assert checksums(tmp_path / "cache") == before
