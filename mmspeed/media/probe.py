"""Probe a media file without decoding more than its first frame: kind, display size, time of every frame.

Legend: H W height and width in pixels.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from functools import lru_cache, partial
from itertools import islice, pairwise
from typing import Any, BinaryIO, Literal

import av
import av.container
import av.error
import av.filter
import av.logging
import av.video
from PIL import Image

from mmspeed.media.colours import UNREAD_MATRICES, UNREAD_TRANSFERS, deinterlaces, light_of, maps_light
from mmspeed.media.containers import DEMUXERS, holds_pickle, is_picture, structural_cut
from mmspeed.media.geometry import Box, aperture, require_whole, upright
from mmspeed.media.images import (
    open_picture,
    picture_light,
    picture_times,
    profile_of,
    refused_depth,
    separate_first,
    shown_size,
)
from mmspeed.media.rejections import Reason, Rejected, in_words
from mmspeed.media.source import Kind, Source

Decoder = Literal["pyav", "pillow"]

# Files are decoded in parallel, one per process, so threads add no cores; two cost about as much work a frame as one. One
# keeps frames, errors and their order the same everywhere, and each process's memory small.
DECODE_THREADS = 1
_FFMPEG_ERRORS: tuple[tuple[type[av.error.FFmpegError], str], ...] = (
    (av.error.InvalidDataError, "its data are damaged, or of another format than they claim"),
    (av.error.EOFError, "it ends too early"),
    (av.error.PatchWelcomeError, "it uses a part of its format that FFmpeg does not read"),
    (av.error.DecoderNotFoundError, "FFmpeg has no decoder for it here"),
    (av.error.DemuxerNotFoundError, "FFmpeg has no reader for its container here"),
    (av.error.ProtocolNotFoundError, "it names another file, which is not opened"),
)
# Damaged files make PyAV seek before the start (OSError) and access streams that it has not announced (LookupError).
DECODER_ERRORS = (av.error.FFmpegError, OSError, LookupError, ValueError, ArithmeticError)
# pixel formats with these prefixes are scaled before they are converted to RGB
YUV = ("yuv", "nv", "p0", "uyvy", "yvyu")
_UNTAGGED, _FULL_RANGE = 2, 2  # of `frame.colorspace` and `frame.color_range`
_ALPHA_DECODERS = {"vp8": "libvpx", "vp9": "libvpx-vp9"}
# of those that are not read, by property
_REASONS = {"order": Reason.NO_TIMES, "geometry": Reason.UNKNOWN_GEOMETRY, "fields": Reason.INTERLACED}
_IN_CONTAINER = "put it into a container: ffmpeg -framerate RATE -i FILE -c copy FILE.mp4"
_NEW_TIMES = "put it into another container with new times"
_EXAMINED = 500  # frames whose stamps are compared with their order: two groups of pictures of most encoders
# Containers that state their duration; others only estimate it.
_STATES_DURATION = ("mov", "matroska", "avi", "flv", "asf", "ogg")


@dataclass(frozen=True)
class Probe:
    """Properties of a file before it is decoded.

    `width` and `height` are the displayed ones: after rotation, with square pixels; `coded_width` and `coded_height` are the
    decoder's. `pts_seconds` holds the times of all frames in presentation order, as stated in the file (an
    image has one, 0), and `key_seconds` those of the frames at which decoding can begin; it is empty if seeking is
    unreliable. `fps` is the average rate, 0 for an image. Of the decoder's picture `aperture` is shown (None: all of it), with left and
    right exchanged if it is `mirrored`, and then turned by `rotation`, counter-clockwise, in degrees. `decoder` is the
    library that probes the file and reads it, unless `reader` names another that does; `same_bytes` if its clips have PyAV's bytes;
    `refusal` says in words why the wanted one does not, with `refusal_detail`.
    Of a video's first frame: `pixel_format` and `chroma_location` in FFmpeg's words (the latter
    empty without subsampled chroma), and `untagged` if it states no colour matrix. `alpha`: it may have transparent pixels.
    `order` says how decoded frames are told apart: by `stamps`, which must ascend; by `count`, where stamps contradict the order
    of the frames; or, if it is empty, by stamps of which nothing is asked.
    `scan` is `interlaced` for video that is made of fields, `progressive` for other, and empty where nothing is asked. `light` is the
    transfer and the primaries that are mapped to BT.709 (`colours.light_of`), empty for none; with `profile` an ICC profile is applied.
    The first `skipped` pictures are no frames.
    `unread` says why the file is not read, by properties of a cache's recipe. `applied` names those that the file states and that are
    applied: its pixels are others than those of a plain reading.
    """

    kind: Kind
    width: int
    height: int
    fps: float
    pts_seconds: list[float]
    codec: str
    bits: int
    rotation: int
    sar: Fraction
    container: str
    decoder: Decoder
    key_seconds: list[float]
    coded_width: int
    coded_height: int
    pixel_format: str = ""
    chroma_location: str = ""
    untagged: bool = False
    alpha: bool = False
    reader: str = ""
    same_bytes: bool = False
    refusal: str = ""
    refusal_detail: str = ""
    mirrored: bool = False
    aperture: Box | None = None
    order: str = ""
    scan: str = ""
    light: str = ""
    profile: bool = False
    skipped: int = 0
    unread: Mapping[str, str] = field(default_factory=dict)
    applied: tuple[str, ...] = ()

    def applying(self, name: str, **fields: Any) -> Probe:
        """The probe with the fields that a property of the file changes."""
        return replace(self, **fields, applied=tuple(sorted({*self.applied, name})))

    def refused(self, name: str, why: str) -> Probe:
        """The probe of a file that is not read because of a property."""
        return replace(self.applying(name), unread={**self.unread, name: why})

    def require_read(self) -> None:
        """Raise Rejected for a file that is not read."""
        for name, why in sorted(self.unread.items()):
            raise Rejected(_REASONS.get(name, Reason.UNKNOWN_COLOURS), why)

    @property
    def step(self) -> float:
        """The usual time from one frame to the next in seconds; 0 if there is one frame."""
        return median_step(self.pts_seconds)

    def to_json(self) -> dict[str, Any]:
        """The probe in JSON's types."""
        return asdict(self) | {"sar": [self.sar.numerator, self.sar.denominator]}

    @classmethod
    def from_json(cls, tree: dict[str, Any]) -> Probe:
        """The inverse of `to_json`."""
        box = tree["aperture"] and tuple(tree["aperture"])
        return cls(**{**tree, "sar": Fraction(*tree["sar"]), "aperture": box, "applied": tuple(tree["applied"])})


