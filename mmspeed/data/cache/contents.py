"""What a cache remembers of its sources, in lines of JSON, a file of each process: whole-file hashes of large ones and scene cuts."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .keys import digest

CONTENTS = "contents"

FileState = tuple[str, int, int, int, int]  # path, offset in it, size in bytes, modification time in ns, inode


@dataclass(frozen=True)
class ContentLine:
    """One file: its state, the digest of its samples, the hash of all its bytes, and the content id that it has in the cache."""

    file: FileState
    sampled: str
    whole: str
    content: str


def read_contents(root: Path) -> Iterator[ContentLine]:
    """Yield the lines of a cache, in the order of the files' names; a line cut off by a kill counts as absent. Raises OSError."""
    for tree in checked_trees(root / CONTENTS):
        try:
            location, offset, size, changed, inode = tree.pop("file")
            yield ContentLine((location, offset, size, changed, inode), **tree)
        except (ValueError, KeyError, TypeError, AttributeError):
            continue


def append_content(root: Path, name: str, line: ContentLine) -> None:
    """Append a line to `contents/<name>.jsonl`, durably. Raises OSError."""
    append_checked(root / CONTENTS / f"{name}.jsonl", asdict(line))


def checked_trees(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the values of the lines that `append_checked` wrote to the `*.jsonl` of a folder, without damaged lines. Raises OSError."""
    for path in sorted(folder.glob("*.jsonl")):
        for row in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                check, text = json.loads(row)
                tree = json.loads(text) if digest(text.encode()) == check else None
            except (ValueError, TypeError, AttributeError):
                continue
            if isinstance(tree, dict):
                yield tree


def append_checked(path: Path, tree: dict[str, Any]) -> None:
    """Append a line of JSON and its digest, durably. Raises OSError."""
    text = json.dumps(tree)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        file.write(f"{json.dumps([digest(text.encode()), text])}\n")
        file.flush()
        os.fsync(file.fileno())


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
