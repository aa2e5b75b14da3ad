"""Which frames are taken, and their pixels: decord where it is exact, PyAV for the rest, Pillow for pictures.

Legend: F frames, H W height and width in pixels.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from typing import Any

import av.video
import numpy as np
from PIL import Image

from mmspeed.preprocess.containers import is_picture
from mmspeed.preprocess.pictures import read_picture
from mmspeed.preprocess.probe import DECODER_ERRORS, Probe, frame_stamp, median_step, open_video, refused, video_stream
from mmspeed.preprocess.reasons import Reason, Rejected
from mmspeed.preprocess.source import Source

_EPSILON = 1e-6  # seconds


class _DecordError(Exception):
    """decord failed, or its answer does not agree with the probe."""


def covers(pts: Sequence[float], frames: int, fps: float | None) -> bool:
    """Whether a clip with frames at `pts` (seconds) is long enough for `frames` frames at `fps`.

    The window is (frames - 1) / fps seconds. The clip reaches from its first frame's time to its last's and, since that
    is shown for a while, half a usual step further: no frame that is taken stands more than half a step from its time.
    Without `fps` every frame counts.
    """
    if fps is None or frames == 1:
        return len(pts) >= frames
    return (frames - 1) / fps <= pts[-1] - pts[0] + median_step(pts) / 2 + _EPSILON


def choose_frames(pts: Sequence[float], frames: int, fps: float | None) -> list[int]:
    """Indices into `pts` (seconds, ascending) of the `frames` frames to take, `fps` a second, by time.

    The window is the middle one of the clip, started at a frame, so that rates that divide take evenly spaced frames.
    Each target time takes the frame nearest to it, the earlier of two. `fps` None takes successive frames. One frame is
    the first. Raises Rejected (too_short).
    """
    if not covers(pts, frames, fps):
        need = f"{frames} frames" if fps is None else f"{(frames - 1) / fps:.2f} s"
        have = f"{len(pts)} frames" if fps is None else f"{pts[-1] - pts[0] + median_step(pts):.2f} s"
        raise Rejected(Reason.TOO_SHORT, f"{have}, and {frames} frames need {need}")
    if frames == 1:
        return [0]
    if fps is None:
        start = (len(pts) - frames) // 2
        return list(range(start, start + frames))
    slack = pts[-1] - pts[0] - (frames - 1) / fps
    first = pts[max(0, bisect.bisect_right(pts, pts[0] + max(0.0, slack) / 2 + _EPSILON) - 1)]
    return [nearest(pts, first + k / fps) for k in range(frames)]


def nearest(pts: Sequence[float], time: float) -> int:
    """Index of the time in `pts` (ascending) that is nearest to `time`; the earlier of two."""
    after = min(bisect.bisect_left(pts, time), len(pts) - 1)
    before = max(0, after - 1)
    return before if time - pts[before] <= pts[after] - time + _EPSILON else after


def decode(source: Source, probe: Probe, indices: Sequence[int], decord: bool = True) -> tuple[np.ndarray, str]:
    """The frames `indices` (in the order they are shown) as (F, H, W, 3) uint8, and the name of what decoded them.

    Upright and with square pixels: H and W are the probe's. decord is tried where the probe says that it is exact, and
    its answer is checked; `decord` False leaves it out. Raises Rejected (truncated, undecodable).
    """
    with source.open() as file:
        if is_picture(file.read(64)):
            file.seek(0)
            return read_picture(file, indices), "pillow"
    if decord and probe.decord_ok:
        try:
            return _square(_with_decord(source, probe, indices), probe), "decord"
        except _DecordError:
            pass  # PyAV's answer or error is the one that counts
    return _square(_with_pyav(source, probe, indices), probe), "pyav"


def _square(frames_FHWC: np.ndarray, probe: Probe) -> np.ndarray:
    """Frames of the probe's size: files with non-square pixels are stretched."""
    if frames_FHWC.shape[1:3] == (probe.height, probe.width):
        return frames_FHWC
    size = probe.width, probe.height
    return np.stack([np.asarray(Image.fromarray(x).resize(size, Image.Resampling.BICUBIC)) for x in frames_FHWC])


