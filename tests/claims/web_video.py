"""A synthetic data set with the published shape of web video: lengths, sizes, aspect ratios; and the buckets its clips go to.

Published:

- Lengths. Panda-70M, cut from YouTube: 70,723,513 clips of 167,000 hours together (its download page), so 8.5 s on average. Its
  splitter discards events under 2.5 s, cuts others at 60 s and takes a tenth off at both ends (a call kept as a comment in its
  event_stitching.py), and its longest clip has 48 s (a maintainer in issue 52). So lengths lie in 2 to 48 s. The lengths of whole
  YouTube videos fit a log-normal law (arXiv 1408.5777), so the clips' are one here, cut off at both ends, with a mean of 8.5 s.
- Resolutions. InternVid (arXiv 2307.06942, and its page): of its YouTube videos 85 % have 720 lines, the others 360 to 720.
- Frames and classes of buckets, and hand-tuned batch sizes: Open-Sora 2.0's training configs (256px and 768px, up to 129 frames).

Assumed, since nothing was found that states it: the spread of the lengths (SIGMA 1.0: the median is then 5.9 s, and 73 % have at
most 10 s; InternVid's clips, of 11.7 s on average, have 85 %), how the 15 % below 720 lines are spread, all aspect ratios, rates of
frames, one picture in ten samples, and the 480p class between Open-Sora's two.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mmspeed.errors import UserError
from mmspeed.rng import key64
from mmspeed.shapes import Bucket
from tests.support.decoding import probed

Array = npt.NDArray[Any]
MU, SIGMA, SHORTEST, LONGEST = 1.536, 1.0, 2.0, 48.0  # of the natural logarithm of seconds; seconds
IMAGES = 0.1
LINES = {720: 0.85, 540: 0.03, 480: 0.06, 360: 0.05, 240: 0.01}  # of the shorter side
RATES = {30: 0.6, 25: 0.2, 24: 0.2}
ASPECTS = {
    (16, 9): 0.78,
    (9, 16): 0.10,
    (4, 3): 0.05,
    (1, 1): 0.03,
    (21, 9): 0.02,
    (3, 4): 0.01,
    (3, 2): 0.01,
}

FPS = 16.0  # that clips are sampled at
FRAMES = (17, 33, 49, 65, 81, 97, 113, 129)
CLASSES = {"256px": 256, "480p": 638, "768px": 768}  # square root of the pixels
BUCKET_ASPECTS = ((21, 9), (16, 9), (3, 2), (4, 3), (1, 1), (3, 4), (2, 3), (9, 16), (9, 21))
MULTIPLE = 16  # codec stride 8, patch 2
# Samples of a batch by frames (up to), after Open-Sora's stage2_i2v.py; 480p is interpolated here, on logarithms of pixels and sizes.
HAND = {
    "256px": {1: 195, 33: 80, 65: 40, 97: 28, 129: 23},
    "480p": {1: 50, 33: 14, 65: 7, 97: 4, 129: 3},
    "768px": {1: 38, 33: 10, 65: 5, 97: 3, 129: 2},
}


@dataclass(frozen=True)
class ClipShapes:
    """Clips, an entry each: pixels shown, frames, and frames a second. A picture has one frame."""

    widths: Array
    heights: Array
    frames: Array
    fps: Array

    def __len__(self) -> int:
        return len(self.widths)


@dataclass(frozen=True)
class DataSet:
    """`counts`: samples of each bucket, `clips` together; `fell_out`: clips drawn beside them that fit no bucket, by reason."""

    counts: dict[Bucket, int]
    fell_out: dict[str, int]
    mean_seconds: float  # of the videos among all that were drawn
    median_seconds: float

    @property
    def clips(self) -> int:
        return sum(self.counts.values())

    def lines(self) -> list[str]:
        lost = ", ".join(f"{count:,} {reason}" for reason, count in sorted(self.fell_out.items())) or "none"
        videos = {bucket: count for bucket, count in self.counts.items() if not bucket.is_image}
        share = "; ".join(
            f"{name} {sum(c for b, c in self.counts.items() if class_of(b) == name) / self.clips:.1%}"
            for name in CLASSES
        )
        bucket, most = max(self.counts.items(), key=lambda item: item[1])
        return [
            f"data set: {self.clips:,} samples in {len(self.counts)} buckets, {sum(videos.values()):,} of them videos of"
            f" {self.mean_seconds:.1f} s on average (median {self.median_seconds:.1f} s); fell out besides: {lost}",
            f"          {share}; fewest {min(self.counts.values()):,} in a bucket, most {most:,} in {bucket}",
        ]


def make_buckets() -> list[Bucket]:
    """The hand list: classes of pixels x aspect ratios x frames, images among them."""
    results = []
    for side in CLASSES.values():
        for across, down in BUCKET_ASPECTS:
            ratio = math.sqrt(across / down)
            height, width = (round(edge / MULTIPLE) * MULTIPLE for edge in (side / ratio, side * ratio))
            results += [Bucket(frames, height, width) for frames in (1, *FRAMES)]
    return results


def class_of(bucket: Bucket) -> str:
    """The class of pixels that is nearest to a bucket's."""
    side = math.sqrt(bucket.height * bucket.width)
    return min(CLASSES, key=lambda name: abs(CLASSES[name] - side))


