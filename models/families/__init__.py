"""Families of video transformers, published ones and our own: a file and a line here for each.

`FAMILIES` looks a family up by the name of its transformer's class.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from mmspeed.errors import UserError, nearest
from mmspeed.models.families import (
    cogvideox,
    flux,
    hunyuan_video,
    hunyuan_video15,
    ltx,
    mochi,
    qwen_image,
    sora,
    wan,
    wan_vace,
)
from mmspeed.models.families.base import Family, FamilyCall, SizeLimits
from mmspeed.protocols.calls import ModelCall

__all__ = [
    "FAMILIES",
    "Family",
    "FamilyCall",
    "SizeLimits",
    "call_for",
    "class_name",
    "family_in",
    "family_of",
    "published_classes",
]

FAMILIES: Mapping[str, Family] = {
    family.transformer: family
    for family in (
        wan.FAMILY,
        wan_vace.FAMILY,
        ltx.FAMILY,
        cogvideox.FAMILY,
        hunyuan_video.FAMILY,
        hunyuan_video15.FAMILY,
        mochi.FAMILY,
        qwen_image.FAMILY,
        flux.FAMILY,
        sora.FAMILY,
    )
}


def family_in(kind: type) -> Family | None:
    """The family of a class, below any mixins; None where it has none."""
    return next((FAMILIES[own.__name__] for own in kind.__mro__ if own.__name__ in FAMILIES), None)


def class_name(model: nn.Module) -> str | None:
    """The name of a model's class in `FAMILIES`, below any mixins; None where it has none."""
    family = family_in(type(model))
    return None if family is None else family.transformer


def published_classes() -> list[str]:
    """The names of the classes that begin with a repository's weights."""
    return [name for name, family in FAMILIES.items() if not family.seeded]


def family_of(name: str, key: str) -> Family:
    """The family of a class of diffusers. Raises UserError, naming the config's `key` and the known classes, for any other."""
    known = published_classes()
    if name not in known:
        raise UserError(
            f"{key}: {name} is no class that mmspeed trains{nearest(name, known)}: known are {', '.join(known)}"
        )
    return FAMILIES[name]


def call_for(model: nn.Module) -> ModelCall:
    """The call of a model, by the name of its class. Raises UserError with the known classes for any other."""
    name = class_name(model)
    if name is None:
        own = type(model).__name__
        raise UserError(
            f"no call is known for the class {own}{nearest(own, list(FAMILIES))}: known are {', '.join(FAMILIES)}; "
            "for another class give call=, an object like those of mmspeed/models/families"
        )
    return FAMILIES[name].call
