"""Declare plans of diffusers' video transformers (`mmspeed.protocols.plan`): a function for each class, looked up by its name.

Sequences: `video` (tokens of the latent video) and, where text takes part in the same attention, `text`. Text that is
cross-attended to stays whole on every process: it is short, and then nothing has to be exchanged for it.

Their norms, modulation and gates are in the blocks' own forward, not in modules: regions are attentions and MLPs, and selective policies
cover the rest.

For other classes diffusers' own declaration (`_cp_plan`) is read, where it splits one sequence and is unambiguous.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from mmspeed.errors import UserError
from mmspeed.protocols.plan import (
    Block,
    Chunked,
    Gather,
    Leading,
    Linear,
    ModelPlan,
    Region,
    Seen,
    Site,
    Split,
    declare_plan,
    plan_of,
)

VIDEO = Gather("video", 1)
TIMESTEP = Split("video", 1, ndim=2, broadcast=True)  # one per sample (B,) or one per token (B, N)
SUM = Linear("row", "video", dim=1)
# the elementwise activations of diffusers' FeedForward
ACTIVATIONS: Mapping[str, Any] = {"gelu": "gelu", "gelu-approximate": "gelu_tanh", "linear-silu": "silu"}


def wan_plan(model: nn.Module) -> ModelPlan:
    """The plan of WanTransformer3DModel. Timesteps may be one per sample (B,) or, in Wan 2.2, one per token (B, N).

    Under tensor parallelism attentions and MLPs see the tokens of all processes, and the modulation around them applies to own tokens.
    """
    attention = "blocks.*.attn1", "blocks.*.attn2"
    rotary = Split("video", 1, level="seen")
    return ModelPlan(
        blocks=tuple(_listed(model, "blocks")),
        before=("patch_embedding", "condition_embedder"),
        after=("norm_out", "proj_out"),
        inputs={
            "": {"timestep": TIMESTEP},
            "blocks.0": {"hidden_states": Split("video", 1)},
            **{name: {"hidden_states": Seen("video", 1)} for name in (*attention, "blocks.*.ffn")},
        },
        outputs={"rope": {0: rotary, 1: rotary}, "proj_out": {0: VIDEO}},
        attention={"blocks.*.attn1": Site(("video",), layout="BNAD")},
        linears=_wan_linears(model),
        heads=_config(model).num_attention_heads,
        channel_norms=("blocks.*.attn*.norm_q", "blocks.*.attn*.norm_k", *_added(model, "norm_added_k")),
        divided=dict.fromkeys(attention, ("heads",)),
        regions={"attention": Region(("attn1",)), "cross_attention": Region(("attn2",)), "mlp": Region(("ffn",))},
        chunks=_chunks("ffn", "gelu-approximate"),
        draws=_draws(model),
        image=("hidden_states", 2),
    )


def _wan_linears(model: nn.Module) -> dict[str, Linear]:
    """Roles of the layers; none where projections are fused, since their weight cannot be split by heads."""
    if any(vars(module).get("fused_projections") for module in model.modules()):
        return {}
    columns = [f"blocks.*.attn*.{name}" for name in ("to_q", "to_k", "to_v")]
    columns += [*_added(model, "add_k_proj"), *_added(model, "add_v_proj"), "blocks.*.ffn.net.0.proj"]
    return {name: Linear("column") for name in columns} | {"blocks.*.attn*.to_out.0": SUM, "blocks.*.ffn.net.2": SUM}


def _added(model: nn.Module, name: str) -> tuple[str, ...]:
    """The pattern of a layer that only image-to-video models have in their cross-attention; empty for others."""
    return (f"blocks.*.attn2.{name}",) if _config(model).added_kv_proj_dim is not None else ()


def ltx_plan(model: nn.Module) -> ModelPlan:
    """The plan of LTXVideoTransformer3DModel. Rotary frequencies are (B, N, E); timesteps (B,) or one per token (B, N)."""
    return ModelPlan(
        blocks=tuple(_listed(model, "transformer_blocks")),
        before=("proj_in", "time_embed", "caption_projection"),
        after=("norm_out", "proj_out"),
        inputs={"": {"hidden_states": Split("video", 1), "timestep": TIMESTEP}},
        outputs={"rope": {0: Split("video", 1), 1: Split("video", 1)}, "proj_out": {0: VIDEO}},
        attention={"transformer_blocks.*.attn1": Site(("video",), layout="BNAD")},
        heads=_config(model).num_attention_heads,
        regions={"attention": Region(("attn1",)), "cross_attention": Region(("attn2",)), "mlp": Region(("ff",))},
        chunks=_chunks("ff", _config(model).activation_fn),
        draws=_draws(model),
        image=("num_frames", None),
    )


def cogvideox_plan(model: nn.Module) -> ModelPlan:
    """The plan of CogVideoXTransformer3DModel: text and video attend jointly; the caller may pass rotary frequencies (N, D)."""
    return ModelPlan(
        blocks=tuple(_listed(model, "transformer_blocks")),
        before=("patch_embed", "time_embedding"),
        after=("norm_final", "norm_out", "proj_out"),
        inputs={
            "": {"image_rotary_emb": Split("video", 0, ndim=2)},
            "transformer_blocks.0": {"hidden_states": Split("video", 1), "encoder_hidden_states": Split("text", 1)},
        },
        outputs={"proj_out": {0: VIDEO}},
        attention={"transformer_blocks.*.attn1": Site(("text", "video"))},
        heads=_config(model).num_attention_heads,
        regions={"attention": Region(("attn1",)), "mlp": Region(("ff",))},
        draws=_draws(model),
        image=("hidden_states", 1),
    )


def hunyuan_video_plan(model: nn.Module) -> ModelPlan:
    """The plan of HunyuanVideoTransformer3DModel: blocks of two streams, then of one, with joint attention masked over [video, text].

    Its blocks cut text off by `[:-n]`, which takes everything for n = 0: every process needs a text token.
    """
    blocks = tuple(
        block for name in ("transformer_blocks", "single_transformer_blocks") for block in _listed(model, name)
    )
    if not blocks:
        raise UserError(f"{type(model).__name__} has no blocks")
    first = blocks[0].name
    stacks = dict.fromkeys(f"{block.name.partition('.')[0]}.*" for block in blocks)
    every: dict[str, Split | Leading] = {"attention_mask": Split(("video", "text"), -1), "num_tokens": Leading("video")}
    inputs: dict[str, dict[str, Split | Leading | Seen]] = {
        first: {"hidden_states": Split("video", 1), "encoder_hidden_states": Split("text", 1, least=1)}
    }
    return ModelPlan(
        blocks=blocks,
        before=("x_embedder", "context_embedder", "time_text_embed"),
        after=("norm_out", "proj_out"),
        inputs={**inputs, **dict.fromkeys(stacks, every)},
        outputs={"rope": {0: Split("video", 0), 1: Split("video", 0)}, "proj_out": {0: VIDEO}},
        attention={f"{stack}.attn": Site(("video", "text")) for stack in stacks},
        heads=_config(model).num_attention_heads,
        regions={"attention": Region(("attn",))},
        draws=_draws(model),
        image=("hidden_states", 2),
    )


PLANS: Mapping[str, Callable[[nn.Module], ModelPlan]] = {
    "WanTransformer3DModel": wan_plan,
    "LTXVideoTransformer3DModel": ltx_plan,
    "CogVideoXTransformer3DModel": cogvideox_plan,
    "HunyuanVideoTransformer3DModel": hunyuan_video_plan,
}


def plan_for(model: nn.Module) -> ModelPlan:
    """The plan of a diffusers model: one of `PLANS` by the name of its class, or one made from its `_cp_plan`.

    Raises UserError where it has neither.
    """
    known = _known(model)
    return converted(model) if known is None else known(model)


def declare_known_plan(model: nn.Module) -> None:
    """Declare the plan of a model's class on it, in place, unless the model has a plan already or its class has none here."""
    known = _known(model)
    if plan_of(model) is None and known is not None:
        declare_plan(model, known(model))


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
    outputs: dict[str, dict[int | str, Split | Gather]] = {}
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
        blocks=tuple(_repeated(model)),
        inputs=inputs,
        outputs=outputs,
        attention=_self_attention(model),
        draws=_draws(model),
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


