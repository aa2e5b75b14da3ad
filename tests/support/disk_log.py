"""Records in which order files reach the disk and get their names."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest


class DiskLog:
    """The syncs and renames of this process: ("sync", path) and ("name", path), in their order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[tuple[str, Path]] = []
        sync = os.fsync

        def noted_sync(fd: int) -> None:
            self.events.append(("sync", Path(os.readlink(f"/proc/self/fd/{fd}"))))
            sync(fd)

        monkeypatch.setattr(os, "fsync", noted_sync)
        for name in ("rename", "replace", "link"):
            monkeypatch.setattr(os, name, self._noted(getattr(os, name)))

    def _noted(self, call: Any) -> Any:
        def noted(source: Any, target: Any, **more: Any) -> None:
            call(source, target, **more)
            self.events.append(("name", Path(target)))

        return noted

    def place(self, what: str, path: Path) -> int:
        """The place of the last such event. Raises AssertionError where there is none."""
        assert (what, path) in self.events, (what, path, self.events)
        return len(self.events) - 1 - self.events[::-1].index((what, path))
