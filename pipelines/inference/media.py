"""Videos as files, in notebooks and as pictures of reports: writing, embedding, contact sheets.

Legend: F frames, H W pixels, the last dim of `frames_FHWC` is red, green, blue.
"""

from __future__ import annotations

import base64
import os
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import torch
from av.video.reformatter import Colorspace
from PIL import Image, ImageDraw, ImageFont

from mmspeed.data.cache.files import private_file
from mmspeed.errors import UserError

RATE = 24.0  # frames per second, where nothing names any
# Visually close to lossless. Without cpu-independent, x264's AVX-512 code reads past a row of macroblocks, so that bytes are by chance.
X264_OPTIONS = {"crf": "18", "preset": "medium", "x264-params": "cpu-independent=1"}
SMPTE170M = 6  # the code of BT.601 for primaries, transfer and matrix in a video stream
MAX_CELL_WIDTH = 256  # pixels of a frame on a contact sheet
LABEL_HEIGHT = 22  # pixels of a line of text on a contact sheet
MIN_SHEET_WIDTH = 480  # pixels, so that labels stay readable under small videos
GAP = 2  # pixels between the frames of a contact sheet
MOST_BYTES = 4 << 20  # of a file that is embedded for a notebook
MOST_PIXELS = 640  # of its longer side
LEAST_PIXELS = 64


@dataclass(frozen=True, eq=False, repr=False)
class Video:
    """Frames (F, H, W, 3) uint8 and their number per second. An image is F = 1. Notebooks show it."""

    frames_FHWC: np.ndarray
    fps: float

    def __post_init__(self) -> None:
        shape = self.frames_FHWC.shape
        if self.frames_FHWC.dtype != np.uint8 or len(shape) != 4 or shape[-1] != 3 or 0 in shape:
            raise ValueError(f"frames are uint8 (F, H, W, 3), not {self.frames_FHWC.dtype} {shape}")
        if not 0.01 <= self.fps <= 1000:
            raise ValueError(f"{self.fps} frames per second are not within 0.01 to 1000")

    def __repr__(self) -> str:
        frames, height, width = self.frames_FHWC.shape[:3]
        return f"Video({frames} frame{'s' * (frames > 1)} of {width} x {height}, {self.fps:g} a second)"

    def _repr_html_(self) -> str:
        """The HTML that a notebook shows: the video itself, embedded."""
        return html_of(self)

    def save(self, path: str | Path) -> None:
        """Write by the ending of `path`: .mp4 (H.264), .gif, or .png for a single frame. Whole or not at all (law 4).

        H.264 holds even sizes only: the last column or row of an odd-sized video is written twice. Raises UserError
        for another ending, several frames as .png, or a place that cannot be written.
        """
        path = Path(path)
        writer = _writer(path, len(self.frames_FHWC))
        with _whole_file(path) as temporary:
            writer(self, temporary)


def _writer(path: Path, frames: int) -> Callable[[Video, Path], None]:
    writer = _WRITERS.get(path.suffix.lower())
    if writer is None:
        raise UserError(f"{path}: cannot tell the format from this name: end it in .mp4, .gif or .png")
    if writer is _write_png and frames > 1:
        raise UserError(f"{path}: a .png holds one frame, the video has {frames}: use .mp4 or .gif")
    return writer


def check_output(path: Path, frames: int) -> None:
    """Raises UserError, before any work, for an ending that `Video.save` does not write or a folder that cannot be made."""
    _writer(path, frames)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{path.parent}: cannot be made: {error.strerror}") from None


