"""Locations of a dataset cache: a local folder, or the URL of a remote store with a local folder for fetched files."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def is_url(place: str | Path) -> bool:
    """True if a cache's location is a URL such as `s3://bucket/my-set`, not a folder."""
    return not isinstance(place, Path) and "://" in place


def mirror_folder(url: str, base: str | Path | None = None) -> Path:
    """The local folder for the fetched files of a remote cache: under `base`, else $MMSPEED_CACHE, else `~/.cache/mmspeed`."""
    parent = base or os.environ.get("MMSPEED_CACHE") or "~/.cache/mmspeed"
    return Path(parent).expanduser() / hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:32]
