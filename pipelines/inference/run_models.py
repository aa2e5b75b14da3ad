"""The models of a run, to sample from: with a checkpoint's weights, and the expert that the run did not train from its repository."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from torch import nn

from mmspeed.compute.sparse.controller import SparsityController
from mmspeed.compute.sparse.module import clustered_layers
from mmspeed.config import Config
from mmspeed.config.schema import ModelConfig, PublishedModelConfig
from mmspeed.device import Device, parse_dtype
from mmspeed.initialize import materialize, read_weights
from mmspeed.models.diffusers.repository import Repository
from mmspeed.models.families.complete import EXPERTS as FOLDERS
from mmspeed.models.families.complete import boundary_of
from mmspeed.models.sections import repository_of, with_weights
from mmspeed.parallel import autocast
from mmspeed.pipelines.diffusion.experts import Expert, OtherExpert, experts_of
from mmspeed.protocols import source_of


def load_model(
    config: Config,
    section: ModelConfig | PublishedModelConfig,
    sizes: tuple[int, int],
    checkpoint: Path | None,
    weights: Literal["ema", "model"],
    device: Device,
    role: str | None = None,
    opened: Repository | None = None,
) -> nn.Module:
    """The model of a section on the device, to sample from, with a role's weights of a checkpoint; None: with those of its repository.

    sizes: (latent channels, text width). opened: the section's repository. Raises UserError where weights are missing.
    """
    model = with_weights(section, *sizes, "meta", opened)
    materialize(model, torch.device("cpu"))
    source = source_of(model)
    if source is not None and (checkpoint is None or _lacks_frozen(checkpoint, role)):
        read_weights(model, source)
    for layer in clustered_layers(model).values():
        layer.reset()
    if checkpoint is not None:
        from mmspeed.loop.checkpoint.manager import load_weights

        step = load_weights(checkpoint, model, weights, role=role)["step"]
        sparsity = SparsityController.of(model)
        if sparsity is not None:
            sparsity.before_step(step)  # dense, if the checkpoint is of the dense steps
    model.to(device.torch_device).eval()
    if config.device.dtype != "float32":
        autocast(model, parse_dtype(config.device.dtype))
    return model


def _lacks_frozen(checkpoint: Path, role: str | None) -> bool:
    """True where what did not train of a role is in its base alone."""
    from mmspeed.loop.checkpoint.load import open_checkpoint
    from mmspeed.loop.checkpoint.storage import FROZEN, ROLES

    facts = open_checkpoint(checkpoint)[0]
    return FROZEN in (facts if role is None else facts.get(ROLES, {}).get(role, {}))


def load_other(
    config: Config,
    sizes: tuple[int, int],
    checkpoint: Path,
    weights: Literal["ema", "model"],
    device: Device,
    opened: Repository | None = None,
) -> OtherExpert | None:
    """The expert that samples beside a run's first model: the run's own where it trained both, else the repository's.

    `config` is completed. None for a model without experts, and for a repository that lacks the other one.
    """
    section, trained = config.model, experts_of(config)
    if not isinstance(section, PublishedModelConfig):
        return None
    if trained is not None:
        low = trained.roles["low"]
        own = section.model_copy(update={"subfolder": low, "second_subfolder": None})
        return OtherExpert(
            load_model(config, own, sizes, checkpoint, weights, device, low, opened), trained.boundary, "low"
        )
    repository = repository_of(section, opened)
    boundary, folders = boundary_of(repository), {folder: noise for noise, folder in FOLDERS.items()}
    if boundary is None or section.subfolder not in folders:
        return None
    noise: Expert = "low" if folders[section.subfolder] == "high" else "high"
    if not repository.has(FOLDERS[noise]):
        return None
    base = section.model_copy(update={"subfolder": FOLDERS[noise], "weights": None})
    return OtherExpert(load_model(config, base, sizes, None, weights, device, None, repository), boundary, noise)
