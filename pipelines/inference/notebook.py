"""Videos in notebooks: HTML with the video embedded, of bounded size."""

from __future__ import annotations

import base64
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

if TYPE_CHECKING:
    from mmspeed.pipelines.inference.media import Video

MOST_BYTES = 4 << 20  # of the embedded file
MOST_PIXELS = 640  # of its longer side
LEAST_PIXELS = 64


def html_of(video: Video) -> str:
    """A `<video>` element with an embedded mp4, or an `<img>` with a png of a single frame: at most `MOST_BYTES` of it.

    Videos are scaled down until they fit; one that is too long in any size is said to be, with what to do.
    """
    frames, height, width = video.frames_FHWC.shape[:3]
    side = min(max(height, width), MOST_PIXELS)
    while True:
        data = _file(_scaled(video, side))
        if len(data) <= MOST_BYTES:
            break
        if side // 2 < LEAST_PIXELS:
            return f"<p>{video!r} is too long to be shown here: save it with <code>video.save('video.mp4')</code></p>"
        side //= 2
    text = base64.b64encode(data).decode()
    style = 'style="max-width: 100%"'
    if frames == 1:
        return f'<img {style} width="{width}" alt="a frame" src="data:image/png;base64,{text}">'
    return f'<video controls loop autoplay muted playsinline {style} width="{width}" src="data:video/mp4;base64,{text}"></video>'


def _file(video: Video) -> bytes:
    """The video as mp4, a single frame as png."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / ("video.png" if len(video.frames_FHWC) == 1 else "video.mp4")
        video.save(path)
        return path.read_bytes()


def _scaled(video: Video, side: int) -> Video:
    """The video with a longer side of at most as many pixels."""
    height, width = video.frames_FHWC.shape[1:3]
    if max(height, width) <= side:
        return video
    size = (max(1, round(width * side / max(height, width))), max(1, round(height * side / max(height, width))))
    frames = [np.asarray(Image.fromarray(frame).resize(size)) for frame in video.frames_FHWC]
    return type(video)(np.stack(frames), video.fps)
