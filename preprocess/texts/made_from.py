"""What a text cache is made from: the record of its files, by which it is seen that they have changed since."""

from __future__ import annotations

import os
from collections.abc import Iterator

from mmspeed.config.texts import TextsConfig
from mmspeed.data.cache.made_from import ListedSource, MadeFrom
from mmspeed.preprocess.texts.sources import files_of


def texts_now(texts: TextsConfig) -> MadeFrom:
    """The record of the sources' files as they are now; none is opened. Raises UserError for a source without files."""
    return MadeFrom.of(_files(texts))


def _files(texts: TextsConfig) -> Iterator[ListedSource]:
    for source, name in zip(texts.sources, texts.source_names, strict=True):
        for file in files_of(source):
            state = os.stat(file)
            place = os.path.relpath(file, os.path.dirname(os.path.expanduser(source.path).rstrip("/")))
            shown = place.encode("utf-8", "backslashreplace").decode()
            yield ListedSource(f"{name}: {shown}", state.st_size, state.st_mtime_ns)
