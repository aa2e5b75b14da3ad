"""Declare the plan of a decoder: where tokens are split, roles of its linear layers, and parts of blocks with policies of their own.

Tokens are split before the embedding, and the losses of all are joined behind the head; tensor-parallel processes hold rows of both.
Each process computes the experts of its own tokens, or sends them to those that hold their experts.
"""

from __future__ import annotations

from collections.abc import Iterator

from mmspeed.models.language.config import DecoderSettings
from mmspeed.protocols.plan import (
    Block,
    Gather,
    Hidden,
    Leading,
    Linear,
    ModelPlan,
    Output,
    Region,
    Seen,
    Site,
    Split,
    Total,
)

REGIONS = {"attention": Region(("self_attn",)), "mlp": Region(("mlp",))}
# the rows that the experts' first products take, and those of the last ones; some blocks may have no experts
OF_EXPERTS = {
    "dispatch": Region(("mlp.experts.dispatch",), optional=True),
    "experts": Region(("mlp.experts.activation",), optional=True),
}
OWN = Split("text", dim=1)
COLUMN, SUM, SEEN = Linear("column"), Linear("row", "text", dim=1), {"x_BNE": Seen("text", dim=1)}


def decoder_plan(settings: DecoderSettings) -> ModelPlan:
    """The plan of a decoder; modules for further tokens are blocks behind the others."""
    names = [f"layers.{place}" for place in range(settings.num_hidden_layers)]
    mtp = [f"mtp.{place}" for place in range(settings.num_nextn_predict_layers)]
    blocks = [*names, *(f"{name}.mtp_block" for name in mtp)]
    inputs: dict[str, dict[str, Split | Leading | Seen]] = {
        "embed_tokens": {"input": Split("text", dim=1, level="seen")},
        "lm_head": {"target_BN": Split("text", dim=1, level="seen")},
    }
    outputs: dict[str, dict[int | str, Output]] = {
        "lm_head": dict.fromkeys((0, 1), Gather("text", dim=1, level="seen"))
    }
    linears = {"embed_tokens": Linear("embedding", "text", dim=1), "lm_head": Linear("vocabulary", "text", dim=1)}
    for place, name in enumerate(blocks):
        inputs[name] = {"turn_2BNH": Split("text", dim=2, level="seen"), "counted_BN": OWN, "packs_BNP": OWN}
        inputs[f"{name}.self_attn"] = dict(SEEN)
        linears |= {f"{name}.self_attn.{part}": role for part, role in _attention_roles(settings)}
        if not settings.has_experts(place):
            inputs[f"{name}.mlp"] = dict(SEEN)
            linears |= {f"{name}.mlp.gate_proj": COLUMN, f"{name}.mlp.up_proj": COLUMN, f"{name}.mlp.down_proj": SUM}
        elif settings.experts is not None and settings.experts.balance is not None:
            outputs[f"{name}.mlp.balance"] = {0: Total("text")}
    again = settings.tie_word_embeddings or mtp  # the embedding is also read behind the last block
    return ModelPlan(
        blocks=tuple(Block(name) for name in blocks),
        inputs=inputs,
        outputs=outputs,
        attention={f"{name}.self_attn.attend": Site(("text",), calls=True, sparse=False) for name in blocks},
        linears=linears,
        heads=settings.num_attention_heads,
        key_heads=settings.num_key_value_heads,
        regions=REGIONS if settings.experts is None else REGIONS | OF_EXPERTS,
        experts={
            f"{name}.mlp.experts": {"gate_up_proj": Hidden(1, joined=2), "down_proj": Hidden(2)}
            for place, name in enumerate(blocks)
            if settings.has_experts(place)
        },
        carried=("x_BNE",),
        further=True,
        summed=("packs_BNP", -1) if settings.experts is not None and settings.experts.balance is not None else None,
        cuts=tuple(names[1:]),
        before=("embed_tokens",),
        after=("norm", "lm_head", *(("embed_tokens",) if again else ())),
        embeds=("embed_tokens",),
        draws=False,
        causal=True,
        packed=("bounds_Z", "text"),
    )


def _attention_roles(settings: DecoderSettings) -> Iterator[tuple[str, Linear]]:
    """The roles of an attention's layers; projections to vectors of low rank are whole on every process."""
    latent = settings.latent
    if latent is None:
        yield from ((part, COLUMN) for part in ("q_proj", "k_proj", "v_proj"))
    else:
        yield from ((part, COLUMN) for part in ("q_proj" if latent.query_rank is None else "q_b_proj", "kv_b_proj"))
    yield "o_proj", SUM
