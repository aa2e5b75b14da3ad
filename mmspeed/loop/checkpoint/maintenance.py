"""Listing, verification and removal of a run's checkpoints, without a model."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from mmspeed.errors import UserError

from .load import best, latest, open_checkpoint, recorded
from .retention import KEPT
from .storage import META, DamageError, check_header, read_chunk, step_name


@dataclass(frozen=True)
class CheckpointEntry:
    """A checkpoint in a folder: `bytes` of all its files, `written` in seconds since 1970, its validation `loss` if it has one.

    `marks`: `latest`, `best`, `before a spike` (kept by the run), `damaged` (moved aside by it).
    """

    name: str
    step: int | None
    bytes: int
    written: float
    loss: float | None
    marks: tuple[str, ...]


def checkpoints_of(place: Path) -> Path:
    """The folder of checkpoints at `place`: that of a run, or the folder itself. Raises UserError where there is none."""
    folder = place / "checkpoints" if (place / "checkpoints").is_dir() else place
    if not folder.is_dir() or not any(folder.glob("step-*")):
        raise UserError(f"{place} holds no checkpoint: give the folder of a run, such as runs/NAME")
    return folder


def entries(folder: Path) -> list[CheckpointEntry]:
    """The checkpoints in `folder` in the order they were written, and then those that a run moved aside."""
    newest, lowest = latest(folder), best(folder)
    listed = []
    for entry in recorded(folder):
        path = folder / step_name(entry["step"])
        marks = [mark for mark, one in (("latest", newest), ("best", lowest)) if one == path]
        marks += ["before a spike"] if KEPT in entry else []
        listed.append(_entry(path, entry["step"], entry["loss"], marks))
    return listed + [_entry(path, None, None, ["damaged"]) for path in set_aside(folder)]


def set_aside(folder: Path) -> list[Path]:
    """The damaged checkpoints that runs moved aside."""
    return sorted(path for path in folder.glob("step-*.damaged*") if path.is_dir())


def _entry(path: Path, step: int | None, loss: float | None, marks: list[str]) -> CheckpointEntry:
    sizes = [file.stat().st_size for file in path.rglob("*") if file.is_file()]
    written = path / META if (path / META).is_file() else path
    return CheckpointEntry(path.name, step, sum(sizes), written.stat().st_mtime, loss, tuple(marks))


def verify(folder: Path) -> list[str]:
    """Read every byte of a checkpoint and compare it with the hashes. Returns its problems, none where it is sound."""
    try:
        _, index = open_checkpoint(folder)
    except UserError as error:
        return [str(error)]
    problems = []
    for name in index["files"]:
        try:
            problems += _verify_file(folder / name, index)
        except DamageError as error:
            problems.append(f"checkpoint {folder} {error}")
        except (SafetensorError, OSError) as error:
            problems.append(f"checkpoint {folder} is damaged: {name} cannot be read ({error})")
    return problems


def _verify_file(path: Path, index: dict[str, Any]) -> list[str]:
    check_header(path, index["headers"][path.name])
    problems = []
    with safe_open(path, framework="pt") as file:
        for tensor, entry in index["tensors"].items():
            for chunk in entry["chunks"]:
                if chunk["file"] == path.name:
                    try:
                        read_chunk(file, tensor, tuple(chunk["shape"]), chunk["hash"])
                    except DamageError as error:
                        problems.append(f"checkpoint {path.parent} {error}, in {path.name}")
    return problems


def prunable(folder: Path, keep_last: int) -> list[Path]:
    """The checkpoints that `prune` removes: all but the newest `keep_last`, and the best; and those that were moved aside."""
    lowest = best(folder)
    paths = [folder / step_name(entry["step"]) for entry in recorded(folder)]
    return [path for path in paths[:-keep_last] if path != lowest] + set_aside(folder)


def remove(paths: list[Path]) -> None:
    """Remove checkpoints, each so that a kill half-way leaves no part of it under its name."""
    for path in paths:
        doomed = path.with_name(f".tmp-{path.name}.gone")
        path.rename(doomed)
        shutil.rmtree(doomed)
