"""What a cache is made from: the record of a listing, by which it is seen that sources have changed since."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable

from mmspeed.config.places import base_name
from mmspeed.config.schema import DataConfig
from mmspeed.data.cache.keys import digest
from mmspeed.data.cache.made_from import ListedSource, MadeFrom, digest_of_words
from mmspeed.errors import UserError
from mmspeed.media.rejections import in_words
from mmspeed.media.source import Source
from mmspeed.preprocess.sources.discover import list_sources
from mmspeed.preprocess.sources.listing import LateError, SourceListing

LISTING_SECONDS = 30.0  # of a listing that is only compared: other processes wait for it


def made_from(sources: Iterable[Source]) -> MadeFrom:
    """The record of listed sources."""
    return MadeFrom.of(
        ListedSource(one.name, *_states(one), digest_of_words(one.captions, one.split, one.dataset, *_paths(one)))
        for one in sources
    )


def _paths(source: Source) -> list[tuple[str, str]]:
    return [(role, base_name(other.path)) for role, other in source.roles]


def _states(source: Source) -> tuple[int, int]:
    """`state_of` all files of a source together."""
    sizes, changes = zip(*map(state_of, source.files), strict=True)
    return -1 if -1 in sizes else sum(sizes), max(changes)


def listed_now(data: DataConfig, seconds: float = LISTING_SECONDS) -> MadeFrom:
    """The record of a config's sources as they are now; no medium is opened.

    Raises UserError like `list_sources`, and where that takes longer; a store that does not answer is left alone then.
    """
    found: list[SourceListing] = []
    errors: list[Exception] = []
    deadline = time.monotonic() + seconds

    def work() -> None:
        try:
            found.append(list_sources(data, deadline))
        except Exception as error:  # raised below, in the thread that waits
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True)  # it ends at the first source after the deadline
    thread.start()
    thread.join(seconds)
    if errors and not isinstance(errors[0], LateError):
        error = errors[0]
        raise UserError(f"{error.filename}: {in_words(error)}") if isinstance(error, OSError) else error
    if not found:
        raise UserError(f"listing them takes longer than {seconds:g} s")
    return made_from(found[0].sources)


def state_of(source: Source) -> tuple[int, int]:
    """Bytes of a source and the modification time of its file in nanoseconds, or a number of its state; -1 if they are unknown."""
    if source.remote is not None:
        size = source.remote.size if source.size is None else source.size
        state = source.remote.checksum or source.remote.tag
        return -1 if size is None else size, int(digest(state.encode())[:15], 16)
    try:
        on_disk = os.stat(source.path)
    except (OSError, ValueError):
        return -1, -1
    return on_disk.st_size if source.size is None else source.size, on_disk.st_mtime_ns
