"""Read frames of one file in this process, with the pixels that training takes of it.

Legend: F frames, H W height and width in pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from mmspeed.errors import UserError
from mmspeed.media.decode import Cut, stream
from mmspeed.media.pixel_rules import PixelRules
from mmspeed.media.probe import Probe, probe
from mmspeed.media.rejections import Rejected, in_words
from mmspeed.media.scaling import crop_box
from mmspeed.media.source import Source
from mmspeed.media.windows import choose_frames, covers, frames_available, nearest
from mmspeed.shapes import Bucket

_MOST_BYTES, _MOST_PIXELS = 1 << 40, 1 << 28


def first_frame(path: Path, size: Bucket | None, rules: PixelRules) -> np.ndarray:
    """The picture of a file, or a video's first frame, cut around its middle and scaled to a size; None: whole. (H, W, 3), uint8.

    Raises UserError.
    """
    return _frames(path, "picture", lambda _: [0], size, rules)[0]


def last_frames(path: Path, count: int, fps: float | None, size: Bucket, rules: PixelRules) -> np.ndarray:
    """The last `count` frames of a video, `fps` a second (None: its own), cut and scaled to a size: (F, H, W, 3), uint8.

    Raises UserError.
    """

    def chosen(found: Probe) -> list[int]:
        times = found.pts_seconds
        if not covers(times, count, fps):
            rate = "" if fps is None else f" at {fps:g} frames a second"
            raise UserError(f"{path}: is shorter than the {count} frames that are given{rate}")
        if fps is None:
            return list(range(len(times) - count, len(times)))
        return [nearest(times, times[-1] - (count - 1 - number) / fps) for number in range(count)]

    return _frames(path, "video", chosen, size, rules)


def whole_window(path: Path, size: Bucket, fps: float | None, stride: int, rules: PixelRules) -> np.ndarray:
    """The frames (F, H, W, 3), uint8, of a video as a clip of a size is taken from a source, `fps` a second (None: its own).

    Raises UserError, also for a video of other than the size's frames; fewer than `stride` more, of which a codec makes no further
    latent frame, are left out at both ends.
    """

    def chosen(found: Probe) -> list[int]:
        count = frames_available(found.pts_seconds, fps)
        if not 0 <= count - size.frames < stride:
            rate = "" if fps is None else f" at {fps:g} a second"
            fit = 1 + (count - 1) // stride * stride
            raise UserError(
                f"{path}: has {count} frames{rate}, and the video {size.frames}: give --frames {fit}, or another file"
            )
        return choose_frames(found.pts_seconds, size.frames, fps)

    return _frames(path, "video", chosen, size, rules)


def _frames(
    path: Path, what: str, choose: Callable[[Probe], Sequence[int]], size: Bucket | None, rules: PixelRules
) -> np.ndarray:
    """The frames (F, H, W, 3) of a file whose indices are chosen by its probe. Raises UserError, also for a file that is no `what`."""
    source = Source(path.name, str(path), None, None, "video", (), "train")
    try:
        found = probe(source, _MOST_BYTES, _MOST_PIXELS)
        box = (0, 0, found.width, found.height) if size is None else crop_box(found.width, found.height, size)
        height, width = (found.height, found.width) if size is None else (size.height, size.width)
        ((_, frames),) = stream(source, found, [Cut(tuple(choose(found)), box, width, height, rules)])
        if isinstance(frames, Rejected):
            raise frames
    except (Rejected, OSError) as error:
        why = error.detail if isinstance(error, Rejected) else in_words(error)
        raise UserError(f"{path}: is no {what} that can be read: {why}") from None
    return np.ascontiguousarray(frames)
