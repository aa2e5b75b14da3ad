"""Weights that a new run begins with: those of another run."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from mmspeed.errors import UserError
from mmspeed.parallel import unwrap

from .checkpoint import latest, open_checkpoint
from .storage import META, THRESHOLD, SafetensorsReader


def starting_checkpoint(place: str | Path) -> Path:
    """The checkpoint that a run's folder, or a checkpoint's, stands for: a run's latest. Raises UserError when there is none."""
    folder = Path(place)
    if (folder / META).is_file():
        return folder
    found = latest(folder / "checkpoints") if (folder / "checkpoints").is_dir() else None
    if found is None:
        raise UserError(f"train.start_from: {place} is neither a run with a checkpoint nor a checkpoint")
    return found


def load_start(place: str | Path, model: nn.Module) -> None:
    """Fill a model's parameters from a checkpoint, whatever its layout; its moving average where it has one.

    All ranks call it. Thresholds of sparse attention come with it, where both models have them; they need not. Raises UserError when
    there is no checkpoint, or a parameter is missing, left over or of another shape.
    """
    folder = starting_checkpoint(place)
    meta, index = open_checkpoint(folder)
    part = "model" if meta["ema_updates"] is None else "ema"
    state = get_model_state_dict(model)
    parameters = {name for name, _ in unwrap(model).named_parameters()}
    wanted: dict[str, Any] = {f"{part}.{name}": state[name] for name in state if name in parameters}
    advice = f"train.start_from: {folder} is of another model; compare the `model` sections"
    for name, tensor in wanted.items():
        held = index["tensors"].get(name)
        if held is None or held["shape"] != list(tensor.shape):
            have = "nothing" if held is None else f"the shape {tuple(held['shape'])}"
            raise UserError(f"{advice}: `{name}` has the shape {tuple(tensor.shape)} here and {have} there")
    averaged = {name for name in index["tensors"] if name.startswith(f"{part}.")}
    buffers = {f"model.{name}" for name in state if name not in parameters}
    left = sorted(name for name in averaged - set(wanted) - buffers if not name.endswith(THRESHOLD))
    if left:
        raise UserError(f"{advice}: it holds `{left[0]}`, which the model here does not have")
    wanted |= {name: state[name.removeprefix("model.")] for name in buffers if name in index["tensors"]}
    dcp.load(
        cast(dict[str, Any], wanted),
        storage_reader=SafetensorsReader(folder, index),
        no_dist=not dist.is_initialized(),
    )