def probe(source: Source, max_file_bytes: int, max_pixels: int) -> Probe:
    """Probe `source`. Raises Rejected if it is not a readable picture or video, or larger than allowed."""
    size = source.bytes()
    if size == 0:
        raise Rejected(Reason.EMPTY_FILE, "it holds no bytes")
    if size > max_file_bytes:
        raise Rejected(Reason.TOO_LARGE, f"{size / 1e6:.1f} MB, more than the {max_file_bytes / 1e6:.1f} MB allowed")
    with source.open() as file:
        head = file.read(64)
        file.seek(0)
        if holds_pickle(head):
            raise Rejected(Reason.NOT_MEDIA, "a pickle under the name of media, which is never opened")
        if is_picture(head):
            return _probe_picture(file, max_pixels)
        if cut := structural_cut(file, head, size):
            raise Rejected(Reason.TRUNCATED, cut)
        file.seek(0)
        return _probe_video(file, head, size, max_pixels)


def check_pixels(width: int, height: int, max_pixels: int) -> None:
    """Raise Rejected (too_large) for a picture with more pixels than allowed, (undecodable) for one with none."""
    if width < 1 or height < 1:
        raise Rejected(Reason.UNDECODABLE, f"the picture is {width} x {height}")
    if width * height > max_pixels:
        raise Rejected(Reason.TOO_LARGE, f"{width} x {height} pixels, more than the {max_pixels} allowed")


