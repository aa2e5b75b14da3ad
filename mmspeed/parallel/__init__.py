"""Apply all parallelism to a model. The order of the steps matters, so all of them are here on one screen."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from mmspeed.axes import AxisName
from mmspeed.config.parallel import ParallelConfig
from mmspeed.errors import UserError
from mmspeed.graphs import compile_forward
from mmspeed.memory import BlockPolicies
from mmspeed.mesh import Mesh
from mmspeed.mixin import mix_in
from mmspeed.protocols.plan import ModelPlan, blocks_of, plan_of
from mmspeed.replay import recorded_modules

from .boundaries.apply import Boundaries, is_spread, make_layout, sequence_parallel, token_layout, uncrossed
from .boundaries.boundary import BetweenStages
from .boundaries.layout import TokenLayout
from .boundaries.record import Sequences
from .data_parallel import (
    Strategy,
    autocast,
    is_half,
    make_half,
    no_sync,
    replicate,
    shard,
    take_float32_gradients,
    tensors_of,
    unwrap,
)
from .experts import spread_experts
from .sequence.hybrid_attention import SequenceAxes
from .stages import StageModel, end_calls_at_stages, stages_of
from .tensor import check_heads, sum_shared_gradients

__all__ = [
    "SequenceAxes",
    "Strategy",
    "TokenLayout",
    "autocast",
    "check_layout",
    "is_half",
    "is_spread",
    "make_half",
    "make_layout",
    "no_sync",
    "parallelize",
    "resolve_strategy",
    "sequence_parallel",
    "sum_shared_gradients",
    "take_float32_gradients",
    "tensors_of",
    "token_layout",
    "uncrossed",
    "unwrap",
]


def resolve_strategy(strategy: str, world: int) -> Strategy:
    """Resolve `auto` to `none` on one device and `fsdp` on several. Raises UserError for `none` on several, which would train apart."""
    if strategy == "auto":
        return "none" if world == 1 else "fsdp"
    if strategy not in ("none", "ddp", "fsdp"):
        raise UserError(f"parallel.strategy is {strategy!r}: use auto, none, ddp or fsdp")
    if strategy == "none" and world > 1:
        raise UserError(f"parallel.strategy: none is for one process, this run has {world}; use fsdp, ddp or auto")
    return cast(Strategy, strategy)


def parallelize(
    model: nn.Module,
    mesh: Mesh | None,
    strategy: Strategy,
    *,
    layout: TokenLayout | None = None,
    compute_dtype: torch.dtype = torch.float32,
    keeping: BlockPolicies | None = None,
    compile: bool | str = False,
    host: bool = False,
) -> nn.Module:
    """Make `model` ready for training; it is already on its device in float32 (or bfloat16, by `make_half`), or on the meta device.

    The model is changed in place and returned; only `ddp` wraps it. Every rank must pass the same parameters. State-dict names (through
    `torch.distributed.checkpoint.state_dict`) are those of the bare model in every strategy.

    Args:
        mesh: of `mmspeed.mesh`; may be None for the strategy `none`.
        layout: of `make_layout`; None: one process per sample.
        keeping: which activations each block keeps for backward; None: all.
        compile: compile each block with inductor, or with the backend that it names.
        host: with the strategy `fsdp`, frozen weights of blocks lie in the host's memory.

    Raises UserError for a mesh, a strategy or a plan that does not fit the model.
    """
    layout = layout or TokenLayout()
    boundaries = None
    stages = stages_of(model)
    if stages is not None:
        stages.axis = layout.stages
    if mesh is not None and mesh.staged and stages is None:
        raise UserError(
            f"parallel.pp: {type(model).__name__} is whole, so the processes of its {mesh.size(AxisName.PP)} stages would all compute the "
            "same; leave pp at 1"
        )
    if layout.size > 1:  # with one process per sample nothing is added: the bare class runs
        boundaries = Boundaries(model, Sequences(_checked_plan(model, layout), layout))
        if layout.tensor.size > 1:  # first, so that later steps see split layers
            assert mesh is not None
            _check_tensor(model, strategy, mesh)
            boundaries.split_weights(mesh.submesh(AxisName.TP))
        boundaries.put_inside()  # the tokens that each process computes and attends to
    if layout.spreads_experts:
        assert mesh is not None
        if strategy != "fsdp":
            raise UserError(
                f"parallel.{'ep' if layout.experts.size > 1 else 'etp'} goes with parallel.strategy fsdp, which shards the experts, not with {strategy}"
            )
        spread_experts(model, mesh, layout)
    # checkpointing is compiled into each block's graph, except where exchanges or recorded plans break graphs: there it goes around them
    exchanges = max(layout.size, layout.experts.size) > 1 or is_spread(model)
    breaks = exchanges or bool(recorded_modules(model))
    backend = compile if isinstance(compile, str) else "inductor"
    for number, (_, block) in enumerate(blocks_of(model)):
        if compile and breaks:
            compile_forward(block, backend=backend)
        if keeping is not None:  # activation checkpointing
            keeping.apply(block, number, compiled=bool(compile), around_graphs=breaks)
        if compile and not breaks:
            compile_forward(block, backend=backend)
    if boundaries is not None:  # outside of checkpointing and graphs: the inputs and outputs of blocks and of the model
        boundaries.put_around()
        if stages is not None:
            stages.tokens = BetweenStages(boundaries.sequences)
    if compute_dtype != torch.float32:  # around the whole model, so that training, validation and sampling agree
        autocast(model, compute_dtype)
    if stages is not None:
        mix_in(model, StageModel, rename=False)
        apart = mesh is not None and mesh.storage.size() > mesh.size(AxisName.PP)
        if strategy == "ddp" or (strategy == "none" and apart):
            raise UserError(f"parallel.pp goes with parallel.strategy fsdp, not with {strategy}")
    if strategy == "none":
        if stages is not None:
            end_calls_at_stages(model, stages)
        return model
    if mesh is None:
        raise ValueError(f"strategy {strategy} needs a device mesh")
    # bfloat16 parameters are replicated by FSDP2 over `dp_replicate`, since DDP would sum their gradients in bfloat16
    if strategy != "fsdp" and not is_half(model):
        return replicate(model)
    shard(model, mesh, compute_dtype, host)
    if stages is not None:
        end_calls_at_stages(model, stages)
    return model


def _checked_plan(model: nn.Module, layout: TokenLayout) -> ModelPlan:
    """The plan of a model that is split over processes. Raises UserError where it has none, or where the layout does not fit it."""
    plan = plan_of(model)
    if plan is None:
        raise UserError(
            f"parallel: {type(model).__name__} has no plan, so one sample cannot be computed by {layout.size} processes together; "
            "declare one (mmspeed.protocols.plan.declare_plan, docs/extending.md)"
        )
    if not plan.inputs and not plan.linears:
        raise UserError(
            f"parallel: the plan of {type(model).__name__} splits no tokens and no layers, so {layout.size} processes would all compute "
            "the same; use fsdp or replicas"
        )
    ring, ulysses = layout.axes.ring.size, layout.axes.ulysses.size
    check_layout(model, ParallelConfig(dsp=layout.dsp.size, ring=ring, ulysses=ulysses, tp=layout.tensor.size))
    return plan


def _check_tensor(model: nn.Module, strategy: Strategy, mesh: Mesh) -> None:
    """Raise UserError where a model cannot be split over tensor-parallel processes."""
    if strategy == "ddp" or (strategy == "none" and mesh.storage.size() > mesh.size(AxisName.TP)):
        raise UserError("parallel.tp goes with parallel.strategy: fsdp")
    plan = plan_of(model)
    if plan is None or not plan.linears:
        raise UserError(
            f"parallel.tp: the plan of {type(model).__name__} gives its layers no roles; use ring and ulysses"
        )


def check_layout(model: nn.Module, parallel: ParallelConfig) -> None:
    """Raise UserError where a model's heads do not fit `ulysses` or `tp`, or its blocks `dsp`. The model may be on the meta device."""
    plan = plan_of(model)
    if parallel.dsp > 1 and (plan is None or not plan.factorised):
        raise UserError(
            f"parallel.dsp {parallel.dsp}: every block of {type(model).__name__} attends over all tokens, so there are no dims to "
            "re-shard them between; use ulysses or ring"
        )
    if plan is not None and plan.heads is not None:
        check_heads(plan.heads, parallel.ulysses, parallel.tp, plan.key_heads)
