"""Plans of diffusers' transformers whose blocks keep text beside the video, in streams of their own, and attend over both.

Text lies split like the video. Where a mask hides padding, it is split with the tokens that it covers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

from mmspeed.errors import UserError
from mmspeed.models.diffusers.plan_parts import SUM, VIDEO, config_of, draws, listed
from mmspeed.protocols.plan import (
    Block,
    Leading,
    Linear,
    ModelPlan,
    Output,
    Region,
    Seen,
    Site,
    Split,
    base_of_adapters,
    named_like,
)

TEXT_SUM = Linear("row", "text", dim=1)
Inputs = dict[str, dict[str, Split | Leading | Seen]]


def hunyuan_video_plan(model: nn.Module) -> ModelPlan:
    """The plan of HunyuanVideoTransformer3DModel: blocks of two streams, then of one, with joint attention masked over [video, text].

    Its blocks cut text off by `[:-n]`, which takes everything for n = 0: every process needs a text token. Under tensor parallelism
    blocks of one stream gather tokens for their MLP and, stream by stream, for attention; one layer sums both.
    """
    blocks, joint = _both_stacks(model), ("video", "text")
    two, one = "transformer_blocks.*", "single_transformer_blocks.*"
    stacks = dict.fromkeys(f"{block.name.partition('.')[0]}.*" for block in blocks)
    every: dict[str, Split | Leading | Seen] = {
        "attention_mask": Split(joint, -1, level="seen"),
        "num_tokens": Leading("video"),
    }
    inputs: Inputs = {
        blocks[0].name: {"hidden_states": Split("video", 1), "encoder_hidden_states": Split("text", 1, least=1)}
    }
    linears: dict[str, Linear] = {}
    if two in stacks:
        inputs |= _seen(f"{two}.attn", "ff", "ff_context")
        linears |= _roles(f"{two}.attn", "ff", "ff_context")
    if one in stacks:
        inputs[f"{one}.attn"] = {"hidden_states": Seen("video", 1), "encoder_hidden_states": Seen("text", 1)}
        linears |= _roles_of_one(model, one, joint, Linear("column", joint, dim=1))
    rotary = Split("video", 0, level="seen")
    return ModelPlan(
        blocks=blocks,
        carried=("hidden_states", "encoder_hidden_states"),
        before=("x_embedder", "context_embedder", "time_text_embed"),
        after=("norm_out", "proj_out"),
        embeds=("x_embedder", "context_embedder"),
        inputs={**inputs, **dict.fromkeys(stacks, every)},
        outputs={"rope": {0: rotary, 1: rotary}, "proj_out": {0: VIDEO}},
        attention={f"{stack}.attn": Site(joint) for stack in stacks},
        linears=linears,
        heads=config_of(model).num_attention_heads,
        divided={f"{stack}.attn": ("heads",) for stack in stacks},
        regions={"attention": Region(("attn",))},
        mlps=_mlps(stacks),
        draws=draws(model),
        image=("hidden_states", 2),
    )


def hunyuan_video15_plan(model: nn.Module) -> ModelPlan:
    """The plan of HunyuanVideo15Transformer3DModel: blocks of two streams with joint attention over [video, text].

    Its text holds glyphs and image tokens too. Blocks cut text off by `[:-n]`: every process needs a text token. The mask of an attention
    shows pairs of tokens that both count.
    """
    attention, inputs = "transformer_blocks.*.attn", _streams("transformer_blocks", least=1)
    inputs["transformer_blocks.*"] = {"attention_mask": Split("text", 1, level="seen")}
    inputs |= _seen(attention, "ff", "ff_context")
    rotary = Split("video", 0, level="seen")
    return ModelPlan(
        blocks=tuple(listed(model, "transformer_blocks")),
        before=(
            "x_embedder",
            "image_embedder",
            "context_embedder",
            "context_embedder_2",
            "time_embed",
            "cond_type_embed",
        ),
        after=("norm_out", "proj_out"),
        inputs=inputs,
        outputs={"rope": {0: rotary, 1: rotary}, "proj_out": {0: VIDEO}},
        attention={attention: Site(("video", "text"), masks="pairs")},
        linears=_roles(attention, "ff", "ff_context"),
        heads=config_of(model).num_attention_heads,
        divided={attention: ("heads",)},
        regions={"attention": Region(("attn",)), "mlp": Region(("ff", "ff_context"))},
        draws=draws(model),
        image=("hidden_states", 2),
    )


def mochi_plan(model: nn.Module) -> ModelPlan:
    """The plan of MochiTransformer3DModel: joint attention over [video, text], sample by sample without padding.

    Its rotary frequencies are trained, one set for each head. Its MLPs have gates beside their values in one weight, which is not split:
    under tensor parallelism they compute with all of it on own tokens.
    """
    attention, inputs = "transformer_blocks.*.attn1", _streams("transformer_blocks")
    inputs["transformer_blocks.*"] = {"encoder_attention_mask": Split("text", 1, level="seen")}
    inputs[attention] = {"hidden_states": Seen("video", 1), "encoder_hidden_states": Seen("text", 1)}
    rotary = Split("video", 0, level="seen", channels=1)
    columns = [f"{attention}.{name}" for name in ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj")]
    return ModelPlan(
        blocks=tuple(listed(model, "transformer_blocks")),
        before=("patch_embed", "time_embed", "rope"),
        after=("norm_out", "proj_out"),
        inputs=inputs,
        outputs={"rope": {0: rotary, 1: rotary}, "proj_out": {0: VIDEO}},
        attention={attention: Site(("video", "text"), masks="trimmed")},
        linears={
            **{name: Linear("column") for name in columns},
            f"{attention}.to_out.0": SUM,
            **(
                {f"{attention}.to_add_out": TEXT_SUM} if config_of(model).num_layers > 1 else {}
            ),  # the last block has none
        },
        heads=config_of(model).num_attention_heads,
        divided={attention: ("heads",)},
        regions={"attention": Region(("attn1",)), "mlp": Region(("ff",))},
        mlps=("transformer_blocks.*.ff_context",) if config_of(model).num_layers > 1 else (),
        draws=draws(model),
        image=("hidden_states", 2),
    )


def qwen_image_plan(model: nn.Module) -> ModelPlan:
    """The plan of QwenImageTransformer2DModel: joint attention over [text, image]; an image's tokens are the sequence `video`."""
    attention, inputs = "transformer_blocks.*.attn", _streams("transformer_blocks")
    inputs["transformer_blocks.*"] = {"encoder_hidden_states_mask": Split("text", 1, level="seen")}
    inputs |= _seen(attention, "img_mlp", "txt_mlp")
    return ModelPlan(
        blocks=tuple(listed(model, "transformer_blocks")),
        before=("img_in", "txt_norm", "txt_in", "time_text_embed"),
        after=("norm_out", "proj_out"),
        inputs=inputs,
        outputs={
            "pos_embed": {0: Split("video", 0, level="seen"), 1: Split("text", 0, level="seen")},
            "proj_out": {0: VIDEO},
        },
        attention={attention: Site(("text", "video"))},
        linears=_roles(attention, "img_mlp", "txt_mlp"),
        heads=config_of(model).num_attention_heads,
        regions={"attention": Region(("attn",)), "mlp": Region(("img_mlp", "txt_mlp"))},
        draws=draws(model),
        stills=True,
    )


