"""The recipe of a cache: the versions of its properties and its content ids, by which additions match what is there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mmspeed.config import Config
from mmspeed.config.places import is_url
from mmspeed.data.cache.tables import cache_versions
from mmspeed.data.cache.versions import VERSIONS, upgraded
from mmspeed.media.pixel_rules import PixelRules
from mmspeed.media.source import Source
from mmspeed.preprocess.sources.contents import ContentIds


@dataclass(frozen=True)
class Recipe:
    """The facts of a cache that select and read the clips of its sources."""

    versions: Mapping[str, int]
    contents: ContentIds
    rules: PixelRules

    @property
    def lowered(self) -> tuple[str, ...]:
        """The properties of version 1: what files state of them is not applied (`Probe.by`)."""
        return tuple(sorted(name for name, version in self.versions.items() if version == 1))

    @classmethod
    def of(
        cls, config: Config, listed: Sequence[Source] = (), builds: bool = False, upgrade: Sequence[str] = ()
    ) -> Recipe:
        """The recipe of the config's cache, with the properties in `upgrade` at their newest version.

        `listed` are all sources of the config; `builds`: for a build, which reads large files and records their hashes. A cache at a
        URL, which nothing is added to, has the newest versions. Raises UserError like `cache_versions` and `upgraded`.
        """
        versions = dict(VERSIONS) if is_url(config.data.cache) else cache_versions(config.cache_dir)
        return cls.at(upgraded(versions, upgrade), config, config.cache_dir, listed, builds, builds)

    @classmethod
    def at(
        cls,
        versions: Mapping[str, int],
        config: Config,
        root: Path,
        listed: Sequence[Source] = (),
        reads: bool = False,
        records: bool = False,
    ) -> Recipe:
        """The recipe of these `versions` for a config's cache in `root`; `listed`, `reads` and `records`: see `ContentIds`."""
        contents = ContentIds(root, config.preprocess.full_hash, listed, reads, records)
        return cls(versions, contents, PixelRules.of(config.data))
