"""Words for shell completion: run folders, configs, tasks. They come from files and tables only, so that completing loads no torch."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path


def run_folders(incomplete: str) -> list[str]:
    """The run folders that begin so, of an empty word those in `runs/` too; where there are none, folders on the way to some."""
    words = [word for word, folder in _entries(incomplete) if (folder / "run.json").is_file()]
    if not incomplete:
        words += run_folders("runs/")
    return words or [f"{word}/" for word, folder in _entries(incomplete) if folder.is_dir()]


def config_files(incomplete: str) -> list[str]:
    """The YAML files, and folders on the way to some, that begin so."""
    entries = _entries(incomplete)
    files = [word for word, path in entries if path.suffix in (".yaml", ".yml") and path.is_file()]
    return [*files, *(f"{word}/" for word, path in entries if path.is_dir())]


def checkpoints(incomplete: str) -> list[str]:
    """The names of checkpoints that are no steps."""
    return [name for name in ("latest", "best") if name.startswith(incomplete)]


def tasks(incomplete: str) -> list[str]:
    """The names of tasks: our own and those that installed packages declare."""
    declared = {entry.name for entry in importlib.metadata.entry_points(group="mmspeed.tasks")}
    return [name for name in sorted({"video", *declared}) if name.startswith(incomplete)]


def samplers(incomplete: str) -> list[str]:
    """The names of samplers."""
    return [name for name in ("auto", "euler", "heun", "ddim", "unipc", "dpm++") if name.startswith(incomplete)]


def _entries(incomplete: str) -> list[tuple[str, Path]]:
    """The files and folders whose path, as it is typed, begins so: the words and their paths, without hidden ones."""
    typed = incomplete[: incomplete.rfind("/") + 1]
    try:
        names = sorted(entry.name for entry in Path(typed or ".").iterdir() if not entry.name.startswith("."))
    except OSError:  # no folder yet, or one that cannot be read: nothing to complete
        return []
    return [(typed + name, Path(typed + name)) for name in names if (typed + name).startswith(incomplete)]
