"""MLPs that can be computed in parts: a plain one, and what a model's MLPs are set to."""

from __future__ import annotations

from torch import Tensor, nn

from mmspeed.memory.chunks import ACTIVATIONS, ChunkedDown, set_chunks
from mmspeed.models.sora.layers import ActLinear
from mmspeed.protocols.plan import BlockParts, Chunked, Region

gelu = ACTIVATIONS["gelu_tanh"]
PARTS = BlockParts({"activation": Region(("down",), small=True)}, (Chunked("up", "down"),), draws=False)


class Packed(nn.Parameter):
    """A weight of a class of its own, as quantised ones are: only its layer is called."""


class PlainMlp(nn.Module):
    """Linear, GELU (tanh form), linear: a block of its own, whose parts are declared."""

    def __init__(self, width_in: int, hidden: int, width_out: int) -> None:
        super().__init__()
        self.up = nn.Linear(width_in, hidden)
        self.down = ActLinear(hidden, width_out)
        vars(self)["block_parts"] = PARTS

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x))

    def in_parts(self, tokens: int | None, readable: bool = True) -> PlainMlp:
        """The same MLP, which computes so many tokens at a time, None: all of them; `readable`: by its weights."""
        if not readable:
            pack(self)
        if tokens is not None:
            assert set_chunks(self, tokens)
        return self


def pack(mlp: nn.Module) -> None:
    """Make the weights of an MLP unreadable, in place: in parts, its layers are called."""
    for layer in mlp.modules():
        if isinstance(layer, nn.Linear):
            layer.weight = Packed(layer.weight.detach())


def chunk_sizes(model: nn.Module) -> list[int | None]:
    """Tokens at a time of each MLP of a model that can be computed in parts."""
    return [module._chunk_setting.size for module in model.modules() if isinstance(module, ChunkedDown)]
