"""Plans of diffusers' video transformers (`mmspeed.protocols.plan`): a function for each class, found by its name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from torch import nn

from mmspeed.errors import UserError
from mmspeed.protocols.plan import Block, ModelPlan, declare_plan, plan_of


def wan_plan(model: nn.Module) -> ModelPlan:
    """WanTransformer3DModel."""
    return ModelPlan(blocks=tuple(_listed(model, "blocks")))


def ltx_plan(model: nn.Module) -> ModelPlan:
    """LTXVideoTransformer3DModel."""
    return ModelPlan(blocks=tuple(_listed(model, "transformer_blocks")))


def cogvideox_plan(model: nn.Module) -> ModelPlan:
    """CogVideoXTransformer3DModel."""
    return ModelPlan(blocks=tuple(_listed(model, "transformer_blocks")))


def hunyuan_video_plan(model: nn.Module) -> ModelPlan:
    """HunyuanVideoTransformer3DModel: blocks of two streams, then of one."""
    return ModelPlan(
        blocks=(*_listed(model, "transformer_blocks"), *_listed(model, "single_transformer_blocks")),
    )


PLANS: Mapping[str, Callable[[nn.Module], ModelPlan]] = {
    "WanTransformer3DModel": wan_plan,
    "LTXVideoTransformer3DModel": ltx_plan,
    "CogVideoXTransformer3DModel": cogvideox_plan,
    "HunyuanVideoTransformer3DModel": hunyuan_video_plan,
}


def declare_known_plan(model: nn.Module) -> None:
    """Put the plan of its class on a model, in place; nothing where it has one, or its class has none here."""
    if plan_of(model) is not None:
        return
    for own in type(model).__mro__:
        if own.__name__ in PLANS:
            declare_plan(model, PLANS[own.__name__](model))
            return


def _listed(model: nn.Module, name: str) -> Iterator[Block]:
    """The blocks of a list. Raises UserError where there is no such list."""
    blocks = dict(model.named_children()).get(name)
    if not isinstance(blocks, nn.ModuleList):
        raise UserError(f"{type(model).__name__} has no list of blocks {name!r}")
    for number in range(len(blocks)):
        yield Block(f"{name}.{number}")
