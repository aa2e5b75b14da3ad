"""Words for shell completion: run folders, configs, tasks. They come from files and tables only, so that completing loads no torch."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from pathlib import Path


def run_folders(incomplete: str) -> list[str]:
    """The run folders that begin so: those in `runs/`, in the folder named so far, and in the current one; else folders on the way."""
    typed = Path(incomplete)
    parent = typed if incomplete.endswith("/") else typed.parent
    if not incomplete:
        return sorted({str(run) for place in (Path("runs"), parent) for run in _runs(place)})
    if incomplete.rstrip("/") != incomplete and (parent / "run.json").is_file():
        return [incomplete.rstrip("/")]
    found = [str(run) for run in _runs(parent) if str(run).startswith(incomplete)]
    return sorted(found) or sorted(
        f"{folder}/" for folder in _folders(parent) if str(folder).startswith(incomplete.rstrip("/"))
    )


def config_files(incomplete: str) -> list[str]:
    """The YAML files, and folders on the way to some, that begin so."""
    parent = Path(incomplete) if incomplete.endswith("/") else Path(incomplete).parent
    try:
        entries = sorted(entry for entry in parent.iterdir() if not entry.name.startswith("."))
    except OSError:
        return []
    words = [f"{entry}/" if entry.is_dir() else str(entry) for entry in entries if _of_config(entry)]
    return [word for word in words if word.startswith(incomplete)]


def checkpoints(incomplete: str) -> list[str]:
    """The names of checkpoints that are no steps."""
    return [name for name in ("latest", "best") if name.startswith(incomplete)]


def tasks(incomplete: str) -> list[str]:
    """The names of tasks: our own and those that installed packages declare."""
    declared = {entry.name for entry in importlib.metadata.entry_points(group="mmspeed.tasks")}
    return [name for name in sorted({"video", *declared}) if name.startswith(incomplete)]


def devices(incomplete: str) -> list[str]:
    """The kinds of devices."""
    return [kind for kind in ("auto", "npu", "cuda", "cpu") if kind.startswith(incomplete)]


def samplers(incomplete: str) -> list[str]:
    """The names of samplers."""
    return [name for name in ("auto", "euler", "heun", "ddim", "unipc", "dpm++") if name.startswith(incomplete)]


def _of_config(entry: Path) -> bool:
    return entry.is_dir() or entry.suffix in (".yaml", ".yml")


def _folders(place: Path) -> Iterator[Path]:
    try:
        yield from (entry for entry in place.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    except OSError:  # no folder yet, or one that cannot be read: nothing to complete
        return


def _runs(place: Path) -> list[Path]:
    return [folder for folder in _folders(place) if (folder / "run.json").is_file()]
