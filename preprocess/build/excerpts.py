"""Captions and frames of a config's sources, for those who compare what is made of them."""

from __future__ import annotations

import numpy as np

from mmspeed.config import Config
from mmspeed.device import Device
from mmspeed.preprocess.decoding.pool import DecodePool, Frames
from mmspeed.preprocess.encoding.encode import Encoders
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


def captions_by_key(config: Config) -> dict[str, str]:
    """The captions of a config's sources, and the empty one, by the keys of their entries in its cache.

    Reads lists of media and captions, and no media. Raises UserError for sources or a text encoder that cannot be found.
    """
    encoders = Encoders(config, Device("cpu", 0))
    words = dict.fromkeys(caption for source in list_sources(config.data).sources for caption in source.captions)
    return {encoders.text_key(caption): caption for caption in ("", *words)}
