"""Crop, scale and rotate decoded frames to the pixels of a clip, without a full-size RGB picture in between.

libavfilter crops the frame and scales its planes (bicubic, the support grows with the reduction) to luma and chroma of the
final size, and only those are converted to RGB. Scaling straight to RGB costs twice as much: swscale has no fast code for it.
A crop that cuts through a chroma sample is made after chroma has been brought to full size, from the next whole samples on:
swscale takes the edges of both planes to be the same. `accurate_rnd` and `bitexact` give the same bytes on every processor.

Legend: H W height and width in pixels, C channels (RGB).
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import av.filter
import av.video
import numpy as np
from PIL import Image

from mmspeed.media.colours import BT2100, MAP, mapped
from mmspeed.media.images import on_background
from mmspeed.media.pixel_rules import WHITE, PixelRules
from mmspeed.media.probe import YUV, Probe, chroma_steps, has_alpha
from mmspeed.media.rejections import Reason, Rejected
from mmspeed.shapes import Bucket

Box = tuple[int, int, int, int]  # left, top, right, bottom

_MATRICES = {1: "bt709", 4: "fcc", 7: "smpte240m", 9: "bt2020", 10: "bt2020"}
_OTHER_MATRIX = "bt601"
_SWSCALE_MATRICES = {"bt709": 1, "fcc": 4, "bt601": 5, "smpte240m": 7, "bt2020": 9}
_UNTAGGED = 2  # of `frame.colorspace`
_LIMITED_RANGE, _FULL_RANGE = 1, 2
_FLAGS = "bicubic+accurate_rnd+bitexact"


def coded_box(crop: Box, probe: Probe) -> Box:
    """A box in displayed pixels, converted to the decoder's pixels: not rotated, mirrored or stretched, rounded to whole pixels."""
    left, top, right, bottom = crop
    width, height = probe.width, probe.height
    turn = probe.rotation % 360
    if turn == 90:
        left, top, right, bottom = height - bottom, left, height - top, right
    elif turn == 180:
        left, top, right, bottom = width - right, height - bottom, width - left, height - top
    elif turn == 270:
        left, top, right, bottom = top, width - right, bottom, width - left
    if turn % 180:
        width, height = height, width
    if probe.mirrored:
        left, right = width - right, width - left
    part = probe.aperture or (0, 0, probe.coded_width, probe.coded_height)
    x, y = Fraction(part[2] - part[0], width), Fraction(part[3] - part[1], height)
    left, top = min(round(left * x), part[2] - part[0] - 1), min(round(top * y), part[3] - part[1] - 1)
    right, bottom = max(left + 1, round(right * x)), max(top + 1, round(bottom * y))
    return part[0] + left, part[1] + top, part[0] + right, part[1] + bottom


