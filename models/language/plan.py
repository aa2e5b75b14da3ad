"""Declare the plan of a decoder: its blocks and the parts of them that may be recomputed or offloaded by themselves."""

from __future__ import annotations

from mmspeed.models.language.config import DecoderSettings
from mmspeed.protocols.plan import Block, ModelPlan, Region

REGIONS = {"attention": Region(("self_attn",)), "mlp": Region(("mlp",))}


def decoder_plan(settings: DecoderSettings) -> ModelPlan:
    """The plan of a decoder; modules for further tokens are blocks behind the others."""
    blocks = [Block(f"layers.{place}") for place in range(settings.depth)]
    blocks += [Block(f"mtp.{place}.mtp_block") for place in range(settings.further)]
    return ModelPlan(
        blocks=tuple(blocks),
        before=("embed_tokens",),
        after=("norm",) if settings.tied else ("norm", "lm_head"),
        heads=settings.heads,
        key_heads=settings.key_heads,
        regions=REGIONS,
        draws=False,
        causal=True,
    )
