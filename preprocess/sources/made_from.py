"""What a cache is made from: the record of a listing, by which it is seen that sources have changed since."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

from mmspeed.config.places import is_url
from mmspeed.config.schema import DataConfig
from mmspeed.data.cache.keys import digest
from mmspeed.data.cache.made_from import ListedSource, MadeFrom, digest_of_words
from mmspeed.errors import UserError
from mmspeed.preprocess.sources.discover import list_sources
from mmspeed.preprocess.sources.source import Source

REMOTE_SECONDS = 30.0  # a listing of stores takes at most, where it is only compared

Result = TypeVar("Result")


def made_from(sources: Iterable[Source]) -> MadeFrom:
    """The record of listed sources."""
    return MadeFrom.of(
        ListedSource(one.name, *state_of(one), digest_of_words(one.captions, one.split, one.dataset)) for one in sources
    )


def listed_now(data: DataConfig, seconds: float = REMOTE_SECONDS) -> MadeFrom:
    """The record of a config's sources as they are now; no medium is opened. Raises UserError like `list_sources`, and for slow stores."""
    remote = any(is_url(source.path) for source in data.sources)
    return made_from(within(seconds if remote else None, lambda: list_sources(data)).sources)


def within(seconds: float | None, action: Callable[[], Result]) -> Result:
    """The result of `action`. Raises what it raises, and UserError where it takes longer; it is left alone then."""
    if seconds is None:
        return action()
    results: list[Result] = []
    errors: list[Exception] = []

    def work() -> None:
        try:
            results.append(action())
        except Exception as error:  # raised below, in the thread that waits
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True)  # no thread can be ended
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise UserError(f"listing them takes longer than {seconds:g} s")
    return results[0]


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