def turned(planes_CHW: np.ndarray, probe: Probe) -> np.ndarray:
    """Planes of the decoder's picture as they are shown: mirrored, then turned."""
    planes_CHW = planes_CHW[..., ::-1] if probe.mirrored else planes_CHW
    return np.rot90(planes_CHW, probe.rotation // 90, axes=(1, 2))


def crop_box(width: int, height: int, bucket: Bucket) -> Box:
    """The largest centred box of the bucket's aspect ratio in a picture, in whole pixels."""
    if width * bucket.height > height * bucket.width:
        inner = max(1, round(height * bucket.width / bucket.height)), height
    else:
        inner = width, max(1, round(width * bucket.height / bucket.width))
    left, top = (width - inner[0]) // 2, (height - inner[1]) // 2
    return left, top, left + inner[0], top + inner[1]


def resize(picture_HWC: np.ndarray, box: Box, width: int, height: int) -> np.ndarray:
    """An RGB picture cropped to `box` and scaled by Pillow's bicubic filter: (`height`, `width`, 3) uint8."""
    left, top, right, bottom = box
    # Crop first: with Pillow's `box`, pixels beyond the crop, such as black bars, would bleed into its edge.
    cut = Image.fromarray(np.ascontiguousarray(picture_HWC[top:bottom, left:right]))
    return np.asarray(cut.resize((width, height), Image.Resampling.BICUBIC))


def scale_rgb(picture_HWC: np.ndarray, crop: Box, probe: Probe, width: int, height: int) -> np.ndarray:
    """The `crop` (in displayed pixels) of a stored RGB picture, upright: (3, `height`, `width`) uint8."""
    if probe.rotation % 180:
        width, height = height, width
    planes_CHW = resize(picture_HWC, coded_box(crop, probe), width, height).transpose(2, 0, 1)
    return turned(planes_CHW, probe)


def pixel_parts(rules: PixelRules, probe: Probe, crop: Box) -> dict[str, Any]:
    """The parts of a clip's key that say in what its pixels differ from the plain reading of its file; empty if in nothing.

    Plain are chroma in the middle of its pixels, cut at whole samples, BT.601, white behind a picture, and nothing that the file states beside.
    """
    parts: dict[str, Any] = dict.fromkeys(probe.applied, 2)
    if probe.light:
        parts["hdr"] = f"{MAP} {probe.light}"
    video = probe.decoder == "pyav"
    if video and probe.pixel_format.startswith(YUV):
        if not _plain_chroma(probe, coded_box(crop, probe)):
            parts["chroma"] = 2  # the version of the property
        matrix = rules.untagged_matrix(probe.coded_height)
        if probe.untagged and matrix != _OTHER_MATRIX:
            parts["untagged"] = matrix
    if probe.alpha and (video or rules.background != WHITE):
        parts["background"] = rules.background
    if probe.reader and not probe.same_bytes:
        parts["decoder"] = probe.reader
    return parts


def _plain_chroma(probe: Probe, box: Box) -> bool:
    """True if the stream sites chroma in the middle of its pixels, and a box cuts it at whole samples."""
    columns, rows = chroma_steps(probe.pixel_format)
    middle = probe.chroma_location == "center"
    across = columns == 1 or middle or probe.chroma_location in ("top", "bottom")
    down = rows == 1 or middle or probe.chroma_location == "left"
    return across and down and _whole_samples(box, columns, rows) == box


def _whole_samples(box: Box, columns: int, rows: int) -> Box:
    """The smallest box of whole chroma samples, of `columns` x `rows` pixels each, around `box`."""
    left, top, right, bottom = box
    return left // columns * columns, top // rows * rows, -(-right // columns) * columns, -(-bottom // rows) * rows


class Scaler:
    """Scale the frames of one file; keeps a filter graph for each distinct crop, size, pixel format and set of rules."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._graphs: dict[tuple[object, ...], av.filter.Graph] = {}

    def scale(self, frame: av.video.VideoFrame, crop: Box, width: int, height: int, rules: PixelRules) -> np.ndarray:
        """The `crop` (in displayed pixels) of a frame, upright: (3, `height`, `width`) uint8.

        Raises Rejected (undecodable) for a frame of another size than the file's first.
        """
        probe = self._probe
        if (frame.width, frame.height) != (probe.coded_width, probe.coded_height):
            raise Rejected(Reason.UNDECODABLE, f"the picture's size changes to {frame.width} x {frame.height}")
        box = coded_box(crop, probe)
        if probe.rotation % 180:
            width, height = height, width
        if has_alpha(frame.format):
            planes_CHW = self._composed(frame, box, width, height, rules)
        elif frame.format.name.startswith(YUV):
            planes_CHW = self._filtered(frame, box, width, height, rules)
        else:  # RGB, grey and palettes are rare, and swscale would convert them to chroma and back
            planes_CHW = resize(frame.to_ndarray(format="rgb24"), box, width, height).transpose(2, 0, 1)
        return turned(planes_CHW, probe)

    def _filtered(self, frame: av.video.VideoFrame, box: Box, width: int, height: int, rules: PixelRules) -> np.ndarray:
        scaled = self._pulled(frame, box, (width, height), rules, "gbrp")
        planes_CHW = np.empty((3, height, width), np.uint8)
        for channel, plane in enumerate((scaled.planes[2], scaled.planes[0], scaled.planes[1])):  # stored as G, B, R
            rows = np.frombuffer(memoryview(plane), np.uint8).reshape(-1, plane.line_size)
            planes_CHW[channel] = rows[:height, :width]
        return planes_CHW

    def _composed(self, frame: av.video.VideoFrame, box: Box, width: int, height: int, rules: PixelRules) -> np.ndarray:
        """Compose a frame with alpha like a picture: at its own size, before it is scaled."""
        left, top, right, bottom = box
        if frame.format.name.startswith(YUV):
            picture_HWC = self._pulled(frame, box, None, rules, "rgba").to_ndarray()
        else:
            picture_HWC = frame.to_ndarray(format="rgba")[top:bottom, left:right]
        picture = on_background(Image.fromarray(np.ascontiguousarray(picture_HWC), "RGBA"), rules.background)
        return resize(np.asarray(picture), (0, 0, right - left, bottom - top), width, height).transpose(2, 0, 1)

    def _pulled(
        self, frame: av.video.VideoFrame, box: Box, size: tuple[int, int] | None, rules: PixelRules, form: str
    ) -> av.video.VideoFrame:
        """A crop of a frame, of another `size` if one is given, in the pixel format `form`."""
        frame = _with_whole_samples(frame)
        key = box, size, rules, form, frame.format.name, frame.colorspace, frame.color_range
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._graphs[key] = _graph(frame, self._probe, box, size, rules, form)
        graph.vpush(frame)
        return graph.vpull()


def is_yuv(pixel_format: str) -> bool:
    """True for a pixel format that is scaled before it is converted to RGB."""
    return pixel_format.startswith(YUV)


def plain_rgb(frame: av.video.VideoFrame, rules: PixelRules) -> np.ndarray:
    """A whole frame in RGB, (H, W, 3) uint8, by swscale's plain conversion, which other decoders use, with the matrix of `rules`."""
    if not is_yuv(frame.format.name):
        return frame.to_ndarray(format="rgb24")
    matrix, full = _SWSCALE_MATRICES[_matrix(frame, rules, frame.height)], _is_full_range(frame)
    plain = frame.reformat(
        format="rgb24",
        src_colorspace=matrix,
        src_color_range=_FULL_RANGE if full else _LIMITED_RANGE,
        dst_color_range=_FULL_RANGE,
    )
    return plain.to_ndarray()


def _matrix(frame: av.video.VideoFrame, rules: PixelRules, lines: int) -> str:
    """The colour matrix of a frame by its tag, or of an untagged one of so many `lines` by `rules`."""
    if int(frame.colorspace) == _UNTAGGED:
        return rules.untagged_matrix(lines)
    return _MATRICES.get(int(frame.colorspace), _OTHER_MATRIX)


def _is_full_range(frame: av.video.VideoFrame) -> bool:
    return int(frame.color_range) == _FULL_RANGE or frame.format.name.startswith("yuvj")


def _with_whole_samples(frame: av.video.VideoFrame) -> av.video.VideoFrame:
    """The frame; a copy with empty pixels added at the right and the bottom if its sides are no multiples of the chroma steps."""
    columns, rows = chroma_steps(frame.format.name)
    if frame.width % columns == 0 and frame.height % rows == 0:
        return frame
    whole = av.VideoFrame(-(-frame.width // columns) * columns, -(-frame.height // rows) * rows, frame.format.name)
    whole.pts, whole.time_base = frame.pts, frame.time_base
    whole.colorspace, whole.color_range = frame.colorspace, frame.color_range
    for plane, wider in zip(frame.planes, whole.planes, strict=True):
        stored = np.frombuffer(memoryview(plane), np.uint8).reshape(-1, plane.line_size)
        copied = np.zeros((wider.buffer_size // wider.line_size, wider.line_size), np.uint8)
        high, wide = min(len(stored), len(copied)), min(plane.line_size, wider.line_size)
        copied[:high, :wide] = stored[:high, :wide]
        wider.update(copied.tobytes())
    return whole


def graph_of(frame: av.video.VideoFrame) -> tuple[av.filter.Graph, Any]:
    """A new graph of one thread, and its source of frames like this one."""
    graph = av.filter.Graph()
    if hasattr(graph, "threads"):  # older PyAV lacks it; the bytes are the same
        graph.threads = 1
    source = graph.add(
        "buffer",
        video_size=f"{frame.width}x{frame.height}",
        pix_fmt=frame.format.name,
        time_base="1/1000",
        pixel_aspect="1/1",
        colorspace=str(int(frame.colorspace)),
        range=str(int(frame.color_range)),
    )
    return graph, source


def _graph(
    frame: av.video.VideoFrame, probe: Probe, box: Box, size: tuple[int, int] | None, rules: PixelRules, form: str
) -> av.filter.Graph:
    """Build the graph that crops, scales the planes and converts to `form`. Matrix and range are explicit, so that no filter guesses."""
    left, top, right, bottom = box
    matrix, full = _matrix(frame, rules, probe.coded_height), _is_full_range(frame)
    if int(frame.colorspace) == _UNTAGGED and probe.light.startswith(BT2100):
        matrix = "bt2020"
    stated = f"in_color_matrix={matrix}:in_range={'full' if full else 'limited'}"
    same = f"out_color_matrix={matrix}:out_range={'full' if full else 'limited'}"
    columns, rows = chroma_steps(frame.format.name)
    subsampled = columns * rows > 1
    sited = f":in_chroma_loc={probe.chroma_location or 'center'}" if subsampled else ""
    graph, source = graph_of(frame)
    nodes = [source]
    outer = _whole_samples(box, columns, rows)
    nodes.append(graph.add("crop", f"{outer[2] - outer[0]}:{outer[3] - outer[1]}:{outer[0]}:{outer[1]}:exact=1"))
    if outer != box:  # chroma to full size first
        bits = max(part.bits for part in frame.format.components)
        alpha = "a" if has_alpha(frame.format) else ""
        nodes += [
            graph.add("scale", f"flags={_FLAGS}:{stated}:{same}{sited}"),
            graph.add("format", f"yuv{alpha}444p" + (f"{bits}le" if bits > 8 else "")),
            graph.add("crop", f"{right - left}:{bottom - top}:{left - outer[0]}:{top - outer[1]}:exact=1"),
        ]
        sited = ""
    if size is not None:
        nodes += [
            graph.add("scale", f"{size[0]}:{size[1]}:flags={_FLAGS}:{stated}:{same}{sited}"),
            graph.add("format", "yuv444p16le" if probe.light else "yuv444p"),
        ]
        sited = ""
    nodes += [
        graph.add("scale", f"flags={_FLAGS}:{stated}:out_range=full{sited}{mapped(probe.light)}"),
        graph.add("format", form),
        graph.add("buffersink"),
    ]
    graph.link_nodes(*nodes).configure()
    return graph
