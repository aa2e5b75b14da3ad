"""Make MLPs compute some tokens at a time, by mixins on the two linear layers that a plan names.

The first layer passes its input on, and the second computes both, part by part; norms, gathers and gates around them stay as they are.
Legend: N tokens, E width, P tokens of a part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch.nn.functional as F
from torch import Tensor, nn

from mmspeed.mixin import mix_in
from mmspeed.protocols.plan import Chunked, PreparesInput, check_adapter, modules_like, parts_of
from mmspeed.torch_internals import is_fake, is_sharded

from .chunked import Linear, chunked_mlp, in_chunks

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "gelu": F.gelu,
    "silu": F.silu,
}


@runtime_checkable
class AppliesWeights(Protocol):
    """A linear layer that computes with other weights than its parameters, such as this process's part of them."""

    def applied_weights(self) -> Linear:
        """The weight and the bias."""
        ...


def applied(layer: nn.Linear) -> Linear:
    """The weight and the bias of a linear layer that this process computes with, split or not."""
    return layer.applied_weights() if isinstance(layer, AppliesWeights) else (layer.weight, layer.bias)


@dataclass
class ChunkSetting:
    """The setting of an MLP. `size`: tokens at a time; None: all."""

    size: int | None


class HandsOn(nn.Module):
    """Mixed in before a module that expands tokens: it returns its input, for `ChunkedDown` to expand."""

    _chunk_setting: ChunkSetting

    def forward(self, x: Tensor) -> Tensor:
        return self.whole(x) if self._chunk_setting.size is None else x

    def whole(self, x: Tensor) -> Tensor:
        """The module's own forward."""
        out: Tensor = super().forward(x)
        return out


class HandsOnPrepared(nn.Module):
    """The same for a linear layer that prepares its input, and returns the prepared input."""

    _chunk_setting: ChunkSetting

    def project(self, x: Tensor) -> Tensor:
        """The input of the product."""
        return self.whole(x) if self._chunk_setting.size is None else x

    def whole(self, x: Tensor) -> Tensor:
        """The module's own product."""
        out: Tensor = super().project(x)  # type: ignore[misc]
        return out


@dataclass
class ChunkedLayers:
    """The layers of an MLP, as its second half computes with them."""

    up: nn.Linear | None  # None: its weight cannot be read, only the layer called
    down: nn.Linear | None
    expands: HandsOn | HandsOnPrepared
    activation: Callable[[Tensor], Tensor]


class ChunkedDown(nn.Module):
    """Mixed in before the second layer of an MLP: it computes both layers, some tokens at a time."""

    _chunk_setting: ChunkSetting
    _chunk_layers: ChunkedLayers

    def forward(self, x: Tensor) -> Tensor:
        size, layers = self._chunk_setting.size, self._chunk_layers
        if size is None:
            return self.whole(x)
        x_NE = x.flatten(0, -2)
        if layers.up is not None and layers.down is not None:
            out = chunked_mlp(x_NE, applied(layers.up), layers.activation, applied(layers.down), size)
        else:
            out = in_chunks(lambda x_PE: self.whole(layers.expands.whole(x_PE)), x_NE, 0, size)
        parts: Tensor = out.unflatten(0, x.shape[:-1])
        return parts

    def whole(self, x: Tensor) -> Tensor:
        """The layer's own forward."""
        out: Tensor = super().forward(x)
        return out


def set_chunks(block: nn.Module, tokens: int | None) -> bool:
    """Make a block's MLPs compute so many tokens at a time, None: all, in place; True where the block has such an MLP."""
    chunks = parts_of(block).chunks
    for chunk in chunks:
        _set(block, chunk, ChunkSetting(tokens))
    return bool(chunks)


def _set(block: nn.Module, chunk: Chunked, setting: ChunkSetting) -> None:
    up, down = _module(block, chunk.up), _module(block, chunk.down)
    for name, layer in ((chunk.up, up), (chunk.down, down)):
        check_adapter(layer, f"memory.mlp_chunk: {name} of {type(block).__name__}")
    expands = up if chunk.expands is None else _module(block, chunk.expands)
    readable = is_plain_linear(up) and is_plain_linear(down)
    mixin: Any = HandsOnPrepared if isinstance(expands, PreparesInput) else HandsOn
    mix_in(expands, mixin, rename=False)._chunk_setting = setting
    prepares: Any = down
    activation = prepares.prepare if chunk.activation is None else ACTIVATIONS[chunk.activation]
    layers = ChunkedLayers(
        up if readable and isinstance(up, nn.Linear) else None,
        down if readable and isinstance(down, nn.Linear) else None,
        expands,  # type: ignore[arg-type]
        activation,
    )
    mixed = mix_in(down, ChunkedDown, rename=False)
    mixed._chunk_setting, mixed._chunk_layers = setting, layers


def is_plain_linear(layer: nn.Module) -> bool:
    """True for a linear layer without adapter and without quantisation, be it packed or by a tensor class of its own."""
    if not isinstance(layer, nn.Linear) or not layer.weight.is_floating_point():
        return False
    return is_sharded(layer.weight) or is_fake(layer.weight) or type(layer.weight) is nn.Parameter


def _module(block: nn.Module, pattern: str) -> nn.Module:
    return modules_like(block, pattern, "plan, chunks")[0][1]
