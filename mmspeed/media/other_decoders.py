"""Decoders beside PyAV: torchcodec and decord, for the files of which they give the frames and times that PyAV gives.

Both return RGB of their own conversion, so their clips have other pixels than PyAV's after cropping and scaling. `examine` says of a file
whether its frames are the same, and whether a clip's bytes are: the latter only where PyAV's path too crops and scales RGB.

Legend: H W height and width in pixels of the decoder's picture, before it is turned upright.
"""

from __future__ import annotations

import bisect
import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from mmspeed.media.containers import PLAIN_HEAD_BYTES, is_plain_container
from mmspeed.media.pixel_rules import PixelRules
from mmspeed.media.probe import DECODER_ERRORS, Probe, frame_stamp, open_video, refused, video_stream
from mmspeed.media.rejections import Reason, Rejected, in_words
from mmspeed.media.scaling import is_yuv, plain_rgb
from mmspeed.media.source import Source

# of 255: two versions of a colour conversion may round differently; a wrong frame or matrix differs by far more
MOST_DIFFERENT = 2
_CLOSE = 1e-3  # seconds: Matroska's resolution


@dataclass(frozen=True)
class OtherDecoder:
    """A choice of another decoder than PyAV: `torchcodec` or `decord`, the torch device it decodes on, and the rules of pixels."""

    name: str
    device: str
    rules: PixelRules

    @property
    def label(self) -> str:
        """The name that enters keys: with the kind of device, where it is not the CPU, since its pixels may differ."""
        kind = self.device.partition(":")[0]
        return self.name if kind == "cpu" else f"{self.name}/{kind}"

    def to_json(self) -> dict[str, Any]:
        """The choice in JSON's types."""
        return asdict(self)

    @classmethod
    def from_json(cls, tree: dict[str, Any]) -> OtherDecoder:
        """The inverse of `to_json`."""
        return cls(tree["name"], tree["device"], PixelRules(**tree["rules"]))


class OpenedVideo(Protocol):
    """A file that another decoder has opened.

    `count` is its number of frames; `times` are theirs in seconds, in order, where the decoder tells them without decoding.
    """

    count: int
    times: Sequence[float] | None

    def frame(self, index: int) -> tuple[np.ndarray, float]:
        """Frame `index` in presentation order, (H, W, 3) uint8, turned upright, and its time in seconds. Raises what the library raises."""
        ...


class _TorchcodecVideo:
    """A file opened by torchcodec."""

    times: Sequence[float] | None = None  # it tells a frame's time with the frame alone

    def __init__(self, source: Source, device: str) -> None:
        decoders = importlib.import_module("torchcodec.decoders")
        file = source.path if source.offset is None else source.open()
        settings = {"dimension_order": "NHWC", "num_ffmpeg_threads": 1, "seek_mode": "exact"}
        self._decoder: Any = decoders.VideoDecoder(file, device=device, **settings)
        self.count = len(self._decoder)

    def frame(self, index: int) -> tuple[np.ndarray, float]:
        frame = self._decoder.get_frame_at(index)
        return frame.data.cpu().numpy(), float(frame.pts_seconds)


class _DecordVideo:
    """A file opened by decord."""

    def __init__(self, source: Source, device: str) -> None:
        decord = importlib.import_module("decord")
        file = source.path if source.offset is None else source.open()
        self._reader: Any = decord.VideoReader(file, ctx=decord.cpu(0), num_threads=1)
        self.count = len(self._reader)
        stamps = self._reader.get_frame_timestamp(range(self.count))
        self._times = [float(start) for start in stamps[:, 0]]
        self.times: Sequence[float] | None = self._times

    def frame(self, index: int) -> tuple[np.ndarray, float]:
        return self._reader[index].asnumpy(), self._times[index]


_OPENERS: dict[str, Callable[[Source, str], OpenedVideo]] = {"torchcodec": _TorchcodecVideo, "decord": _DecordVideo}


def why_unusable(other: OtherDecoder) -> str:
    """The reason that a decoder cannot be used in this process; empty if it can. Imports it."""
    try:
        importlib.import_module("torchcodec.decoders" if other.name == "torchcodec" else other.name)
    except Exception as error:  # libraries that miss another fail in many ways
        lines = [line for line in str(error).splitlines() if "cannot open shared object" in line] or [str(error)]
        return lines[0].strip().splitlines()[0] if lines[0].strip() else type(error).__name__
    return ""


def examine(source: Source, probe: Probe, other: OtherDecoder) -> Probe:
    """The probe of a file with what became of the wish to read it by `other`: `reader`, `same_bytes`, or `refusal` where PyAV reads it.

    Another decoder reads a file if it has as many frames, if the last has PyAV's time, and if the first and the one after the last key
    frame have PyAV's times and, in RGB of their own size, no value further than `MOST_DIFFERENT` from PyAV's. The time of every frame
    is compared again when it is read.
    """
    if probe.decoder != "pyav":
        return probe
    try:
        worst = _difference(source, probe, other)
    except _RefusedError as refusal:
        return replace(probe, refusal=str(refusal), refusal_detail=refusal.detail)
    return replace(probe, reader=other.label, same_bytes=worst == 0 and not is_yuv(probe.pixel_format))