def flux_plan(model: nn.Module) -> ModelPlan:
    """The plan of FluxTransformer2DModel: blocks of two streams, then of one, over [text, image]; an image's tokens are `video`.

    Under tensor parallelism the norm of a block of one stream gathers tokens for its attention and its MLP, and one layer sums both.
    """
    blocks, joint = _both_stacks(model), ("text", "video")
    two, one = "transformer_blocks.*", "single_transformer_blocks.*"
    stacks = dict.fromkeys(f"{block.name.partition('.')[0]}.*" for block in blocks)
    inputs: Inputs = {
        "": {
            "hidden_states": Split("video", 1),
            "encoder_hidden_states": Split("text", 1),
            "img_ids": Split("video", 0, level="seen"),
            "txt_ids": Split("text", 0, level="seen"),
        }
    }
    outputs: dict[str, dict[int | str, Output]] = {"proj_out": {0: VIDEO}}
    linears: dict[str, Linear] = {}
    if two in stacks:
        inputs |= _seen(f"{two}.attn", "ff", "ff_context")
        linears |= _roles(f"{two}.attn", "ff", "ff_context")
    if one in stacks:
        outputs[f"{one}.norm"] = {0: Seen(joint, 1)}
        linears |= _roles_of_one(model, one, joint, Linear("column"))
    return ModelPlan(
        blocks=blocks,
        before=("x_embedder", "context_embedder", "time_text_embed"),
        after=("norm_out", "proj_out"),
        inputs=inputs,
        outputs=outputs,
        attention={f"{stack}.attn": Site(joint) for stack in stacks},
        linears=linears,
        heads=config_of(model).num_attention_heads,
        divided={f"{stack}.attn": ("heads",) for stack in stacks},
        regions={"attention": Region(("attn",))},
        mlps=_mlps(stacks),
        draws=draws(model),
        stills=True,
    )


