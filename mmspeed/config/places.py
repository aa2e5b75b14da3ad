"""Locations: of a dataset cache, a local folder or the URL of a remote store with a local folder for fetched files; of runs."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from mmspeed.errors import UserError

_REMOTE = re.compile(r"[A-Za-z][A-Za-z0-9+]+:/")


def require_run(root: str | Path) -> Path:
    """The folder of an existing run. Raises UserError when there is none."""
    folder = Path(root)
    if folder.is_file():
        raise UserError(
            f"{root} is no run: `mmspeed train {root}` makes one; give its folder, such as runs/{folder.stem}"
        )
    if not folder.is_dir():
        raise UserError(f"{root}: no such run; `mmspeed train CONFIG` makes one")
    if not (folder / "config.yaml").exists():
        raise UserError(f"{root} is not a run folder: it has no config.yaml")
    return folder


def is_url(place: str | Path) -> bool:
    """True if a cache's location is a URL such as `s3://bucket/my-set`, not a folder."""
    return not isinstance(place, Path) and "://" in place


def base_name(place: str) -> str:
    """The last part of a path or URL, without a web address's query, which may hold a token."""
    path = re.split(r"[?#]", place, maxsplit=1)[0] if place.lower().startswith(("http://", "https://")) else place
    return path.rstrip("/").rpartition("/")[2] or place


def absolute_places(base: Path, places: str) -> str:
    """The path of a source, each set of it between `::` taken from `base`; URLs stay as they are."""
    sets = places.split("::")
    return "::".join(place if is_url(place) else str(base / Path(place).expanduser()) for place in sets)


def mirror_folder(url: str, base: str | Path | None = None) -> Path:
    """The local folder for the fetched files of a remote cache: under `base`, else $MMSPEED_CACHE, else `~/.cache/mmspeed`."""
    parent = base or os.environ.get("MMSPEED_CACHE") or "~/.cache/mmspeed"
    return Path(parent).expanduser() / hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:32]


def store_folder() -> Path:
    """The local folder in which fetched media are kept: under $MMSPEED_CACHE, else `~/.cache/mmspeed`."""
    return Path(os.environ.get("MMSPEED_CACHE") or "~/.cache/mmspeed").expanduser() / "media"


def absent_hint(path: str | Path) -> str:
    """Advice about media at a path where nothing is: a URL that lost a slash, and what looks like a hub id."""
    if _REMOTE.match(str(path)):
        return f"is a path, not an address; write {str(path).replace(':/', '://', 1)}, as text"
    folder = Path(path)
    if not folder.suffix and not folder.parent.exists() and folder.parent.parent.is_dir():
        name = "/".join(folder.parts[-2:])
        return (
            f"does not exist; correct the path, or, if it is an id on the hub, name hf://datasets/{name}, or download it: "
            f"`hf download --repo-type dataset {name} --local-dir {folder.name}`"
        )
    return "does not exist; correct the path"
