"""Rank the buckets of a clip, compute its crops, and convert pixels to the model's range. Pure functions.

Legend: F frames, H W height and width in pixels, C channels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mmspeed.media.probe import Probe
from mmspeed.media.rejections import Reason, Rejected
from mmspeed.media.scaling import Box, crop_box
from mmspeed.media.windows import choose_frames, covers
from mmspeed.shapes import Bucket


def rank_buckets(probe: Probe, buckets: Sequence[Bucket], fps: float | None, allow_upscale: bool) -> list[Bucket]:
    """The buckets that a probed file can fill, the one that loses least of it first.

    A bucket's rank is its frames x the share of the picture that the crop keeps x the length of its sides (the root
    of its pixels, without those added by enlarging). Images and videos of one frame use buckets with F = 1, videos
    the others. If the picture covers some of the buckets, only those count; if it covers none, those that need
    enlargement count with `allow_upscale`. Among equals the one that crops less comes first, then the smaller
    enlargement, then the larger bucket.
    Raises Rejected (no_bucket, too_short, too_small) if no bucket fits.
    """
    single = len(probe.pts_seconds) == 1
    kind = [bucket for bucket in dict.fromkeys(buckets) if bucket.is_image == single]
    if not kind:
        why = (
            "it is a picture, and no bucket has one frame"
            if single
            else "it is a video, and every bucket has one frame"
        )
        raise Rejected(Reason.NO_BUCKET, why)
    long_enough = [bucket for bucket in kind if covers(probe.pts_seconds, bucket.frames, fps)]
    if not long_enough:
        choose_frames(probe.pts_seconds, min(bucket.frames for bucket in kind), fps)  # raises, with the lengths
    ranked = rank_by_picture(probe.width, probe.height, long_enough, allow_upscale)
    if not ranked:
        smallest = min(long_enough, key=lambda bucket: _scale(probe.width, probe.height, bucket))
        raise Rejected(
            Reason.TOO_SMALL, f"it is {probe.width} x {probe.height} pixels, and the smallest bucket is {smallest}"
        )
    return ranked


def rank_by_picture(width: int, height: int, buckets: Sequence[Bucket], allow_upscale: bool) -> list[Bucket]:
    """The buckets in the order of `rank_buckets`, of those that a source has the frames for; empty if its picture is too small for all."""

    def order(bucket: Bucket) -> tuple[float, ...]:
        area = bucket.height * bucket.width
        kept_share = kept_fraction(width, height, bucket)
        worth = bucket.frames * kept_share * math.sqrt(min(area, width * height))
        return worth, kept_share, -max(1.0, _scale(width, height, bucket)), area, bucket.width

    covered = [bucket for bucket in buckets if _scale(width, height, bucket) <= 1]
    return sorted(covered or (buckets if allow_upscale else ()), key=order, reverse=True)


def kept_fraction(width: int, height: int, bucket: Bucket) -> float:
    """The share of a picture's pixels that the centre crop to the bucket's aspect ratio keeps."""
    one, other = bucket.width * height, bucket.height * width
    return min(one, other) / max(one, other)  # from integers, so equal shapes give equal shares


def crop_boxes(width: int, height: int, bucket: Bucket, crops: int) -> list[Box]:
    """`crops` boxes like `crop_box`, evenly spaced from edge to edge along the cropped side; a single one is in the middle.

    All are distinct: there are fewer if the spare pixels are fewer than the steps between them.
    """
    left, top, right, bottom = middle = crop_box(width, height, bucket)
    inner = right - left, bottom - top
    slack = max(width - inner[0], height - inner[1])  # one of the two is 0
    count = min(crops, slack + 1)
    if count == 1:
        return [middle]
    along = [slack * number // (count - 1) for number in range(count)]
    if inner[0] < width:
        return [(at, top, at + inner[0], bottom) for at in along]
    return [(left, at, right, at + inner[1]) for at in along]


def to_model_range(frames_FHWC: np.ndarray) -> Tensor:
    """Convert uint8 (F, H, W, 3) to float32 (3, F, H, W) in [-1, 1]: 0 becomes -1, 255 becomes 1."""
    return torch.from_numpy(frames_FHWC).permute(3, 0, 1, 2).to(torch.float32).div_(127.5).sub_(1.0).contiguous()


def grey_frames(bucket: Bucket) -> np.ndarray:
    """Frames (F, H, W, 3) of a bucket that `to_model_range` makes zeros; no uint8 does."""
    return np.full((bucket.frames, bucket.height, bucket.width, 3), 127.5, np.float32)


def _scale(width: int, height: int, bucket: Bucket) -> float:
    """The factor by which a picture is enlarged to cover the bucket; below 1 it is reduced."""
    return max(bucket.height / height, bucket.width / width)
