"""Decode the clips of a file in one pass over it: PyAV (or the chosen decoder) for video, Pillow for pictures.

Each frame is cropped and scaled for the clips that need it as it is decoded, so a long video is never in memory as a whole, and a
clip is returned as soon as its last frame is decoded. A clip's pixels do not depend on the other requested clips: a clip that
fails in the common pass is tried again in a pass from the file's start, as it would be alone.

Legend: F frames, H W height and width in pixels, C channels (RGB).
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import av.container
import av.error
import av.filter
import av.video
import numpy as np

from mmspeed.media.images import picture_frames
from mmspeed.media.other_decoders import OtherDecoder, coded_frames
from mmspeed.media.pixel_rules import NEWEST_RULES, PixelRules
from mmspeed.media.probe import DECODER_ERRORS, Probe, alpha_decoder, frame_stamp, open_video, refused, video_stream
from mmspeed.media.rejections import Reason, Rejected
from mmspeed.media.scaling import Box, Scaler, graph_of, resize, scale_rgb
from mmspeed.media.source import Source

_WORTH_SEEKING = 1.0  # seconds of video; below that, decoding costs no more than a seek


@dataclass(frozen=True)
class Cut:
    """A request for a clip: frames by their index in presentation order, a crop in displayed pixels, a size, and rules of pixels.

    `mirrored`: the scaled crop with left and right exchanged.
    """

    indices: tuple[int, ...]
    crop: Box
    width: int
    height: int
    rules: PixelRules = NEWEST_RULES
    mirrored: bool = False


Pixels = Callable[[Cut], np.ndarray]  # of the frame at hand: (3, height, width)


@dataclass
class _Filling:
    """A clip in progress. `marks` identify its frames, ascending: times in seconds, or frame numbers of pictures."""

    position: int
    cut: Cut
    marks: list[float]
    pixels_FCHW: np.ndarray | None = None
    count: int = 0
    problem: Rejected | None = None
    final: bool = True  # true if a problem would be the same in a pass from the file's start

    @property
    def ended(self) -> bool:
        return self.problem is not None or self.count == len(self.marks)

    def give(self) -> np.ndarray | Rejected:
        """Return the frames and drop the reference: a long video may have thousands of clips."""
        pixels_FCHW, self.pixels_FCHW = self.pixels_FCHW, None
        if self.problem is not None or pixels_FCHW is None:
            return self.problem or Rejected(Reason.UNDECODABLE, "the clip has no frames")
        if self.cut.mirrored:
            pixels_FCHW = np.ascontiguousarray(pixels_FCHW[..., ::-1])
        return pixels_FCHW.transpose(0, 2, 3, 1)

    def fail(self, problem: Rejected, final: bool) -> _Filling:
        self.problem, self.final, self.pixels_FCHW = problem, final, None
        return self

    def take(self, seen: float, tolerance: float, pixels: Pixels, final: bool) -> None:
        """Store the current frame if it is the next one needed; fail if that one has been passed."""
        if seen > self.marks[self.count] + tolerance:
            problem = f"the frame at {self.marks[self.count]:.3f} s is damaged or missing"
            self.fail(Rejected(Reason.UNDECODABLE, problem), final)
        while not self.ended and abs(seen - self.marks[self.count]) <= tolerance:
            if self.pixels_FCHW is None:
                self.pixels_FCHW = np.empty((len(self.marks), 3, self.cut.height, self.cut.width), np.uint8)
            try:
                self.pixels_FCHW[self.count] = pixels(self.cut)
                self.count += 1
            except Rejected as rejected:
                self.fail(rejected, final)


def stream(
    source: Source, probe: Probe, cuts: Sequence[Cut], other: OtherDecoder | None = None
) -> Iterator[tuple[int, np.ndarray | Rejected]]:
    """Yield for each cut its position and its frames (F, H, W, 3), uint8, upright with square pixels; or its rejection.

    Cuts come in the order in which they are complete. The arrays are views of planes (F, 3, H, W), the layout of the scaler and of
    codecs. A cut's indices are ascending. Rejections are truncated or undecodable. A file of which the probe says so is
    read by `other`. Raises Rejected and OSError if the file is not the one that was probed.
    """
    if not cuts:
        return
    try:
        probe.require_read()
    except Rejected as rejected:
        yield from ((number, rejected) for number in range(len(cuts)))
        return
    if probe.decoder == "pillow":
        yield from _stream_picture(source, probe, cuts)
        return
    if other is not None and probe.reader:
        yield from _stream_other(source, probe, cuts, other)
        return
    fillings = [_Filling(n, cut, [probe.pts_seconds[i] for i in cut.indices]) for n, cut in enumerate(cuts)]
    retries: list[_Filling] = []
    for filling in _sweep(source, probe, fillings, seek=True):
        if filling.problem is not None and not filling.final:
            retries.append(_Filling(filling.position, filling.cut, filling.marks))
        else:
            yield filling.position, filling.give()
    for filling in _sweep(source, probe, retries, seek=False):
        yield filling.position, filling.give()


def _stream_picture(source: Source, probe: Probe, cuts: Sequence[Cut]) -> Iterator[tuple[int, np.ndarray | Rejected]]:
    def scaled(picture_HWC: np.ndarray, cut: Cut) -> np.ndarray:
        return resize(picture_HWC, cut.crop, cut.width, cut.height).transpose(2, 0, 1)

    with source.open() as file:
        background = cuts[0].rules.background  # one for all cuts of a source
        pictures = picture_frames(file, _indices(cuts), background, probe.profile, probe.skipped)
        yield from _fill_by_index(pictures, cuts, scaled)


def _stream_other(
    source: Source, probe: Probe, cuts: Sequence[Cut], other: OtherDecoder
) -> Iterator[tuple[int, np.ndarray | Rejected]]:
    def scaled(picture_HWC: np.ndarray, cut: Cut) -> np.ndarray:
        return scale_rgb(picture_HWC, cut.crop, probe, cut.width, cut.height)

    yield from _fill_by_index(coded_frames(source, probe, other, _indices(cuts)), cuts, scaled)


def _indices(cuts: Sequence[Cut]) -> list[int]:
    return sorted({index for cut in cuts for index in cut.indices})


def _fill_by_index(
    pictures: Iterator[tuple[int, np.ndarray | Rejected]],
    cuts: Sequence[Cut],
    scaled: Callable[[np.ndarray, Cut], np.ndarray],
) -> Iterator[tuple[int, np.ndarray | Rejected]]:
    """Yield the cuts as `pictures`, which are all frames that they need, by index, complete them."""
    fillings = [_Filling(n, cut, [float(i) for i in cut.indices]) for n, cut in enumerate(cuts)]
    for index, picture in pictures:

        def pixels(cut: Cut, picture: np.ndarray | Rejected = picture) -> np.ndarray:
            if isinstance(picture, Rejected):
                raise picture
            return scaled(picture, cut)

        for filling in fillings:
            if not filling.ended and filling.marks[filling.count] <= index:
                filling.take(index, 0.0, pixels, True)
                if filling.ended:
                    yield filling.position, filling.give()


def _sweep(source: Source, probe: Probe, fillings: list[_Filling], seek: bool) -> Iterator[_Filling]:
    """Yield each filling once, complete or with its problem. `seek` skips frames that no clip needs, and continues after damage."""
    waiting = deque(sorted(fillings, key=lambda filling: filling.marks[0]))
    active: list[_Filling] = []
    while waiting or active:
        run = _DecodeRun(probe, waiting, active, seek)
        try:
            with source.open() as file, open_video(file) as container:
                yield from run.over(container)
            problem: Rejected | None = None
        except Rejected as rejected:
            problem = rejected
        except DECODER_ERRORS as error:
            problem = refused(error)
        lost = list(active)
        active.clear()
        if not seek:
            lost += waiting
            waiting.clear()
        elif not lost and waiting and not run.untried(waiting[0]):
            lost.append(waiting.popleft())  # clips after the damage are tried separately, as they would be alone
        for filling in lost:
            end = f"the frames end at {run.seen:.3f} s, before {filling.marks[filling.count]:.3f} s"
            yield filling.fail(problem or Rejected(Reason.TRUNCATED, end), run.from_start)


def _frames(
    container: av.container.InputContainer, stream: av.video.VideoStream, context: Any
) -> Iterator[av.video.VideoFrame]:
    """Yield the frames from here on, decoded by another codec context than the stream's."""
    context.flush_buffers()
    for packet in container.demux(stream):
        yield from context.decode(packet)


