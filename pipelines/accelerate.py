"""Spread a model in your own training script: `transformer = mmspeed.accelerate_model(transformer, "ulysses=4,ring=2")`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch.distributed as dist
from pydantic import ValidationError
from torch import nn

from mmspeed.comm import Ledger
from mmspeed.config.parallel import ParallelConfig
from mmspeed.config.schema import Config
from mmspeed.device import Device
from mmspeed.errors import UserError, nearest
from mmspeed.mesh import make_mesh
from mmspeed.models.diffusers.plans import plan_for
from mmspeed.models.language.published import language_plan
from mmspeed.parallel import sequence_parallel
from mmspeed.protocols.plan import ModelPlan, plan_of

Model = TypeVar("Model", bound=nn.Module)


def accelerate_model(
    transformer: Model,
    config: Config | ParallelConfig | Mapping[str, Any] | str,
    *,
    plan: ModelPlan | None = None,
    ledger: Ledger | None = None,
) -> Model:
    """Make a transformer compute each sample on `ring` x `ulysses` processes together, in place, and return it.

    transformer: a diffusers model (Wan, CogVideoX, HunyuanVideo, LTX, or one whose `_cp_plan` can be read), a language model of
    transformers (Llama, Qwen3, Qwen3-MoE, DeepSeek-V3 with a head), a model with a plan of its own (`mmspeed.protocols.declare_plan`), or
    any model with `plan`. config: of its fields (section `parallel`) `ring`, `ulysses`, `ring_window` and `exchange` are used; a string is
    like "ulysses=4,ring=2". ledger: counts the bytes of exchanges.

    The model must be on its device, and the launcher's process group initialised. Ranks of a group are consecutive:
    rank // (ring * ulysses) is the number of a rank's sample. The script itself applies DDP, FSDP, recomputation and compilation, after
    this call.

    Raises UserError when the processes do not fit, no plan is known, or the config asks for something that such a model does not support.
    """
    parallel = parallel_config(config)
    if parallel.tp > 1:
        raise UserError(
            f"parallel.tp is {parallel.tp}: it leaves each process different weights of {type(transformer).__name__}, and gradients that a "
            "script's own DDP or FSDP would average wrongly; use ring and ulysses here, or tp in mmspeed's own training"
        )
    if parallel.dsp > 1:
        raise UserError(
            f"parallel.dsp is {parallel.dsp}: it re-shards tokens between the spatial and temporal blocks of mmspeed's own models; "
            f"{type(transformer).__name__} takes ring and ulysses"
        )
    degree = parallel.sequence
    if degree == 1:
        return transformer
    if not dist.is_initialized():
        raise UserError(
            f"accelerate_model: {degree} processes share a sample, and there is no process group; start the script by "
            "torchrun or accelerate, and call torch.distributed.init_process_group (or make the Accelerator) first"
        )
    if plan is None:
        plan = plan_of(transformer) or language_plan(transformer) or plan_for(transformer)
    kind = next((parameter.device.type for parameter in transformer.parameters()), "cpu")
    world = dist.get_world_size()
    if world % degree:
        raise UserError(
            f"accelerate_model: {parallel.group_in_words()} does not divide the {world} processes of the run"
        )
    mesh = make_mesh(Device(kind, 0), parallel.axis_sizes())
    sequence_parallel(
        transformer, mesh.dense, plan, window=parallel.ring_window, exchange=parallel.exchange, ledger=ledger
    )
    return transformer


def parallel_config(config: Config | ParallelConfig | Mapping[str, Any] | str) -> ParallelConfig:
    """The parallel section from a config, the section itself, a mapping, or a string such as "ulysses=2,ring=2"."""
    if isinstance(config, Config):
        return config.parallel
    if isinstance(config, ParallelConfig):
        return config
    values: Mapping[str, Any]
    if isinstance(config, str):
        pairs = [part.partition("=") for part in config.replace(" ", "").split(",") if part]
        twice = next((key for key, _, _ in pairs if [other for other, _, _ in pairs].count(key) > 1), None)
        if twice is not None:
            raise UserError(f"accelerate_model: {twice} is given twice in '{config}'")
        values = {key: int(value) if value.lstrip("-").isdigit() else value for key, _, value in pairs}
    elif not isinstance(config, Mapping):
        raise UserError(f"accelerate_model: config is a {type(config).__name__}; give a mapping or 'ulysses=2,ring=2'")
    else:
        values = config.get("parallel", config)
    fields = tuple(ParallelConfig.model_fields)
    for key in values:
        if key not in fields:
            raise UserError(f"parallel.{key}: no such key{nearest(str(key), fields)}")
    try:
        return ParallelConfig.model_validate(dict(values))
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"parallel.{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
