"""Versions of the properties of a cache's recipe: an old cache goes on with its own until it is upgraded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmspeed.errors import UserError

from .tables import read_info

# The versions of new caches. A cache whose `cache.json` lacks a property has its version 1.
VERSIONS: Mapping[str, int] = {
    "alpha": 2,  # of videos: 1 dropped, 2 composed on data.background
    "chroma": 2,  # 1 centred and cut at whole samples, 2 where the stream sites it
    "content": 2,  # 1 equal samples of large files are one content, 2 their whole-file hashes are compared
    "untagged": 2,  # 1 BT.601 always, 2 BT.709 from 720 lines on
}


def info_versions(info: Mapping[str, Any]) -> dict[str, int]:
    """The versions in the content of a `cache.json`. Raises UserError for one that this mmspeed does not know."""
    recorded = info.get("versions", {})
    versions = {name: recorded.get(name, 1) for name in VERSIONS}
    for name, version in versions.items():
        if version not in range(1, VERSIONS[name] + 1):
            raise UserError(
                f"the cache has version {version} of {name}, this mmspeed knows {VERSIONS[name]}: install a newer mmspeed"
            )
    return versions


def cache_versions(root: Path) -> dict[str, int]:
    """The versions of the cache at `root`; those of new caches if it has no `cache.json` yet. Raises UserError like `read_info`."""
    return info_versions(read_info(root)) if (root / "cache.json").exists() else dict(VERSIONS)


def upgraded(versions: Mapping[str, int], names: Sequence[str]) -> dict[str, int]:
    """`versions` with the properties `names` at the version of new caches. Raises UserError for a property that there is not."""
    for name in names:
        if name not in VERSIONS:
            raise UserError(f"--upgrade {name}: there is no such property (only: {', '.join(sorted(VERSIONS))})")
    return {**versions, **{name: VERSIONS[name] for name in names}}