def _with_decord(source: Source, probe: Probe, indices: Sequence[int]) -> np.ndarray:
    """decord's frames. Raises _DecordError when it fails, or disagrees with the probe on size or times."""
    import decord

    decord.logging.set_level(decord.logging.QUIET)
    unique = sorted(set(indices))
    try:
        if source.offset is None:
            reader = decord.VideoReader(source.path, num_threads=1)
            frames = _decord_frames(reader, probe, unique)
        else:
            with source.open() as file:
                reader = decord.VideoReader(file, num_threads=1)
                frames = _decord_frames(reader, probe, unique)
    except Exception as error:  # whatever it is, PyAV is next
        raise _DecordError(str(error)) from None
    turned = probe.rotation % 180 != 0
    size = (probe.coded_width, probe.coded_height) if turned else (probe.coded_height, probe.coded_width)
    if frames.shape != (len(unique), *size, 3):
        raise _DecordError(f"shape {frames.shape}")
    return frames[np.searchsorted(unique, indices)]


def _decord_frames(reader: Any, probe: Probe, unique: list[int]) -> np.ndarray:
    times = reader.get_frame_timestamp([0, *unique])[:, 0]
    wanted = np.array([probe.pts_seconds[index] - probe.pts_seconds[0] for index in unique])
    if not np.all(np.abs(times[1:] - times[0] - wanted) <= max(probe.step / 2, 1e-3)):
        raise _DecordError("times disagree")
    return reader.get_batch(unique).asnumpy()


def _with_pyav(source: Source, probe: Probe, indices: Sequence[int]) -> np.ndarray:
    """PyAV's frames, upright: from the key frame before the first, or from the start when the file's index is wrong."""
    times = [probe.pts_seconds[index] for index in indices]
    tolerance = max(probe.step / 2, 1e-3)
    if probe.pts_seconds[0] + 1.0 < times[0]:
        try:
            return _scan(source, probe, times, tolerance, seek=True)
        except Rejected:
            pass  # a wrong index in the file; the scan from the start decides
    return _scan(source, probe, times, tolerance, seek=False)


def _scan(source: Source, probe: Probe, times: list[float], tolerance: float, seek: bool) -> np.ndarray:
    """Decode in order, keeping the frame at each of `times` (ascending, seconds). Raises Rejected."""
    kept: list[np.ndarray] = []
    last_seen = 0.0
    for seen, frame in _frames(source, times[0] if seek else None):
        last_seen = seen
        if seen > times[len(kept)] + tolerance:
            raise Rejected(Reason.UNDECODABLE, f"the frame at {times[len(kept)]:.3f} s is damaged or missing")
        pixels: np.ndarray | None = None
        while len(kept) < len(times) and abs(seen - times[len(kept)]) <= tolerance:
            pixels = _pixels(frame, probe) if pixels is None else pixels
            kept.append(pixels)
        if len(kept) == len(times):
            return np.stack(kept)
    raise Rejected(Reason.TRUNCATED, f"the frames end at {last_seen:.3f} s, before {times[len(kept)]:.3f} s")


def _frames(source: Source, start: float | None) -> Iterator[tuple[float, av.video.VideoFrame]]:
    """(seconds, frame) from the key frame before `start` on, or from the beginning. Raises Rejected (undecodable)."""
    with source.open() as file:
        try:
            with open_video(file) as container:
                stream = video_stream(container)
                if start is not None and stream.time_base:
                    container.seek(round(start / stream.time_base), stream=stream, backward=True)
                for frame in container.decode(stream):
                    stamp = frame_stamp(frame)
                    if stamp is not None and not frame.is_corrupt:
                        yield float(stamp * (frame.time_base or stream.time_base or 1)), frame
        except DECODER_ERRORS as error:
            raise refused(error) from None


def _pixels(frame: av.video.VideoFrame, probe: Probe) -> np.ndarray:
    """A decoded frame as upright RGB (H, W, 3)."""
    if (frame.width, frame.height) != (probe.coded_width, probe.coded_height):
        raise Rejected(Reason.UNDECODABLE, f"the picture's size changes to {frame.width} x {frame.height}")
    return np.rot90(frame.to_ndarray(format="rgb24"), probe.rotation // 90)
