"""8-bit states of torchao's optimizers, as checkpoints hold them: float32, so that any optimizer can go on with them.

A state is a code for each value, which a table maps to a share of the largest value of its block (Dettmers et al., 2022). What was
read is packed into the codes it came from; blocks that are cut otherwise, as on another number of ranks, are rounded anew.
"""

from __future__ import annotations

import torch
from torch import Tensor

LEAST = 4096  # smaller tensors stay float32, and those that are no whole number of blocks
BLOCK = 256


def unpacked(state: Tensor) -> Tensor:
    """The float32 values of a state; one that is float32 itself."""
    dequantize = getattr(state, "dequantize", None)
    return state if type(state) in (Tensor, torch.nn.Parameter) or dequantize is None else dequantize().float()


def packed(name: str, values: Tensor) -> Tensor:
    """float32 values as the state called `name` (`exp_avg`, else a state that is never below zero), on their device."""
    if values.numel() < LEAST or values.numel() % BLOCK:
        return values
    from torchao.optim.quant_utils import quantize_8bit_with_qmap
    from torchao.optim.subclass_8bit import OptimState8bit

    state = OptimState8bit.zeros(values.shape, name == "exp_avg", BLOCK, values.device, dtype=values.dtype)
    blocks = values.reshape(-1, BLOCK)
    least, scales = state.qmap[0], blocks.amax(1)
    if (
        name == "exp_avg"
    ):  # the table goes from `least`, which is above -1, to 1: a block's largest value may have been rounded to it
        scales = torch.where(-blocks.amin(1) >= scales, blocks.amin(1) / least, scales)
    shares = blocks / scales.clamp(min=1e-12)[:, None]
    state.codes.copy_(quantize_8bit_with_qmap(shares.reshape(values.shape), state.qmap))
    state.scale.copy_(scales)
    found: Tensor = state
    return found
