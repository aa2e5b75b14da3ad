"""Declare plans of language models of transformers (`mmspeed.protocols.plan`): of the plain classes, by the names of their modules.

Tokens (`text`) are split before the first block and joined behind the last norm, so that embedding and head see all of them on every
process. Attention is that of `F.scaled_dot_product_attention`; a mask of all tokens, as the classes make it for packed documents or
windows, is used as it is wherever a process has all tokens of some heads (Ulysses). Under tensor parallelism the head is split by rows of
the vocabulary, and its logits gathered, unless it shares its weight with the embedding; experts are whole on every process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from mmspeed.errors import UserError
from mmspeed.protocols.plan import Block, Gather, Linear, ModelPlan, Region, Seen, Site, Split

COLUMN, SUM = Linear("column"), Linear("row", "text", dim=1)
# class -> (its column layers of attention, True where some of its blocks have experts)
CLASSES: Mapping[str, tuple[tuple[str, ...], bool]] = {
    "LlamaForCausalLM": (("q_proj", "k_proj", "v_proj"), False),
    "Qwen3ForCausalLM": (("q_proj", "k_proj", "v_proj"), False),
    "Qwen3MoeForCausalLM": (("q_proj", "k_proj", "v_proj"), True),
    "DeepseekV3ForCausalLM": (("q_proj", "q_b_proj", "kv_b_proj"), True),
}


def language_plan(model: nn.Module) -> ModelPlan | None:
    """The plan of a class of transformers; None for another class.

    Raises UserError for a model whose attention is no `F.scaled_dot_product_attention`, or that returns an auxiliary loss of its experts,
    which is of the tokens of all processes.
    """
    known = next((CLASSES[own.__name__] for own in type(model).__mro__ if own.__name__ in CLASSES), None)
    if known is None:
        return None
    config: Any = model.config
    name, attention = type(model).__name__, config._attn_implementation
    if attention != "sdpa":
        raise UserError(f"{name}: its attention is {attention!r}; call model.set_attn_implementation('sdpa') first")
    if getattr(config, "output_router_logits", False):
        raise UserError(
            f"{name}: its config asks for an auxiliary loss of the experts, which is of the tokens of all processes: set "
            "output_router_logits to False"
        )
    columns, experts = known
    return _plan(model, columns, experts)


def _plan(model: nn.Module, columns: tuple[str, ...], experts: bool) -> ModelPlan:
    config: Any = model.config
    blocks = [f"model.layers.{number}" for number in range(config.num_hidden_layers)]
    inputs: dict[str, dict[str, Any]] = {blocks[0]: {"hidden_states": Split("text", 1, least=1)}}
    linears: dict[str, Linear] = {} if config.tie_word_embeddings else {"lm_head": Linear("vocabulary")}
    for block in blocks:
        inputs[f"{block}.self_attn"] = {"hidden_states": Seen("text", 1)}
        own = model.get_submodule(f"{block}.self_attn")
        linears |= {f"{block}.self_attn.{part}": COLUMN for part in columns if getattr(own, part, None) is not None}
        linears[f"{block}.self_attn.o_proj"] = SUM
        if not experts or "experts" not in dict(model.get_submodule(f"{block}.mlp").named_children()):
            inputs[f"{block}.mlp"] = {"x": Seen("text", 1)}
            linears |= {f"{block}.mlp.gate_proj": COLUMN, f"{block}.mlp.up_proj": COLUMN, f"{block}.mlp.down_proj": SUM}
    rotary = Split("text", 1, level="seen")
    return ModelPlan(
        blocks=tuple(Block(name) for name in blocks),
        before=("model.embed_tokens",),
        after=("model.norm", "lm_head"),
        inputs=inputs,
        outputs={"model.rotary_emb": {0: rotary, 1: rotary}, "model.norm": {0: Gather("text", 1)}},
        attention={f"{name}.self_attn": Site(("text",), sparse=False, masks="whole") for name in blocks},
        linears=linears,
        heads=config.num_attention_heads,
        key_heads=config.num_key_value_heads,
        regions={"attention": Region(("self_attn",)), "mlp": Region(("mlp",))},
        draws=False,
        causal=True,
    )
