"""The picture is shown as its container says: mirrored, turned, and cut to its clean aperture."""

from __future__ import annotations

import struct
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, features

from mmspeed.media.decode import Cut, stream
from mmspeed.media.probe import Probe, probe
from mmspeed.media.rejections import Reason, Rejected
from tests.support.decoding import LIMITS, source_of
from tests.support.media import picture, write_video
from tests.support.odd_media import LAST, ONE, P3, icc_profile, shown, with_clap, with_matrix, with_pixel_crop

W, H = 96, 64
_UPRIGHT = [
    (a, b, c, d) for a, b, c, d in product((-1, 0, 1), repeat=4) if abs(a * d - b * c) == 1 and a * b == c * d == 0
]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_video(tmp_path_factory.mktemp("plain") / "plain.mp4", frames=6, options={"crf": "4"})


def matrix(a: float, b: float, c: float, d: float) -> tuple[int, ...]:
    return tuple(round(v) for v in (a * ONE, b * ONE, 0, c * ONE, d * ONE, 0, 0, 0, LAST))


@pytest.mark.parametrize("numbers", _UPRIGHT, ids=str)
def test_each_upright_matrix(numbers: tuple[int, int, int, int], plain: Path, tmp_path: Path) -> None:
    """(x, y) is shown at (a x + c y, b x + d y), moved into view; a crop is the part of it that is shown there."""
    a, b, c, d = numbers
    path = with_matrix(plain, tmp_path / "m.mp4", matrix(*numbers))
    width, height = (W, H) if a else (H, W)
    y, x = np.mgrid[:H, :W]
    want = np.zeros((height, width, 3), np.uint8)
    want[(b * x + d * y) % height, (a * x + c * y) % width] = picture(0)
    found, frames = shown(path)
    assert np.abs(frames[0].astype(int) - want).mean() < 6
    assert found.applied == (("geometry",) if a * d - b * c < 0 else ())
    crop = (2, 4, width // 2, height - 8)
    ((_, part),) = stream(source_of(path), found, [Cut((0,), crop, crop[2] - 2, crop[3] - 4)])
    assert np.abs(part[0].astype(int) - want[4 : crop[3], 2 : crop[2]]).mean() < 6


@pytest.mark.parametrize("numbers", [(0.7071, 0.7071, -0.7071, 0.7071), (1, 0.3, 0, 1), (2, 0, 0, 1)], ids=str)
def test_another_matrix_is_rejected_by_name(numbers: tuple[float, ...], plain: Path, tmp_path: Path) -> None:
    path = with_matrix(plain, tmp_path / "m.mp4", matrix(*numbers))
    with pytest.raises(Rejected, match="does more than mirror and turn by right angles") as rejected:
        shown(path)
    assert rejected.value.reason is Reason.UNKNOWN_GEOMETRY


def test_an_empty_matrix_says_nothing(plain: Path, tmp_path: Path) -> None:
    _, frames = shown(with_matrix(plain, tmp_path / "m.mp4", matrix(0, 0, 0, 0)))
    assert np.array_equal(frames, shown(plain)[1])


def cut(path: Path) -> tuple[Probe, np.ndarray]:
    found, frames = shown(path)
    assert found.applied == ("geometry",)
    return found, frames


def test_a_clean_aperture_is_what_is_shown(plain: Path, tmp_path: Path) -> None:
    """ISO's offsets are those of the middles: 64 x 48 around a middle 8 pixels to the left and 4 below."""
    found, frames = cut(with_clap(plain, tmp_path / "clap.mp4", 64, 1, 48, 1, -8, 1, 4, 1))
    assert (found.width, found.height, found.aperture) == (64, 48, (8, 12, 72, 60))
    assert np.abs(frames[0].astype(int) - picture(0)[12:60, 8:72]).mean() < 6
    whole, _ = shown(with_clap(plain, tmp_path / "whole.mp4", W, 1, H, 1, 0, 1, 0, 1))
    assert whole.applied == ()
    turned = with_matrix(tmp_path / "clap.mp4", tmp_path / "turned.mp4", matrix(0, 1, 1, 0))
    found, frames = cut(turned)
    assert (found.width, found.height) == (48, 64)
    assert np.abs(frames[0].astype(int) - picture(0)[12:60, 8:72].transpose(1, 0, 2)).mean() < 6


def test_matroska_says_what_is_cut_off(tmp_path: Path) -> None:
    path = write_video(tmp_path / "plain.mkv", frames=6, options={"crf": "4"})
    assert shown(path)[0].applied == ()
    found, frames = cut(with_pixel_crop(path, tmp_path / "crop.mkv", 10, 6, 4, 2, (82, 56)))
    assert (found.width, found.height, found.aperture) == (82, 56, (10, 6, 92, 62))
    assert np.abs(frames[0].astype(int) - picture(0)[6:62, 10:92]).mean() < 6


@pytest.mark.parametrize("numbers", [(200, 1, 48, 1, 0, 1, 0, 1), (64, 0, 48, 1, 0, 1, 0, 1)])
def test_an_impossible_aperture_is_rejected_by_name(numbers: tuple[int, ...], plain: Path, tmp_path: Path) -> None:
    path = with_clap(plain, tmp_path / "clap.mp4", *numbers)
    with pytest.raises(Rejected, match=r"shows the part|denominator"):
        shown(path)


def test_an_aperture_that_is_cut_short_is_rejected_by_name(plain: Path, tmp_path: Path) -> None:
    path = with_clap(plain, tmp_path / "clap.mp4", 64, 1, 48, 1, 0, 1, 0, 1)
    path.write_bytes(path.read_bytes().replace(struct.pack(">I4s", 40, b"clap"), struct.pack(">I4s", 24, b"clap")))
    with pytest.raises(Rejected, match="its clean aperture is cut short"):
        shown(path)


@pytest.mark.skipif(not features.check("avif"), reason="this Pillow reads no AVIF")
@pytest.mark.parametrize(("width", "refused"), [(64, True), (W, False)])
def test_an_aperture_of_an_avif_is_rejected_by_name(width: int, refused: bool, tmp_path: Path) -> None:
    """In the place of a box that is long enough, and marked as essential."""
    Image.fromarray(picture(0)).save(path := tmp_path / "a.avif", icc_profile=icc_profile(2.2, P3))
    data, at = bytearray(path.read_bytes()), path.read_bytes().index(b"colrprof")
    data[at : at + 36] = b"clap" + struct.pack(">8i", width, 1, H, 1, 0, 1, 0, 1)
    marks = data.index(b"ipma") + 15
    data[marks : marks + data[marks - 1]] = bytes(mark | 128 for mark in data[marks : marks + data[marks - 1]])
    path.write_bytes(data)
    found = probe(source_of(path), *LIMITS)
    assert ("geometry" in found.unread) is refused
