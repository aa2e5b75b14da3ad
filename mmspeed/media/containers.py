"""Inspect the first bytes and the boxes of a file to detect its reader, pickles, and a missing end.

Decoders do not report many cut files, but the formats state their length: ISO base media (mp4, mov) in
its boxes, Matroska (webm, mkv) in its segment, AVI in its RIFF header.

Reading a pickle runs code, so none is ever opened.
"""

from __future__ import annotations

import os
import struct
from typing import BinaryIO

HEAD_BYTES = 512  # enough of a file to identify it
PLAIN_HEAD_BYTES = 4096
DEMUXERS = (
    "mov", "mp4", "m4a", "3gp", "3g2", "mj2", "matroska", "webm", "avi", "mpegts", "mpeg", "mpegvideo", "flv", "asf",
    "ogg", "mxf", "dv", "ivf", "nut", "yuv4mpegpipe", "h264", "hevc", "obu", "wtv", "mp3", "wav", "flac", "aac",
)  # fmt: skip
ISO_STARTS = (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip", b"pnot")
_ISO_BOXES = frozenset(ISO_STARTS) | {b"moof", b"mfra", b"sidx", b"styp", b"uuid", b"meta", b"udta", b"emsg", b"ssix"}
_PICKLE_ENDINGS = frozenset(".pkl .pickle .pt .pth .ckpt .joblib .dill .p".split())
EBML, _SEGMENT = b"\x1a\x45\xdf\xa3", b"\x18\x53\x80\x67"


def is_picture(head: bytes) -> bool:
    """True if Pillow reads a file with these first bytes: stills, and the animations that video decoders do not read."""
    return (
        head.startswith((b"\x89PNG\r\n", b"\xff\xd8\xff", b"GIF87a", b"GIF89a", b"II*\0", b"MM\0*"))
        or (head[:4] == b"RIFF" and head[8:12] == b"WEBP")
        or (head[:2] == b"BM" and head[6:10] == b"\0\0\0\0")
        or (head[4:8] == b"ftyp" and head[8:12] in (b"avif", b"avis"))
    )


def is_plain_container(head: bytes) -> bool:
    """True if a file begins as an ISO, Matroska, AVI or FLV file, and not as a playlist too.

    Libraries that cannot be limited to such containers would follow a playlist to other files. `head` is of `PLAIN_HEAD_BYTES`.
    """
    media = (
        head[4:8] in ISO_STARTS
        or head.startswith((EBML, b"FLV\x01"))
        or (head[:4] == b"RIFF" and head[8:12] == b"AVI ")
    )
    return media and b"<mpd" not in head.lower()


def is_pickle(name: str, head: bytes = b"") -> bool:
    """True if a file is a pickle, or holds one: by its ending, or by its first bytes if they are given.

    Detected are bare pickles (protocol 2 and later), zips whose first file is one (what torch writes), and NumPy arrays of objects.
    """
    return os.path.splitext(name)[1].lower() in _PICKLE_ENDINGS or holds_pickle(head)


def holds_pickle(head: bytes) -> bool:
    """True if the first bytes of a file are a pickle's, or those of a zip or a NumPy array that holds one."""
    if head[:1] == b"\x80" and head[1:2] in (b"\2", b"\3", b"\4", b"\5"):
        # A framed pickle states its frame; an older one continues with an opcode, which is a printable character.
        return head[2:3] == b"\x95" or 0x20 <= (head[2:3] or b"\0")[0] < 0x7F or head[2:3] in (b"\x8a", b"\x8c")
    if head.startswith(b"PK\x03\x04"):
        length = int.from_bytes(head[26:28], "little")
        return head[30 : 30 + length].endswith(b".pkl")
    return head.startswith(b"\x93NUMPY") and (b"'|O" in head or b"'O" in head)


def structural_cut(file: BinaryIO, head: bytes, size: int) -> str:
    """A sentence about the missing end of a file of `size` bytes, by its own declaration; empty if it is complete."""
    if head[4:8] in ISO_STARTS:
        return _iso_cut(file, size)
    if head.startswith(EBML):
        return _matroska_cut(file, size)
    if head[:4] == b"RIFF" and head[8:12] == b"AVI ":
        declared = struct.unpack("<I", head[4:8])[0] + 8
        return _missing(declared, size) if 8 < declared < 0xFFFFFFFF and declared > size else ""
    return ""


def _missing(declared: int, size: int) -> str:
    return f"it holds {size} of the {declared} bytes that it declares"


def _iso_cut(file: BinaryIO, size: int) -> str:
    """Check the top-level boxes. Their sizes include their headers; 1 stands for a 64-bit size, 0 for all the rest."""
    at, has_index = 0, False
    while at + 8 <= size:
        file.seek(at)
        header = file.read(16)
        length, kind = struct.unpack(">I", header[:4])[0], header[4:8]
        if length == 1 and len(header) == 16:
            length = struct.unpack(">Q", header[8:16])[0]
        elif length == 0:
            length = size - at
        if kind not in _ISO_BOXES or length < 8:
            break  # data that some devices write after the last box
        if at + length > size:
            return _missing(at + length, size)
        has_index = has_index or kind in (b"moov", b"moof")
        at += length
    return "" if has_index else "its index (moov) is missing, as in an unfinished recording"


def _matroska_cut(file: BinaryIO, size: int) -> str:
    file.seek(4)
    length, at = vint(file.read(8), 4)
    if length is None:
        return ""
    file.seek(at + length)
    head = file.read(12)
    if head[:4] != _SEGMENT:
        return "" if len(head) == 12 else "it ends in its header"
    segment, start = vint(head[4:], at + length + 4)
    return _missing(start + segment, size) if segment is not None and start + segment > size else ""


def vint(data: bytes, at: int) -> tuple[int | None, int]:
    """An EBML length at position `at` and the position after it; None for `unknown` (all ones) and for damage."""
    if not data or not data[0]:
        return None, at
    count = 9 - data[0].bit_length()
    if len(data) < count:
        return None, at
    mask = (1 << 7 * count) - 1
    value = int.from_bytes(data[:count], "big") & mask
    return (None if value == mask else value), at + count
