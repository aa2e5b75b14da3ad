"""Weights that a new run begins with: those of another run."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist
from torch import nn

from mmspeed.errors import UserError
from mmspeed.parallel import unwrap

from .checkpoint.load import latest, load_weights, open_checkpoint
from .checkpoint.storage import META
from .optimizers.build import AnyOptimizer


def starting_checkpoint(place: str | Path) -> Path:
    """The checkpoint that a run's folder, or a checkpoint's, stands for: a run's latest. Raises UserError when there is none."""
    folder = Path(place)
    if (folder / META).is_file():
        return folder
    found = latest(folder / "checkpoints") if (folder / "checkpoints").is_dir() else None
    if found is None:
        raise UserError(f"train.start_from: {place} is neither a run with a checkpoint nor a checkpoint")
    return found


def load_start(place: str | Path, model: nn.Module, optimizer: AnyOptimizer | None = None) -> None:
    """Fill a model's parameters from a checkpoint, whatever its layout; its moving average where it has one.

    `optimizer` takes them where the float32 weights are its own.

    All ranks call it. Thresholds of sparse attention come with it, where both models have them; they need not. Raises UserError when
    there is no checkpoint, or a parameter is missing, left over or of another shape.
    """
    folder = starting_checkpoint(place)
    try:
        averaged = open_checkpoint(folder)[0]["ema_updates"] is not None
        which, alone = "ema" if averaged else "model", not dist.is_initialized()
        load_weights(folder, unwrap(model), which, alone, optimizer)  # type: ignore[arg-type]
    except UserError as error:
        raise UserError(f"train.start_from: {error}") from None
