"""Decoded pixels by a cache's rules: the place of chroma by sub-pixel correlation, untagged colours, alpha."""

from __future__ import annotations

from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from mmspeed.media.decode import Cut, stream
from mmspeed.media.pixel_rules import PixelRules
from mmspeed.media.probe import probe
from mmspeed.media.scaling import pixel_parts
from tests.support.decoding import LIMITS, source_of
from tests.support.zone_plates import displacement, write_plate

WIDTH, HEIGHT = 96, 80


def displacements(
    path: Path, offsets: list[tuple[int, int]], size: tuple[int, int], turns: int, rules: PixelRules
) -> np.ndarray:
    """(n, 2) displacements of unscaled crops at `offsets`."""
    source = source_of(path)
    video = probe(source, *LIMITS)
    wide, high = size
    cuts = [Cut((0,), (x, y, x + wide, y + high), wide, high, rules) for x, y in offsets]
    frames = dict(stream(source, video, cuts))
    return np.array([displacement(frames[n][0], x, y, WIDTH, HEIGHT, turns) for n, (x, y) in enumerate(offsets)])  # type: ignore[index]


@pytest.mark.parametrize(
    ("size", "pixel_format", "location"),
    [
        ((64, 56), "yuv420p", "left"),
        ((63, 55), "yuv420p", "topleft"),
        ((63, 55), "yuv420p10le", "center"),
        ((64, 56), "yuv420p", "top"),
        ((63, 55), "yuv422p", "left"),
        ((63, 55), "yuv444p10le", "left"),
    ],
)
def test_chroma_lies_where_the_stream_sites_it(
    tmp_path: Path, size: tuple[int, int], pixel_format: str, location: str
) -> None:
    path = write_plate(tmp_path / "plate.mp4", pixel_format, location, WIDTH, HEIGHT)
    at = displacements(path, list(product(range(8), range(8))), size, 0, PixelRules())
    assert np.abs(at).max() < 0.05


