"""What a file's container says of its picture: the part of it that is shown, how that is turned or mirrored, and the light of a still.

FFmpeg's decoders apply neither, and its reader hands a clean aperture to FFmpeg's own commands alone, so it is read here: ISO's `clap`
box and Matroska's `PixelCrop` elements. Pillow leaves out what AVIF and PNG state of their light beside ICC profiles.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from fractions import Fraction
from typing import BinaryIO

from mmspeed.media.containers import EBML, ISO_STARTS, vint
from mmspeed.media.rejections import Reason, Rejected

Box = tuple[int, int, int, int]  # left, top, right, bottom
_LONGEST = 1 << 20  # bytes of a description of a track
_SAMPLE_ENTRY = 78  # bytes before the boxes of a video's sample entry
_SEGMENT, _TRACKS, _TRACK, _VIDEO = 0x18538067, 0x1654AE6B, 0xAE, 0xE0
_CROPS = {0x54CC: 0, 0x54BB: 1, 0x54DD: 2, 0x54AA: 3}  # Matroska's elements: left, top, right, bottom
_NEAR = 0.01  # of a turn's cosine, and of a scale


def aperture(file: BinaryIO, head: bytes, size: int, track: int, number: int, width: int, height: int) -> Box | None:
    """The part of a track's decoded pictures (of `width` x `height`) that its container shows; None: all of them.

    track: its id in ISO's files. number: among the video tracks, in Matroska's.
    Raises Rejected for one that is not inside of the picture.
    """
    if head[4:8] in ISO_STARTS:
        box = _iso_aperture(file, size, track, width, height)
    elif head.startswith(EBML):
        box = _matroska_aperture(file, size, number, width, height)
    else:
        return None
    if box is None or box == (0, 0, width, height):
        return None
    left, top, right, bottom = box
    if not (0 <= left < right <= width and 0 <= top < bottom <= height):
        raise Rejected(Reason.UNKNOWN_GEOMETRY, f"it shows the part {box} of a picture of {width} x {height} pixels")
    return box


def upright(matrix: bytes) -> tuple[bool, int]:
    """(mirrored, rotation) of FFmpeg's display matrix: left and right are exchanged first, then it is turned counter-clockwise, in degrees.

    Raises Rejected for another matrix: one that turns by no right angle, shears, or stretches.
    """
    values = struct.unpack("=9i", matrix)
    a, b, c, d = (value / 65536 for value in (values[0], values[1], values[3], values[4]))
    if a == b == c == d == 0:
        return False, 0  # some writers leave it empty
    mirrored = a * d - b * c < 0
    right, down = ((-a, -b) if mirrored else (a, b)), (c, d)  # where steps to the right and down go
    long, other = math.hypot(*right), math.hypot(*down)
    turn = round(math.degrees(math.atan2(right[1], right[0])) / 90) % 4  # clockwise
    cosine, sine = ((1, 0), (0, 1), (-1, 0), (0, -1))[turn]
    off = max(
        abs(right[0] - long * cosine),
        abs(right[1] - long * sine),
        abs(down[0] + long * sine),
        abs(down[1] - long * cosine),
    )
    if off > _NEAR * max(long, other):
        rows = f"({a:g} {b:g}, {c:g} {d:g})"
        raise Rejected(
            Reason.UNKNOWN_GEOMETRY, f"its display matrix {rows} does more than mirror and turn by right angles"
        )
    return mirrored, -90 * turn % 360


def stated_light(file: BinaryIO, format: str) -> tuple[int, int] | None:
    """(transfer, primaries) by FFmpeg's numbers that a picture's file states, in an AVIF's `colr` box or a PNG's cICP chunk; None: neither."""
    size = file.seek(0, 2)
    if format == "AVIF":
        for begin, end in _inside(file, 0, size, b"meta"):
            for place in _inside(file, begin + 4, end, b"iprp", b"ipco", b"colr"):
                data = _read(file, *place)
                if data[:4] == b"nclx" and len(data) >= 8:
                    primaries, transfer = struct.unpack_from(">2H", data, 4)
                    return transfer, primaries
    at = 8 if format == "PNG" else size
    while at + 8 <= size:
        length, kind = struct.unpack(">I4s", _read(file, at, at + 8))
        if kind == b"cICP" and length >= 2:
            primaries, transfer = _read(file, at + 8, at + 10)
            return transfer, primaries
        at = size if kind == b"IDAT" else at + 12 + length
    return None


def require_whole(file: BinaryIO, format: str, width: int, height: int) -> None:
    """Raise Rejected for an AVIF of which a part is shown: Pillow gives all of it."""
    size = file.seek(0, 2) if format == "AVIF" else 0
    for begin, end in _inside(file, 0, size, b"meta"):
        for place in _inside(file, begin + 4, end, b"iprp", b"ipco", b"clap"):
            if (box := _clap(_read(file, *place), width, height)) != (0, 0, width, height):
                why = f"it shows the part {box} of a picture of {width} x {height} pixels, and an AVIF is not cut"
                raise Rejected(Reason.UNKNOWN_GEOMETRY, why)


def _iso_aperture(file: BinaryIO, size: int, track: int, width: int, height: int) -> Box | None:
    for begin, end in _inside(file, 0, size, b"moov", b"trak"):
        headers = [_read(file, *place) for place in _inside(file, begin, end, b"tkhd")]
        if not headers or len(headers[0]) < 24:
            continue
        long = headers[0][0] == 1  # times of 64 bits
        if struct.unpack_from(">I", headers[0], 20 if long else 12)[0] != track:
            continue
        for start, stop in _inside(file, begin, end, b"mdia", b"minf", b"stbl", b"stsd"):
            for _, inner, last in _boxes(file, start + 8, stop):
                for place in _inside(file, inner + _SAMPLE_ENTRY, last, b"clap"):
                    return _clap(_read(file, *place), width, height)
    return None


def _clap(data: bytes, width: int, height: int) -> Box:
    """The box of a `clap`: sizes and the offsets of their middle from the picture's, as fractions."""
    if len(data) < 32:
        raise Rejected(Reason.UNKNOWN_GEOMETRY, "its clean aperture is cut short")
    numbers = struct.unpack(">8i", data[:32])
    if min(numbers[1::2]) < 1:
        raise Rejected(Reason.UNKNOWN_GEOMETRY, "its clean aperture has a denominator below 1")
    wide, high, x, y = (Fraction(*numbers[at : at + 2]) for at in range(0, 8, 2))
    left, top = round(x + (width - wide) / 2), round(y + (height - high) / 2)
    return left, top, left + round(wide), top + round(high)


