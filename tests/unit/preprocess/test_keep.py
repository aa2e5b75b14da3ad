"""Buckets of a source: drawn by `keep`, never enlarged without permission; and the losses of each by crop, scale and trim."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmspeed.config.schema import DataConfig
from mmspeed.data import DatasetCache
from mmspeed.errors import UserError
from mmspeed.media.rejections import Reason, Rejected
from mmspeed.media.source import Source, content_id
from mmspeed.pipelines.domains.open_cache import check_cache
from mmspeed.preprocess import CacheBuilder, check
from mmspeed.preprocess.decoding.clips import Clip, kept_buckets, select_clips, split_of
from mmspeed.preprocess.decoding.transform import rank_buckets
from mmspeed.preprocess.records.bucket_use import BucketUse, use_of
from mmspeed.shapes import Bucket
from tests.support.decoding import probed
from tests.support.runs import small_config

A, B, C = Bucket(17, 64, 96), Bucket(9, 64, 64), Bucket(5, 32, 48)
CONTENTS = [f"{number:032x}" for number in range(4000)]


def within(share: float, keep: float, count: int) -> bool:
    """True if a share of `count` fair draws is within six standard deviations, which fails by chance once in 5e8."""
    return abs(share - keep) <= 6 * math.sqrt(keep * (1 - keep) / count)


def test_the_share_of_contents_that_a_bucket_keeps_is_its_keep() -> None:
    seed = 7
    keep = {A: 0.7, B: 0.2, C: 1.0}
    kept = [kept_buckets((A, B, C), keep, content, seed) for content in CONTENTS]
    for bucket, share in keep.items():
        assert within(sum(bucket in some for some in kept) / len(kept), share, len(kept))
    assert within(sum({A, B} <= set(some) for some in kept) / len(kept), 0.14, len(kept))  # drawn apart
    # the first that is kept: 0.7 go to A, then a fifth of the rest to B, and C has what is left
    first = [some[0] for some in kept]
    for bucket, share in ((A, 0.7), (B, 0.06), (C, 0.24)):
        assert within(first.count(bucket) / len(first), share, len(first))
    others = [kept_buckets((A, B, C), keep, content, seed + 1) for content in CONTENTS]
    assert kept != others, "the draw is of the seed too"


shares = st.floats(0.01, 1.0)


@given(st.permutations([A, B, C]), shares, shares, shares, st.sampled_from(CONTENTS), st.integers(0, 3))
def test_a_draw_depends_on_its_own_bucket_and_keep_alone(
    ranked: list[Bucket], a: float, b: float, c: float, content: str, seed: int
) -> None:
    keep = {A: a, B: b, C: c}
    kept = kept_buckets(ranked, keep, content, seed)
    assert kept == kept_buckets(ranked, keep, content, seed) == [bucket for bucket in ranked if bucket in kept]
    for bucket in ranked:
        alone = kept_buckets([bucket], {bucket: keep[bucket]}, content, seed)
        assert alone == ([bucket] if bucket in kept else [])
        more = kept_buckets([bucket], {bucket: min(1.0, keep[bucket] * 1.5)}, content, seed)
        assert not alone or more, "who is kept stays when keep is raised"


def of(buckets: Mapping[Bucket, float], **more: Any) -> DataConfig:
    rows = [{"frames": b.frames, "height": b.height, "width": b.width, "keep": keep} for b, keep in buckets.items()]
    return DataConfig.model_validate({"sources": [{"path": "x"}], "buckets": rows, "fps": 8} | more)


def a_file(folder: Path, content: int) -> Source:
    """A file that is never decoded: of it only the content id is taken."""
    path = folder / f"{content}.mp4"
    path.write_bytes(content.to_bytes(8, "big"))
    return Source(path.name, str(path), None, None, "video", ("words",), "train")


def test_the_next_best_buckets_are_taken_and_none_is_a_reason(tmp_path: Path) -> None:
    probe = probed(96, 64, 200, 24.0)
    ranked = rank_buckets(probe, (A, B, C), 8, False)
    keep = {A: 0.5, B: 0.5, C: 0.5}
    seen = set()
    for number in range(64):
        source = a_file(tmp_path, number)
        expected = kept_buckets(ranked, keep, content_id(source, False), 3)
        seen.add(len(expected))
        for most in (1, 2, 5):
            data = of(keep, buckets_per_clip=most)
            if not expected:
                with pytest.raises(Rejected, match=r"drawn out of .*17x64x96.* by data.buckets\[\]\.keep") as rejected:
                    select_clips(source, probe, data, False, 3)
                assert rejected.value.reason is Reason.NOT_KEPT
                continue
            assert [clip.bucket for clip in select_clips(source, probe, data, False, 3)] == expected[:most]
    assert seen == {0, 1, 2, 3}


def test_what_is_drawn_out_is_counted_reported_and_belongs_to_the_seed(small_cache: Path, tmp_path: Path) -> None:
    shutil.copytree(small_cache, tmp_path, dirs_exist_ok=True)
    config = small_config(tmp_path, "data.buckets.0.keep=0.5", "seed=1")
    report = check(config)
    gone = report.statistics.reasons["not_kept"]
    assert 0 < gone < 8 and report.statistics.usable == 8 - gone
    assert f"hint: {gone} rejected as not_kept: raise data.buckets[].keep" in "\n".join(report.lines())
    built = CacheBuilder(config).run()  # the keys are those without `keep`
    assert (built.encoded, built.reused, built.rejected, built.reasons) == (0, 8 - gone, gone, {"not_kept": gone})
    cache = DatasetCache(config.cache_dir)
    assert len(cache.samples) == 8 - gone and {row["reason"] for row in cache.rejects()} == {"not_kept"}
    check_cache(cache, config)
    with pytest.raises(UserError, match=r"other data\.buckets\.0\.keep"):
        check_cache(cache, small_config(tmp_path, "data.buckets.0.keep=0.5", "seed=2"))


@given(
    st.integers(4, 700), st.integers(4, 700), st.sampled_from([1, 8, 40, 120]), st.integers(1, 9), st.integers(1, 4), st.booleans()
)  # fmt: skip
def test_nothing_is_enlarged_unless_it_is_allowed_and_needed(
    tmp_path_factory: pytest.TempPathFactory, width: int, height: int, frames: int, crops: int, most: int, upscale: bool
) -> None:
    probe, source = probed(width, height, frames, 24.0), a_file(tmp_path_factory.getbasetemp(), 0)
    buckets = dict.fromkeys((A, B, C, Bucket(1, 64, 64), Bucket(1, 256, 256)), 1.0)
    data = of(buckets, crops=crops, buckets_per_clip=most, allow_upscale=upscale)
    try:
        clips = select_clips(source, probe, data, False, 0)
    except Rejected:
        return
    for clip in clips:
        left, top, right, bottom = clip.crop
        if right - left < clip.bucket.width or bottom - top < clip.bucket.height:
            ranked = rank_buckets(probe, tuple(buckets), 8.0, True)
            assert upscale and not any(other.width <= width and other.height <= height for other in ranked)


def test_counts_of_a_bucket_by_hand() -> None:
    source = Source("a.mp4", "a.mp4", None, None, "video", ("words",), "train")
    probe = probed(200, 100, 96, 24.0)  # 4 s: 32 frames at 8 a second
    bucket = Bucket(5, 40, 40)
    clips = [
        Clip(source, bucket, (0, 3, 6, 9, 12), (left, 0, left + 100, 100), "c", 8.0, 0.625, "", window, crop)
        for window in (0, 1)
        for crop, left in enumerate((0, 100))
    ]
    use = use_of(probe, clips)
    assert use == BucketUse(4, 32, 10, 20 * 200 * 100, 20 * 100 * 100, 20 * (100 * 100 - 40 * 40))
    assert (use.cropped, use.scaled, use.trimmed) == (0.5, 0.42, 1 - 10 / 32)
    every = use_of(probe, [Clip(source, bucket, (0, 1, 2, 3, 4), (0, 0, 100, 100), "c", 24.0, 5 / 24)])
    assert (every.frames, every.frames_taken) == (96, 5)  # each frame of the file counts
    still = Clip(source, Bucket(1, 200, 200), (0,), (50, 0, 150, 100), "c", 0.0, 0.0)  # enlarged: nothing scaled away
    assert use_of(probed(200, 100, 1, 24.0), [still]) == BucketUse(1, 1, 1, 20_000, 10_000, 0)
    use.add(every)
    assert (use.clips, use.frames, use.frames_taken) == (5, 128, 15)
    assert (BucketUse().cropped, BucketUse().scaled, BucketUse().trimmed) == (0.0, 0.0, 0.0)


def test_the_split_of_a_source_is_drawn_by_its_content_and_not_by_its_name(tmp_path: Path) -> None:
    data = small_config(tmp_path, "data.val_fraction=0.3").data
    first, second = (Source(f"{name}.mp4", name, None, None, "video", (), "train") for name in "ab")
    contents = [f"content {number}" for number in range(400)]
    splits = [split_of(first, content, data, 0) for content in contents]
    assert splits == [split_of(second, content, data, 0) for content in contents]
    assert 80 < splits.count("val") < 160
    marked = replace(first, split="val")
    assert all(split_of(marked, content, data, 0) == "val" for content in contents[:9])
