"""Seals: a file that contains its own SHA-256, so that any changed byte is detected.

A seal is a mark and 64 hexadecimal digits: the digest of the file with zeros in place of the digits. The last mark of a file counts,
and others with the same digits (Arrow writes its metadata twice); marks inside user data, such as captions, do not.

Files too large to hold twice in memory are checked and sealed through a mapping, in pieces.
"""

from __future__ import annotations

import hashlib
import mmap
import re
import threading
from contextlib import suppress
from pathlib import Path

_MARK = b"mmspeed-sha256:"
_DIGITS = 64
_ZEROS = b"0" * _DIGITS
BLANK = (_MARK + _ZEROS).decode()  # placeholder for the seal
_SEAL = re.compile(re.escape(_MARK) + rb"([0-9a-f]{64})")
_PIECE = 1 << 24


def seal(data: bytes) -> bytes:
    """`data` with its last `BLANK` replaced by the seal. Raises ValueError if there is no `BLANK`."""
    at = data.rfind(BLANK.encode())
    if at < 0:
        raise ValueError("there is no place for a seal")
    place = at + len(_MARK)
    return data[:place] + hashlib.sha256(data).hexdigest().encode() + data[place + len(_ZEROS) :]


def is_sealed(data: bytes) -> bool:
    """True if `data` has a seal that matches it."""
    digests = [match[1] for match in _SEAL.finditer(data)]
    if not digests:
        return False
    blank = data.replace(_MARK + digests[-1], _MARK + _ZEROS)
    return hashlib.sha256(blank).hexdigest().encode() == digests[-1]


def sealed_file(path: Path) -> bool:
    """True if a file has a seal that matches it, like `is_sealed` of its bytes. Raises OSError."""
    if path.stat().st_size == 0:
        return False
    with map_file(path) as data:
        return sealed_map(data)


def map_file(path: Path) -> mmap.mmap:
    """The bytes of a file, mapped to be read. Raises OSError, and ValueError for an empty file."""
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def is_cut(data: mmap.mmap | None) -> bool:
    """True if a file has become shorter than its mapping: touching a page that was cut off would kill the process."""
    return data is not None and data.size() < len(data)


def sealed_map(data: mmap.mmap) -> bool:
    """True if a mapped file has a seal that matches it, and was not cut since."""
    places = [] if is_cut(data) else _places(data)
    if not places:
        return False
    digits = data[places[-1] : places[-1] + _DIGITS]
    return _digest(data, [place for place in places if data[place : place + _DIGITS] == digits]) == digits


class LaterSeal:
    """The seal of a file too large to be compared at once: a thread does it from now on. Raises OSError."""

    def __init__(self, path: Path) -> None:
        self.path, self._data = path, map_file(path)  # whatever has its name later
        self._intact: bool | None = None
        self._thread = threading.Thread(target=self._compare, name="mmspeed-seal", daemon=True)
        self._thread.start()

    def intact(self) -> bool:
        """True if the seal matches, as `sealed_file`; waits for the thread. Raises OSError."""
        self._thread.join()
        return sealed_map(self._data) if self._intact is None else self._intact  # a forked process has no thread

    def _compare(self) -> None:
        with suppress(OSError):
            self._intact = sealed_map(self._data)


def seal_file(path: Path) -> None:
    """Replace the first and the last `BLANK` of a file (Arrow writes its metadata twice) by its seal. Raises ValueError without one."""
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_WRITE) as data:
        places = [place for place in _places(data) if data[place : place + _DIGITS] == _ZEROS]
        if not places:
            raise ValueError("there is no place for a seal")
        # Blanks in user data stay: they are zeros both before and after.
        digits = _digest(data, places)
        for place in (places[0], places[-1]):
            data[place : place + _DIGITS] = digits


def _places(data: mmap.mmap) -> list[int]:
    """The offsets of the digits of all seals."""
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
                result.update(_ZEROS)
                at = place + _DIGITS
    return result.hexdigest().encode()
