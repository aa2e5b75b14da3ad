"""Seals: a file that carries the SHA-256 of itself, so that any changed byte of it shows.

A seal is a mark and 64 hexadecimal digits somewhere in the file. The digest is that of the file with zeros in place of the
digits. It may stand in a file several times (Arrow writes its metadata twice); all places hold the same digits.
"""

from __future__ import annotations

import hashlib
import re

_MARK = b"mmspeed-sha256:"
_ZEROS = b"0" * 64
BLANK = (_MARK + _ZEROS).decode()  # what is written where the seal is to stand
_SEAL = re.compile(re.escape(_MARK) + rb"([0-9a-f]{64})")


def seal(data: bytes) -> bytes:
    """`data` with every `BLANK` in it turned into its seal. Raises ValueError when there is none."""
    if BLANK.encode() not in data:
        raise ValueError("there is no place for a seal")
    return data.replace(BLANK.encode(), _MARK + hashlib.sha256(data).hexdigest().encode())


def is_sealed(data: bytes) -> bool:
    """Whether `data` carries a seal that is its own."""
    found = {match[1] for match in _SEAL.finditer(data)}
    if len(found) != 1:
        return False
    digits = found.pop()
    blank = data.replace(_MARK + digits, _MARK + _ZEROS)
    return hashlib.sha256(blank).hexdigest().encode() == digits
