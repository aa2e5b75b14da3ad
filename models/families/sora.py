"""SoraDiT, our own diffusion transformer, whose weights begin from a seed: it takes latents, times and captions as they are.

Legend: B batch, C channels, T h w latent, L caption tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from mmspeed.config import Bucket
from mmspeed.config import Config as RunConfig
from mmspeed.config.conditioning import MODES
from mmspeed.models.families.base import Config, Family, FamilyCall, Latent
from mmspeed.models.sora.model import SoraDiTConfig, forward_flops, forward_work
from mmspeed.models.sparse_note import sparse_lines, sparse_warnings
from mmspeed.plan.traffic import AttentionWorkload
from mmspeed.protocols import Work
from mmspeed.protocols.calls import Conditioning, Conditions, Predicted


@dataclass(frozen=True)
class SoraCall(FamilyCall):
    """The call of SoraDiT. It learns what the objective asks for; frames that are given have the time 0."""

    predicts: Predicted = "any"

    @staticmethod
    def patch(config: Config) -> Latent:
        t, h, w = config["patch"]
        return t, h, w

    def check(self, config: Config, channels: int, text_width: int) -> None:
        """Nothing: the model is made for the latents and captions that there are."""

    def conditioning(self, config: Config) -> Conditioning:
        """All modes, or none alone where a patch of several frames would mix their times; and a control, where the model has one."""
        modes = MODES if self.patch(config)[0] == 1 else ("none",)
        return Conditioning(modes, roles=("control",) if config["control"] else ())

    def call(self, config: Config, x_BCThw: Tensor, t_B: Tensor, conditions: Conditions) -> dict[str, Any]:
        """The arguments of the forward; times are of frames (B, T) where some are given."""
        return {
            "x_BCThw": x_BCThw,
            "t": conditions.times_of(t_B),
            "text_BLD": conditions.text_BLD,
            "text_mask_BL": conditions.text_mask_BL,
            **({"control_BCThw": conditions.latents_of("control")} if config["control"] else {}),
        }

    def prediction(self, config: Config, output: Any, x_BCThw: Tensor) -> Tensor:
        whole: Tensor = output
        return whole

    def tokens(self, config: Config, latent: Latent) -> int:
        return math.prod(_sizes(config).grid(latent))

    def flops(self, config: Config, latent: Latent, text_tokens: int) -> int:
        return forward_flops(_sizes(config), latent, text_tokens)

    def work(self, config: Config, latent: Latent, text_tokens: int) -> Work:
        """Work of the forward pass of one sample by kind, if all attention were dense."""
        return forward_work(replace(_sizes(config), sparse=None), latent, text_tokens)

    def sparse_notes(
        self, config: Config, latents: Mapping[Bucket, Latent], run: RunConfig
    ) -> tuple[list[str], list[str]]:
        """Lines and warnings about sparse blocks, and the buckets for which they are dense."""
        sizes = _sizes(config)
        return sparse_lines(sizes, latents), sparse_warnings(sizes, latents, run)

    def attention_workload(self, config: Config, latent: Latent, text_tokens: int, size: int) -> AttentionWorkload:
        """The sizes of a step of one sample, for the traffic of split sequences. size: bytes of a number in the computation."""
        sizes = _sizes(config)
        return AttentionWorkload(
            batch=1,
            grid=sizes.grid(latent),
            width=sizes.width,
            heads=sizes.heads,
            spans=tuple(sizes.span(block) for block in range(sizes.depth)),
            values=sizes.patch_values,
            text=text_tokens,
            element_size=size,
        )


def _sizes(config: Config) -> SoraDiTConfig:
    return SoraDiTConfig(**config)


FAMILY = Family("sora", "SoraDiT", SoraCall(), None, seeded=True)
