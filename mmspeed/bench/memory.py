"""A model, its input, and its steps with any ways of keeping activations.

Legend: T h w latent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from mmspeed import rng
from mmspeed.config.memory import ActivationPolicy
from mmspeed.device import parse_dtype, pick
from mmspeed.memory import set_policies
from mmspeed.memory.offload.offloader import Offloader
from mmspeed.models.sora.model import SoraDiT, SoraDiTConfig
from mmspeed.parallel import autocast

CHANNELS, TEXT_WIDTH, TEXT_TOKENS = 16, 64, 32
# a difference that another order of sums explains, relative to a gradient's largest value: sums of up to 10^4 terms, 100 x 2^-23, times
# ten for eight blocks; roundings to bfloat16, 2^-8, times eight
CLOSE = {"float32": 1e-4, "bfloat16": 3e-2}


@dataclass(frozen=True)
class PolicySetting:
    """The model, the latent and the device to measure on."""

    arrangement: Literal["factorised", "full"] = "factorised"
    dtype: Literal["float32", "bfloat16"] = "float32"
    width: int = 384
    heads: int = 6
    rank: int = 64
    depth: int = 8
    latent: tuple[int, int, int] = (5, 32, 32)
    device: str = "auto"


class BenchModel:
    """A model, its input, and its steps with any ways."""

    def __init__(self, setting: PolicySetting) -> None:
        self.setting = setting
        self.device = pick(setting.device)
        self.device.activate()
        config = SoraDiTConfig(
            width=setting.width,
            depth=setting.depth,
            heads=setting.heads,
            latent_channels=CHANNELS,
            text_width=TEXT_WIDTH,
            adaln_rank=setting.rank,
            arrangement=setting.arrangement,
        )
        self.model = SoraDiT(config).to(self.device.torch_device)
        fill_zeros(self.model)
        dtype = parse_dtype(setting.dtype)
        if dtype != torch.float32:
            autocast(self.model, dtype)
        inputs = [
            rng.normal((1, CHANNELS, *setting.latent), 0, "bench", "latent"),
            torch.full((1,), 0.5),
            rng.normal((1, TEXT_TOKENS, TEXT_WIDTH), 0, "bench", "text"),
            torch.ones(1, TEXT_TOKENS, dtype=torch.bool),
        ]
        self.inputs = [x.to(self.device.torch_device) for x in inputs]
        self.offloader = Offloader(self.device)

    def use(self, ways: Mapping[str, ActivationPolicy]) -> None:
        """Use these ways in the following steps."""
        for block in self.model.blocks:
            set_policies(block, dict(ways), self.offloader.group)

    def forward(self) -> Tensor:
        out: Tensor = self.model(*self.inputs)
        return out.float().square().mean()

    def step(self) -> None:
        self.forward().backward()
        self.model.zero_grad(set_to_none=True)


def largest_distance(grads: Sequence[Tensor], truth: Sequence[Tensor]) -> float:
    """The largest difference of a gradient from the true one, relative to that one's largest value; infinite where one is missing."""
    if len(grads) != len(truth):
        return float("inf")
    return max(float((g - t).abs().max() / t.abs().max()) for g, t in zip(grads, truth, strict=True) if t.any())


def fill_zeros(model: nn.Module) -> None:
    """Fill matrices that start at zero with small random numbers: else most gradients are zero in every case."""
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and not parameter.detach().any():
            with torch.no_grad():
                parameter.copy_(0.02 * rng.normal(tuple(parameter.shape), 0, "bench", name))
