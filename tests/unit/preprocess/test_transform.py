"""Buckets, crops, resizing and the model's number range."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmspeed.preprocess.decoding.probe import Probe
from mmspeed.preprocess.decoding.transform import crop_box, crop_boxes, kept_fraction, rank_buckets, to_model_range
from mmspeed.preprocess.sources.rejections import Reason, Rejected
from mmspeed.shapes import Bucket
from tests.support.decoding import probed

BUCKETS = (Bucket(49, 180, 320), Bucket(17, 180, 320), Bucket(17, 320, 180), Bucket(17, 360, 640), Bucket(1, 256, 256))


def best(probe: Probe, buckets: tuple[Bucket, ...], fps: float | None, allow_upscale: bool) -> Bucket:
    return rank_buckets(probe, buckets, fps, allow_upscale)[0]


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
        best(probe, buckets, 8, False)
    assert rejected.value.reason is reason and rejected.value.detail


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


@given(sizes, sizes, buckets, st.integers(1, 9))
def test_crop_boxes_properties(width: int, height: int, bucket: Bucket, crops: int) -> None:
    boxes = crop_boxes(width, height, bucket, crops)
    assert crop_boxes(width, height, bucket, 1) == [crop_box(width, height, bucket)]
    assert 1 <= len(boxes) <= crops and len(set(boxes)) == len(boxes) and boxes == sorted(boxes)
    left, top, right, bottom = crop_box(width, height, bucket)
    assert {(box[2] - box[0], box[3] - box[1]) for box in boxes} == {(right - left, bottom - top)}
    assert all(0 <= box[0] and 0 <= box[1] and box[2] <= width and box[3] <= height for box in boxes)
    slack = width - (right - left) + height - (bottom - top)
    assert len(boxes) == min(crops, slack + 1)
    if len(boxes) > 1:
        assert boxes[0][:2] == (0, 0) and boxes[-1][2:] == (width, height)  # from edge to edge
        steps = np.diff([box[0] + box[1] for box in boxes])
        assert steps.max() - steps.min() <= 1
    if len(boxes) % 2:
        assert boxes[len(boxes) // 2] == crop_box(width, height, bucket)  # the same entry as with one crop


SMALL, LARGE, LONGER = Bucket(17, 180, 320), Bucket(17, 360, 640), Bucket(49, 180, 320)
THREE = (SMALL, LARGE, LONGER, Bucket(1, 8, 8), SMALL)
WIDE, TALL = Bucket(17, 96, 160), Bucket(13, 160, 96)
QUARTER, WHOLE = Bucket(1, 200, 200), Bucket(1, 25, 100)  # of 800 x 200: 1/4 x 200, and 1 x 50
P256, P480 = Bucket(17, 256, 448), Bucket(17, 480, 832)


@pytest.mark.parametrize(
    ("probe", "buckets", "upscale", "ranked"),
    [
        # all that can be filled and covered
        (probed(1920, 1080, 168), THREE, False, [LONGER, LARGE, SMALL]),
        (probed(1920, 1080, 72), THREE, False, [LARGE, SMALL]),
        (probed(400, 225, 168), THREE, True, [LONGER, SMALL]),
        (probed(100, 56, 168), THREE, True, [LONGER, SMALL, LARGE]),
        # a few frames are given up for the picture: 13 of 94 %, not 17 of 34 %
        (probed(360, 640, 72), (WIDE, TALL), False, [TALL, WIDE]),
        (probed(640, 360, 72), (WIDE, TALL), False, [WIDE, TALL]),
        # a little is cropped for a larger picture, 97.4 % and not 98.4 %, but not most of it
        (probed(854, 480, 72), (P256, P480), False, [P480, P256]),
        (probed(1080, 1920, 72), (LARGE, Bucket(17, 320, 180)), False, [Bucket(17, 320, 180), LARGE]),
        # of equals the one that crops less
        (probed(800, 200), (QUARTER, WHOLE), False, [WHOLE, QUARTER]),
    ],
)
def test_ranking(probe: Probe, buckets: tuple[Bucket, ...], upscale: bool, ranked: list[Bucket]) -> None:
    assert rank_buckets(probe, buckets, 8, upscale) == ranked


def test_model_range() -> None:
    frames = np.zeros((5, 8, 16, 3), np.uint8)
    frames[2, 3, 4] = (0, 255, 51)
    video = to_model_range(frames)
    assert video.shape == (3, 5, 8, 16) and video.dtype == torch.float32 and video.is_contiguous()
    torch.testing.assert_close(video[:, 2, 3, 4], torch.tensor([-1.0, 1.0, -0.6]))
    back = ((video + 1) * 127.5).round().to(torch.uint8).permute(1, 2, 3, 0).numpy()
    np.testing.assert_array_equal(back, frames)
