"""Cutting, scaling and colours of decoded frames."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from mmspeed.media.decode import Cut, stream
from mmspeed.media.probe import probe
from mmspeed.media.scaling import Box, resize
from tests.support import media
from tests.support.decoding import COLOURED, LIMITS, decode, source_of, whole
from tests.support.media import corners_of, number_of, write_video


@pytest.mark.parametrize(
    ("rotation", "sar"), [(0, Fraction(2)), (90, Fraction(1)), (180, Fraction(1)), (-90, Fraction(2))]
)
def test_crops_are_of_the_picture_as_it_is_shown(tmp_path: Path, rotation: int, sar: Fraction) -> None:
    """Whatever way it is stored: each quarter alone is its colour up to its edges, and the whole is upright."""
    width = 96 if sar == 1 else 48
    source = source_of(write_video(tmp_path / "v.mp4", width=width, height=64, rotation=rotation, sar=sar, frames=12))
    video = probe(source, *LIMITS)
    wide, high = video.width, video.height
    assert {wide, high} == {96, 64} or (sar != 1 and rotation % 180 and (wide, high) == (48, 128))
    halves: list[Box] = [(x, y, x + wide // 2, y + high // 2) for y in (0, high // 2) for x in (0, wide // 2)]
    cuts = [Cut((7,), box, 40, 24) for box in halves] + [whole(video, [3, 7])]
    frames = dict(stream(source, video, cuts))
    for position, colour in enumerate(COLOURED):
        (frame,) = frames[position]  # type: ignore[misc]
        assert frame.shape == (24, 40, 3)
        spread = np.ptp(frame[3:-3, 3:-3].reshape(-1, 3), axis=0)
        assert corners_of(frame) == [colour] * 4 and spread.max() < 40, (position, spread)
    last = frames[4]
    assert isinstance(last, np.ndarray) and [number_of(frame) for frame in last] == [3, 7]
    assert corners_of(last[0]) == COLOURED


def tagged(path: Path, pix_fmt: str, matrix: int, colour_range: int, codec: str = "libx264") -> np.ndarray:
    """A video of one noisy picture, made RGB to YUV by `matrix` and `colour_range`, and tagged so; returns the picture."""
    rng = np.random.default_rng(0)
    small = Image.fromarray(rng.integers(0, 256, (4, 6, 3), dtype=np.uint8))
    pixels = np.asarray(small.resize((320, 192), Image.Resampling.BICUBIC))
    with av.open(str(path), "w") as output:
        stream: Any = output.add_stream(codec, rate=24)
        stream.width, stream.height, stream.pix_fmt = 320, 192, pix_fmt
        stream.options = {"crf": "4"} | (
            {"x265-params": "log-level=none:pools=none:frame-threads=1"} if codec == "libx265" else {}
        )
        stream.codec_context.colorspace, stream.codec_context.color_range = matrix, colour_range
        frame = av.VideoFrame.from_ndarray(pixels, "rgb24")
        frame = frame.reformat(format=pix_fmt, dst_colorspace=matrix, dst_color_range=colour_range)
        frame.pts, frame.time_base = 0, Fraction(1, 24)
        output.mux(stream.encode(frame))
        output.mux(stream.encode())
    return pixels


@pytest.mark.parametrize(
    ("pix_fmt", "matrix", "colour_range", "codec"),
    [
        ("yuv420p", 1, 1, "libx264"),
        ("yuvj420p", 5, 2, "libx264"),
        ("yuv444p", 1, 1, "libx264"),
        ("yuv420p10le", 1, 1, "libx265"),
    ],
)
def test_colours_are_those_of_the_picture(
    tmp_path: Path, pix_fmt: str, matrix: int, colour_range: int, codec: str
) -> None:
    """Colours agree with PyAV's conversion, with the picture itself, and with Pillow's scaling."""
    picture = tagged(tmp_path / "v.mp4", pix_fmt, matrix, colour_range, codec)
    source = source_of(tmp_path / "v.mp4")
    video = probe(source, *LIMITS)
    half = Cut((0,), (40, 0, 280, 192), 120, 96)
    same, small = (result for _, result in stream(source, video, [whole(video, [0]), half]))
    assert isinstance(same, np.ndarray) and isinstance(small, np.ndarray)
    with av.open(str(tmp_path / "v.mp4")) as container:
        theirs = next(container.decode(video=0)).to_ndarray(format="rgb24")
    assert np.abs(same[0].astype(int) - theirs).mean() < 3 and np.abs(same[0].astype(int) - picture).mean() < 3
    assert abs(float(same.mean()) - float(picture.mean())) < 1
    expected = resize(picture, half.crop, 120, 96)
    assert np.abs(small[0].astype(int) - expected).mean() < 3


def test_pixel_formats_that_are_not_yuv(tmp_path: Path) -> None:
    source = source_of(write_video(tmp_path / "v.mkv", codec="ffv1", pix_fmt="bgr0", frames=4))
    video = probe(source, *LIMITS)
    (frame,) = decode(source, video, [3])
    np.testing.assert_array_equal(frame, media.picture(3))
