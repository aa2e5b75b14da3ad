"""Declare plans of diffusers' video transformers (`mmspeed.protocols.plan`): a function for each class, looked up by its name.

Sequences: `video` (tokens of the latent video) and, where text takes part in the same attention, `text`. Text that is
cross-attended to stays whole on every process: it is short, and then nothing has to be exchanged for it.

Their norms, modulation and gates are in the blocks' own forward, not in modules: regions are attentions and MLPs, and selective policies
cover the rest.

For other classes diffusers' own declaration (`_cp_plan`) is read, where it splits one sequence and is unambiguous.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeVar

from torch import nn

from mmspeed.errors import UserError
from mmspeed.models.diffusers import joint_plans
from mmspeed.models.diffusers.plan_parts import ROW, SUM, VIDEO, chunks_of, config_of, draws, listed, repeated
from mmspeed.protocols.plan import (
    Gather,
    Leading,
    Linear,
    ModelPlan,
    Output,
    Region,
    Seen,
    Site,
    Split,
    Summed,
    declare_plan,
    plan_of,
)

T = TypeVar("T")
TIMESTEP = Split("video", 1, ndim=2, broadcast=True)  # one per sample (B,) or one per token (B, N)


def wan_plan(model: nn.Module) -> ModelPlan:
    """The plan of WanTransformer3DModel. Timesteps may be one per sample (B,) or, in Wan 2.2, one per token (B, N).

    Under tensor parallelism attentions and MLPs see the tokens of all processes, and the modulation around them applies to own tokens.
    """
    attention = "blocks.*.attn1", "blocks.*.attn2"
    rotary = Split("video", 1, level="seen")
    return ModelPlan(
        blocks=tuple(listed(model, "blocks")),
        carried=("hidden_states",),
        before=("patch_embedding", "condition_embedder"),
        after=("norm_out", "proj_out"),
        embeds=("patch_embedding",),
        inputs={
            "": {"timestep": TIMESTEP},
            "blocks.0": {"hidden_states": Split("video", 1)},
            **{name: {"hidden_states": Seen("video", 1)} for name in (*attention, "blocks.*.ffn")},
        },
        outputs={"rope": {0: rotary, 1: rotary}, "proj_out": {0: VIDEO}},
        attention={"blocks.*.attn1": Site(("video",), layout="BNAD")},
        linears=_wan_linears(model),
        heads=config_of(model).num_attention_heads,
        channel_norms=("blocks.*.attn*.norm_q", "blocks.*.attn*.norm_k", *_added(model, "norm_added_k")),
        divided=dict.fromkeys(attention, ("heads",)),
        regions={"attention": Region(("attn1",)), "cross_attention": Region(("attn2",)), "mlp": Region(("ffn",))},
        chunks=chunks_of("ffn", "gelu-approximate"),
        draws=draws(model),
        image=("hidden_states", 2),
    )


def _wan_linears(model: nn.Module) -> dict[str, Linear]:
    columns = [f"blocks.*.attn*.{name}" for name in ("to_q", "to_k", "to_v")]
    columns += [*_added(model, "add_k_proj"), *_added(model, "add_v_proj"), "blocks.*.ffn.net.0.proj"]
    return {name: Linear("column") for name in columns} | {"blocks.*.attn*.to_out.0": SUM, "blocks.*.ffn.net.2": SUM}


def _added(model: nn.Module, name: str) -> tuple[str, ...]:
    """The pattern of a layer that only image-to-video models have in their cross-attention; empty for others."""
    return (f"blocks.*.attn2.{name}",) if config_of(model).added_kv_proj_dim is not None else ()


def ltx_plan(model: nn.Module) -> ModelPlan:
    """The plan of LTXVideoTransformer3DModel. Rotary frequencies are (B, N, E); timesteps (B,) or one per token (B, N).

    Under tensor parallelism it is as Wan's; a process has the frequencies of its heads.
    """
    attention, mlp = ("transformer_blocks.*.attn1", "transformer_blocks.*.attn2"), "transformer_blocks.*.ff"
    rotary = Split("video", 1, level="seen", channels=2)
    columns = [f"transformer_blocks.*.attn*.{name}" for name in ("to_q", "to_k", "to_v")] + [f"{mlp}.net.0.proj"]
    return ModelPlan(
        blocks=tuple(listed(model, "transformer_blocks")),
        carried=("hidden_states",),
        before=("proj_in", "time_embed", "caption_projection"),
        after=("norm_out", "proj_out"),
        embeds=("proj_in",),
        inputs={
            "": {"hidden_states": Split("video", 1), "timestep": TIMESTEP},
            **{name: {"hidden_states": Seen("video", 1)} for name in (*attention, mlp)},
        },
        outputs={"rope": {0: rotary, 1: rotary}, "proj_out": {0: VIDEO}},
        attention={"transformer_blocks.*.attn1": Site(("video",), layout="BNAD")},
        linears={
            **{name: Linear("column") for name in columns},
            "transformer_blocks.*.attn*.to_out.0": SUM,
            f"{mlp}.net.2": SUM,
        },
        heads=config_of(model).num_attention_heads,
        channel_norms=("transformer_blocks.*.attn*.norm_q", "transformer_blocks.*.attn*.norm_k"),
        divided=dict.fromkeys(attention, ("heads",)),
        regions={"attention": Region(("attn1",)), "cross_attention": Region(("attn2",)), "mlp": Region(("ff",))},
        chunks=chunks_of("ff", config_of(model).activation_fn),
        draws=draws(model),
        image=("num_frames", None),
    )


def cogvideox_plan(model: nn.Module) -> ModelPlan:
    """The plan of CogVideoXTransformer3DModel: text and video attend jointly; the caller may pass rotary frequencies (N, D).

    One layer projects what attention gave for both, and the module cuts them apart after it, so they are summed at the module's output.
    """
    attention, mlp, joint = "transformer_blocks.*.attn1", "transformer_blocks.*.ff", ("text", "video")
    columns = [f"{attention}.{name}" for name in ("to_q", "to_k", "to_v")] + [f"{mlp}.net.0.proj"]
    return ModelPlan(
        blocks=tuple(listed(model, "transformer_blocks")),
        carried=("hidden_states", "encoder_hidden_states"),
        before=("patch_embed", "time_embedding"),
        after=("norm_final", "norm_out", "proj_out"),
        embeds=("patch_embed",),
        inputs={
            "": {"image_rotary_emb": Split("video", 0, ndim=2, level="seen")},
            "transformer_blocks.0": {"hidden_states": Split("video", 1), "encoder_hidden_states": Split("text", 1)},
            attention: {"hidden_states": Seen("video", 1), "encoder_hidden_states": Seen("text", 1)},
            mlp: {"hidden_states": Seen(joint, 1)},
        },
        outputs={attention: {0: Summed("video", 1), 1: Summed("text", 1)}, "proj_out": {0: VIDEO}},
        attention={attention: Site(joint)},
        linears={
            **{name: Linear("column") for name in columns},
            f"{attention}.to_out.0": ROW,
            f"{mlp}.net.2": Linear("row", joint, dim=1),
        },
        heads=config_of(model).num_attention_heads,
        divided={attention: ("heads",)},
        regions={"attention": Region(("attn1",)), "mlp": Region(("ff",))},
        draws=draws(model),
        image=("hidden_states", 1),
    )


def wan_vace_plan(model: nn.Module) -> ModelPlan:
    """The plan of WanVACETransformer3DModel: blocks of the control, which read the whole video's tokens once, and those of Wan."""
    wan = wan_plan(model)

    def both(named: Mapping[str, T]) -> dict[str, T]:
        control = {f"vace_{name}": what for name, what in named.items() if name.startswith("blocks.*.")}
        return {**named, **control}

    first = {"vace_blocks.0": {name: Split("video", 1) for name in ("hidden_states", "control_hidden_states")}}
    return replace(
        wan,
        blocks=(*listed(model, "vace_blocks"), *wan.blocks),
        embeds=(),
        carried=(),  # hints of the control reach many blocks
        before=(*wan.before, "vace_patch_embedding"),
        inputs={**both(wan.inputs), **first},
        attention=both(wan.attention),
        linears=both(wan.linears),
        channel_norms=(*wan.channel_norms, *(f"vace_{name}" for name in wan.channel_norms)),
        divided=both(wan.divided),
    )


