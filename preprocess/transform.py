"""From a decoded clip to the pixels of its bucket. Pure functions.

Legend: F frames, H W height and width in pixels, C channels.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from mmspeed.preprocess.decode import choose_frames, covers
from mmspeed.preprocess.probe import Probe
from mmspeed.preprocess.reasons import Reason, Rejected
from mmspeed.shapes import Bucket

Box = tuple[int, int, int, int]  # left, top, right, bottom in displayed pixels


def assign_bucket(probe: Probe, buckets: Sequence[Bucket], fps: float | None, allow_upscale: bool) -> Bucket:
    """The bucket of a probed file: the most frames that its length fills, then the crop that keeps the most of it.

    Images and videos of one frame take F = 1 buckets and videos take the others. Buckets that the picture covers come
    before those that it would be enlarged for, which count only with `allow_upscale`. Of equal crops the larger bucket
    is taken (the smaller enlargement, where there must be one). Raises Rejected (no_bucket, too_short, too_small).
    """
    single = len(probe.pts_seconds) == 1
    kind = [bucket for bucket in buckets if bucket.is_image == single]
    if not kind:
        raise Rejected(Reason.NO_BUCKET, "no bucket has F = 1" if single else "all buckets have F = 1")
    long_enough = [bucket for bucket in kind if covers(probe.pts_seconds, bucket.frames, fps)]
    if not long_enough:
        choose_frames(probe.pts_seconds, min(bucket.frames for bucket in kind), fps)  # raises, with the lengths
    covered = [bucket for bucket in long_enough if _scale(probe, bucket) <= 1]
    if not covered and not allow_upscale:
        smallest = min(long_enough, key=lambda bucket: _scale(probe, bucket))
        raise Rejected(Reason.TOO_SMALL, f"{probe.width} x {probe.height}, and the smallest bucket is {smallest}")

    def order(bucket: Bucket) -> tuple[float, ...]:
        enlarged = max(1.0, _scale(probe, bucket))
        kept = round(kept_fraction(probe.width, probe.height, bucket), 6)
        return bucket.frames, kept, -enlarged, bucket.height * bucket.width, bucket.width

    return max(covered or long_enough, key=order)


def kept_fraction(width: int, height: int, bucket: Bucket) -> float:
    """The share of a picture's pixels that the centre crop to the bucket's aspect ratio keeps."""
    ratio = (bucket.width * height) / (bucket.height * width)
    return min(ratio, 1 / ratio)


def crop_box(width: int, height: int, bucket: Bucket) -> Box:
    """The largest centred box of the bucket's aspect ratio in a picture, in whole pixels."""
    if width * bucket.height > height * bucket.width:
        inner = max(1, round(height * bucket.width / bucket.height)), height
    else:
        inner = width, max(1, round(width * bucket.height / bucket.width))
    left, top = (width - inner[0]) // 2, (height - inner[1]) // 2
    return left, top, left + inner[0], top + inner[1]


def resize_crop(frames_FHWC: np.ndarray, bucket: Bucket) -> np.ndarray:
    """uint8 frames (F, H, W, 3), cropped to `crop_box` and resized to the bucket's height and width.

    Pillow's bicubic filter, whose support grows with the reduction (no aliasing); its fixed-point arithmetic gives the
    same bytes on every machine.
    """
    left, top, right, bottom = crop_box(frames_FHWC.shape[2], frames_FHWC.shape[1], bucket)
    size = bucket.width, bucket.height
    # Cut first: Pillow's own `box` lets pixels beyond the crop, such as black bars, run into its edge.
    cropped = (np.ascontiguousarray(frame[top:bottom, left:right]) for frame in frames_FHWC)
    return np.stack([np.asarray(Image.fromarray(x).resize(size, Image.Resampling.BICUBIC)) for x in cropped])


def to_model_range(frames_FHWC: np.ndarray) -> Tensor:
    """uint8 (F, H, W, 3) as float32 (3, F, H, W) in [-1, 1]: 0 becomes -1, 255 becomes 1."""
    return torch.from_numpy(frames_FHWC).permute(3, 0, 1, 2).to(torch.float32).div_(127.5).sub_(1.0).contiguous()


def _scale(probe: Probe, bucket: Bucket) -> float:
    """How much the picture is enlarged to cover the bucket; below 1 it is reduced."""
    return max(bucket.height / probe.height, bucket.width / probe.width)
