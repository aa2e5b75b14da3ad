"""Modules that other stages hold give zeros of the right shapes, computed once for each kind of input."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mmspeed.parallel.stages import make_outline


class Counted(nn.Linear):
    """A layer that counts its calls."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


def test_an_outline_computes_shapes_once_for_each_kind_of_input() -> None:
    layer = Counted(4, 6)
    outline, x = make_outline(layer), torch.ones(2, 4)
    for given, calls in ((x, 1), (x + 1, 1), (x[:1], 2), (x, 2), (x.half(), 3), (x.half(), 3)):
        if given.dtype == torch.half and layer.calls == 2:
            outline.set_type(torch.half)
        out = outline(given)
        assert (out.shape, out.dtype, layer.calls) == ((len(given), 6), given.dtype, calls)
        assert not out.any() and out.untyped_storage().nbytes() == given.element_size()
