"""Counts of the frames and pixels that a bucket's clips use of their sources, and of those cropped, scaled away and trimmed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from mmspeed.media.probe import Probe
from mmspeed.media.windows import windows_that_fit
from mmspeed.preprocess.decoding.clips import Clip


@dataclass
class BucketUse:
    """Counts of one bucket, integers, so that parts added in any order give the exact total.

    Frames are counted at the clips' own rate (`data.fps`), so that a frame skipped to reach that rate does not count as lost.
    Pixels are counted clip by clip: each of two crops of one picture is compared with the whole picture.
    """

    clips: int = 0
    frames: int = 0  # of the sources, each source once
    frames_taken: int = 0  # inside some window
    pixels: int = 0  # of the frames taken, before the crop
    pixels_kept: int = 0  # inside the crop
    pixels_scaled: int = 0  # of these, lost by scaling down to the bucket's size
    frames_repeated: int = 0  # of the frames taken, repeats of the one before

    def add(self, other: BucketUse) -> None:
        """Add the counts of other clips."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    @property
    def cropped(self) -> float:
        """Share of the pixels outside the crops."""
        return 1 - self.pixels_kept / self.pixels if self.pixels else 0.0

    @property
    def scaled(self) -> float:
        """Share of the pixels inside the crops that are lost by scaling down."""
        return self.pixels_scaled / self.pixels if self.pixels else 0.0

    @property
    def trimmed(self) -> float:
        """Share of the frames that are in no window."""
        return 1 - self.frames_taken / self.frames if self.frames else 0.0

    @property
    def repeated(self) -> float:
        """Share of the frames in windows that repeat the one before."""
        return self.frames_repeated / self.frames_taken if self.frames_taken else 0.0


def use_of(probe: Probe, clips: Sequence[Clip]) -> BucketUse:
    """The counts of one source's clips in one bucket, at least one."""
    bucket, rate = clips[0].bucket, clips[0].fps
    used_frames = bucket.frames * len({clip.window for clip in clips})
    available = len(probe.pts_seconds) if rate in (0, probe.fps) else windows_that_fit(probe.pts_seconds, 1, rate)
    use = BucketUse(len(clips), max(available, used_frames), used_frames)
    use.frames_repeated = sum({clip.window: clip.repeated for clip in clips}.values())
    for left, top, right, bottom in (clip.crop for clip in clips):
        inside, bucket_pixels = (right - left) * (bottom - top), bucket.width * bucket.height
        use.pixels += bucket.frames * probe.width * probe.height
        use.pixels_kept += bucket.frames * inside
        use.pixels_scaled += bucket.frames * max(0, inside - bucket_pixels)
    return use
