"""Crop, scale and rotate decoded frames to the pixels of a clip, without a full-size RGB picture in between.

libavfilter crops the frame and scales its planes (bicubic, the support grows with the reduction) to luma and chroma of the
final size, and only those are converted to RGB. Scaling straight to RGB costs twice as much: swscale has no fast code for it.
`accurate_rnd` and `bitexact` give the same bytes on every processor.

Legend: H W height and width in pixels, C channels (RGB).
"""

from __future__ import annotations

from fractions import Fraction

import av.filter
import av.video
import numpy as np
from PIL import Image

from mmspeed.preprocess.decoding.probe import Probe
from mmspeed.preprocess.sources.rejections import Reason, Rejected

Box = tuple[int, int, int, int]  # left, top, right, bottom

_YUV = (
    "yuv",
    "nv",
    "p0",
    "uyvy",
    "yvyu",
)  # pixel formats with these prefixes are scaled before they are converted to RGB
_MATRICES = {1: "bt709", 4: "fcc", 7: "smpte240m", 9: "bt2020", 10: "bt2020"}  # others, and files that state none
_OTHER_MATRIX = "bt601"
_FULL_RANGE = 2
_FLAGS = "bicubic+accurate_rnd+bitexact"


def coded_box(crop: Box, probe: Probe) -> Box:
    """A box in displayed pixels, converted to the decoder's pixels: not rotated, not stretched, rounded to whole pixels."""
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
    x, y = Fraction(probe.coded_width, width), Fraction(probe.coded_height, height)
    left, top = min(round(left * x), probe.coded_width - 1), min(round(top * y), probe.coded_height - 1)
    return left, top, max(left + 1, round(right * x)), max(top + 1, round(bottom * y))


def resize(picture_HWC: np.ndarray, box: Box, width: int, height: int) -> np.ndarray:
    """An RGB picture cropped to `box` and scaled by Pillow's bicubic filter: (`height`, `width`, 3) uint8."""
    left, top, right, bottom = box
    # Crop first: with Pillow's `box`, pixels beyond the crop, such as black bars, would bleed into its edge.
    cut = Image.fromarray(np.ascontiguousarray(picture_HWC[top:bottom, left:right]))
    return np.asarray(cut.resize((width, height), Image.Resampling.BICUBIC))


class Scaler:
    """Scale the frames of one file; keeps a filter graph for each distinct crop, size and pixel format."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._graphs: dict[tuple[object, ...], av.filter.Graph] = {}

    def scale(self, frame: av.video.VideoFrame, crop: Box, width: int, height: int) -> np.ndarray:
        """The `crop` (in displayed pixels) of a frame, upright: (3, `height`, `width`) uint8.

        Raises Rejected (undecodable) for a frame of another size than the file's first.
        """
        probe = self._probe
        if (frame.width, frame.height) != (probe.coded_width, probe.coded_height):
            raise Rejected(Reason.UNDECODABLE, f"the picture's size changes to {frame.width} x {frame.height}")
        box = coded_box(crop, probe)
        if probe.rotation % 180:
            width, height = height, width
        if frame.format.name.startswith(_YUV):
            planes_CHW = self._filtered(frame, box, width, height)
        else:  # RGB, grey and palettes are rare, and swscale would convert them to chroma and back
            planes_CHW = resize(frame.to_ndarray(format="rgb24"), box, width, height).transpose(2, 0, 1)
        return np.rot90(planes_CHW, probe.rotation // 90, axes=(1, 2))

    def _filtered(self, frame: av.video.VideoFrame, box: Box, width: int, height: int) -> np.ndarray:
        key = box, width, height, frame.format.name, frame.colorspace, frame.color_range
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._graphs[key] = _graph(frame, box, width, height)
        graph.vpush(frame)
        scaled = graph.vpull()
        planes_CHW = np.empty((3, height, width), np.uint8)
        for channel, plane in enumerate((scaled.planes[2], scaled.planes[0], scaled.planes[1])):  # stored as G, B, R
            rows = np.frombuffer(memoryview(plane), np.uint8).reshape(-1, plane.line_size)
            planes_CHW[channel] = rows[:height, :width]
        return planes_CHW


def _graph(frame: av.video.VideoFrame, box: Box, width: int, height: int) -> av.filter.Graph:
    """Build the graph that crops, scales the planes and converts to RGB. Matrix and range are explicit, so that no filter guesses."""
    left, top, right, bottom = box
    matrix = _MATRICES.get(int(frame.colorspace), _OTHER_MATRIX)
    full = int(frame.color_range) == _FULL_RANGE or frame.format.name.startswith("yuvj")
    stated = f"in_color_matrix={matrix}:in_range={'full' if full else 'limited'}"
    same = f"out_color_matrix={matrix}:out_range={'full' if full else 'limited'}"
    graph = av.filter.Graph()
    if hasattr(graph, "threads"):  # older PyAV lacks it; the bytes are the same
        graph.threads = 1
    nodes = [
        graph.add(
            "buffer",
            video_size=f"{frame.width}x{frame.height}",
            pix_fmt=frame.format.name,
            time_base="1/1000",
            pixel_aspect="1/1",
            colorspace=str(int(frame.colorspace)),
            range=str(int(frame.color_range)),
        ),
        graph.add("crop", f"{right - left}:{bottom - top}:{left}:{top}:exact=1"),
        graph.add("scale", f"{width}:{height}:flags={_FLAGS}:{stated}:{same}"),
        graph.add("format", "yuv444p"),
        graph.add("scale", f"flags={_FLAGS}:{stated}:out_range=full"),
        graph.add("format", "gbrp"),
        graph.add("buffersink"),
    ]
    graph.link_nodes(*nodes).configure()
    return graph