class _RefusedError(Exception):
    """Another decoder does not read a file: the reason in a few words that are the same for many files, and a detail."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.detail = detail


def _difference(source: Source, probe: Probe, other: OtherDecoder) -> int:
    """The greatest difference of two frames' values from PyAV's. Raises _RefusedError."""
    if probe.alpha:
        raise _RefusedError("transparent pixels")
    if probe.applied:
        raise _RefusedError(
            "stated times, geometry or colours that PyAV's reader alone applies", ", ".join(probe.applied)
        )
    if not probe.key_seconds:
        raise _RefusedError("no presentation times in the file")
    with source.open() as file:
        if not is_plain_container(file.read(PLAIN_HEAD_BYTES)):
            raise _RefusedError("container that PyAV alone reads", probe.container)
    try:
        opened = _OPENERS[other.name](source, other.device)
    except Exception as error:  # each library has errors of its own
        raise _RefusedError("cannot be opened", _first_line(error)) from None
    expected = probe.pts_seconds
    if opened.count != len(expected):
        raise _RefusedError("another number of frames", f"{opened.count}, not {len(expected)}")
    tolerance = _tolerance(probe)
    if opened.times is not None and any(
        abs(time - due) > tolerance for time, due in zip(opened.times, expected, strict=True)
    ):
        raise _RefusedError("frames at other times")
    worst = 0
    try:
        for index, expected_HWC in _expected_frames(source, probe, other.rules):
            picture_HWC = _coded_frame(opened, probe, index, tolerance)
            worst = max(worst, int(np.abs(picture_HWC.astype(np.int16) - expected_HWC).max()))
        _coded_frame(opened, probe, len(expected) - 1, tolerance)  # a wrong index shows at the end
    except Rejected as rejected:
        raise _RefusedError("other frames", rejected.detail) from None
    if worst > MOST_DIFFERENT:
        raise _RefusedError("other colours", f"by up to {worst} of 255")
    return worst


def coded_frames(
    source: Source, probe: Probe, other: OtherDecoder, indices: Sequence[int]
) -> Iterator[tuple[int, np.ndarray | Rejected]]:
    """Yield the frames `indices` (ascending) of a file that `other` reads, (H, W, 3) uint8, not turned, or their rejections."""
    try:
        opened = _OPENERS[other.name](source, other.device)
    except Exception as error:
        raise Rejected(Reason.UNDECODABLE, f"{other.name} cannot open it (any more): {_first_line(error)}") from None
    for index in indices:
        try:
            yield index, _coded_frame(opened, probe, index, _tolerance(probe))
        except Rejected as rejected:
            yield index, rejected


def _coded_frame(opened: OpenedVideo, probe: Probe, index: int, tolerance: float) -> np.ndarray:
    """Frame `index`, turned back to how it is stored. Raises Rejected (undecodable), also if it has another time or size."""
    due = probe.pts_seconds[index]
    try:
        picture_HWC, time = opened.frame(index)
    except Exception as error:
        raise Rejected(Reason.UNDECODABLE, f"the frame at {due:.3f} s: {_first_line(error)}") from None
    if abs(time - due) > tolerance:
        raise Rejected(Reason.UNDECODABLE, f"the frame at {due:.3f} s is given as that at {time:.3f} s")
    picture_HWC = np.rot90(picture_HWC, -probe.rotation // 90)
    if picture_HWC.shape != (probe.coded_height, probe.coded_width, 3):
        height, width = picture_HWC.shape[:2]
        raise Rejected(
            Reason.UNDECODABLE,
            f"the frame at {due:.3f} s is {width} x {height} pixels, not {probe.coded_width} x {probe.coded_height}",
        )
    return picture_HWC


def _expected_frames(source: Source, probe: Probe, rules: PixelRules) -> Iterator[tuple[int, np.ndarray]]:
    """Yield two frames by PyAV with their indices: the first, and the one after the last key frame. Raises Rejected."""
    times = probe.pts_seconds
    last_key = max((bisect.bisect_left(times, key) for key in probe.key_seconds), default=0)
    try:
        with source.open() as file, open_video(file) as container:
            stream = video_stream(container)
            for index in sorted({0, min(last_key + 1, len(times) - 1)}):
                if index and last_key:
                    start = round(times[last_key] / (stream.time_base or 1))
                    container.seek(start, stream=stream, backward=True)
                for frame in container.decode(stream):
                    seen = float((frame_stamp(frame) or 0) * (frame.time_base or stream.time_base or 1))
                    if abs(seen - times[index]) <= _tolerance(probe):
                        yield index, plain_rgb(frame, rules)
                        break
                else:
                    raise Rejected(Reason.UNDECODABLE, f"PyAV finds no frame at {times[index]:.3f} s")
    except DECODER_ERRORS as error:
        raise refused(error) from None


def _tolerance(probe: Probe) -> float:
    """Seconds within which two times are one: never half of the smallest step."""
    steps = (after - before for before, after in pairwise(probe.pts_seconds))
    return min(_CLOSE, 0.49 * min(steps, default=1.0))


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [in_words(error)])[0][:200]
