"""Keys of cache entries and of samples, derived from their content (law 5), as pure functions."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

KEY_LENGTH = 32
_KEY_TYPE = np.dtype(f"S{KEY_LENGTH // 2}")
_KEY = re.compile(rf"[0-9a-f]{{{KEY_LENGTH}}}")


def canonical_json(value: Any) -> str:
    """The canonical JSON text of a value: sorted names, no spaces, tuples as lists.

    Raises TypeError for types that JSON lacks (also for names that are not strings: JSON would make 1 and "1" one
    name) and ValueError for numbers that are not finite.
    """
    _check_names(value)
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _check_names(value: Any) -> None:
    if isinstance(value, Mapping):
        for name, item in value.items():
            if not isinstance(name, str):
                raise TypeError(f"names in JSON are strings, not {name!r}")
            _check_names(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _check_names(item)


def digest(data: bytes) -> str:
    """The first 32 hexadecimal digits of SHA-256: the checksum of a payload, and the form of every key."""
    return hashlib.sha256(data).hexdigest()[:KEY_LENGTH]


def entry_key(parts: Mapping[str, Any]) -> str:
    """The key of a cache entry: a digest of the canonical JSON of everything that the entry depends on.

    Two entries whose `parts` differ anywhere have different keys; the order of the parts does not matter.
    """
    return digest(canonical_json(dict(parts)).encode("utf-8", "surrogatepass"))


class KeySet:
    """A set of keys, most of them known at construction: those take 16 bytes each in a sorted array, the rest a few objects."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        raw = b"".join(map(bytes.fromhex, keys))
        self._sorted = np.sort(np.frombuffer(raw, _KEY_TYPE))
        self._added: set[str] = set()
        self._gone: set[str] = set()

    def __contains__(self, key: str) -> bool:
        if key in self._added:
            return True
        key_row = np.frombuffer(bytes.fromhex(key), _KEY_TYPE)
        index = int(np.searchsorted(self._sorted, key_row)[0])
        return index < len(self._sorted) and self._sorted[index] == key_row[0] and key not in self._gone

    def add(self, key: str) -> None:
        self._added.add(key)
        self._gone.discard(key)

    def discard(self, key: str) -> None:
        self._added.discard(key)
        self._gone.add(key)


def is_key(text: str) -> bool:
    """True if `text` has the form of an entry's key."""
    return _KEY.fullmatch(text) is not None


def sample_key(
    latent_keys: Sequence[str], text_keys: Sequence[str], roles: Mapping[str, Sequence[str]] | None = None
) -> str:
    """The key of a sample, from its latents, its captions and those of further roles in order; file name and split do not count."""
    others = {"roles": {role: list(keys) for role, keys in roles.items()}} if roles else {}
    return entry_key({"latents": list(latent_keys), "texts": list(text_keys), **others})


def number_duplicates(keys: Iterable[str]) -> list[str]:
    """The keys in their order, made distinct: the second sample of one content is `<key>-1`, the third `<key>-2`."""
    counts: dict[str, int] = {}
    numbered = []
    for key in keys:
        count = counts.get(key, 0)
        counts[key] = count + 1
        numbered.append(f"{key}-{count}" if count else key)
    return numbered
