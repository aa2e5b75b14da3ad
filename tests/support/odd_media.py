"""Media whose containers and codecs state something of times, geometry and colours that a plain reading leaves out."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np

from mmspeed.media.containers import vint
from mmspeed.media.decode import Cut, stream
from mmspeed.media.probe import Probe, probe
from mmspeed.media.rejections import Rejected
from tests.support.decoding import LIMITS, source_of

ONE, LAST = 1 << 16, 1 << 30  # of a display matrix
_MASTERS = (b"\x16\x54\xae\x6b", b"\xae", b"\xe0")  # Matroska's tracks, a track, its video


def shown(path: Path, indices: tuple[int, ...] | None = None) -> tuple[Probe, np.ndarray]:
    """The probe of a file and its frames (F, H, W, 3) at their own size. Raises Rejected."""
    found = probe(source_of(path), *LIMITS)
    indices = tuple(range(len(found.pts_seconds))) if indices is None else indices
    whole = Cut(indices, (0, 0, found.width, found.height), found.width, found.height)
    ((_, frames),) = stream(source_of(path), found, [whole])
    if isinstance(frames, Rejected):
        raise frames
    return found, frames


def with_matrix(path: Path, out: Path, matrix: tuple[int, ...]) -> Path:
    """A copy of an MP4 with another display matrix: nine numbers of 16.16 and, the last of a row, 2.30."""
    data = bytearray(path.read_bytes())
    at = data.find(b"tkhd")
    begin = at + 8 + (20 if data[at + 4] == 0 else 32) + 16
    data[begin : begin + 36] = struct.pack(">9i", *matrix)
    out.write_bytes(data)
    return out


def with_clap(path: Path, out: Path, *numbers: int) -> Path:
    """A copy of an MP4 whose index is at its end, with a clean aperture: width, height and the offsets of its middle, as fractions."""
    data = bytearray(path.read_bytes())
    moov = data.rfind(b"moov") - 4
    box = struct.pack(">I4s8i", 40, b"clap", *numbers)
    places = [data.find(kind, moov) - 4 for kind in (b"moov", b"trak", b"mdia", b"minf", b"stbl", b"stsd", b"avc1")]
    end = places[-1] + struct.unpack_from(">I", data, places[-1])[0]
    for at in places:
        struct.pack_into(">I", data, at, struct.unpack_from(">I", data, at)[0] + len(box))
    data[end:end] = box
    out.write_bytes(data)
    return out


def with_pixel_crop(path: Path, out: Path, left: int, top: int, right: int, bottom: int, size: tuple[int, int]) -> Path:
    """A copy of a Matroska file that shows its pictures without so many pixels at each side, in a size."""
    data = path.read_bytes()
    at = data.rindex(_MASTERS[0], 0, data.index(b"\x1f\x43\xb6\x75"))  # before the first cluster
    crops = zip((0x54CC, 0x54BB, 0x54DD, 0x54AA, 0x54B0, 0x54BA), (left, top, right, bottom, *size), strict=True)
    body = b"".join(struct.pack(">HBH", name, 0x82, value) for name, value in crops)
    places = []
    for name in _MASTERS:
        while True:
            width = 9 - data[at].bit_length()
            length, start = vint(data[at + width :][:8], at + width)
            assert length is not None
            if data[at : at + width] == name:
                break
            at = start + length
        places.append((name, at, start, start + length))
        at = start
    first = last = places[-1][3]  # where the new part goes, and what follows it
    for name, begin, start, end in reversed(places):
        inner = data[start:first] + body + data[last:end]
        body, first, last = name + b"\x01" + len(inner).to_bytes(7, "big") + inner, begin, end
    segment = data.index(b"\x18\x53\x80\x67") + 4
    head = data[:segment] + b"\x01" + b"\xff" * 7 + data[segment + 8 : first]
    out.write_bytes(head + body + data[last:])
    return out


_D50 = (0.9642, 1.0, 0.8249)
ADOBE = ((0.6097, 0.3111, 0.0195), (0.2053, 0.6257, 0.0609), (0.1492, 0.0632, 0.7446))
P3 = ((0.5151, 0.2412, -0.0011), (0.2920, 0.6922, 0.0419), (0.1571, 0.0666, 0.7841))


def icc_profile(gamma: float, primaries: Sequence[tuple[float, ...]] = ()) -> bytes:
    """A minimal ICC profile of red, green and blue primaries (XYZ for D50), or without them of grey, and a gamma."""

    def fixed(*values: float) -> bytes:
        return struct.pack(f">{len(values)}i", *(round(value * ONE) for value in values))

    curve = b"curv\0\0\0\0" + struct.pack(">IH", 1, round(gamma * 256)) + b"\0\0"
    text = b"desc\0\0\0\0" + struct.pack(">I", 5) + b"test\0" + b"\0" * 78
    tags = [(b"desc", text + b"\0" * (-len(text) % 4)), (b"wtpt", b"XYZ \0\0\0\0" + fixed(*_D50))]
    for name, primary in zip("rgb", primaries, strict=bool(primaries)):
        tags += [(f"{name}XYZ".encode(), b"XYZ \0\0\0\0" + fixed(*primary)), (f"{name}TRC".encode(), curve)]
    tags += [] if primaries else [(b"kTRC", curve)]
    at, table, data = 132 + 12 * len(tags), struct.pack(">I", len(tags)), b""
    for name, body in tags:
        table += name + struct.pack(">II", at + len(data), len(body))
        data += body
    space = b"RGB " if primaries else b"GRAY"
    head = struct.pack(">I", at + len(data)) + b"lcms\x02\x10\0\0mntr" + space + b"XYZ "
    head += struct.pack(">6H", 2020, 1, 1, 0, 0, 0) + b"acsp" + b"\0" * 28 + fixed(*_D50)
    return head + b"\0" * (128 - len(head)) + table + data


def write_plain_colour(
    path: Path,
    planes: Sequence[int],
    params: str,
    form: str = "yuv444p10le",
    frames: int = 3,
    codec: str = "libx265",
    light: tuple[int, int] | None = None,
) -> Path:
    """A video whose planes have one value each, with parameters of x264 or x265 that state colours, or a transfer and primaries."""
    with av.open(str(path), "w") as output:
        track: Any = output.add_stream(codec, rate=10)
        track.width, track.height, track.pix_fmt = 96, 64, form
        quiet = "log-level=none:pools=none:frame-threads=1:" if codec == "libx265" else ""
        track.options = {"crf": "1", f"{codec[3:]}-params": quiet + params} if light is None else {}
        if light is not None:
            track.codec_context.color_trc, track.codec_context.color_primaries = light
            track.codec_context.colorspace = 9  # BT.2020's matrix
        for number in range(frames):
            frame = av.VideoFrame(96, 64, form)
            for plane, value in zip(frame.planes, planes, strict=True):
                wide = form.endswith("10le")
                plane.update(np.full(plane.buffer_size // (1 + wide), value, "<u2" if wide else "u1").tobytes())
            frame.pts, frame.time_base = number, Fraction(1, 10)
            output.mux(track.encode(frame))
        output.mux(track.encode())
    return path


def write_fields(path: Path, frames: int = 12) -> Path:
    """Interlaced video of a bar that moves to the right by three pixels from field to field."""
    with av.open(str(path), "w") as output:
        track: Any = output.add_stream("libx264", rate=25)
        track.width, track.height, track.pix_fmt = 96, 64, "yuv420p"
        track.options = {"crf": "6", "x264-params": "tff=1:interlaced=1:bframes=0:keyint=4"}
        for number in range(frames):
            pixels = np.full((64, 96, 3), 30, np.uint8)
            for field in (0, 1):
                pixels[field::2, 8 + 6 * number + 3 * field : 20 + 6 * number + 3 * field] = 220
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = number, Fraction(1, 25)
            output.mux(track.encode(frame))
        output.mux(track.encode())
    return path
