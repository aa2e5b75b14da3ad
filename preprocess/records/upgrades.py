"""Counts of the entries of an older cache that an upgrade of each property of its recipe would make again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from mmspeed.config import Config
from mmspeed.data.cache.versions import VERSIONS, upgraded
from mmspeed.media.probe import Probe
from mmspeed.media.scaling import pixel_parts
from mmspeed.media.source import Source
from mmspeed.preprocess.decoding.clips import Clip
from mmspeed.preprocess.decoding.recipe import Recipe


class UpgradeCounts:
    """The stored latents that would differ, for each property that the cache has in an older version."""

    def __init__(self, config: Config, recipe: Recipe, listed: Sequence[Source]) -> None:
        self._newer = {
            name: Recipe.at(upgraded(recipe.versions, [name]), config, recipe.contents.root, listed)
            for name in sorted(VERSIONS)
            if recipe.versions[name] < VERSIONS[name]
        }
        self.counts: Counter[str] = Counter()
        self.stored = 0

    def add(self, clip: Clip, probe: Probe, stored: bool) -> None:
        """Add a clip; only those whose entry is `stored` can differ."""
        if not stored:
            return
        self.stored += 1
        for name, recipe in self._newer.items():
            self.counts[name] += name in probe.older or pixel_parts(recipe.rules, probe, clip.crop) != clip.pixel_parts

    def lines(self) -> list[str]:
        """A line for each property of an older version by which stored latents would differ."""
        return [
            f"cache recipe: {name} is of version {VERSIONS[name] - 1}; "
            f"{self.counts[name]} of {self.stored} stored latents would differ (`mmspeed preprocess --upgrade {name}`)"
            for name in self._newer
            if self.counts[name]
        ]
