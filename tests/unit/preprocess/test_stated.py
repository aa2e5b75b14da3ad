"""What files state of times, geometry and colours: counted by `check`, and applied or rejected by a build."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageCms

from mmspeed.config import Config
from mmspeed.data import DatasetCache
from mmspeed.media.windows import choose_windows, furthest
from mmspeed.preprocess import CacheBuilder, check
from tests.support.media import write_animation, write_image, write_video
from tests.support.odd_media import (
    LAST,
    ONE,
    P3,
    icc_profile,
    with_clap,
    with_matrix,
    write_fields,
    write_plain_colour,
)
from tests.support.runs import small_config

_KIND_OF = {
    "b_frames.avi": "order",
    "mirror.mp4": "geometry",
    "clap.mp4": "geometry",
    "pq.mp4": "hdr",
    "fields.mp4": "fields",
    "p3.png": "profile",
    "p3.jpg": "profile",
    "cover.png": "cover",
}
_REFUSED = {
    "float.tiff": "unknown_colours",
    "ycgco.mp4": "unknown_colours",
    "raw.h264": "no_times",
    "sheared.mp4": "unknown_geometry",
}
_PLAIN = ("plain.mp4", "plain.avi", "plain.png", "moving.png", "srgb.png", "turned.mp4")


def matrix(*numbers: int) -> tuple[int, ...]:
    a, b, c, d = (number * ONE // 2 for number in numbers)
    return (a, b, 0, c, d, 0, 0, 0, LAST)


def folder_of(folder: Path) -> Config:
    """Sources of each kind, and plain ones."""
    media = folder / "media"
    media.mkdir(parents=True)
    plain = write_video(media / "plain.mp4")
    write_video(media / "b_frames.avi", frames=40, options={"bf": "3", "x264-params": "b-adapt=0"})
    write_video(media / "plain.avi", options={"bf": "0"})
    write_video(media / "turned.mp4", rotation=90)
    with_matrix(plain, media / "mirror.mp4", matrix(-2, 0, 0, 2))
    with_matrix(plain, media / "sheared.mp4", matrix(2, 1, 0, 2))
    with_clap(plain, media / "clap.mp4", 72, 1, 48, 1, 0, 1, 0, 1)
    write_plain_colour(media / "pq.mp4", (500, 512, 512), "transfer=smpte2084:colormatrix=bt2020nc", frames=12)
    write_plain_colour(media / "ycgco.mp4", (64, 64, 255), "colormatrix=YCgCo", "yuv444p", codec="libx264", frames=12)
    write_fields(media / "fields.mp4", 24)
    write_video(media / "raw.h264")
    write_video(media / "gaps.mp4", times_ms=[40 * n + 360 * (n // 12) for n in range(36)])
    write_image(media / "plain.png")
    write_animation(media / "moving.png")
    for name, profile in (("p3.png", icc_profile(2.2, P3)), ("p3.jpg", icc_profile(2.2, P3)), ("srgb.png", None)):
        with Image.open(media / "plain.png") as image:
            image.save(
                media / name, icc_profile=profile or ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
            )
    images = [Image.new("RGB", (96, 64), (10 * number, 0, 0)) for number in range(14)]
    images[0].save(media / "cover.png", save_all=True, append_images=images[1:], default_image=True, duration=100)
    Image.fromarray(np.linspace(0, 1, 96 * 64, dtype=np.float32).reshape(64, 96)).save(media / "float.tiff")
    for path in list(media.iterdir()):
        path.with_suffix(".txt").write_text(f"a picture named {path.stem}")
    buckets = "data.buckets=[{frames: 1, height: 32, width: 48}, {frames: 5, height: 32, width: 48}]"
    return small_config(folder, f"data.sources.0.path={media}", buckets, "data.fps=6", "data.max_repeated=1", clips=1)


def counted(lines: Sequence[str]) -> dict[str, int]:
    """The counts of kinds and reasons in the lines of `check`."""
    words = [line.split() for line in lines if line.startswith("  ")]
    return {first: int(second) for first, second, *_ in (w for w in words if len(w) > 2) if second.isdigit()}


def test_check_counts_each_kind_and_a_build_takes_or_rejects_it(tmp_path: Path) -> None:
    config = folder_of(tmp_path)
    after = check(config)
    named = {"order": 1, "geometry": 2, "hdr": 1, "fields": 1, "profile": 2, "cover": 1, "gaps": 1}
    assert counted(after.lines()) | named == counted(after.lines())
    CacheBuilder(config).run()
    samples = {sample.source: sample.latent_keys for sample in DatasetCache(config.cache_dir).samples}
    assert set(samples) == {*_KIND_OF, *_PLAIN, "gaps.mp4"}
    reasons = after.statistics.reasons
    assert {reason: reasons[reason] for reason in set(_REFUSED.values())} == {
        "unknown_colours": 2,
        "no_times": 1,
        "unknown_geometry": 1,
    }


def test_gaps_are_half_of_what_frames_are_off_at_most() -> None:
    rng = np.random.default_rng(0)
    for number in range(200):
        steps = rng.choice([0.02, 0.04, 0.4, 1.0], 120, p=[0.1, 0.8, 0.08, 0.02]) if number else np.full(120, 0.04)
        times = [0.0, *np.cumsum(steps).tolist()]
        for fps in (3.0, 8.0, 24.0):
            for indices in choose_windows(times, 9, fps, "all"):
                step = max(np.median(steps), *steps[max(0, indices[0] - 1) : indices[-1] + 1])
                assert furthest(times, indices, fps) <= step / 2 + 1e-5
                assert number or furthest(times, indices, fps) <= 0.02 + 1e-5
