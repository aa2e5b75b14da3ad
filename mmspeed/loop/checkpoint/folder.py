"""Changes to a folder of checkpoints, after each of which a checkpoint is whole or absent."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from mmspeed.data.cache.files import fsync_folder

from .storage import FORMAT, META, SEAL, step_name, write_json, write_sealed


def put_in_place(folder: Path, step: int, temporary: Path, meta: dict[str, Any], index_hash: str, run: str) -> None:
    """Complete a checkpoint whose tensors and index are in `temporary`, seal it, and give it its name in `folder`."""
    hashes = {"index": index_hash, "meta": write_json(temporary / META, meta)}
    write_sealed(temporary / SEAL, {"format": FORMAT, "run": run, "step": step, **hashes})
    fsync_folder(temporary)
    target = folder / step_name(step)
    former = folder / f".old-{target.name}"
    if target.exists():
        target.rename(former)
    temporary.rename(target)
    fsync_folder(folder)
    shutil.rmtree(former, ignore_errors=True)


def remove(checkpoint: Path) -> None:
    """Remove a checkpoint so that a kill half-way leaves no part of it under its name."""
    doomed = checkpoint.with_name(f".tmp-{checkpoint.name}.gone")
    checkpoint.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def clean(folder: Path) -> None:
    """Remove half-written files of a killed run; restore a checkpoint whose replacement was not finished."""
    for left in folder.glob(".tmp-*"):
        shutil.rmtree(left, ignore_errors=True)
    for former in folder.glob(".old-*"):
        target = folder / former.name.removeprefix(".old-")
        if target.exists():
            shutil.rmtree(former, ignore_errors=True)
        else:
            former.rename(target)
