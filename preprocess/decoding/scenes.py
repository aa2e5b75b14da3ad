"""Scene cuts of a video by the detectors of PySceneDetect (an optional package), fed with our own decoded frames.

The detectors compare neighbouring frames of at most 256 pixels' width, as PySceneDetect's own command does. Cuts are found on all frames
of a file in one pass, in the decoder process; pool.py remembers them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from mmspeed.media.decode import Cut, stream
from mmspeed.media.probe import Probe
from mmspeed.media.rejections import Rejected
from mmspeed.media.source import Source

PACKAGE = "scenedetect"
_WIDTH = 256  # pixels that wider frames are scaled to, as PySceneDetect scales them
_BATCH = 64  # frames decoded at a time
VERSION = 1  # raise it when the same settings give other cuts


@dataclass(frozen=True)
class SceneDetector:
    """The detector and threshold of a config: the settings that cuts depend on."""

    detector: str
    threshold: float

    def to_json(self) -> dict[str, Any]:
        """The settings in JSON's types."""
        return asdict(self)

    def new(self) -> Callable[[int, np.ndarray], list[int]]:
        """A fresh detector: called with each frame's index and its (H, W, 3) RGB pixels, it returns the cuts that it has found."""
        detectors, common = (importlib.import_module(f"{PACKAGE}.{name}") for name in ("detectors", "common"))
        comparison = (
            detectors.ContentDetector(threshold=self.threshold, min_scene_len=0)
            if self.detector == "content"
            else detectors.AdaptiveDetector(adaptive_threshold=self.threshold, min_scene_len=0)
        )

        def cuts_at(index: int, frame_HWC: np.ndarray) -> list[int]:
            # Frames count, not seconds: the rate of a FrameTimecode changes nothing without a minimal length.
            bgr_HWC = np.ascontiguousarray(frame_HWC[..., ::-1])
            return [cut.frame_num for cut in comparison.process_frame(common.FrameTimecode(index, fps=25.0), bgr_HWC)]

        return cuts_at


def find_cuts(source: Source, probe: Probe, detector: SceneDetector) -> Iterator[list[int]]:
    """Yield, for each batch of frames that was examined, the cuts known since: ascending indices of the first frames of scenes.

    Frames that cannot be decoded make a scene of their own, since what is in them is unknown. Raises Rejected and OSError if the
    file is not the one that was probed.
    """
    count = len(probe.pts_seconds)
    width = min(_WIDTH, probe.width)
    height = max(1, round(probe.height * width / probe.width))
    batches = [range(start, min(start + _BATCH, count)) for start in range(0, count, _BATCH)]
    box = 0, 0, probe.width, probe.height
    cuts_at, position = detector.new(), 0
    for at, frames in stream(source, probe, [Cut(tuple(batch), box, width, height) for batch in batches]):
        if at < position:  # of a damaged part, decoded again at the end: its frames count as unknown
            continue
        cuts: list[int] = []
        if at > position or isinstance(frames, Rejected):
            damaged = range(position, at + isinstance(frames, Rejected))
            cuts += [edge for one in damaged for edge in (batches[one].start, batches[one].stop) if 0 < edge < count]
            cuts_at = detector.new()
        if not isinstance(frames, Rejected):
            for index, frame_HWC in zip(batches[at], frames, strict=True):
                cuts += cuts_at(index, frame_HWC)
        position = at + 1
        yield cuts


def scenes_between(cuts: Sequence[int], pts: Sequence[float], step: float, min_seconds: float) -> list[range]:
    """The frames of each scene that is at least `min_seconds` long, from a cut to the next; a scene of one frame is none."""
    edges = [0, *cuts, len(pts)]
    times = [*pts, pts[-1] + step]
    scenes = [range(start, stop) for start, stop in pairwise(edges)]
    return [one for one in scenes if len(one) > 1 and times[one.stop] - times[one.start] >= min_seconds - 1e-6]
