"""The rules by which stored pixels become the RGB of a clip: a fact of a cache's config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # decoder processes start without the config's packages
    from mmspeed.config.schema import DataConfig

WHITE = "#ffffff"
HD_LINES = 720  # untagged video of so many lines is BT.709, as players take it


@dataclass(frozen=True)
class PixelRules:
    """The reading of untagged colours and alpha.

    `untagged` is the matrix of frames that state none: `bt601`, `bt709` or `auto` (by the lines). Pictures and frames with alpha are
    composed on `background` (`#rrggbb`).
    """

    untagged: str = "auto"
    background: str = WHITE

    @classmethod
    def of(cls, data: DataConfig) -> PixelRules:
        """The rules of a config."""
        return cls(data.untagged, data.background)

    def untagged_matrix(self, lines: int) -> str:
        """The matrix of a video of so many `lines` whose frames state none."""
        if self.untagged != "auto":
            return self.untagged
        return "bt709" if lines >= HD_LINES else "bt601"


NEWEST_RULES = PixelRules()
