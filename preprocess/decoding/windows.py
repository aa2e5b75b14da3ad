"""Which frames of a clip are taken, by their times. Pure functions."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Literal

from mmspeed.preprocess.decoding.probe import median_step
from mmspeed.preprocess.sources.rejections import Reason, Rejected

_EPSILON = 1e-6  # seconds


def covers(pts: Sequence[float], frames: int, fps: float | None) -> bool:
    """Whether a clip with frames at `pts` (seconds) is long enough for `frames` frames at `fps`.

    The window is (frames - 1) / fps seconds. The clip reaches from its first frame's time to its last's and, since that
    is shown for a while, half a usual step further: no frame that is taken stands more than half a step from its time.
    Without `fps` every frame counts.
    """
    if fps is None or frames == 1:
        return len(pts) >= frames
    return (frames - 1) / fps <= _reach(pts) - pts[0]


def frames_available(pts: Sequence[float], fps: float | None) -> int:
    """The most frames at `fps` that a clip with frames at `pts` (seconds) `covers`."""
    if fps is None or len(pts) == 1:
        return len(pts)
    count = max(1, int((_reach(pts) - pts[0]) * fps))  # rounding may leave it one or two short
    while covers(pts, count + 1, fps):
        count += 1
    return count


def choose_frames(pts: Sequence[float], frames: int, fps: float | None) -> list[int]:
    """Indices into `pts` (seconds, ascending) of the `frames` frames of the one window in the middle of the clip.

    See `choose_windows`. Raises Rejected (too_short).
    """
    return choose_windows(pts, frames, fps, 1)[0]


def choose_windows(
    pts: Sequence[float], frames: int, fps: float | None, windows: int | Literal["all"]
) -> list[list[int]]:
    """Indices into `pts` (seconds, ascending) of each window of `frames` frames, `fps` a second, by time.

    The clip's time is cut into as many equal parts as there are windows, and each window stands in the middle of its part,
    started at a frame, so that rates that divide take evenly spaced frames. Where fewer than `windows` fit beside each other,
    as many as fit are taken. No frame is in two windows. Each target time takes the frame nearest to it, the earlier of two.
    `fps` None takes successive frames. One frame is the first. Raises Rejected (too_short) when not even one fits.
    """
    if not covers(pts, frames, fps):
        need = f"{frames} frames" if fps is None else f"{(frames - 1) / fps:.2f} s"
        have = f"{len(pts)} frames" if fps is None else f"{pts[-1] - pts[0] + median_step(pts):.2f} s"
        raise Rejected(Reason.TOO_SHORT, f"{have}, and {frames} frames need {need}")
    if frames == 1:
        return [[0]]
    count = windows_that_fit(pts, frames, fps)
    count = count if windows == "all" else min(windows, count)
    if fps is None:
        spare = len(pts) - count * frames
        starts = [number * frames + spare * (2 * number + 1) // (2 * count) for number in range(count)]
        return [list(range(start, start + frames)) for start in starts]
    slack = max(0.0, pts[-1] - pts[0] - (count * frames - 1) / fps)
    end, chosen, free = _reach(pts), list[list[int]](), 0
    for number in range(count):
        start = pts[0] + slack / count * (number + 0.5) + number * frames / fps
        # Where times are uneven a window may end beyond its part; the next starts behind it.
        first = max(free, bisect.bisect_right(pts, start + _EPSILON) - 1)
        if number and (first >= len(pts) or pts[first] + (frames - 1) / fps > end):
            break
        chosen.append([nearest(pts, pts[first] + k / fps) for k in range(frames)])
        free = chosen[-1][-1] + 1
    return chosen


def windows_that_fit(pts: Sequence[float], frames: int, fps: float | None) -> int:
    """How many windows of `frames` frames stand beside each other in a clip; each fills frames / fps seconds."""
    if fps is None:
        return len(pts) // frames
    return max(1, int(((_reach(pts) - pts[0]) * fps + 1) / frames))


def nearest(pts: Sequence[float], time: float) -> int:
    """Index of the time in `pts` (ascending) that is nearest to `time`; the earlier of two."""
    after = min(bisect.bisect_left(pts, time), len(pts) - 1)
    before = max(0, after - 1)
    return before if time - pts[before] <= pts[after] - time + _EPSILON else after


def _reach(pts: Sequence[float]) -> float:
    """The latest time that a frame may be taken for: half a usual step behind the last frame's."""
    return pts[-1] + median_step(pts) / 2 + _EPSILON
