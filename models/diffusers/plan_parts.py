"""Parts that plans of diffusers' transformers share: blocks of a list, MLPs, roles of sums.

Sequences: `video` (tokens of the latent video) and, where text takes part in the same attention, `text`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from mmspeed.errors import UserError
from mmspeed.protocols.plan import Block, Chunked, Gather, Linear

VIDEO = Gather("video", 1)
SUM = Linear("row", "video", dim=1)
ROW = Linear("row")  # a module around the layer sums what it gives
# the elementwise activations of diffusers' FeedForward
ACTIVATIONS: Mapping[str, Any] = {"gelu": "gelu", "gelu-approximate": "gelu_tanh", "linear-silu": "silu"}


def config_of(model: nn.Module) -> Any:
    """The arguments that a model of diffusers was made with, as its attributes."""
    return model.config


def listed(model: nn.Module, name: str) -> Iterator[Block]:
    """The blocks of a list. Raises UserError where there is no such list."""
    blocks = dict(model.named_children()).get(name)
    if not isinstance(blocks, nn.ModuleList):
        raise UserError(f"{type(model).__name__} has no list of blocks {name!r}")
    for number in range(len(blocks)):
        yield Block(f"{name}.{number}")


def repeated(model: nn.Module) -> Iterator[Block]:
    """The blocks that diffusers names as repeated, or as not to be split."""
    kinds = getattr(model, "_repeated_blocks", None) or getattr(model, "_no_split_modules", None) or ()
    for name, module in model.named_modules():
        if type(module).__name__ in kinds:
            yield Block(name)


def chunks_of(mlp: str, activation: str) -> tuple[Chunked, ...]:
    """A block's MLP, a FeedForward of diffusers, where its activation is elementwise; else none."""
    if activation not in ACTIVATIONS:
        return ()
    return (Chunked(f"{mlp}.net.0.proj", f"{mlp}.net.2", f"{mlp}.net.0", ACTIVATIONS[activation]),)


def draws(model: nn.Module) -> bool:
    """True for a model with dropout."""
    return any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules())
