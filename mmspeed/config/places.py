"""Where a dataset cache may lie: a folder, or a URL of another machine's store with a folder here that holds what was fetched."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def is_url(place: str | Path) -> bool:
    """Whether a cache lies behind a URL such as `s3://bucket/my-set`, and not in a folder."""
    return not isinstance(place, Path) and "://" in place


def mirror_folder(url: str, base: str | Path | None = None) -> Path:
    """The local folder for what is fetched of a remote cache: under `base`, else $MMSPEED_CACHE, else `~/.cache/mmspeed`."""
    chosen = base or os.environ.get("MMSPEED_CACHE") or "~/.cache/mmspeed"
    return Path(chosen).expanduser() / hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:32]
