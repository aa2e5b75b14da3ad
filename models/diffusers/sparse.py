"""Find the attention of a video transformer that can be sparse, and its grid of video tokens from its forward's arguments.

A joint attention names its sequences in order; all tokens of a call beyond the grid are text. Video tokens are in the order of time, then
rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from mmspeed.errors import UserError
from mmspeed.models.diffusers.plans import plan_for
from mmspeed.parallel.boundaries.boundary import Arguments, Grid
from mmspeed.protocols.plan import ModelPlan, Site, plan_of


def _wan(model: nn.Module) -> Grid:
    config: Any = model.config
    t, h, w = config.patch_size

    def grid(arguments: Arguments) -> tuple[int, int, int]:
        frames, height, width = arguments["hidden_states"].shape[2:]
        return frames // t, height // h, width // w

    return grid


def _hunyuan_video(model: nn.Module) -> Grid:
    config: Any = model.config
    t, p = config.patch_size_t, config.patch_size

    def grid(arguments: Arguments) -> tuple[int, int, int]:
        frames, height, width = arguments["hidden_states"].shape[2:]
        return frames // t, height // p, width // p

    return grid


def _cogvideox(model: nn.Module) -> Grid:
    config: Any = model.config
    t, p = config.patch_size_t or 1, config.patch_size

    def grid(arguments: Arguments) -> tuple[int, int, int]:
        _, frames, _, height, width = arguments["hidden_states"].shape
        return -(-frames // t), height // p, width // p

    return grid


def _ltx(model: nn.Module) -> Grid:
    def grid(arguments: Arguments) -> tuple[int, int, int]:
        sizes = [arguments.get(name) for name in ("num_frames", "height", "width")]
        if None in sizes:
            raise UserError(
                f"{type(model).__name__}: sparse attention needs num_frames, height and width of its forward (video_coords alone "
                "do not give the grid)"
            )
        t, h, w = (int(size) for size in sizes if size is not None)
        return t, h, w

    return grid


GRIDS: Mapping[str, Callable[[nn.Module], Grid]] = {
    "WanTransformer3DModel": _wan,
    "LTXVideoTransformer3DModel": _ltx,
    "CogVideoXTransformer3DModel": _cogvideox,
    "HunyuanVideoTransformer3DModel": _hunyuan_video,
}


def sparse_plan(model: nn.Module, attention: Mapping[str, tuple[str, ...]] | None = None) -> ModelPlan:
    """The plan of a model that is to be sparse: its own, or that of its class here, with the given attention.

    attention: patterns of module names, each with the sequences that attend in it, in their order: ("video",), ("text", "video") or
    ("video", "text"). Raises UserError without attention and without a plan.
    """
    known = plan_of(model)
    if known is None and _known(model) is not None:
        known = plan_for(model)
    if attention is None:
        if known is None:
            raise _unknown(model)
        return known
    for pattern, sequences in attention.items():
        if isinstance(sequences, str) or tuple(sorted(sequences)) not in (("video",), ("text", "video")):
            raise UserError(
                f"sparse attention: {pattern!r} has the sequences {sequences!r}; use ('video',), ('text', 'video') or "
                "('video', 'text')"
            )
    sites = {pattern: Site(tuple(sequences)) for pattern, sequences in attention.items()}
    return ModelPlan(blocks=(), attention=sites) if known is None else replace(known, attention=sites)


def grid_of(model: nn.Module) -> Grid:
    """The function that gives a model's grid, by the name of its class. Raises UserError where there is none."""
    known = _known(model)
    if known is None:
        raise _unknown(model)
    return GRIDS[known](model)


def _known(model: nn.Module) -> str | None:
    return next((own.__name__ for own in type(model).__mro__ if own.__name__ in GRIDS), None)


def _unknown(model: nn.Module) -> UserError:
    return UserError(
        f"sparsify_model: {type(model).__name__} is not one of {', '.join(GRIDS)}; name the modules of self-attention, "
        "attention={'blocks.*.attn1': ('video',)}, and grid=lambda arguments: (frames, height, width) in tokens"
    )
