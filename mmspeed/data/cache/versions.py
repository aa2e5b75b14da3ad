"""The version of each property of a cache's recipe, by which pixels and keys are made: another one is another cache."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mmspeed import rng
from mmspeed.errors import UserError

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
    "generator": rng.VERSION,
}


def check_versions(versions: Mapping[str, int], root: str | Path) -> None:
    """Raise UserError if the cache at `root` records another version of a property than this mmspeed has."""
    for name, version in sorted(versions.items()):
        if VERSIONS.get(name) != version:
            raise UserError(
                f"cache {root} was made by another mmspeed ({name} {version}): name another folder under data.cache and run "
                "mmspeed preprocess"
            )
