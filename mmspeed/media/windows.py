"""Select the frames of a clip by their times. Pure functions."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Literal

from mmspeed.media.probe import median_step
from mmspeed.media.rejections import Reason, Rejected

_EPSILON = 1e-6  # seconds


def covers(pts: Sequence[float], frames: int, fps: float | None) -> bool:
    """True if a clip with frames at `pts` (seconds) is long enough for `frames` frames at `fps`.

    The window is (frames - 1) / fps seconds. The clip reaches from its first frame's time to its last's and, since that
    is displayed for a while, half a usual step further. A time takes the nearest frame, so none is further from its time than half the
    step that the time falls in: half a usual step where the times of the clip are even, and half a gap in a gap (`furthest`).
    Without `fps` every frame counts.
    """
    if fps is None or frames == 1:
        return len(pts) >= frames
    return (frames - 1) / fps <= _reach(pts) - pts[0]


def frames_available(pts: Sequence[float], fps: float | None) -> int:
    """The most frames at `fps` that a clip with frames at `pts` (seconds) `covers`."""
    if fps is None or len(pts) == 1:
        return len(pts)
    count = max(1, int((_reach(pts) - pts[0]) * fps))  # rounding may give one or two too few
    while covers(pts, count + 1, fps):
        count += 1
    return count


def choose_frames(pts: Sequence[float], frames: int, fps: float | None) -> list[int]:
    """Indices into `pts` (seconds, ascending) of the `frames` frames of a single window in the middle of the clip.

    See `choose_windows`. Raises Rejected (too_short).
    """
    return choose_windows(pts, frames, fps, 1)[0]


def choose_windows(
    pts: Sequence[float], frames: int, fps: float | None, windows: int | Literal["all"]
) -> list[list[int]]:
    """Indices into `pts` (seconds, ascending) of each window of `frames` frames, `fps` a second, by time.

    The clip's time is divided into as many equal parts as there are windows, and each window is in the middle of its part,
    starting at a frame, so that dividing rates give evenly spaced frames. If fewer than `windows` fit without overlap,
    as many as fit are used. No frame is in two windows. Each target time takes the nearest frame, the earlier of two.
    `fps` None takes successive frames. For `frames` 1 it is the first. Raises Rejected (too_short) if not even one fits.
    """
    if not covers(pts, frames, fps):
        need = f"{frames} frames" if fps is None else f"{(frames - 1) / fps:.2f} s"
        have = f"{len(pts)} frames" if fps is None else f"{pts[-1] - pts[0] + median_step(pts):.2f} s"
        raise Rejected(Reason.TOO_SHORT, f"it has {have}, and {frames} frames need {need}")
    if frames == 1:
        return [[0]]
    count = windows_that_fit(pts, frames, fps)
    count = count if windows == "all" else min(windows, count)
    if fps is None:
        spare = len(pts) - count * frames
        starts = [number * frames + spare * (2 * number + 1) // (2 * count) for number in range(count)]
        return [list(range(start, start + frames)) for start in starts]
    slack = max(0.0, pts[-1] - pts[0] - (count * frames - 1) / fps)
    end, selected, free = _reach(pts), list[list[int]](), 0
    for number in range(count):
        start = pts[0] + slack / count * (number + 0.5) + number * frames / fps
        # With uneven times a window may end beyond its part; the next starts after it.
        first = max(free, bisect.bisect_right(pts, start + _EPSILON) - 1)
        if number and (first >= len(pts) or pts[first] + (frames - 1) / fps > end):
            break
        selected.append([nearest(pts, pts[first] + k / fps) for k in range(frames)])
        free = selected[-1][-1] + 1
    return selected


def furthest(pts: Sequence[float], indices: Sequence[int], fps: float) -> float:
    """The most seconds from a frame of a window to its time; its frames are `fps` a second from the first one's time on."""
    first = pts[indices[0]]
    return max(abs(pts[index] - first - number / fps) for number, index in enumerate(indices))


def windows_that_fit(pts: Sequence[float], frames: int, fps: float | None) -> int:
    """The number of windows of `frames` frames that fit into a clip without overlap; each fills frames / fps seconds."""
    if fps is None:
        return len(pts) // frames
    return max(1, int(((_reach(pts) - pts[0]) * fps + 1) / frames))


def nearest(pts: Sequence[float], time: float) -> int:
    """Index of the time in `pts` (ascending) that is nearest to `time`; the earlier of two."""
    after = min(bisect.bisect_left(pts, time), len(pts) - 1)
    before = max(0, after - 1)
    return before if time - pts[before] <= pts[after] - time + _EPSILON else after


def _reach(pts: Sequence[float]) -> float:
    """The latest time that a frame can represent: half a usual step after the last frame."""
    return pts[-1] + median_step(pts) / 2 + _EPSILON