def _inside(file: BinaryIO, begin: int, end: int, *path: bytes) -> Iterator[tuple[int, int]]:
    """Yield where the boxes at the end of a path begin and end, without their headers."""
    for kind, start, stop in _boxes(file, begin, end):
        if kind == path[0]:
            if len(path) == 1:
                yield start, stop
            else:
                yield from _inside(file, start, stop, *path[1:])


def _boxes(file: BinaryIO, begin: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield kind, begin and end of the boxes between two positions, without their headers."""
    while begin + 8 <= end:
        header = _read(file, begin, begin + 16)
        length, kind, skip = struct.unpack(">I", header[:4])[0], header[4:8], 8
        if length == 1 and len(header) == 16:
            length, skip = struct.unpack(">Q", header[8:])[0], 16
        length = length or end - begin
        if length < skip:
            return
        yield kind, begin + skip, min(begin + length, end)
        begin += length


def _matroska_aperture(file: BinaryIO, size: int, number: int, width: int, height: int) -> Box | None:
    videos = [
        place
        for track in _elements_at(file, 0, size, _SEGMENT, _TRACKS, _TRACK)
        for place in _elements_at(file, *track, _VIDEO)
    ]
    crops = [0, 0, 0, 0]
    for name, begin, end in _elements(file, *videos[number]) if number < len(videos) else ():
        if name in _CROPS:
            crops[_CROPS[name]] = int.from_bytes(_read(file, begin, end), "big")
    return crops[0], crops[1], width - crops[2], height - crops[3]


def _elements_at(file: BinaryIO, begin: int, end: int, *path: int) -> Iterator[tuple[int, int]]:
    """Yield where the elements at the end of a path begin and end, without their headers."""
    for name, start, stop in _elements(file, begin, end):
        if name == path[0]:
            if len(path) == 1:
                yield start, stop
            else:
                yield from _elements_at(file, start, stop, *path[1:])
            if name in (_SEGMENT, _TRACKS):
                return  # tracks are described once


def _elements(file: BinaryIO, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield name, begin and end of the EBML elements between two positions, without their headers; one of unknown length ends there."""
    while begin < end:
        head = _read(file, begin, begin + 12)
        count = 9 - head[0].bit_length() if head and head[0] else 5
        if count > 4 or len(head) <= count:
            return
        length, start = vint(head[count:], begin + count)
        stop = end if length is None else min(end, start + length)
        yield int.from_bytes(head[:count], "big"), start, stop
        begin = stop


def _read(file: BinaryIO, begin: int, end: int) -> bytes:
    file.seek(begin)
    return file.read(min(end - begin, _LONGEST))