def _known(model: nn.Module) -> Callable[[nn.Module], ModelPlan] | None:
    return next((PLANS[own.__name__] for own in type(model).__mro__ if own.__name__ in PLANS), None)


def _config(model: nn.Module) -> Any:
    return model.config


def _listed(model: nn.Module, name: str) -> Iterator[Block]:
    """The blocks of a list. Raises UserError where there is no such list."""
    blocks = dict(model.named_children()).get(name)
    if not isinstance(blocks, nn.ModuleList):
        raise UserError(f"{type(model).__name__} has no list of blocks {name!r}")
    for number in range(len(blocks)):
        yield Block(f"{name}.{number}")


def _repeated(model: nn.Module) -> Iterator[Block]:
    """The blocks that diffusers names as repeated, or as not to be split."""
    kinds = getattr(model, "_repeated_blocks", None) or getattr(model, "_no_split_modules", None) or ()
    for name, module in model.named_modules():
        if type(module).__name__ in kinds:
            yield Block(name)


def _chunks(mlp: str, activation: str) -> tuple[Chunked, ...]:
    """A block's MLP, a FeedForward of diffusers, where its activation is elementwise; else none."""
    if activation not in ACTIVATIONS:
        return ()
    return (Chunked(f"{mlp}.net.0.proj", f"{mlp}.net.2", f"{mlp}.net.0", ACTIVATIONS[activation]),)


def _draws(model: nn.Module) -> bool:
    """True for a model with dropout."""
    return any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules())
