"""The listing of a source by itself, for processes that are to import little."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mmspeed.config.schema import DataConfig
from mmspeed.preprocess.sources.discover import SourceListing, list_sources

BUCKETS = [{"frames": 9, "height": 32, "width": 48}]


def listed(
    path: Path | str,
    limit: int | None = None,
    max_caption_chars: int = 4096,
    caption_encoding: str | None = None,
    **options: Any,
) -> SourceListing:
    """The listing of one source."""
    source = {"path": str(path), **options}
    data = {"sources": [source], "buckets": BUCKETS, "limit": limit, "max_caption_chars": max_caption_chars}
    data["caption_encoding"] = caption_encoding
    return list_sources(DataConfig(**data))