@pytest.mark.parametrize(("rotation", "pixel_format"), [(90, "yuv420p"), (180, "yuv422p"), (270, "yuv422p")])
def test_rotated_chroma_lies_where_the_stream_sites_it(tmp_path: Path, rotation: int, pixel_format: str) -> None:
    path = write_plate(tmp_path / "plate.mp4", pixel_format, "left", WIDTH, HEIGHT, rotation)
    at = displacements(path, list(product(range(8), range(8))), (57, 56), rotation // 90, PixelRules())
    assert np.abs(at).max() < 0.05


def test_reduced_chroma_lies_where_the_stream_sites_it(tmp_path: Path) -> None:
    """Crops that are reduced to a half: beside those of full chroma, in pixels of the source."""
    offsets, (wide, high) = list(product(range(4), range(4))), (75, 63)
    found_at = []
    for pixel_format in ("yuv420p", "yuv444p"):
        source = source_of(write_plate(tmp_path / f"{pixel_format}.mp4", pixel_format, "left", 2 * WIDTH, 2 * HEIGHT))
        cuts = [Cut((0,), (x, y, x + 2 * wide, y + 2 * high), wide, high) for x, y in offsets]
        frames: Any = dict(stream(source, probe(source, *LIMITS), cuts))
        at = [displacement(frames[n][0], x, y, 2 * WIDTH, 2 * HEIGHT, reduction=2) for n, (x, y) in enumerate(offsets)]
        found_at.append(np.array(at))
    assert np.abs(found_at[0] - found_at[1]).max() < 0.05


@pytest.mark.parametrize("pixel_format", ["yuv420p", "yuv422p"])
def test_chroma_of_odd_pictures_keeps_its_place_up_to_the_edge(tmp_path: Path, pixel_format: str) -> None:
    """Sides that no whole chroma sample ends at: swscale would stretch chroma by half a sample."""
    wide, high = WIDTH + 1, HEIGHT + 1
    path = write_plate(tmp_path / "plate.mkv", pixel_format, "left", wide, high, codec="ffv1")
    source = source_of(path)
    video = probe(source, *LIMITS)
    assert (video.width, video.height, video.chroma_location) == (wide, high, "left")
    ends = [(0, 0, wide, high), (wide - 40, high - 40, wide, high), (1, 1, 41, 41)]
    frames = dict(stream(source, video, [Cut((0,), box, box[2] - box[0], box[3] - box[1]) for box in ends]))
    at = [displacement(frames[n][0], box[0], box[1], wide, high) for n, box in enumerate(ends)]  # type: ignore[index]
    assert np.abs(at).max() < 0.05


@pytest.mark.parametrize("location", ["center", "topleft"])
def test_a_crop_through_a_chroma_sample_is_that_part_of_the_picture(tmp_path: Path, location: str) -> None:
    """But for its edges, beyond which nothing is read."""
    source = source_of(write_plate(tmp_path / "plate.mp4", "yuv420p", location, WIDTH, HEIGHT))
    video = probe(source, *LIMITS)
    assert video.chroma_location == location
    cuts = [Cut((0,), box, box[2] - box[0], box[3] - box[1]) for box in ((0, 0, WIDTH, HEIGHT), (5, 3, 68, 60))]
    (whole,), (crop,) = (frames for _, frames in sorted(stream(source, video, cuts), key=lambda pair: pair[0]))
    assert np.abs(crop[4:-4, 4:-4].astype(int) - whole[7:56, 9:64]).max() <= 1


def test_parts_of_keys_say_where_chroma_is_not_centred_or_not_cut_at_whole_samples(tmp_path: Path) -> None:
    source = source_of(write_plate(tmp_path / "plate.mp4", "yuv420p", "left", WIDTH, HEIGHT))
    left, even, odd = probe(source, *LIMITS), (0, 0, 64, 56), (1, 0, 65, 56)
    centred = probe(source_of(write_plate(tmp_path / "c.mp4", "yuv420p", "center", WIDTH, HEIGHT)), *LIMITS)
    full = probe(source_of(write_plate(tmp_path / "f.mp4", "yuv444p", "left", WIDTH, HEIGHT)), *LIMITS)
    new = PixelRules()
    assert pixel_parts(new, centred, even) == pixel_parts(new, full, odd) == {}
    assert pixel_parts(new, left, even) == pixel_parts(new, centred, odd) == {"chroma": 2}


@pytest.mark.parametrize(
    ("lines", "setting", "matrix"),
    [(480, "auto", "bt601"), (720, "auto", "bt709"), (720, "bt601", "bt601")],
)
def test_untagged_video_is_of_the_matrix_of_its_lines(tmp_path: Path, lines: int, setting: str, matrix: str) -> None:
    """BT.709 from 720 lines on, unless the config says which; tagged files keep theirs."""
    rules = PixelRules(untagged=setting)
    for tag, stated in ((2, matrix), (1, "bt709"), (5, "bt601")):
        path = tmp_path / f"{tag}.mkv"
        with av.open(str(path), "w") as output:
            track: Any = output.add_stream("libx264", rate=8)
            track.width, track.height, track.pix_fmt, track.options = 64, lines, "yuv420p", {"qp": "0"}
            track.codec_context.colorspace, track.codec_context.color_range = tag, 1
            frame = av.VideoFrame(64, lines, "yuv420p")
            for plane, value in zip(frame.planes, (120, 90, 170), strict=True):
                plane.update(bytes([value]) * plane.buffer_size)
            frame.pts, frame.time_base, frame.colorspace, frame.color_range = 0, Fraction(1, 8), tag, 1
            output.mux(track.encode(frame))
            output.mux(track.encode())
        source = source_of(path)
        video = probe(source, *LIMITS)
        assert video.untagged == (tag == 2)
        ((_, frames),) = stream(source, video, [Cut((0,), (0, 0, 64, 64), 64, 64, rules)])
        blue, red = {"bt601": (1.772, 1.402), "bt709": (1.8556, 1.5748)}[stated]
        scale = 255 / 224
        expected = (
            (120 - 16) * 255 / 219 + (170 - 128) * scale * red,
            (120 - 16) * 255 / 219 + (90 - 128) * scale * blue,
        )
        np.testing.assert_allclose(np.asarray(frames)[0, 20, 20][[0, 2]], expected, atol=1.5)
        parts = pixel_parts(rules, video, (0, 0, 64, 64))
        assert parts.get("untagged") == ("bt709" if tag == 2 and matrix == "bt709" else None)


@pytest.mark.parametrize(
    ("codec", "pixel_format", "name", "background"),
    [
        ("qtrle", "argb", "a.mov", "#ffffff"),
        ("prores_ks", "yuva444p10le", "c.mov", "#204060"),
        ("libvpx-vp9", "yuva420p", "g.webm", "#204060"),
        ("", "", "e.png", "#ffffff"),
        ("", "", "f.webp", "#204060"),
    ],
)
def test_transparent_pixels_show_the_background(
    tmp_path: Path, codec: str, pixel_format: str, name: str, background: str
) -> None:
    """Pictures and videos alike; half-transparent pixels mix it in."""
    shown = np.zeros((64, 96, 4), np.uint8)
    shown[..., :3], shown[..., 3] = (200, 40, 90), 255
    shown[:, :32, 3], shown[:, 32:64, 3] = 0, 128
    path = tmp_path / name
    if codec:
        with av.open(str(path), "w") as output:
            track: Any = output.add_stream(codec, rate=8)
            track.width, track.height, track.pix_fmt = 96, 64, pixel_format
            if name.endswith("webm"):
                track.options = {"auto-alt-ref": "0", "crf": "4", "b": "1M", "deadline": "realtime", "cpu-used": "8"}
                track.metadata["alpha_mode"] = "1"
            for number in range(30):
                frame = av.VideoFrame.from_ndarray(shown, format="rgba").reformat(format=pixel_format)
                frame.pts, frame.time_base = number, Fraction(1, 8)
                output.mux(track.encode(frame))
            output.mux(track.encode())
    else:
        Image.fromarray(shown).save(path, **({"lossless": True} if name.endswith("webp") else {}))
    source = source_of(path)
    video = probe(source, *LIMITS)
    rules = PixelRules(background=background)
    last = len(video.pts_seconds) - 1
    cut = Cut((last,), (1, 1, 95, 63), 94, 62, rules)
    results: Any = dict(stream(source, video, [cut, Cut((0,), (0, 0, 96, 64), 96, 64, rules)]))
    frames = results[0]
    np.testing.assert_allclose(results[1][0, 30, 13], frames[0, 29, 12], atol=4)
    colour = np.array([int(background[n : n + 2], 16) for n in (1, 3, 5)])
    for column, alpha in ((12, 0), (47, 128), (82, 255)):
        expected = shown[0, 0, :3] * (alpha / 255) + colour * (1 - alpha / 255)
        np.testing.assert_allclose(np.asarray(frames)[0, 30, column], expected, atol=4)
    parts = pixel_parts(rules, video, cut.crop)
    assert video.alpha and parts.get("background") == (background if codec or background != "#ffffff" else None)
