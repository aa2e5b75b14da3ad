"""Videos whose chroma is a zone plate, sampled where the stream says that its samples lie; used by tests of chroma's position.

Legend: H W height and width in pixels.
"""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np

LOCATIONS = {"left": (0.0, 0.5), "center": (0.5, 0.5), "topleft": (0.0, 0.0), "top": (0.5, 0.0)}  # of the first sample
_NUMBERS = {"left": 0, "center": 1, "topleft": 2, "top": 3}  # in the bitstreams of H.264 and HEVC
_AMPLITUDE, _GREY = 0.22, 0.5
_FASTEST = 1 / 8  # cycles a pixel at the corner, half of what 4:2:0 holds


def plate(x: np.ndarray, y: np.ndarray, width: int, height: int) -> np.ndarray:
    """The pattern at positions in pixels, between -1 and 1: rings about a point off the middle."""
    rate = _FASTEST / np.hypot(width, height)
    return np.cos(np.pi * rate * ((x - 0.3 * width) ** 2 + (y - 0.4 * height) ** 2))


def write_plate(
    path: Path,
    pixel_format: str,
    location: str,
    width: int,
    height: int,
    rotation: int = 0,
    frames: int = 2,
    codec: str = "",
) -> Path:
    """A lossless H.264 or (10 bits) HEVC video, or one of another lossless `codec`.

    Luma is flat, and both chroma planes, as they are stored, hold the pattern.
    """
    deep = "10" in pixel_format
    lossless = "lossless=1:bframes=0:log-level=none:pools=none:frame-threads=1:" if deep else ""
    name = codec or ("libx265" if deep else "libx264")
    with av.open(str(path), "w") as output:
        stream: Any = output.add_stream(name, rate=8)
        stream.width, stream.height, stream.pix_fmt = width, height, pixel_format
        site = f"{lossless}chromaloc={_NUMBERS[location]}" if "420" in pixel_format else lossless.rstrip(":")
        if not codec:
            stream.options = {f"{name[3:]}-params": site} | ({} if deep else {"qp": "0"})
        stream.codec_context.colorspace, stream.codec_context.color_range = 5, 1
        if rotation:
            stream.set_display_rotation(rotation)
        for number in range(frames):
            frame = plate_frame(pixel_format, location, width, height)
            frame.pts, frame.time_base = number, Fraction(1, 8)
            output.mux(stream.encode(frame))
        output.mux(stream.encode())
    return path


def plate_frame(pixel_format: str, location: str, width: int, height: int) -> av.VideoFrame:
    """One frame of the pattern."""
    frame = av.VideoFrame(width, height, pixel_format)
    columns, rows = {"420": (2, 2), "422": (2, 1), "444": (1, 1)}[pixel_format[3:6]]
    across, down = LOCATIONS[location]
    x = np.arange(-(-width // columns)) * columns + (across if columns == 2 else 0.0)
    y = np.arange(-(-height // rows)) * rows + (down if rows == 2 else 0.0)
    chroma = _GREY + _AMPLITUDE * plate(x[None], y[:, None], width, height)
    for number, plane in enumerate(frame.planes):
        values = np.full((height, width), _GREY) if number == 0 else chroma
        deep = "10" in pixel_format
        stored = np.round(values * (1023 if deep else 255)).astype(np.uint16 if deep else np.uint8)
        rows_of_plane = np.zeros((stored.shape[0], plane.line_size // stored.itemsize), stored.dtype)
        rows_of_plane[:, : stored.shape[1]] = stored
        plane.update(rows_of_plane.tobytes())
    frame.colorspace, frame.color_range = 5, 1
    return frame


def displacement(
    frame_HWC: np.ndarray, left: int, top: int, width: int, height: int, turns: int = 0, reduction: int = 1
) -> tuple[float, float]:
    """Pixels of the source by which the chroma of a crop lies right of and below the pattern, by Gauss-Newton correlation.

    The frame is the crop at 1 / `reduction` of its size; `left` and `top` are of the crop in displayed
    pixels, `width` and `height` of the stored picture, which is shown after `turns` quarter turns counter-clockwise.
    """
    pixels = frame_HWC.astype(float)
    chroma = pixels[..., 2] - pixels[..., 1]  # luma is flat: blue minus green follows both planes
    wide, high = frame_HWC.shape[1] * reduction, frame_HWC.shape[0] * reduction
    shown = (width, height) if turns % 2 else (height, width)
    # The stored position of every shown pixel: the grids are turned like the picture.
    stored_y, stored_x = (np.rot90(grid, turns) for grid in np.mgrid[0:height, 0:width].astype(float))
    assert stored_x.shape == shown
    x, y = (grid[top : top + high, left : left + wide] for grid in (stored_x, stored_y))
    right_x, right_y = ((grid[0, 1] - grid[0, 0]) for grid in (stored_x, stored_y))  # stored direction of shown right
    below_x, below_y = ((grid[1, 0] - grid[0, 0]) for grid in (stored_x, stored_y))

    x, y = (_reduced(grid, reduction) for grid in (x, y))

    def pattern(dx: float, dy: float) -> np.ndarray:
        return plate(x - dx * right_x - dy * below_x, y - dx * right_y - dy * below_y, width, height)

    inner = np.s_[4:-4, 4:-4]
    at = np.zeros(2)
    for _ in range(8):
        here = pattern(*at)[inner]
        step = 1e-3
        slopes = [(pattern(*(at + shift))[inner] - here) / step for shift in (np.array([step, 0]), np.array([0, step]))]
        columns = np.stack([slope.ravel() for slope in slopes] + [here.ravel(), np.ones(here.size)], 1)
        solution, *_ = np.linalg.lstsq(columns, chroma[inner].ravel(), rcond=None)
        at += solution[:2] / solution[2]
    return float(at[0]), float(at[1])


def _reduced(grid: np.ndarray, by: int) -> np.ndarray:
    """The positions of the middles of blocks of `by` x `by` pixels."""
    high, wide = grid.shape
    return grid.reshape(high // by, by, wide // by, by).mean((1, 3))
