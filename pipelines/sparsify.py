"""Sparse attention for a user's own script, in one line: `controller = mmspeed.sparsify_model(transformer, "keep=0.2")`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from torch import nn

from mmspeed.compute.sparse.controller import SparsityController
from mmspeed.compute.sparse.module import clustered_layers
from mmspeed.config.schema import Config
from mmspeed.config.sparse import SparseConfig
from mmspeed.errors import UserError, nearest
from mmspeed.models.diffusers.sparse import grid_of, sparse_plan
from mmspeed.models.diffusers.sparsified import is_context_parallel, sparsify
from mmspeed.parallel.boundaries.boundary import Grid


class ModelSparsity(SparsityController):
    """The controller of a model whose state dict has no thresholds; they are the controller's state, a few numbers.

    `accelerator.register_for_checkpointing(controller)` saves and loads them with the script's checkpoints.
    """

    def state_dict(self) -> dict[str, float | None]:
        """The threshold of each layer, by the name of its module; None where it is not set. Can be written as JSON."""
        values = {name: float(layer.tau) for name, layer in self.layers.items()}
        return {name: None if math.isnan(tau) else tau for name, tau in values.items()}

    def load_state_dict(self, state: Mapping[str, float | None]) -> None:
        """Take the thresholds of `state_dict`. Raises UserError where they are those of other layers."""
        other = sorted(set(state) ^ set(self.layers))
        if other:
            raise UserError(
                f"sparse attention: the saved thresholds are those of other layers ({other[0]}); use the model, dense_first and "
                "dense_last that they were saved with"
            )
        for name, layer in self.layers.items():
            tau = state[name]
            layer.tau.fill_(math.nan if tau is None else tau)


def sparsify_model(
    transformer: nn.Module,
    config: Config | SparseConfig | Mapping[str, Any] | str = "",
    *,
    attention: Mapping[str, tuple[str, ...]] | None = None,
    grid: Grid | None = None,
) -> ModelSparsity:
    """Make the self-attention of a video transformer sparse, in place. Returns its controller.

    transformer: a diffusers model of a class in docs/any-model.md, or any with `grid` and a plan or `attention`. config: a
    `SparseConfig`, its fields, a string like "keep=0.2,planner=clusters", or a whole config, whose `model.sparse` is used. attention: the
    self-attention modules, as patterns of their names, each with its sequences in order: ("video",) or ("text", "video"). grid: a
    function of the arguments of the model's forward, by name, that returns the video's tokens along time, height and width.

    Text in joint attention keeps every key, and every query keeps it. Images stay dense. In training, call the controller's
    `before_step(step)` and `after_step(mmspeed.comm.all_reduce_sum)` around each optimizer step; a model that only samples needs neither.
    Call it before compilation, FSDP, DDP and hooks, and before or after `accelerate_model`. Raises UserError for a model that is not
    known, or that cannot be made sparse: joint attention of text and video is either sparse or split over processes.
    """
    settings = sparse_config(config)
    name = type(transformer).__name__
    if clustered_layers(transformer):
        raise UserError(f"sparsify_model: {name} has sparse attention already")
    if is_context_parallel(transformer):
        raise UserError(
            f"sparsify_model: {name} is split by diffusers' own context parallelism, which is not sparse; use "
            "mmspeed.accelerate_model instead, before or after sparsify_model"
        )
    plan = sparse_plan(transformer, attention)
    return ModelSparsity(sparsify(transformer, plan, grid or grid_of(transformer), settings), settings)


def sparse_config(config: Config | SparseConfig | Mapping[str, Any] | str) -> SparseConfig:
    """The sparse section of a config, the section itself, a mapping, or a string such as "keep=0.2,tile=4x4x4"."""
    if isinstance(config, SparseConfig):
        return config
    if isinstance(config, Config):
        if config.model.sparse is None:
            raise UserError("sparsify_model: model.sparse of the config is null, which is dense")
        return config.model.sparse
    options: dict[str, Any] = {}
    if isinstance(config, str):
        for part in filter(None, config.replace(" ", "").split(",")):
            key, equals, value = part.partition("=")
            if not equals or key in options:
                raise UserError(
                    f"sparsify_model: {part!r} in '{config}' {'is given twice' if equals else 'has no value'}"
                )
            sizes = re.fullmatch(r"\d+(x\d+)+", value)
            options[key] = value.split("x") if sizes else None if value == "null" else value
    elif isinstance(config, Mapping):
        options = dict(config)
    else:
        raise UserError(f"sparsify_model: config is a {type(config).__name__}; give a mapping or 'keep=0.2'")
    fields = tuple(SparseConfig.model_fields)
    for key in options:
        if key not in fields:
            raise UserError(f"sparse.{key}: no such key{nearest(str(key), fields)}")
    try:
        return SparseConfig.model_validate(options)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(("sparse", *map(str, first["loc"])))
        raise UserError(f"{where}: {first['msg'].removeprefix('Value error, ')}") from error
