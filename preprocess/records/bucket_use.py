"""What the clips of a bucket take of their sources, and what is cropped, scaled away and trimmed. Pure counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from mmspeed.preprocess.decoding.clips import Clip
from mmspeed.preprocess.decoding.probe import Probe
from mmspeed.preprocess.decoding.windows import windows_that_fit


@dataclass
class BucketUse:
    """Counts of one bucket, whole numbers, so that parts added in any order give exactly the whole.

    Frames are counted at the clips' own rate (`data.fps`), so that a frame which is passed over to reach that rate is not one that
    is lost. Pixels are counted clip by clip: of two crops of one picture each is compared with the whole picture.
    """

    clips: int = 0
    frames: int = 0  # that the sources have, each source once
    frames_taken: int = 0  # inside some window
    pixels: int = 0  # of the frames taken, before the crop
    pixels_kept: int = 0  # inside the crop
    pixels_scaled: int = 0  # of these, lost by scaling down to the bucket's size

    def add(self, other: BucketUse) -> None:
        """Add the counts of other clips."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    @property
    def cropped(self) -> float:
        """Share of the pixels that lie outside the crops."""
        return 1 - self.pixels_kept / self.pixels if self.pixels else 0.0

    @property
    def scaled(self) -> float:
        """Share of the pixels that lie inside the crops and are lost by scaling down."""
        return self.pixels_scaled / self.pixels if self.pixels else 0.0

    @property
    def trimmed(self) -> float:
        """Share of the frames that are in no window."""
        return 1 - self.frames_taken / self.frames if self.frames else 0.0


def use_of(probe: Probe, clips: Sequence[Clip]) -> BucketUse:
    """The counts of one source's clips in one bucket, at least one."""
    bucket, rate = clips[0].bucket, clips[0].fps
    taken = bucket.frames * len({clip.window for clip in clips})
    there = len(probe.pts_seconds) if rate in (0, probe.fps) else windows_that_fit(probe.pts_seconds, 1, rate)
    use = BucketUse(len(clips), max(there, taken), taken)
    for left, top, right, bottom in (clip.crop for clip in clips):
        inside, made = (right - left) * (bottom - top), bucket.width * bucket.height
        use.pixels += bucket.frames * probe.width * probe.height
        use.pixels_kept += bucket.frames * inside
        use.pixels_scaled += bucket.frames * max(0, inside - made)
    return use
