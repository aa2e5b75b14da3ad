"""Buckets, crops, resizing and the model's number range."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmspeed.preprocess.probe import Probe
from mmspeed.preprocess.reasons import Reason, Rejected
from mmspeed.preprocess.transform import assign_bucket, crop_box, kept_fraction, resize_crop, to_model_range
from mmspeed.shapes import Bucket
from tests.media import corners_of, number_of, picture

BUCKETS = (Bucket(49, 180, 320), Bucket(17, 180, 320), Bucket(17, 320, 180), Bucket(17, 360, 640), Bucket(1, 256, 256))


def probed(width: int, height: int, frames: int = 1, fps: float = 24) -> Probe:
    times = [index / fps for index in range(frames)]
    kind = "video" if frames > 1 else "image"
    return Probe(kind, width, height, fps, times, "h264", 8, 0, Fraction(1), "mov", False, width, height)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("width", "height", "frames", "expected"),
    [
        (1920, 1080, 24 * 7, Bucket(49, 180, 320)),  # the most frames come first
        (1920, 1080, 24 * 3, Bucket(17, 360, 640)),  # then, of equal crops, the larger picture
        (1080, 1920, 24 * 3, Bucket(17, 320, 180)),
        (400, 225, 24 * 3, Bucket(17, 180, 320)),  # too small for 640 x 360
        (300, 900, 1, Bucket(1, 256, 256)),
    ],
)
def test_assignment(width: int, height: int, frames: int, expected: Bucket) -> None:
    assert assign_bucket(probed(width, height, frames), BUCKETS, 8, False) == expected


@pytest.mark.parametrize(
    ("probe", "buckets", "reason"),
    [
        (probed(640, 360), BUCKETS[:4], Reason.NO_BUCKET),
        (probed(640, 360, 100), BUCKETS[4:], Reason.NO_BUCKET),
        (probed(640, 360, 40), BUCKETS, Reason.TOO_SHORT),
        (probed(200, 200), BUCKETS, Reason.TOO_SMALL),
        (probed(319, 2000, 100), (Bucket(17, 180, 320),), Reason.TOO_SMALL),
    ],
)
def test_rejections(probe: Probe, buckets: tuple[Bucket, ...], reason: Reason) -> None:
    with pytest.raises(Rejected) as rejected:
        assign_bucket(probe, buckets, 8, False)
    assert rejected.value.reason is reason and rejected.value.detail


def test_upscaling_only_where_no_bucket_fits() -> None:
    small = (Bucket(1, 256, 256), Bucket(1, 128, 128), Bucket(1, 512, 512))
    assert assign_bucket(probed(200, 200), small, 8, True) == Bucket(1, 128, 128)
    assert assign_bucket(probed(100, 100), small, 8, True) == Bucket(1, 128, 128)
    assert assign_bucket(probed(300, 300), small, 8, True) == Bucket(1, 256, 256)


def test_order_of_buckets_does_not_matter() -> None:
    for probe in (probed(1920, 1080, 168), probed(1920, 1080, 72), probed(500, 500, 72)):
        assert assign_bucket(probe, BUCKETS, 8, False) == assign_bucket(probe, BUCKETS[::-1], 8, False)


sizes = st.integers(1, 4000)
buckets = st.builds(Bucket, st.just(1), st.integers(8, 1024), st.integers(8, 1024))


@given(sizes, sizes, buckets)
def test_crop_box_properties(width: int, height: int, bucket: Bucket) -> None:
    left, top, right, bottom = crop_box(width, height, bucket)
    assert 0 <= left < right <= width and 0 <= top < bottom <= height
    assert right - left == width or bottom - top == height  # the largest of its kind
    assert abs(left - (width - right)) <= 1 and abs(top - (height - bottom)) <= 1  # centred
    kept = (right - left) * (bottom - top) / (width * height)
    assert abs(kept - kept_fraction(width, height, bucket)) <= 1 / min(width, height)


def test_crop_takes_the_middle() -> None:
    assert crop_box(320, 180, Bucket(1, 90, 160)) == (0, 0, 320, 180)
    assert crop_box(400, 100, Bucket(1, 64, 64)) == (150, 0, 250, 100)
    assert crop_box(100, 401, Bucket(1, 64, 64)) == (0, 150, 100, 250)


def test_resize_keeps_orientation_and_content() -> None:
    frames = np.stack([picture(number, 300, 200) for number in (3, 9)])
    small = resize_crop(frames, Bucket(2, 32, 48))
    assert small.shape == (2, 32, 48, 3) and small.dtype == np.uint8
    assert [number_of(frame) for frame in small] == [3, 9]
    assert corners_of(small[0]) == ["red", "green", "blue", "grey"]
    np.testing.assert_array_equal(small, resize_crop(frames, Bucket(2, 32, 48)))
    np.testing.assert_array_equal(frames, resize_crop(frames, Bucket(2, 200, 300)))


def test_resize_does_not_alias() -> None:
    """Stripes far finer than the result become their mean; picking pixels would give stripes again."""
    stripes = np.zeros((1, 64, 640, 3), np.uint8)
    stripes[:, :, ::2] = 255
    small = resize_crop(stripes, Bucket(1, 32, 320 // 7))
    inner = small[:, :, 1:-1].astype(int)  # at the edges the filter sees half of its stripes
    assert np.abs(inner - 127).max() <= 3


def test_crop_leaves_the_edges_out() -> None:
    wide = np.zeros((1, 32, 96, 3), np.uint8)
    wide[:, :, 32:64] = 200
    np.testing.assert_array_equal(resize_crop(wide, Bucket(1, 16, 16)), 200)


def test_model_range() -> None:
    frames = np.zeros((5, 8, 16, 3), np.uint8)
    frames[2, 3, 4] = (0, 255, 51)
    video = to_model_range(frames)
    assert video.shape == (3, 5, 8, 16) and video.dtype == torch.float32 and video.is_contiguous()
    torch.testing.assert_close(video[:, 2, 3, 4], torch.tensor([-1.0, 1.0, -0.6]))
    back = ((video + 1) * 127.5).round().to(torch.uint8).permute(1, 2, 3, 0).numpy()
    np.testing.assert_array_equal(back, frames)