def hand_size(bucket: Bucket) -> int:
    """The hand-tuned batch of a bucket."""
    sizes = HAND[class_of(bucket)]
    return sizes[min(frames for frames in sizes if frames >= bucket.frames)]


def draw_clips(count: int, seed: int, part: int = 0) -> ClipShapes:
    """`count` clips by the laws above. The same seed and part give the same clips."""

    def uniform(purpose: str) -> torch.Tensor:
        # neither 0 nor 1, whose quantiles are infinite
        drawn = torch.Generator().manual_seed(key64(seed, purpose, part))
        return torch.rand(count, generator=drawn, dtype=torch.float64).clamp(1e-12, 1 - 1e-12)

    def chosen(purpose: str, shares: dict[Any, float]) -> Array:
        ends = np.cumsum(list(shares.values()))
        return np.searchsorted(ends / ends[-1], uniform(purpose).numpy())

    low, high = (torch.special.ndtr(torch.tensor((math.log(s) - MU) / SIGMA).double()) for s in (SHORTEST, LONGEST))
    seconds = torch.exp(MU + SIGMA * torch.special.ndtri(low + (high - low) * uniform("web_seconds"))).numpy()
    fps = np.array(list(RATES))[chosen("web_fps", RATES)]
    short = np.array(list(LINES))[chosen("web_lines", LINES)]
    across, down = np.array(list(ASPECTS))[chosen("web_aspect", ASPECTS)].T
    scale = short / np.minimum(across, down)
    frames = np.maximum(2, np.round(seconds * fps)).astype(np.int64)
    frames[uniform("web_image").numpy() < IMAGES] = 1
    even = [np.round(edge * scale / 2).astype(np.int64) * 2 for edge in (across, down)]
    return ClipShapes(even[0], even[1], frames, fps.astype(np.int64))


def lengths_covered(clips: ClipShapes, lengths: Sequence[int], fps: float) -> Array:
    """How many of the bucket lengths (ascending) each clip is long enough for: `preprocess.windows.covers` for even frame times."""
    reach = (clips.frames - 0.5) / clips.fps + 1e-6
    return np.searchsorted([(length - 1) / fps for length in lengths], reach, side="right")


def assign(clips: ClipShapes, buckets: Sequence[Bucket]) -> tuple[Array, Counter[str]]:
    """The place in `buckets` of each clip's best one, -1 where it fits none; and why these fell out.

    Clips of one size that are long enough for the same buckets are ranked alike, so `preprocess.transform.rank_buckets` is asked
    once for each such kind.
    """
    from mmspeed.media.rejections import Rejected
    from mmspeed.preprocess.decoding.transform import rank_buckets

    lengths = sorted({bucket.frames for bucket in buckets if not bucket.is_image})
    level = np.where(clips.frames == 1, len(lengths) + 1, lengths_covered(clips, lengths, FPS))
    kind = (clips.widths << 32) + (clips.heights << 8) + level
    _, first, of_clip = np.unique(kind, return_index=True, return_inverse=True)
    counts = np.bincount(of_clip)
    places = {bucket: place for place, bucket in enumerate(buckets)}
    best, fell_out = np.full(len(first), -1), Counter[str]()
    for cell, clip in enumerate(first.tolist()):
        try:
            best[cell] = places[rank_buckets(probe_of(clips, clip), buckets, FPS, False)[0]]
        except Rejected as rejected:
            fell_out[rejected.reason.value.replace("_", " ")] += int(counts[cell])
    return best[of_clip], fell_out


def probe_of(clips: ClipShapes, place: int) -> Any:
    """What preprocess would know of a clip's file. Frames beyond what the longest bucket takes make no difference, and are left out."""
    fps = int(clips.fps[place])
    count = min(int(clips.frames[place]), math.ceil(FRAMES[-1] / FPS * fps) + 1)
    return probed(int(clips.widths[place]), int(clips.heights[place]), count, float(fps))


def make_data_set(samples: int, seed: int) -> DataSet:
    """Clips are drawn until exactly `samples` of them have a bucket. Raises UserError for less than one."""
    if samples < 1:
        raise UserError(f"--clips {samples}: use at least 1")
    buckets = make_buckets()
    counts, fell_out, left, seconds = np.zeros(len(buckets), np.int64), Counter[str](), samples, []
    part = 0
    while left:
        clips = draw_clips(left, seed, part)
        best, lost = assign(clips, buckets)
        counts += np.bincount(best[best >= 0], minlength=len(buckets))
        fell_out += lost
        left -= int((best >= 0).sum())
        seconds.append((clips.frames / clips.fps)[clips.frames > 1])
        part += 1
    lengths = np.concatenate(seconds)
    return DataSet(
        {bucket: count for bucket, count in zip(buckets, counts.tolist(), strict=True) if count},
        dict(fell_out),
        float(lengths.mean()) if len(lengths) else 0.0,
        float(np.median(lengths)) if len(lengths) else 0.0,
    )
