"""What is taken of a source: its bucket, its frames by time, its crop. Pure, and the whole of what a latent's key covers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mmspeed.config import Bucket
from mmspeed.config.schema import DataConfig
from mmspeed.preprocess.decode import choose_frames
from mmspeed.preprocess.probe import Probe
from mmspeed.preprocess.source import Source, content_id
from mmspeed.preprocess.transform import assign_bucket, crop_box
from mmspeed.rng import uniform


@dataclass(frozen=True)
class Clip:
    """The part of a source that becomes one entry."""

    source: Source
    bucket: Bucket
    indices: tuple[int, ...]  # frames taken, counted in presentation order
    crop: tuple[int, int, int, int]  # left, top, right, bottom in the source's displayed pixels
    content_id: str
    fps: float  # frames per second of the entry; 0 for images
    seconds: float  # length of the clip; 0 for images
    decoder: str = ""  # which library decoded it, once it is decoded

    def decoded_by(self, decoder: str) -> Clip:
        return replace(self, decoder=decoder)


def split_of(source: Source, content_id: str, data: DataConfig, seed: int) -> str:
    """`val` where the manifest says so or the share drawn by content holds the source out, else `train`."""
    if source.split == "val":
        return "val"
    return "val" if uniform(seed, "val_split", content_id) < data.val_fraction else "train"


def select_clip(source: Source, probe: Probe, data: DataConfig, full_hash: bool) -> Clip:
    """The clip that `data` takes of a probed source. Raises Rejected with the reason when it takes none."""
    buckets = tuple(b.bucket() for b in data.buckets)
    bucket = assign_bucket(probe, buckets, data.fps, data.allow_upscale)
    indices = tuple(choose_frames(probe.pts_seconds, bucket.frames, data.fps))
    fps = 0.0 if bucket.is_image else float(data.fps or probe.fps)
    return Clip(
        source=source,
        bucket=bucket,
        indices=indices,
        crop=crop_box(probe.width, probe.height, bucket),
        content_id=content_id(source, full_hash),
        fps=fps,
        seconds=bucket.frames / fps if fps else 0.0,
    )
