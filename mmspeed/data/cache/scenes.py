"""The scene cuts that a cache remembers of videos: lines of `scenes/*.jsonl`, a file of each process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from .contents import append_checked, checked_trees

SCENES = "scenes"


@dataclass(frozen=True)
class SceneLine:
    """The cuts of one content, as first frames of scenes by their index, found by `detector` with `threshold`."""

    content: str
    detector: str
    threshold: float
    version: int
    cuts: tuple[int, ...]


def read_scenes(root: Path) -> Iterator[SceneLine]:
    """Yield the lines of a cache; a line cut off by a kill counts as absent. Raises OSError."""
    for tree in checked_trees(root / SCENES):
        try:
            yield SceneLine(**{**tree, "cuts": tuple(tree["cuts"])})
        except (KeyError, TypeError):
            continue


def append_scenes(root: Path, name: str, line: SceneLine) -> None:
    """Append a line to `scenes/<name>.jsonl`, durably. Raises OSError."""
    append_checked(root / SCENES / f"{name}.jsonl", asdict(line))
