"""Sparse self-attention in a model that was written without it.

Classes are changed by mixins, as sequence parallelism does (`mmspeed.parallel.declared.apply`):
the model's own notes the grid of each forward;
an attention module's enters a `TorchFunctionMode` around its forward, which takes over its `F.scaled_dot_product_attention`. Names in the
state dict stay as they were: thresholds are buffers that are not in it.

What a forward decides (its grid, whether it is dense, which keys are kept) is recorded by each checkpoint of a block and replayed when
the block is computed again in backward, also when other forwards and other thresholds came in between. A checkpoint that records
nothing is refused.

Legend: B batch, A heads, N queries, M keys, D head width, X position axes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from mmspeed.compute.rope import grid_positions
from mmspeed.compute.sparse.attention import check_backend
from mmspeed.compute.sparse.module import ClusteredAttention, clustered_layers
from mmspeed.config.sparse import SparseConfig
from mmspeed.errors import UserError, nearest
from mmspeed.graphs import outside_graphs
from mmspeed.memory.recompute.block_checkpoint import replay_checkpoints
from mmspeed.mixin import mix_in
from mmspeed.models.diffusers.sparse import Grid, SparseLayout
from mmspeed.parallel.declared.apply import argument_names, named_like
from mmspeed.parallel.declared.attention_hook import key_mask
from mmspeed.replay import recording
from mmspeed.torch_internals import in_backward

NAME = "mmspeed_sparse"  # of the layer in an attention module


@dataclass
class ForwardCall:
    """One forward of the model."""

    grid: tuple[int, int, int]  # video tokens along time, height, width
    _places: dict[Any, tuple[Tensor, Tensor | None]] = field(default_factory=dict)

    def places(self, sequences: tuple[str, ...], tokens: int, device: torch.device, where: str) -> Any:
        """(positions_NX, text_M or None where there is no text) of the tokens of an attention. Raises UserError where they do not fit."""
        text = tokens - math.prod(self.grid)
        if text < 0 or (text and len(sequences) == 1):
            raise UserError(
                f"{where}: {tokens} tokens attend as {' and '.join(sequences)}, but the video has {' x '.join(map(str, self.grid))}; "
                "name the sequences of this module and the grid as they are"
            )
        key = (sequences, tokens, device)
        if key not in self._places:
            positions_NX, nowhere = grid_positions(self.grid, device), torch.full((text, 3), -1, device=device)
            positions_NX = torch.cat([positions_NX if name == "video" else nowhere for name in sequences])
            self._places[key] = positions_NX, positions_NX[:, 0] < 0 if text else None
        return self._places[key]


@dataclass
class ForwardCalls:
    """What all parts of a model share."""

    names: tuple[str, ...]  # of the positional arguments of its forward
    grid: Grid
    model: str
    now: ForwardCall | None = None

    @outside_graphs
    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A forward of the model begins."""
        given: Any = self.grid({**dict(zip(self.names, args, strict=False)), **kwargs})
        grid = tuple(int(size) for size in given)
        if len(grid) != 3 or min(grid) < 1:
            raise UserError(
                f"{self.model}: the grid of video tokens is {given}; it is (time, height, width), 1 at least"
            )
        self.now = ForwardCall(grid)


class _SparseModel(nn.Module):
    """Mixed in before a model's own class."""

    _sparse_calls: ForwardCalls

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if "_sequence_role" in vars(self):
            raise UserError(
                f"{self._sparse_calls.model} was made sparse, then sequence parallel; foreign models are one of them"
            )
        self._sparse_calls.begin(args, kwargs)
        return super().forward(*args, **kwargs)

    @contextmanager
    def cache_context(self, name: str, **kwargs: Any) -> Iterator[None]:
        """Diffusers' pipelines tell by it which caption they call the model with; `warm_plans` listens."""
        with super().cache_context(name, **kwargs):  # type: ignore[misc]
            for layer in clustered_layers(self).values():
                if layer.warm is not None:
                    layer.warm.condition = name
            yield


@dataclass
class _AttentionRole:
    """An attention module's part in its model."""

    where: str
    sequences: tuple[str, ...]
    calls: ForwardCalls

    def call(self) -> ForwardCall:
        """The forward that is being computed."""
        if self.calls.now is None:
            raise UserError(f"{self.where} was called before any forward of the model that was made sparse")
        return self.calls.now


class _SparseSelfAttention(nn.Module):
    """Mixed in before the class of an attention module."""

    _sparse_role: _AttentionRole

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _attend(self._sparse_role, getattr(self, NAME), super().forward, args, kwargs)