def whole_frames(frames: Iterator[av.video.VideoFrame]) -> Iterator[av.video.VideoFrame]:
    """Yield the frames of interlaced video, at least two, each made whole from its first field and those around it.

    The second frame stands before the first and the last but one behind the last too: with itself as its neighbour a frame would seem to
    stand still.
    """
    first, second = next(frames, None), next(frames, None)
    if first is None or second is None:
        return
    graph = _bwdif(first)
    graph.vpush(second)
    before, last, unseen = first, second, 1
    waiting = deque([first, second])
    for frame in chain((first, second), frames):
        if frame is not first and frame is not second:
            waiting.append(frame)
            before, last = last, frame
        graph.vpush(frame)
        for whole in _pulled(graph):
            if unseen:
                unseen = 0
                continue
            yield _timed(whole, waiting.popleft())
    graph.vpush(before)
    for whole in _pulled(graph):
        yield _timed(whole, waiting.popleft())


def _pulled(graph: av.filter.Graph) -> Iterator[av.video.VideoFrame]:
    """Yield the frames that a graph has ready."""
    while True:
        try:
            yield graph.vpull()
        except (av.error.BlockingIOError, av.error.EOFError):
            return


def _timed(whole: av.video.VideoFrame, stored: av.video.VideoFrame) -> av.video.VideoFrame:
    """A frame made whole, with the times of the stored one; the stored one itself if it is damaged."""
    if stored.is_corrupt:
        return stored
    whole.pts, whole.dts, whole.time_base = stored.pts, stored.dts, stored.time_base
    return whole


