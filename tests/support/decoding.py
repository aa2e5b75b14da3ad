"""Short ways to decode a file in tests; used as `from tests.support.decoding import ...`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest

from mmspeed.media.decode import Cut, stream
from mmspeed.media.probe import Probe
from mmspeed.media.rejections import Rejected
from mmspeed.media.source import Kind, Source
from mmspeed.preprocess.decoding.worker import DecodeWorker

LIMITS = (10**9, 8192 * 8192)
FASTSTART = {"movflags": "faststart"}
PILLOW = (".gif", ".webp", ".png", ".jpg", ".bmp", ".tiff")
COLOURED = ["red", "green", "blue", "grey"]


def source_of(path: Path, offset: int | None = None, size: int | None = None) -> Source:
    return Source(path.name, str(path), offset, size, "video", ("words",), "train")


def whole(video: Probe, indices: Sequence[int]) -> Cut:
    """Frames at the file's own size."""
    return Cut(tuple(indices), (0, 0, video.width, video.height), video.width, video.height)


def decode(source: Source, video: Probe, indices: Sequence[int]) -> np.ndarray:
    """Frames at the file's own size. Raises Rejected."""
    ((_, result),) = stream(source, video, [whole(video, indices)])
    if isinstance(result, Rejected):
        raise result
    return result


def read(worker: DecodeWorker, source: Source, cut: Cut, time_limit: float) -> np.ndarray:
    """One clip. Raises Rejected."""
    ((_, result),) = worker.read(source, [cut], time_limit)
    if isinstance(result, Rejected):
        raise result
    return result


def rejection(call: Callable[[], object]) -> Rejected:
    with pytest.raises(Rejected) as rejected:
        call()
    return rejected.value


def video_of(path: Path) -> tuple[np.ndarray, float]:
    """All frames (F, H, W, 3) of a video, GIF or image file, uint8, and their average rate."""
    with av.open(str(path)) as container:
        track = container.streams.video[0]
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(track)]
        return np.stack(frames), float(track.average_rate or 1)


def probed(width: int = 320, height: int = 180, frames: int = 1, fps: float = 24.0) -> Probe:
    """A probe of a file of evenly spaced frames; one frame is a picture."""
    times = [number / fps for number in range(frames)]
    kind: Kind = "video" if frames > 1 else "image"
    codec, shape = "h264" if frames > 1 else "png", (width, height)
    return Probe(kind, *shape, fps, times, codec, 8, 0, Fraction(1), "mov", "pyav", [0.0], *shape)
