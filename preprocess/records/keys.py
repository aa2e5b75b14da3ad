"""What entries are made from: the whole of what their keys cover (law 5), so that changing one part makes another entry."""

from __future__ import annotations

from typing import Any

from mmspeed.config import Config
from mmspeed.preprocess.decoding.clips import Clip

ENCODING_VERSION = 2  # raise it when the way from file to entry changes its numbers
TRANSFORM = "crop-bicubic/2"  # how a crop becomes the bucket's pixels; raise its number when it gives others


def latent_parts(config: Config, codec_fingerprint: str, clip: Clip) -> dict[str, Any]:
    """What a latent's key covers: not the source's name or place, and not which window or crop of how many it is."""
    extra = {"first_frame": True} if config.preprocess.first_frame and not clip.bucket.is_image else {}
    return extra | {
        "version": ENCODING_VERSION,
        "transform": TRANSFORM,
        "content": clip.content_id,
        "frames": list(clip.indices),
        "crop": list(clip.crop),
        "bucket": clip.bucket.name,
        "fps": clip.fps,
        "codec": codec_fingerprint,
        "dtype": config.preprocess.latent_dtype,
    }


def text_parts(config: Config, text_fingerprint: str, caption: str) -> dict[str, Any]:
    """What a text's key covers; the fingerprint covers weights, tokenizer, number type and length limit."""
    return {
        "version": ENCODING_VERSION,
        "caption": caption,
        "encoder": text_fingerprint,
        "dtype": config.preprocess.text_dtype,
    }