def _bwdif(frame: av.video.VideoFrame) -> av.filter.Graph:
    graph, source = graph_of(frame)
    bwdif = graph.add("bwdif", "mode=send_frame:deint=interlaced")
    graph.link_nodes(source, bwdif, graph.add("buffersink")).configure()
    return graph


class _DecodeRun:
    """Decode in order, fill the `active` clips and move clips there from `waiting`, until none is left or the file ends."""

    def __init__(self, probe: Probe, waiting: deque[_Filling], active: list[_Filling], seek: bool) -> None:
        self.probe, self.waiting, self.active = probe, waiting, active
        # an interlaced frame is made with its neighbours
        self.seek = seek and probe.order != "count" and probe.scan != "interlaced"
        # Below half of the smallest step, so that no frame is mistaken for its neighbour if times are uneven.
        steps = (after - before for before, after in pairwise(probe.pts_seconds))
        self.tolerance = max(0.49 * min(steps, default=0.0), 1e-6)
        self.seen = probe.pts_seconds[0]
        self.from_start = True
        self._scaler = Scaler(probe)
        self._sought: _Filling | None = None

    def over(self, container: av.container.InputContainer) -> Iterator[_Filling]:
        """Yield the fillings as they end."""
        stream = video_stream(container)
        with_alpha = alpha_decoder(stream)
        while self.waiting or self.active:
            if self._worth_seeking() and stream.time_base:
                self._sought, self.from_start = self.waiting[0], False
                start = self.waiting[0].marks[0]
                container.seek(round(start / stream.time_base), stream=stream, backward=True)
            passed = None
            frames = container.decode(stream) if with_alpha is None else _frames(container, stream, with_alpha)
            if self.probe.scan == "interlaced":
                frames = whole_frames(iter(frames))
            for number, frame in enumerate(frames):
                time = self._time(number, frame, stream)
                if time is None or frame.is_corrupt:
                    continue
                if self.probe.order == "stamps" and passed is not None and time < passed:
                    raise Rejected(Reason.NO_TIMES, f"the frame at {time:.3f} s comes after that at {passed:.3f} s")
                if self.probe.scan == "progressive" and frame.interlaced_frame:
                    raise Rejected(Reason.INTERLACED, f"the frame at {time:.3f} s is interlaced, and the first is not")
                self.seen = passed = time
                yield from self._fill(frame)
                if not (self.waiting or self.active) or self._worth_seeking():
                    break
            else:
                return

    def _time(self, number: int, frame: av.video.VideoFrame, stream: av.video.VideoStream) -> float | None:
        """The time of the frame that is decoded as number `number` of this run; None if it has none."""
        if self.probe.order == "count":
            return self.probe.pts_seconds[number] if number < len(self.probe.pts_seconds) else None
        stamp = frame_stamp(frame)
        return None if stamp is None else float(stamp * (frame.time_base or stream.time_base or 1))

    def untried(self, filling: _Filling) -> bool:
        """True if a seek for this clip has not been tried, as it would be if the clip were alone."""
        return filling is not self._sought and self._key_ahead(filling, self.probe.pts_seconds[0])

    def _worth_seeking(self) -> bool:
        """True if no frame is needed until a key frame well ahead. Once for each clip: a wrong index may lead back."""
        if not self.seek or self.active or not self.waiting or self.waiting[0] is self._sought:
            return False
        return self._key_ahead(self.waiting[0], self.seen)

    def _key_ahead(self, filling: _Filling, time: float) -> bool:
        keys = self.probe.key_seconds if self.seek else []
        at = bisect.bisect_right(keys, filling.marks[0] + 1e-6) - 1
        return at >= 0 and keys[at] > time + _WORTH_SEEKING

    def _fill(self, frame: av.video.VideoFrame) -> Iterator[_Filling]:
        while self.waiting and self.waiting[0].marks[0] <= self.seen + self.tolerance:
            self.active.append(self.waiting.popleft())
        scaled: dict[tuple[Box, int, int, PixelRules], np.ndarray] = {}

        def pixels(cut: Cut) -> np.ndarray:
            key = cut.crop, cut.width, cut.height, cut.rules
            if key not in scaled:
                scaled[key] = self._scaler.scale(frame, *key)
            return scaled[key]

        for filling in list(self.active):
            filling.take(self.seen, self.tolerance, pixels, self.from_start)
            if filling.ended:
                self.active.remove(filling)
                yield filling
