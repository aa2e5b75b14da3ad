"""Parallel: how a model is spread over devices. The order of the steps matters and stands here on one screen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import nn

from mmspeed.axes import AxisName
from mmspeed.comm import Axis, Ledger
from mmspeed.comm.groups import flattened
from mmspeed.config.parallel import ParallelConfig
from mmspeed.errors import UserError
from mmspeed.graphs import compile_forward
from mmspeed.memory import BlockPolicies
from mmspeed.mesh import Mesh
from mmspeed.protocols import CountsHeads, DeclaresRoles, Role, blocks_of
from mmspeed.replay import recorded_modules

from .data_parallel import (
    Strategy,
    autocast,
    is_half,
    make_half,
    no_sync,
    replicate,
    shard,
    take_float32_gradients,
    unwrap,
)
from .declared.apply import is_sequence_parallel, sequence_axes, sequence_parallel
from .declared.plan import Attends, Gather, Leading, SequencePlan, Split
from .sequence.hybrid_attention import SequenceAxes
from .tensor import check_heads, split_layers, sum_shared_gradients
from .tokens import SpreadsTokens, TokenLayout

__all__ = [
    "Attends",
    "Gather",
    "Leading",
    "SequenceAxes",
    "SequencePlan",
    "Split",
    "Strategy",
    "TokenLayout",
    "autocast",
    "check_layout",
    "is_half",
    "make_half",
    "make_layout",
    "no_sync",
    "parallelize",
    "resolve_strategy",
    "sequence_parallel",
    "shard_tokens",
    "sum_shared_gradients",
    "take_float32_gradients",
    "unwrap",
]


def resolve_strategy(strategy: str, world: int) -> Strategy:
    """`auto` is `none` on one device, else `fsdp`. Raises UserError for `none` on several: they would train apart."""
    if strategy == "auto":
        return "none" if world == 1 else "fsdp"
    if strategy not in ("none", "ddp", "fsdp"):
        raise UserError(f"parallel.strategy is {strategy!r}: use auto, none, ddp or fsdp")
    if strategy == "none" and world > 1:
        raise UserError(f"parallel.strategy: none is for one process, this run has {world}; use fsdp, ddp or auto")
    return cast(Strategy, strategy)


def make_layout(
    mesh: Mesh | None,
    parallel: ParallelConfig | None = None,
    ledger: Ledger | None = None,
    nodes: Sequence[int] | None = None,
) -> TokenLayout:
    """How the tokens of a forward pass are spread over a mesh; all on one process without one.

    `nodes`: the node of each rank, for the ledger's bytes by link; None: by the launcher's LOCAL_WORLD_SIZE.
    Makes process groups: every process of the run must call it.
    """
    if mesh is None:
        return TokenLayout()
    parallel, ledger = parallel or ParallelConfig(), ledger or Ledger()
    axes = sequence_axes(
        mesh.dense, window=parallel.ring_window, exchange=parallel.exchange, ledger=ledger, nodes=nodes
    )
    return TokenLayout(
        axes=axes,
        whole=flattened("sequence", axes.ring, axes.ulysses, mesh.dense, nodes),
        tensor=Axis.of(mesh.dense, AxisName.TP.value, ledger, parallel.exchange, nodes),
        scheme=parallel.scheme,
        shard="rows" if parallel.shard == "frames" else "columns",
        text_from=parallel.shard_text,
    )


def parallelize(
    model: nn.Module,
    mesh: Mesh | None,
    strategy: Strategy,
    *,
    layout: TokenLayout | None = None,
    compute_dtype: torch.dtype = torch.float32,
    keeping: BlockPolicies | None = None,
    compile: bool | str = False,
) -> nn.Module:
    """`model`, already on its device in float32 (or bfloat16, by `make_half`) or on the meta device, made ready for training;
    changed in place, and wrapped by `ddp` only.

    Every rank must hand in the same parameters. `mesh` is of `mmspeed.mesh` and may be None for `none`; `layout` is of
    `make_layout` and None for one process a sample; `keeping` says what backward finds, None: all; `compile` may name a backend.
    State-dict names (through `torch.distributed.checkpoint.state_dict`) are those of the bare model in every strategy.
    """
    layout = layout or TokenLayout()
    if layout.tensor.size > 1:  # first: what follows sees layers that are split already
        assert mesh is not None
        split_layers(model, mesh.submesh(AxisName.TP), *_tensor_parts(model, strategy, mesh))
    exchanges = layout.tensor.size * layout.whole.size > 1
    if exchanges:  # who computes which tokens
        shard_tokens(model, layout)
    # Recomputation is part of the graphs, block by block; but exchanges and plans break graphs, and none is made of a block with both
    breaks = exchanges or is_sequence_parallel(model) or bool(recorded_modules(model))
    backend = compile if isinstance(compile, str) else "inductor"
    for number, (_, block) in enumerate(blocks_of(model)):
        if compile and breaks:
            compile_forward(block, backend=backend)
        if keeping is not None:  # what backward finds
            keeping.apply(block, number, compiled=bool(compile), around_graphs=breaks)
        if compile and not breaks:
            compile_forward(block, backend=backend)
    if compute_dtype != torch.float32:  # around the whole model: training, validation and sampling compute alike
        autocast(model, compute_dtype)
    if strategy == "none":
        return model
    if mesh is None:
        raise ValueError(f"strategy {strategy} needs a device mesh")
    # replicas of bfloat16 parameters come from the sharding engine, over `dp_replicate`: the other sums their gradients in bfloat16
    return shard(model, mesh, compute_dtype) if strategy == "fsdp" or is_half(model) else replicate(model)


def _tensor_parts(model: nn.Module, strategy: Strategy, mesh: Mesh) -> tuple[int, Mapping[str, Role]]:
    """The heads and roles of a model that tensor parallelism takes. Raises UserError where it cannot."""
    if strategy == "ddp" or (strategy == "none" and mesh.storage.size() > mesh.size(AxisName.TP)):
        raise UserError("parallel.tp goes with parallel.strategy: fsdp")
    if not isinstance(model, DeclaresRoles) or not model.roles:
        raise UserError(f"parallel.tp: {type(model).__name__} declares no roles of its layers; use ring and ulysses")
    return model.heads, model.roles


def shard_tokens(model: nn.Module, layout: TokenLayout) -> None:
    """Hand a model its layout, in place. Raises UserError when the model cannot be spread so."""
    if not isinstance(model, SpreadsTokens) or not isinstance(model.layout, TokenLayout):
        raise UserError(
            f"parallel: {type(model).__name__} has no token layout; declare a plan with mmspeed.parallel.sequence_parallel"
        )
    sizes = {"ulysses": layout.axes.ulysses.size, "tp": layout.tensor.size}
    check_layout(model, ParallelConfig(scheme=layout.scheme, **sizes))
    model.layout = layout


def check_layout(model: CountsHeads, parallel: ParallelConfig) -> None:
    """Raises UserError where the heads of a model (which may be on the meta device) do not fit `ulysses` or `tp`."""
    crosses = parallel.scheme == "ulysses" or model.attends_over_all  # else tokens are moved, not heads
    check_heads(model.heads, parallel.ulysses if crosses else 1, parallel.tp)