def median_step(times: Iterable[float]) -> float:
    """The median difference of neighbouring times; 0 for fewer than two."""
    steps = sorted(after - before for before, after in pairwise(times))
    return steps[len(steps) // 2] if steps else 0.0


def _probe_picture(file: BinaryIO, max_pixels: int) -> Probe:
    with open_picture(file) as image:
        check_pixels(*image.size, max_pixels)
        times = picture_times(image)
        width, height = shown_size(image)
        plain = Probe(
            kind="video" if len(times) > 1 else "image",
            width=width,
            height=height,
            fps=_average_fps(times, None),
            pts_seconds=times,
            codec=(image.format or "").lower(),
            bits=16 if image.mode.startswith("I;16") else 8,
            rotation=0,
            sar=Fraction(1),
            container=(image.format or "").lower(),
            decoder="pillow",
            key_seconds=[],
            coded_width=image.width,
            coded_height=image.height,
            alpha=image.has_transparency_data,
        )
        return _stated_picture(plain, file, image)


def _stated_picture(probe: Probe, file: BinaryIO, image: Image.Image) -> Probe:
    """The probe of a picture with a separate first one, with numbers of a great depth, or of colours that it states."""
    if skipped := separate_first(image):
        times = picture_times(image, skipped)
        kind: Kind = "video" if len(times) > 1 else "image"
        probe = probe.applying("cover", skipped=skipped, pts_seconds=times, fps=_average_fps(times, None), kind=kind)
    try:
        require_whole(file, image.format or "", *image.size)
    except Rejected as rejected:
        probe = probe.refused("geometry", rejected.detail)
    if deep := refused_depth(image):
        return probe.refused("depth", deep)
    if light := picture_light(file, image):
        return probe.refused("hdr", f"its light is {light} (transfer, primaries), which is mapped for video alone")
    try:
        return probe if profile_of(image) is None else probe.applying("profile", profile=True)
    except Rejected as rejected:
        return probe.refused("profile", rejected.detail)


def _probe_video(file: BinaryIO, head: bytes, size: int, max_pixels: int) -> Probe:
    try:
        with open_video(file) as container:
            stream = video_stream(container)
            context = stream.codec_context
            check_pixels(context.width, context.height, max_pixels)
            stated = int(context.color_trc), int(context.color_primaries)
            stamps = _stamps(container, stream)
            decoded = int(context.color_trc), int(context.color_primaries)
            # A codec that states nothing, as ProRes may, overwrites what its container states.
            light = tuple(own if own != _UNTAGGED else other for own, other in zip(decoded, stated, strict=True))
            probe = _lit(_describe(container, stream, stamps, max_pixels), light, stamps.first)
            track, number = stream.id, container.streams.video.index(stream)
            base, suspect = stream.time_base or Fraction(1), stamps.suspect and context.has_b_frames
        if stamps.back:
            probe = probe.refused("order", stamps.back)
        elif suspect:
            probe = _in_order(probe, _decoded_stamps(file), stamps, base)
        return _upright(probe, stamps.first, partial(aperture, file, head, size, track, number), max_pixels)
    except DECODER_ERRORS as error:
        raise refused(error) from None


def _decoded_stamps(file: BinaryIO) -> list[int | None]:
    """The stamps of the first frames in the order in which they are decoded, that of presentation, as far as they can be."""
    file.seek(0)
    stamps = []
    with open_video(file) as container, suppress(*DECODER_ERRORS):  # decoding will name the damage
        for frame in islice(container.decode(video_stream(container)), _EXAMINED):
            stamps.append(frame_stamp(frame))  # noqa: PERF401 (those before an error are kept)
    return stamps


def _in_order(probe: Probe, decoded: list[int | None], stamps: _Stamps, base: Fraction) -> Probe:
    """The probe of a file whose packets look as if their stamps were in the order of decoding, by the stamps of its decoded frames."""
    seen = [stamp for stamp in decoded if stamp is not None]
    if len(seen) == len(decoded) and seen == sorted(set(seen) & set(stamps.all)):
        return probe
    if len(decoded) != min(len(stamps.all), _EXAMINED):
        why = f"its packets state {len(stamps.all)} times, and {len(decoded)} frames are decoded"
        return probe.refused("order", f"{why}; {_NEW_TIMES}")
    times = [float(stamp * base) for stamp in stamps.all]
    return probe.applying("order", order="count", pts_seconds=times, fps=_average_fps(times, None))


def _lit(probe: Probe, stated: tuple[int, ...], first: av.video.VideoFrame) -> Probe:
    """The probe of a video that is made of fields, or of other light than BT.709's: its transfer and primaries are `stated`."""
    if first.format.name.startswith(YUV) and (curve := UNREAD_TRANSFERS.get(stated[0])):
        raise Rejected(Reason.UNKNOWN_COLOURS, f"its light is {curve}, which FFmpeg's scaler does not convert")
    if first.interlaced_frame:
        why = "" if deinterlaces() else "it is interlaced, and this FFmpeg has no filter bwdif"
        why = why or ("" if len(probe.pts_seconds) > 1 else "it is a single interlaced frame")
        probe = probe.refused("fields", why) if why else probe.applying("fields", scan="interlaced")
    if light := light_of(stated[0], stated[1]):
        if first.format.name.startswith(YUV) and maps_light():
            return probe.applying("hdr", light=light)
        how = (
            "this FFmpeg does not map it" if first.format.name.startswith(YUV) else f"{first.format.name} is not mapped"
        )
        return probe.refused("hdr", f"its light is {light} (transfer, primaries), and {how}")
    return probe


def _upright(
    probe: Probe, first: av.video.VideoFrame, part: Callable[[int, int], Box | None], max_pixels: int
) -> Probe:
    """The probe of a picture of which the container shows a `part`, or which its matrix mirrors."""
    matrix: Any = first.side_data.get("DISPLAYMATRIX")
    try:
        mirrored, rotation = (False, 0) if matrix is None else upright(bytes(matrix))
        box = part(first.width, first.height)
    except Rejected as rejected:
        return probe.refused("geometry", rejected.detail)
    if not mirrored and rotation == probe.rotation and box is None:
        return probe
    size = (first.width, first.height) if box is None else (box[2] - box[0], box[3] - box[1])
    width, height = _square(size, probe.sar, rotation)
    check_pixels(width, height, max_pixels)
    return probe.applying("geometry", mirrored=mirrored, rotation=rotation, aperture=box, width=width, height=height)


def _square(size: tuple[int, int], sar: Fraction, rotation: int) -> tuple[int, int]:
    """(width, height) of a stored picture that is shown with square pixels, turned."""
    width, height = max(1, round(size[0] * sar)), size[1]
    return (height, width) if rotation % 180 else (width, height)


def refused(error: Exception) -> Rejected:
    """The rejection for a decoder's error."""
    for kind, words in _FFMPEG_ERRORS:
        if isinstance(error, kind):
            return Rejected(Reason.UNDECODABLE, f"{words} (FFmpeg: {error.strerror})")
    return Rejected(Reason.UNDECODABLE, in_words(error))


def open_video(file: BinaryIO) -> av.container.InputContainer:
    """Open the container of `file`, which must be of a known kind: playlists could name other files, and are refused.

    No protocol is allowed either: only the file's own bytes are read, whatever other files it names.
    """
    options = {"format_whitelist": ",".join(DEMUXERS), "protocol_whitelist": "none"}
    return av.open(file, "r", options=options, metadata_errors="replace")


def video_stream(container: av.container.InputContainer) -> av.video.VideoStream:
    """The first video stream that is not cover art. Raises Rejected (no_video_stream, undecodable)."""
    streams = [s for s in container.streams.video if not s.disposition & s.disposition.__class__.attached_pic]
    if not streams:
        only = "cover art" if container.streams.video else "sound, text or data"
        raise Rejected(Reason.NO_VIDEO_STREAM, f"it holds only {only}")
    if streams[0].codec_context is None:
        raise Rejected(Reason.UNDECODABLE, "no decoder for its codec")
    streams[0].codec_context.thread_count = DECODE_THREADS
    return streams[0]


def alpha_decoder(stream: av.video.VideoStream) -> Any:
    """The codec context that decodes a WebM stream with its alpha, which FFmpeg's own VP8 and VP9 decoders leave out; None for others.

    Raises Rejected (undecodable) if this FFmpeg lacks libvpx.
    """
    stated = {name.lower(): value for name, value in stream.metadata.items()}
    name = _ALPHA_DECODERS.get(stream.codec_context.name) if stated.get("alpha_mode") == "1" else None
    if name is None:
        return None
    try:
        context: Any = av.CodecContext.create(name, "r")
    except ValueError:
        raise Rejected(Reason.UNDECODABLE, f"no decoder {name} for its alpha") from None
    context.thread_count = DECODE_THREADS
    return context


def shown_times(stamps: list[tuple[int | None, int | None]]) -> list[int]:
    """Sorted presentation stamps from packets' (presentation, decoding) stamps.

    If some packets lack a presentation stamp, as in old AVI files, all decoding stamps are used instead.
    """
    pts = [pair[0] for pair in stamps]
    selected = [pair[1] for pair in stamps] if None in pts else pts
    return sorted({stamp for stamp in selected if stamp is not None})


def frame_stamp(frame: av.video.VideoFrame) -> int | None:
    """The presentation stamp of a decoded frame, in its time base."""
    return frame.pts if frame.pts is not None else frame.dts


@dataclass(frozen=True)
class _Stamps:
    """Sorted stamps of the frames that can be shown, those of key frames, the first frame, and the stamps of all packets.

    `suspect`: they may be in the order of decoding. `back` says where they go back at a key frame, in words; empty if they do not.
    """

    times: list[int]
    keys: list[int]
    first: av.video.VideoFrame
    all: list[int]
    suspect: bool
    back: str


def _stamps(container: av.container.InputContainer, stream: av.video.VideoStream) -> _Stamps:
    """The stamps of a stream's packets, and its first frame. Raises Rejected (truncated, undecodable, no_times)."""
    stamps: list[tuple[int | None, int | None]] = []
    keys: set[int | None] = set()
    with_alpha = alpha_decoder(stream)
    first: av.video.VideoFrame | None = None
    furthest, problem, latest, back = 0.0, "", -math.inf, ""
    # The end of the longest stream is compared with the stated duration; without one, other streams are not needed.
    for packet in container.demux() if _states_duration(container) else container.demux(stream):
        stamp = packet.pts if packet.pts is not None else packet.dts
        if packet.size and stamp is not None:
            furthest = max(furthest, float((stamp + (packet.duration or 0)) * packet.time_base))
        if packet.stream.index != stream.index:
            continue
        if packet.size and not packet.is_discard:
            stamps.append((packet.pts, packet.dts))
            keys |= {packet.pts} if packet.is_keyframe else set()
            if stamp is not None:
                if packet.is_keyframe and stamp < latest:
                    span = " to ".join(f"{float(one * packet.time_base):.3f} s" for one in (latest, stamp))
                    back = back or f"its times go back from {span}, as of joined files; {_NEW_TIMES}"
                latest = max(latest, stamp)
        if first is None:
            try:
                some = packet.decode() if with_alpha is None else with_alpha.decode(packet)
                frames = (frame for frame in some if isinstance(frame, av.VideoFrame))
                first = next((frame for frame in frames if not frame.is_corrupt), None)
            except av.error.FFmpegError as error:
                problem = refused(error).detail
    _check_duration(container, furthest)
    every = shown_times(stamps)
    if stamps and not every:
        raise Rejected(
            Reason.NO_TIMES, f"its packets have no times, as in a raw {container.format.name} stream; {_IN_CONTAINER}"
        )
    if first is None or not every:
        raise Rejected(
            Reason.UNDECODABLE, problem or ("no frame could be decoded" if every else "its video stream has no frames")
        )
    # Frames before the first that decodes (a recording that starts between key frames) are never shown.
    start = frame_stamp(first)
    times = [stamp for stamp in every if start is None or stamp >= start] or every[:1]
    guessed = any(pts is None for pts, _ in stamps)
    shown = [pts for pts, _ in stamps]
    suspect = guessed or shown == every
    key_stamps = [] if guessed else [stamp for stamp in times if stamp in keys]
    return _Stamps(times, key_stamps, first, every, suspect, back)


def _check_duration(container: av.container.InputContainer, furthest: float) -> None:
    """Raise Rejected (truncated) if all streams end long before the container's stated duration."""
    if container.duration is None or not _states_duration(container):
        return
    declared = container.duration / 1e6
    missing = declared - (furthest - (container.start_time or 0) / 1e6)
    if missing > max(0.5, 0.1 * declared):
        raise Rejected(
            Reason.TRUNCATED, f"it holds {declared - missing:.2f} s of the {declared:.2f} s that it declares"
        )


def _states_duration(container: av.container.InputContainer) -> bool:
    return container.format.name.startswith(_STATES_DURATION)


def _describe(
    container: av.container.InputContainer, stream: av.video.VideoStream, stamps: _Stamps, max_pixels: int
) -> Probe:
    """The probe of a plain reading, which applies nothing else that a file may state."""
    base, first = stream.time_base or Fraction(1), stamps.first
    times = [float(stamp * base) for stamp in stamps.times]
    sar = Fraction(stream.sample_aspect_ratio or 1) or Fraction(1)
    rotation = round(first.rotation / 90) * 90 % 360
    width, height = _square((first.width, first.height), sar, rotation)
    check_pixels(first.width, first.height, max_pixels)
    check_pixels(width, height, max_pixels)
    if first.format.name.startswith(YUV) and (matrix := UNREAD_MATRICES.get(int(first.colorspace))):
        raise Rejected(Reason.UNKNOWN_COLOURS, f"its colour matrix is {matrix}, which FFmpeg's scaler does not convert")
    bits = max((part.bits for part in first.format.components), default=8)
    codec = stream.codec_context.codec.canonical_name
    return Probe(
        kind="video" if len(times) > 1 else "image",
        width=width,
        height=height,
        fps=_average_fps(times, stream.average_rate),
        pts_seconds=times,
        codec=codec,
        bits=bits,
        rotation=rotation,
        sar=sar,
        container=container.format.name,
        decoder="pyav",
        key_seconds=[float(stamp * base) for stamp in stamps.keys],
        coded_width=first.width,
        coded_height=first.height,
        pixel_format=first.format.name,
        chroma_location=_chroma_location(first),
        untagged=int(first.colorspace) == _UNTAGGED,
        alpha=has_alpha(first.format),
        order="stamps",
        scan="progressive",
    )


def has_alpha(format: av.VideoFormat) -> bool:
    """True for a pixel format with an alpha channel."""
    return any(part.is_alpha for part in format.components)


@lru_cache(maxsize=64)
def chroma_steps(pixel_format: str) -> tuple[int, int]:
    """Columns and rows of pixels for each chroma sample of a pixel format: (2, 2) for 4:2:0."""
    format = av.VideoFormat(pixel_format, 64, 64)
    return 64 // (format.chroma_width() or 64), 64 // (format.chroma_height() or 64)


def _chroma_location(frame: av.video.VideoFrame) -> str:
    """FFmpeg's word for the site of a frame's chroma samples; empty if its chroma is not subsampled.

    Where a stream does not say, its range decides, as in players: left for limited, as MPEG's, centred for full, as JPEG's.
    """
    if chroma_steps(frame.format.name) == (1, 1):
        return ""
    stated = _shown_location(frame)
    if stated and stated != "unspecified":
        return stated
    return "center" if int(frame.color_range) == _FULL_RANGE or frame.format.name.startswith("yuvj") else "left"


def _shown_location(frame: av.video.VideoFrame) -> str:
    """The chroma location that a frame states, empty if FFmpeg does not tell: PyAV has no name for it, but `showinfo` prints it."""
    graph = av.filter.Graph()
    size = f"{frame.width}x{frame.height}"
    nodes = [
        graph.add("buffer", video_size=size, pix_fmt=frame.format.name, time_base="1/1000", pixel_aspect="1/1"),
        graph.add("sidedata", "mode=delete"),  # it would be printed, byte by byte
        graph.add("showinfo", "checksum=0"),
        graph.add("buffersink"),
    ]
    graph.link_nodes(*nodes).configure()
    level = av.logging.get_level()
    try:
        av.logging.set_level(av.logging.INFO)
        with av.logging.Capture() as printed:
            graph.vpush(frame)
            graph.vpull()
    finally:
        av.logging.set_level(level)
    match = re.search(r" cl:([a-z]+) ", " ".join(text for _, _, text in printed))
    return match[1] if match else ""


def _average_fps(times: list[float], stated: Fraction | None) -> float:
    if len(times) > 1:
        return (len(times) - 1) / (times[-1] - times[0])
    return float(stated or 0)


def allow_large_pictures() -> None:
    """Disable Pillow's limit on the size of pictures, so that only `max_pixels` applies. For the decoder process."""
    Image.MAX_IMAGE_PIXELS = None
