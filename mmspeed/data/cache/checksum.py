"""Seals: a file that carries the SHA-256 of itself, so that any changed byte of it shows.

A seal is a mark and 64 hexadecimal digits: the digest of the file with zeros in place of the digits. The last mark of a file counts,
and others with the same digits (Arrow writes its metadata twice); marks in what users wrote, such as captions, do not.
"""

from __future__ import annotations

import hashlib
import re

_MARK = b"mmspeed-sha256:"
_ZEROS = b"0" * 64
BLANK = (_MARK + _ZEROS).decode()  # what is written where the seal is to stand
_SEAL = re.compile(re.escape(_MARK) + rb"([0-9a-f]{64})")


def seal(data: bytes) -> bytes:
    """`data` with its last `BLANK` turned into its seal. Raises ValueError when there is none."""
    at = data.rfind(BLANK.encode())
    if at < 0:
        raise ValueError("there is no place for a seal")
    place = at + len(_MARK)
    return data[:place] + hashlib.sha256(data).hexdigest().encode() + data[place + len(_ZEROS) :]


def is_sealed(data: bytes) -> bool:
    """Whether `data` carries a seal that is its own."""
    found = [match[1] for match in _SEAL.finditer(data)]
    if not found:
        return False
    blank = data.replace(_MARK + found[-1], _MARK + _ZEROS)
    return hashlib.sha256(blank).hexdigest().encode() == found[-1]
