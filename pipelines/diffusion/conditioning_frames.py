"""Conditioning frames: clean where others are noisy, without loss, and held while a video is sampled.

Legend: B batch, C channels, T h w latent.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor

from mmspeed.config.conditioning import ConditioningConfig
from mmspeed.config.roles import ROLES
from mmspeed.errors import UserError
from mmspeed.pipelines.diffusion.samplers import Predict
from mmspeed.protocols import Batch
from mmspeed.protocols.calls import Conditioning


def held(x_BCThw: Tensor, clean_BCThw: Tensor, mask_BT: Tensor) -> Tensor:
    """`x_BCThw` with the clean latents at conditioning frames."""
    return clean_BCThw.to(x_BCThw).where(mask_BT[:, None, :, None, None], x_BCThw)


def counted_frames(batch: Batch, how: str) -> Tensor | None:
    """The latent frames (B, T) that count in the loss, True or a weight; None: all.

    They are those of `loss_mask`; conditioning frames, too, in families that concatenate (`Conditioning.how` is not `replace`).
    """
    loss_BT, clean_BT = (batch[name] if name in batch else None for name in ("loss_mask", "conditioning_mask"))
    clean_BT = clean_BT if how == "replace" else None
    if clean_BT is None or loss_BT is None:
        return loss_BT if clean_BT is None else ~clean_BT
    return loss_BT.where(~clean_BT, 0)


def holding(predict: Predict, clean_BCThw: Tensor, mask_BT: Tensor) -> Predict:
    """The prediction for latents whose conditioning frames are the clean ones, whatever a sampler has made of them."""

    def predict_held(x_BCThw: Tensor, t_B: Tensor) -> Tensor:
        return predict(held(x_BCThw, clean_BCThw, mask_BT), t_B)

    return predict_held


def check_modes(conditioning: ConditioningConfig, modes: Sequence[str], model: str) -> None:
    """Raises UserError for a mode of the config that a model (as messages call it) lacks."""
    lacking = next((mode for mode in conditioning.shares if mode not in modes), None)
    if lacking is None:
        return
    known = ", ".join(modes)
    if lacking == "none":
        raise UserError(
            f"conditioning: {model} is always given frames: its modes are {known}, so give them shares that are 1 together"
        )
    raise UserError(f"conditioning.{lacking}: {model} cannot be trained so: its modes are {known}")


def check_prompts(prompts: Sequence[str], rule: Conditioning) -> None:
    """Raises UserError for prompts of validation, which come alone, and a model that is always given frames or a control."""
    if prompts and rule.always:
        what, option = ("by a control", "--control") if rule.roles else ("of given frames", "--image")
        raise UserError(
            f"validate.prompts: the model makes videos {what} alone, and a prompt has none: leave prompts out, so that samples are made "
            f"from held-out clips (validate.clips), and use mmspeed sample with {option}"
        )


def check_roles(roles: Collection[str], rule: Conditioning, model: str) -> None:
    """Raises UserError for a role that a model (as messages call it) takes and the data lack, and for a given one that it does not take."""
    lacking = next((role for role in rule.roles if role not in roles), None)
    if lacking is not None:
        raise UserError(
            f"{model} is always given a {lacking}: name the manifest's column of its files, such as data.sources: "
            f"[{{path: clips.csv, roles: {{{lacking}: {lacking}_path}}}}]"
        )
    given = (role for role in roles if ROLES[role].named and not ROLES[role].drawn)
    other = next((role for role in given if role not in rule.roles), None)
    if other is not None:
        raise UserError(
            f"data.sources[].roles: {model} takes no {other}: leave the role out, or train a model that takes it, such as one of ours with "
            "model.control: true"
        )
