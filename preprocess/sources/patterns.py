"""Expand the `path` of a source: braces, several sets behind `::`, and `*`, on disk and in remote stores."""

from __future__ import annotations

import glob
import math
import os
import re
from collections.abc import Sequence

from braceexpand import braceexpand

from mmspeed.config.places import absent_hint, is_url
from mmspeed.data.cache.stores import attempt, open_store, protocol_of
from mmspeed.errors import UserError
from mmspeed.preprocess.sources.remote_listing import reachable

MOST_NAMES = 1_000_000  # that braces may stand for


def expand(place: str) -> list[str]:
    """The files or the folder that a source names, in order. Raises UserError if one does not exist, or there are none."""
    if not is_url(place) and os.path.exists(place):
        return [place]
    return [path for part in place.split("::") for name in _braces(part) for path in _wildcard(name)]


def _braces(place: str) -> Sequence[str]:
    """The names that braces stand for, as in a shell and in webdataset: `{000000..000099}`, `{a,b}`."""
    if "{" not in place or (not is_url(place) and os.path.exists(place)):
        return [place]
    ranges = re.findall(r"\{(-?\d{1,18})\.\.(-?\d{1,18})", place)
    if math.prod(abs(int(last) - int(first)) + 1 for first, last in ranges) > MOST_NAMES:  # the package makes them all
        raise UserError(f"data.sources: {place} stands for more than {MOST_NAMES} names")
    try:
        names = list(braceexpand(place))
    except ValueError:
        raise UserError(f"data.sources: {place} has a brace without its partner") from None
    absent = [name for name in names if not is_url(name) and "*" not in name and not os.path.exists(name)]
    if absent:
        raise UserError(
            f"data.sources: {absent[0]} does not exist ({len(absent)} of the {len(names)} files of {place})"
        )
    return names


def _wildcard(place: str) -> list[str]:
    """The names that match; `*` is the only wildcard. Remote addresses without one are taken as they are."""
    if not is_url(place):
        if os.path.exists(place):
            return [place]
        pattern = "*".join(glob.escape(part) for part in place.split("*"))
        paths = sorted(glob.glob(pattern)) if "*" in place else []
        if not paths:
            raise UserError(f"data.sources: {place} {absent_hint(place)}")
        return paths
    if "*" not in place:
        return [place]
    if protocol_of(place) in ("http", "https"):
        raise UserError(
            f"data.sources: {place}: folders cannot be listed over http, so * finds nothing; write {{0000..0099}}"
        )
    filesystem, path = open_store(place)
    with reachable(place):
        filesystem.invalidate_cache()
        escaped = "".join(f"[{letter}]" if letter in "[?" else letter for letter in path)
        matches = sorted(attempt(lambda: filesystem.glob(escaped)))
    if not matches:
        raise UserError(f"data.sources: {place} matches no file")
    return [filesystem.unstrip_protocol(name) for name in matches]
