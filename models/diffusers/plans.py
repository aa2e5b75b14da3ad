"""How diffusers' video transformers are split over a sequence-parallel group: a plan for each class, found by its name.

Sequences: `video` (tokens of the latent video) and, where text takes part in the same attention, `text`. Text that is
cross-attended to stays whole on every rank: it is short, and then nothing has to be exchanged for it.

For other classes diffusers' own declaration (`_cp_plan`) is read, where it splits one sequence and leaves no question open.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from mmspeed.errors import UserError
from mmspeed.parallel.declared.apply import Gather, Leading, SequencePlan, Split

VIDEO = Gather("video", 1)


def wan(model: nn.Module) -> SequencePlan:
    """WanTransformer3DModel. Timesteps may be one a sample (B,) or, in Wan 2.2, one a token (B, N)."""
    return SequencePlan(
        inputs={
            "": {"timestep": Split("video", 1, ndim=2, broadcast=True)},
            "blocks.0": {"hidden_states": Split("video", 1)},
        },
        outputs={"rope": {0: Split("video", 1), 1: Split("video", 1)}, "proj_out": {0: VIDEO}},
        attention={"blocks.*.attn1": ("video",)},
        frames=("hidden_states", 2),
    )


def ltx(model: nn.Module) -> SequencePlan:
    """LTXVideoTransformer3DModel. Rotary frequencies are (B, N, E); timesteps (B,) or one a token (B, N)."""
    return SequencePlan(
        inputs={
            "": {
                "hidden_states": Split("video", 1),
                "timestep": Split("video", 1, ndim=2, broadcast=True),
            }
        },
        outputs={"rope": {0: Split("video", 1), 1: Split("video", 1)}, "proj_out": {0: VIDEO}},
        attention={"transformer_blocks.*.attn1": ("video",)},
        frames=("num_frames", None),
    )


def cogvideox(model: nn.Module) -> SequencePlan:
    """CogVideoXTransformer3DModel: text and video attend jointly; the caller may hand in rotary frequencies (N, D)."""
    return SequencePlan(
        inputs={
            "": {"image_rotary_emb": Split("video", 0, ndim=2)},
            "transformer_blocks.0": {"hidden_states": Split("video", 1), "encoder_hidden_states": Split("text", 1)},
        },
        outputs={"proj_out": {0: VIDEO}},
        attention={"transformer_blocks.*.attn1": ("text", "video")},
        frames=("hidden_states", 1),
    )


def hunyuan_video(model: nn.Module) -> SequencePlan:
    """HunyuanVideoTransformer3DModel: joint attention under a mask over [video, text].

    Its blocks cut text off by `[:-n]`, which takes everything for n = 0: every rank needs a text token.
    """
    stacks = [name for name in ("transformer_blocks", "single_transformer_blocks") if len(getattr(model, name))]
    if not stacks:
        raise UserError("HunyuanVideoTransformer3DModel has no blocks")
    every: dict[str, Split | Leading] = {"attention_mask": Split(("video", "text"), -1), "num_tokens": Leading("video")}
    inputs: dict[str, dict[str, Split | Leading]] = {
        f"{stacks[0]}.0": {"hidden_states": Split("video", 1), "encoder_hidden_states": Split("text", 1, least=1)}
    }
    return SequencePlan(
        inputs=inputs | {f"{stack}.*": every for stack in stacks},
        outputs={"rope": {0: Split("video", 0), 1: Split("video", 0)}, "proj_out": {0: VIDEO}},
        attention={f"{stack}.*.attn": ("video", "text") for stack in stacks},
        frames=("hidden_states", 2),
    )


PLANS: Mapping[str, Callable[[nn.Module], SequencePlan]] = {
    "WanTransformer3DModel": wan,
    "LTXVideoTransformer3DModel": ltx,
    "CogVideoXTransformer3DModel": cogvideox,
    "HunyuanVideoTransformer3DModel": hunyuan_video,
}


def plan_for(model: nn.Module) -> SequencePlan:
    """The plan of a diffusers model: ours by the name of its class, or one made from its `_cp_plan`.

    Raises UserError where there is neither.
    """
    for own in type(model).__mro__:
        if own.__name__ in PLANS:
            return PLANS[own.__name__](model)
    return converted(model)


def converted(model: nn.Module) -> SequencePlan:
    """A plan made from diffusers' own declaration, `_cp_plan`, of a model in which one sequence is split.

    All that it splits is taken to be that sequence, `video`; attention modules are those whose processor takes part in
    diffusers' context parallelism and which are not named as cross-attention. Raises UserError where text is split too: the
    declaration does not say which rotary output, mask or attention belongs to which sequence.
    """
    name = type(model).__name__
    declared = getattr(model, "_cp_plan", None)
    if not declared:
        raise UserError(
            f"{name}: no sequence plan is known for it; write one (docs/any-model.md) and call mmspeed.parallel.sequence_parallel"
        )
    inputs: dict[str, dict[str, Split | Leading]] = {}
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
    return SequencePlan(inputs=inputs, outputs=outputs, attention=_self_attention(model))


def _self_attention(model: nn.Module) -> dict[str, tuple[str, ...]]:
    found: dict[str, Any] = {
        name: ("video",)
        for name, module in model.named_modules()
        if hasattr(getattr(module, "processor", None), "_parallel_config")
        and not getattr(module, "is_cross_attention", False)
    }
    if not found:
        raise UserError(
            f"{type(model).__name__}: none of its attention modules takes part in diffusers' context parallelism"
        )
    return found
