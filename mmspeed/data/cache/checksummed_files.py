"""Seals of files too large to hold twice in memory: checked and set through a mapping, in pieces. See checksum.py."""

from __future__ import annotations

import hashlib
import mmap
import os
from pathlib import Path

from .checksum import BLANK

_DIGITS = 64
_MARK = BLANK[:-_DIGITS].encode()
_PIECE = 1 << 24


def sealed_file(path: Path) -> bool:
    """Whether a file carries a seal that is its own, as `is_sealed` of its bytes. Raises OSError."""
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            return False
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            places = _places(data)
            if not places:
                return False
            digits = data[places[-1] : places[-1] + _DIGITS]
            return _digest(data, [place for place in places if data[place : place + _DIGITS] == digits]) == digits


def seal_file(path: Path) -> None:
    """Turn the first and the last `BLANK` of a file, where Arrow has its metadata, into its seal. Raises ValueError without one."""
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_WRITE) as data:
        places = [place for place in _places(data) if data[place : place + _DIGITS] == b"0" * _DIGITS]
        if not places:
            raise ValueError("there is no place for a seal")
        # Others, in what users wrote, stay as they are: they read as zeros before and after.
        digits = _digest(data, places)
        for place in (places[0], places[-1]):
            data[place : place + _DIGITS] = digits


def _places(data: mmap.mmap) -> list[int]:
    """Where the digits of seals stand."""
    places, at = [], data.find(_MARK)
    while at >= 0:
        place = at + len(_MARK)
        digits = data[place : place + _DIGITS]
        if len(digits) == _DIGITS and all(digit in b"0123456789abcdef" for digit in digits):
            places.append(place)
        at = data.find(_MARK, place)
    return places


def _digest(data: mmap.mmap, places: list[int]) -> bytes:
    """Hexadecimal digest of the file with zeros in place of the digits."""
    result, at = hashlib.sha256(), 0
    with memoryview(data) as view:
        for place in [*places, len(data)]:
            while at < place:
                end = min(place, at + _PIECE)
                with view[at:end] as piece:
                    result.update(piece)
                at = end
            if place < len(data):
                result.update(b"0" * _DIGITS)
                at = place + _DIGITS
    return result.hexdigest().encode()
