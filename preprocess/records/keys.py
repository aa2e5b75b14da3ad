"""The parts of entries' keys: everything that an entry depends on (law 5), so that a change of any part gives another entry."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mmspeed.config import Config
from mmspeed.preprocess.decoding.clips import Clip

ENCODING_VERSION = 2  # raise it when the path from file to entry changes its numbers
TRANSFORM = "crop-bicubic/2"  # scaling of a crop to the bucket's pixels; raise its number when it gives others


def latent_parts(
    config: Config,
    codec_fingerprint: str,
    clip: Clip,
    conditions: Sequence[str] = (),
    image_fingerprint: str | None = None,
) -> dict[str, Any]:
    """The parts of a latent's key: not the source's name or location, nor the number of its window or crop.

    A property of the cache's recipe (`mmspeed.data.cache.versions`) is a part only where it makes other pixels than its version 1.
    `conditions`: names of what is stored of conditioning frames, too (`stored_conditions`); `image_fingerprint`: of the image encoder, where
    embeddings are among them.
    """
    extra: dict[str, Any] = {"first_frame": True} if config.preprocess.first_frame and not clip.bucket.is_image else {}
    if conditions and not clip.bucket.is_image:
        extra |= {"conditions": sorted(conditions)}
        extra |= {} if image_fingerprint is None else {"image_encoder": image_fingerprint}
    extra |= {"mirrored": True} if clip.mirrored else {}
    return {
        **extra,
        **clip.pixel_parts,
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


def picture_parts(clip: Clip) -> dict[str, Any]:
    """The parts of a clip's first frame, which some text encoders see beside a caption."""
    return {
        **clip.pixel_parts,
        **({"mirrored": True} if clip.mirrored else {}),
        "transform": TRANSFORM,
        "content": clip.content_id,
        "frame": clip.indices[0],
        "crop": list(clip.crop),
        "size": [clip.bucket.height, clip.bucket.width],
    }


def text_parts(config: Config, text_fingerprint: str, caption: str, clip: Clip | None = None) -> dict[str, Any]:
    """The parts of a text's key; the fingerprint covers weights, tokenizer, number type and length limit.

    clip: whose first frame the encoder sees, too; None: it sees words alone, or the black picture.
    """
    return {
        **({} if clip is None else {"picture": picture_parts(clip)}),
        "version": ENCODING_VERSION,
        "caption": caption,
        "encoder": text_fingerprint,
        "dtype": config.preprocess.text_dtype,
    }
