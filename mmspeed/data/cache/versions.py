"""Versions of the properties of a cache's recipe: a cache goes on with its own until it is upgraded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmspeed import rng
from mmspeed.errors import UserError

# The versions of new caches. A cache whose `cache.json` lacks a property has its version 1.
VERSIONS: Mapping[str, int] = {
    "alpha": 2,
    "chroma": 2,
    "content": 2,
    "untagged": 2,
    "cover": 2,  # the first picture of an animated PNG that is no part of it
    "depth": 2,  # pictures of floating-point or 32-bit numbers
    "fields": 2,  # interlaced video
    "geometry": 2,  # mirrored by the display matrix, cut by a clean aperture
    "hdr": 2,  # PQ, HLG, linear light, wide primaries
    "order": 2,  # frames whose stamps contradict their order
    "profile": 2,  # pictures with an ICC profile
}
# The oldest versions whose rules this mmspeed still has; of a property that is not named, 1.
OLDEST: Mapping[str, int] = {"alpha": 2, "chroma": 2, "content": 2, "generator": rng.VERSION, "untagged": 2}


def check_versions(versions: Mapping[str, int], root: str | Path) -> None:
    """Raise UserError if the cache at `root` goes by a rule that this mmspeed no longer has."""
    for name, version in sorted(versions.items()):
        if version < OLDEST.get(name, 1):
            raise UserError(
                f"cache {root} was made by an earlier mmspeed ({name} {version}): name another folder under data.cache and run "
                "mmspeed preprocess"
            )


def info_versions(info: Mapping[str, Any], root: str | Path) -> dict[str, int]:
    """The versions in the content of the `cache.json` at `root`. Raises UserError for one that this mmspeed does not have."""
    newest = {**VERSIONS, "generator": rng.VERSION}
    versions: dict[str, int] = {**dict.fromkeys(newest, 1), **info.get("versions", {})}
    check_versions(versions, root)
    for name, version in newest.items():
        if versions[name] > version:
            raise UserError(
                f"cache {root} has version {versions[name]} of {name}, this mmspeed knows {version}: install a newer mmspeed"
            )
    return {name: versions[name] for name in VERSIONS}


def upgraded(versions: Mapping[str, int], names: Sequence[str]) -> dict[str, int]:
    """`versions` with the properties `names` at the version of new caches. Raises UserError for a property that there is not."""
    for name in names:
        if name not in VERSIONS:
            raise UserError(f"--upgrade {name}: there is no such property (only: {', '.join(sorted(VERSIONS))})")
    return {**versions, **{name: VERSIONS[name] for name in names}}