def from_model_range(video_3FHW: torch.Tensor, fps: float) -> Video:
    """The video of pixels (3, F, H, W) in [-1, 1] of any float type and device; values beyond the range are clipped.

    Raises UserError when a pixel is not a finite number.
    """
    video_3FHW = video_3FHW.detach().float().cpu()
    if not bool(torch.isfinite(video_3FHW).all()):
        raise UserError("the decoded video holds NaN or infinity: the model has diverged, or its number type overflows")
    pixels_FHWC = ((video_3FHW.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).permute(1, 2, 3, 0)
    return Video(pixels_FHWC.contiguous().numpy(), fps)


def html_of(video: Video) -> str:
    """A `<video>` element with an embedded mp4, or an `<img>` with a png of a single frame: at most `MOST_BYTES` of it.

    Videos are scaled down until they fit; one that is too long in any size is said to be, with what to do.
    """
    frames, height, width = video.frames_FHWC.shape[:3]
    side = min(max(height, width), MOST_PIXELS)
    while True:
        data = _file_bytes(_scaled(video, side))
        if len(data) <= MOST_BYTES:
            break
        if side // 2 < LEAST_PIXELS:
            return f"<p>{video!r} is too long to be shown here: save it with <code>video.save('video.mp4')</code></p>"
        side //= 2
    text = base64.b64encode(data).decode()
    style = 'style="max-width: 100%"'
    if frames == 1:
        return f'<img {style} width="{width}" alt="a frame" src="data:image/png;base64,{text}">'
    return f'<video controls loop autoplay muted playsinline {style} width="{width}" src="data:video/mp4;base64,{text}"></video>'


def _file_bytes(video: Video) -> bytes:
    """The video as mp4, a single frame as png."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / ("video.png" if len(video.frames_FHWC) == 1 else "video.mp4")
        video.save(path)
        return path.read_bytes()


def _scaled(video: Video, side: int) -> Video:
    """The video with a longer side of at most as many pixels."""
    height, width = video.frames_FHWC.shape[1:3]
    if max(height, width) <= side:
        return video
    size = (max(1, round(width * side / max(height, width))), max(1, round(height * side / max(height, width))))
    frames = [np.asarray(Image.fromarray(frame).resize(size)) for frame in video.frames_FHWC]
    return Video(np.stack(frames), video.fps)


def evenly_spaced(count: int, columns: int) -> list[int]:
    """Indices of `count` frames, at most `columns`, rising, without repeats, the first and the last included."""
    return sorted({int(i) for i in np.linspace(0, count - 1, min(columns, count)).round()})


def contact_sheet(videos: Sequence[Video], labels: Sequence[str], columns: int = 8) -> Image.Image:
    """A picture with one row a video: its label, and below it up to `columns` frames evenly spaced in time.

    Wide frames are scaled down, small ones keep their size; a label too long for the sheet is cut. Raises ValueError
    when there is no video, or labels and videos differ in number.
    """
    if not videos or len(videos) != len(labels):
        raise ValueError(f"{len(videos)} videos and {len(labels)} labels make no contact sheet")
    rows = [[_cell(video.frames_FHWC[i]) for i in evenly_spaced(len(video.frames_FHWC), columns)] for video in videos]
    width = max(MIN_SHEET_WIDTH, *(sum(cell.width + GAP for cell in row) + GAP for row in rows))
    height = sum(LABEL_HEIGHT + row[0].height + GAP for row in rows)
    sheet = Image.new("RGB", (width, height), "white")
    draw, font = ImageDraw.Draw(sheet), _label_font()
    y = 0
    for row, label in zip(rows, labels, strict=True):
        draw.text((GAP + 2, y + 2), _fit(label, width - 2 * GAP - 4, font.getlength), fill="black", font=font)
        x = GAP
        for cell in row:
            sheet.paste(cell, (x, y + LABEL_HEIGHT))
            x += cell.width + GAP
        y += LABEL_HEIGHT + row[0].height + GAP
    return sheet


def _label_font() -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """DejaVu, which comes with matplotlib and has more letters than Pillow's own font (no Chinese ones: they show as boxes)."""
    import matplotlib

    return ImageFont.truetype(str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"), 13)


def save_image(image: Image.Image, path: str | Path) -> None:
    """Write a picture as PNG, whole or not at all. Raises UserError for a place that cannot be written."""
    with _whole_file(Path(path)) as temporary:
        image.save(temporary, format="PNG")


def _write_mp4(video: Video, path: Path) -> None:
    frames_FHWC = video.frames_FHWC
    height, width = frames_FHWC.shape[1:3]
    frames_FHWC = np.pad(frames_FHWC, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")
    with av.open(str(path), "w", format="mp4", options={"movflags": "+faststart"}) as container:
        stream = container.add_stream("libx264", rate=_rate(video.fps), options=dict(X264_OPTIONS))
        stream.height, stream.width = frames_FHWC.shape[1:3]
        stream.pix_fmt = "yuv420p"
        # Players that find no tag guess the colours from the picture's size.
        context = stream.codec_context
        context.colorspace = context.color_primaries = context.color_trc = SMPTE170M
        for array_HWC in frames_FHWC:
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(array_HWC), format="rgb24")
            container.mux(stream.encode(frame.reformat(format="yuv420p", dst_colorspace=Colorspace.ITU601)))
        container.mux(stream.encode(None))


def _write_gif(video: Video, path: Path) -> None:
    # A GIF counts in hundredths of a second; rounding each end, not each length, keeps the whole clip's duration.
    ends = [round(100 * (i + 1) / video.fps) for i in range(len(video.frames_FHWC))]
    durations = [10 * max(1, end - start) for start, end in zip([0, *ends], ends, strict=False)]
    pictures = [Image.fromarray(frame) for frame in video.frames_FHWC]
    pictures[0].save(path, format="GIF", save_all=True, append_images=pictures[1:], duration=durations, loop=0)


def _write_png(video: Video, path: Path) -> None:
    Image.fromarray(video.frames_FHWC[0]).save(path, format="PNG")


_WRITERS: dict[str, Callable[[Video, Path], None]] = {".mp4": _write_mp4, ".gif": _write_gif, ".png": _write_png}


@contextmanager
def _whole_file(path: Path) -> Iterator[Path]:
    """The name of a temporary file, which becomes `path` when all that the block wrote there is on disk.

    For writers that need a real file (mp4 moves its index to the front in a second pass).
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with private_file(path) as temporary:
            yield temporary
            _fsync(temporary)
        _fsync(path.parent)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from None


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _rate(fps: float) -> Fraction:
    return Fraction(fps).limit_denominator(1001)  # 1001: rates such as 23.976 are n * 1000 / 1001


def _cell(frame_HWC: np.ndarray) -> Image.Image:
    image = Image.fromarray(frame_HWC)
    if image.width <= MAX_CELL_WIDTH:
        return image
    return image.resize((MAX_CELL_WIDTH, max(1, round(image.height * MAX_CELL_WIDTH / image.width))))


def _fit(text: str, width: float, length: Callable[[str], float]) -> str:
    """`text` on one line, cut at the end with an ellipsis when it is wider than `width` pixels."""
    text = " ".join(text.split())
    if length(text) <= width:
        return text
    keep = bisect_right(range(1, len(text)), width, key=lambda count: length(text[:count] + "…"))
    return text[:keep] + "…"