def _both_stacks(model: nn.Module) -> tuple[Block, ...]:
    """The blocks of two streams, then of one. Raises UserError for a model without any."""
    blocks = tuple(
        block for name in ("transformer_blocks", "single_transformer_blocks") for block in listed(model, name)
    )
    if not blocks:
        raise UserError(f"{type(model).__name__} has no blocks")
    return blocks


def _mlps(stacks: Iterable[str]) -> tuple[str, ...]:
    """The MLPs of blocks of two streams and of one, whose `proj_out` sums the MLP and the heads of attention."""
    parts = {"transformer_blocks.*": ("ff", "ff_context"), "single_transformer_blocks.*": ("proj_mlp", "proj_out")}
    return tuple(f"{stack}.{part}" for stack in stacks for part in parts[stack])


def _roles_of_one(model: nn.Module, block: str, joint: tuple[str, ...], mlp: Linear) -> dict[str, Linear]:
    """Roles of the layers of one stream: `proj_out` takes the heads of attention and the hidden units of the MLP side by side."""
    width = config_of(model).num_attention_heads * config_of(model).attention_head_dim
    mlps = (base_of_adapters(module) for name, module in model.named_modules() if named_like(name, f"{block}.proj_mlp"))
    hidden = next((layer.out_features for layer in mlps if isinstance(layer, nn.Linear)), 0)
    columns = {f"{block}.attn.{name}": Linear("column") for name in ("to_q", "to_k", "to_v")}
    out = Linear("row", joint, dim=1, joined=(width, hidden))
    return {**columns, f"{block}.proj_mlp": mlp, f"{block}.proj_out": out}


def _streams(blocks: str, least: int = 0) -> Inputs:
    """The split of both streams before the first block."""
    return {f"{blocks}.0": {"hidden_states": Split("video", 1), "encoder_hidden_states": Split("text", 1, least=least)}}


def _seen(attention: str, video_mlp: str, text_mlp: str) -> Inputs:
    """The tokens that tensor-parallel processes see together: in attention both streams, in each MLP its own."""
    block = attention.rpartition(".")[0]
    return {
        attention: {"hidden_states": Seen("video", 1), "encoder_hidden_states": Seen("text", 1)},
        f"{block}.{video_mlp}": {"hidden_states": Seen("video", 1)},
        f"{block}.{text_mlp}": {"hidden_states": Seen("text", 1)},
    }


def _roles(attention: str, video_mlp: str, text_mlp: str) -> Mapping[str, Linear]:
    """Roles of the layers of two streams, with diffusers' names."""
    block = attention.rpartition(".")[0]
    columns = [f"{attention}.{name}" for name in ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj")]
    columns += [f"{block}.{mlp}.net.0.proj" for mlp in (video_mlp, text_mlp)]
    return {name: Linear("column") for name in columns} | {
        f"{attention}.to_out.0": SUM,
        f"{attention}.to_add_out": TEXT_SUM,
        f"{block}.{video_mlp}.net.2": SUM,
        f"{block}.{text_mlp}.net.2": TEXT_SUM,
    }
