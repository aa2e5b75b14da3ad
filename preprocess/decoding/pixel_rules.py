"""The rules by which stored pixels become the RGB of a clip: a fact of a cache and its config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # decoder processes start without the config's packages
    from mmspeed.config.schema import DataConfig

WHITE = "#ffffff"
HD_LINES = 720  # untagged video of so many lines is BT.709, as players take it


@dataclass(frozen=True)
class PixelRules:
    """The reading of subsampled chroma, untagged colours and alpha.

    `chroma` 1 takes every chroma sample to be in the middle of its pixels and cuts planes at whole samples; 2 reads it where the
    stream sites it. `untagged` is the matrix of frames that state none: `bt601`, `bt709` or `auto` (by the lines). `alpha` 1 drops
    the alpha of videos; 2 composes their frames on `background` (`#rrggbb`), as pictures always are.
    """

    chroma: int = 2
    untagged: str = "auto"
    alpha: int = 2
    background: str = WHITE

    @classmethod
    def of(cls, data: DataConfig, versions: Mapping[str, int]) -> PixelRules:
        """The rules of a config for a cache of these `versions` (`mmspeed.data.cache.versions`)."""
        untagged = "bt601" if data.untagged == "auto" and versions["untagged"] == 1 else data.untagged
        return cls(versions["chroma"], untagged, versions["alpha"], data.background)

    def untagged_matrix(self, lines: int) -> str:
        """The matrix of a video of so many `lines` whose frames state none."""
        if self.untagged != "auto":
            return self.untagged
        return "bt709" if lines >= HD_LINES else "bt601"


NEWEST_RULES = PixelRules()