@outside_graphs  # of a compiled block, all but the attention is compiled
def _attend(
    role: _AttentionRole, layer: ClusteredAttention, run: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if not recording() and in_backward():  # in backward
        raise UserError(
            f"{role.where} is computed again in backward by a checkpoint that does not keep which keys it kept; use the model's "
            "enable_gradient_checkpointing(), or mmspeed.memory.recompute(block) after sparsify_model"
        )
    call, _ = layer.record_or_replay(role.call)
    if call.grid[0] == 1:  # an image
        layer.counter["dense"] += 1
        return run(*args, **kwargs)
    with _Taken(role, layer, call) as mode:
        out = run(*args, **kwargs)
    if mode.calls != 1:
        raise UserError(
            f"{role.where}: its forward called F.scaled_dot_product_attention {mode.calls} times, not once; with diffusers, "
            "model.set_attention_backend('native') makes it do so"
        )
    return out


class _Taken(TorchFunctionMode):
    """While active, `F.scaled_dot_product_attention` is computed by a layer. `calls` counts how often."""

    def __init__(self, role: _AttentionRole, layer: ClusteredAttention, call: ForwardCall) -> None:
        super().__init__()
        self.role, self.layer, self.call = role, layer, call
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            self.calls += 1
            return self._attend(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """`F.scaled_dot_product_attention`'s own arguments."""
        where = self.role.where
        if query.ndim != 4 or query.shape[2] != key.shape[2]:
            raise UserError(
                f"{where}: queries {tuple(query.shape)} and keys {tuple(key.shape)}; sparse attention is of (B, A, N, D) with "
                "itself: leave cross-attention out of `attention`"
            )
        if dropout_p > 0 or is_causal:
            raise UserError(f"{where}: sparse attention has no {'dropout' if dropout_p > 0 else 'causal mask'}")
        positions_NX, text_M = self.call.places(self.role.sequences, query.shape[2], query.device, where)
        mask_BM = None
        if attn_mask is not None:
            try:
                mask_BM = key_mask(attn_mask, query.shape[0], key.shape[2], where)
            except UserError:
                raise UserError(
                    f"{where}: an attention mask {tuple(attn_mask.shape)} that is not one of keys alone, the same for every query "
                    "and head, or that adds a bias; sparse attention takes masks that show or hide keys"
                ) from None
        if enable_gqa and key.shape[1] != query.shape[1]:
            key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
        if scale is not None:
            query = query * (scale * query.shape[-1] ** 0.5)
        return self.layer(query, key, value, mask_BM, positions_NX, text_M)


def sparsify(model: nn.Module, layout: SparseLayout, settings: SparseConfig) -> dict[str, ClusteredAttention]:
    """Make the self-attention of `model` sparse, in place: its sparse layers, by the names of their modules.

    Of the modules that the layout names, in the model's order, the first `dense_first` and the last `dense_last` stay dense.
    Raises UserError for a layout that does not fit the model, and where nothing would be sparse.
    """
    found = _matching(model, layout)
    check_backend(settings.backend, "model.sparse.backend")
    chosen = range(settings.dense_first, len(found) - settings.dense_last)
    if not chosen:
        raise UserError(
            f"sparse attention: {type(model).__name__} has {len(found)} self-attentions, and all would stay dense: lower dense_first "
            f"({settings.dense_first}) or dense_last ({settings.dense_last})"
        )
    for name, module in [("", model), *(found[place][:2] for place in chosen)]:
        if "forward" in vars(module):
            raise UserError(
                f"sparsify_model: the forward of {name or type(model).__name__} has been replaced (hooks of diffusers or accelerate "
                "do); make the model sparse first"
            )
    calls = ForwardCalls(argument_names(type(model)), layout.grid, type(model).__name__)
    layers = {}
    for place in chosen:
        name, module, sequences = found[place]
        layer = ClusteredAttention(settings, way=1 if (place % 2) else 0).train(module.training)
        layer.reset()
        parameter = next(module.parameters(), None)
        layer.to(parameter.device if parameter is not None else None)
        layer.register_buffer("tau", layer.tau, persistent=False)  # a saved model is the plain class's
        module.add_module(NAME, layer)
        mix_in(module, _SparseSelfAttention, rename=False)
        module._sparse_role = _AttentionRole(f"{name} ({type(module).__name__})", sequences, calls)  # type: ignore[assignment]
        layers[name] = layer
    replay_checkpoints(model)
    mix_in(model, _SparseModel, rename=False)  # diffusers writes the name into a checkpoint's config
    model._sparse_calls = calls  # type: ignore[assignment]
    return layers


def _matching(model: nn.Module, layout: SparseLayout) -> list[tuple[str, nn.Module, tuple[str, ...]]]:
    found, unused = [], set(layout.attention)
    for name, module in model.named_modules():
        for pattern, sequences in layout.attention.items():
            if named_like(name, pattern):
                found.append((name, module, tuple(sequences)))
                unused.discard(pattern)
                break
    if unused:
        pattern = min(unused)
        hint = nearest(pattern, [name for name, _ in model.named_modules()])
        raise UserError(f"sparse attention: {type(model).__name__} has no module {pattern!r}{hint}")
    return found


def is_context_parallel(transformer: nn.Module) -> bool:
    """Whether diffusers' own context parallelism was enabled for a transformer: its attention processors are given a config then."""
    processors = (getattr(module, "processor", None) for module in transformer.modules())
    return any(getattr(processor, "_parallel_config", None) for processor in processors)
