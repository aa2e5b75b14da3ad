"""Media whose containers and codecs state something of times, geometry and colours that a plain reading leaves out."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from mmspeed.media.containers import vint
from mmspeed.media.decode import Cut, stream
from mmspeed.media.probe import Probe, probe
from mmspeed.media.rejections import Rejected
from tests.support.decoding import LIMITS, source_of

ONE, LAST = 1 << 16, 1 << 30  # of a display matrix
_MASTERS = (b"\x16\x54\xae\x6b", b"\xae", b"\xe0")  # Matroska's tracks, a track, its video


def shown(path: Path, indices: tuple[int, ...] | None = None, by: tuple[str, ...] = ()) -> tuple[Probe, np.ndarray]:
    """The probe of a file and its frames (F, H, W, 3) at their own size, by version 1 of the properties `by`. Raises Rejected."""
    found = probe(source_of(path), *LIMITS).by(by)
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
