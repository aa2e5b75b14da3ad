"""The scene cuts of videos, remembered in the cache by content, detector and threshold, so that each video is looked through once."""

from __future__ import annotations

import importlib.util
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mmspeed.config.schema import DataConfig
from mmspeed.data.cache.scenes import SceneLine, append_scenes, read_scenes
from mmspeed.errors import UserError
from mmspeed.preprocess.decoding.scenes import PACKAGE, VERSION, SceneDetector


def scene_memory(data: DataConfig, root: Path) -> SceneMemory | None:
    """The memory of a config's detector in a cache; None without `data.scenes`. Raises UserError if the package is missing."""
    if data.scenes is None:
        return None
    if importlib.util.find_spec(PACKAGE) is None:
        raise UserError(
            f"data.scenes needs the package {PACKAGE}: pip install 'mmspeed[scenes]', or leave data.scenes out"
        )
    return SceneMemory(root, SceneDetector(data.scenes.detector, data.scenes.least_change))


@dataclass
class SceneMemory:
    """The cuts that a cache in `root` remembers for one detector. Threads may share it."""

    root: Path
    detector: SceneDetector
    _cuts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    _name: str = field(default_factory=lambda: secrets.token_hex(8))  # of this process's lines

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        try:
            lines = list(read_scenes(self.root))
        except OSError:  # found again
            lines = []
        wanted = self.detector.detector, self.detector.threshold, VERSION
        self._cuts |= {one.content: one.cuts for one in lines if (one.detector, one.threshold, one.version) == wanted}

    def cuts(self, content: str, find: Callable[[], Sequence[int]]) -> tuple[int, ...]:
        """The cuts of a content: those remembered, else those that `find` returns, which are remembered. Raises what it raises."""
        if content not in self._cuts:
            cuts = tuple(sorted(set(find())))
            settings = self.detector
            with self._lock:
                self._cuts[content] = cuts
                try:
                    line = SceneLine(content, settings.detector, settings.threshold, VERSION, cuts)
                    append_scenes(self.root, self._name, line)
                except OSError:  # a cache that is not written to, such as one at a URL: they are found again
                    pass
        return self._cuts[content]
