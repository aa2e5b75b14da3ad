"""The frames that videos of a config's sources begin and end with, for those who compare what is made of them."""

from __future__ import annotations

import numpy as np

from mmspeed.config import Config
from mmspeed.preprocess.decoding.pool import DecodePool, Frames
from mmspeed.preprocess.sources.discover import list_sources
from mmspeed.shapes import Bucket

MOST_SOURCES = 16  # that are looked at


def clip_pictures(config: Config, bucket: Bucket, count: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """(first frame, last frame) (H, W, 3), uint8, of up to `count` clips of a bucket, as they are encoded.

    Fewer where the first sources have no more that can be read. Raises UserError for sources that cannot be found.
    """
    pictures: list[tuple[np.ndarray, np.ndarray]] = []
    with DecodePool(config, list_sources(config.data).sources[:MOST_SOURCES]) as pool:
        for event in pool.run(lambda clip: clip.bucket == bucket and clip.role == "video", ordered=True):
            if isinstance(event, Frames):
                pictures.append((event.frames_FHWC[0].copy(), event.frames_FHWC[-1].copy()))
            if len(pictures) == count:
                break
    return pictures
