"""The recipe of a cache: its content ids, and the rules of its pixels, by which additions match what is there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mmspeed.config import Config
from mmspeed.config.places import is_url
from mmspeed.data.cache.tables import check_recipe
from mmspeed.media.pixel_rules import PixelRules
from mmspeed.media.source import Source
from mmspeed.preprocess.sources.contents import ContentIds


@dataclass(frozen=True)
class Recipe:
    """The facts of a cache that select and read the clips of its sources."""

    contents: ContentIds
    rules: PixelRules

    @classmethod
    def of(
        cls, config: Config, listed: Sequence[Source] = (), builds: bool = False, root: Path | None = None
    ) -> Recipe:
        """The recipe of the config's cache. `root`: its folder, if it is not the config's.

        `listed` are all sources of the config; `builds`: for a build, which reads large files and records their hashes. Raises UserError
        like `check_recipe`; nothing is added to a cache at a URL, and none is asked of.
        """
        if builds and not is_url(config.data.cache):
            check_recipe(config.cache_dir)
        contents = ContentIds(root or config.cache_dir, config.preprocess.full_hash, listed, builds, builds)
        return cls(contents, PixelRules.of(config.data))