PLANS: Mapping[str, Callable[[nn.Module], ModelPlan]] = {
    "WanTransformer3DModel": wan_plan,
    "WanVACETransformer3DModel": wan_vace_plan,
    "LTXVideoTransformer3DModel": ltx_plan,
    "CogVideoXTransformer3DModel": cogvideox_plan,
    "HunyuanVideoTransformer3DModel": joint_plans.hunyuan_video_plan,
    "HunyuanVideo15Transformer3DModel": joint_plans.hunyuan_video15_plan,
    "MochiTransformer3DModel": joint_plans.mochi_plan,
    "QwenImageTransformer2DModel": joint_plans.qwen_image_plan,
    "FluxTransformer2DModel": joint_plans.flux_plan,
}


def plan_for(model: nn.Module) -> ModelPlan:
    """The plan of a diffusers model: one of `PLANS` by the name of its class, or one made from its `_cp_plan`.

    Raises UserError where it has neither.
    """
    known = _known(model)
    return converted(model) if known is None else known


def declare_known_plan(model: nn.Module) -> None:
    """Declare the plan of a model's class on it, in place, unless the model has a plan already or its class has none here."""
    if plan_of(model) is None and (known := _known(model)) is not None:
        declare_plan(model, known)


def converted(model: nn.Module) -> ModelPlan:
    """A plan made from diffusers' own declaration, `_cp_plan`, for a model in which one sequence is split.

    Everything that it splits is taken as that sequence, `video`; attention modules are those whose processor takes part in
    diffusers' context parallelism and which are not named as cross-attention. Raises UserError where text is split too: the
    declaration does not say which rotary output, mask or attention belongs to which sequence.
    """
    name = type(model).__name__
    declared = getattr(model, "_cp_plan", None)
    if not declared:
        raise UserError(
            f"{name}: no plan is known for it; write one (docs/any-model.md) and call mmspeed.parallel.sequence_parallel"
        )
    inputs: dict[str, dict[str, Split | Leading | Seen]] = {}
    outputs: dict[str, dict[int | str, Output]] = {}
    for module, what in declared.items():
        if not isinstance(what, Mapping):
            gathers = what if isinstance(what, list | tuple) else [what]
            outputs.setdefault(module, {}).update(
                {
                    place: Gather("video", gather.gather_dim)
                    for place, gather in enumerate(gathers)
                    if gather is not None
                }
            )
            continue
        for key, split in what.items():
            if isinstance(split, list | tuple) or "encoder" in str(key) or "txt" in str(key):
                raise UserError(
                    f"{name}: diffusers' plan splits {key!r} too, and does not say which attention sees it; write a plan "
                    "(docs/any-model.md)"
                )
            ours = Split("video", split.split_dim, ndim=split.expected_dims)
            if split.split_output:
                outputs.setdefault(module, {})[int(key)] = ours
            else:
                inputs.setdefault(module, {})[str(key)] = ours
    return ModelPlan(
        blocks=tuple(repeated(model)),
        inputs=inputs,
        outputs=outputs,
        attention=_self_attention(model),
        draws=draws(model),
    )


def _self_attention(model: nn.Module) -> dict[str, Site]:
    sites = {
        name: Site(("video",))
        for name, module in model.named_modules()
        if hasattr(getattr(module, "processor", None), "_parallel_config")
        and not getattr(module, "is_cross_attention", False)
    }
    if not sites:
        raise UserError(
            f"{type(model).__name__}: none of its attention modules takes part in diffusers' context parallelism"
        )
    return sites


def _known(model: nn.Module) -> ModelPlan | None:
    """The plan of a model's class; without roles where projections are fused, since one weight holds queries, keys and values then."""
    make = next((PLANS[own.__name__] for own in type(model).__mro__ if own.__name__ in PLANS), None)
    plan = None if make is None else make(model)
    fused = plan is not None and any(vars(module).get("fused_projections") for module in model.modules())
    return replace(plan, linears={}) if plan is not None and fused else plan
