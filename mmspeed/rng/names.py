"""Hashes of names."""

from __future__ import annotations

import hashlib
import json


def key64(*names: object) -> int:
    """A 63-bit integer that depends on every name and on their order. Names are ints, floats, strings or None."""
    text = "\x1f".join(f"{type(name).__name__}:{name}" for name in names)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def name_digest(*names: object) -> bytes:
    """The SHA-256 (32 bytes) of names as a JSON array, so that different names never meet in one text.

    Names are ints, floats, strings, bools or None, and lists of them; raises TypeError for another type.
    """
    return hashlib.sha256(json.dumps(names, separators=(",", ":")).encode()).digest()
