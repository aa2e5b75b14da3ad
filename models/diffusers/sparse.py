"""Find the attention of a video transformer that can be sparse, and its grid of video tokens from its forward's arguments.

A joint attention names its sequences in order; all tokens of a call beyond the grid are text. Video tokens are in the order of time, then
rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import nn

from mmspeed.errors import UserError
from mmspeed.models.diffusers.plan_parts import config_of
from mmspeed.models.diffusers.plans import plan_for
from mmspeed.parallel.boundaries.boundary import Arguments, Grid
from mmspeed.protocols.plan import ModelPlan, Site, plan_of


def _patched(model: nn.Module) -> Grid:
    """Of a class that takes a latent video (B, C, T, h, w), and names its patches by three numbers, or by one or two."""
    config = config_of(model)
    p, t = config.patch_size, getattr(config, "patch_size_t", 1)
    t, h, w = p if isinstance(p, list | tuple) else (t, p, p)

    def grid(arguments: Arguments) -> tuple[int, int, int]:
        frames, height, width = arguments["hidden_states"].shape[2:]
        return frames // t, height // h, width // w

    return grid


def _qwen_image(model: nn.Module) -> Grid:
    def grid(arguments: Arguments) -> tuple[int, int, int]:
        """The image's own places. Raises UserError for samples of several images, and for images of several sizes."""
        shapes = [[shape] if isinstance(shape, tuple) else list(shape) for shape in arguments["img_shapes"]]
        each = {tuple(int(size) for size in shape) for images in shapes for shape in images}
        if len(each) != 1 or any(len(images) != 1 for images in shapes):
            raise UserError(
                f"{type(model).__name__}: sparse attention takes one image a sample, all of one size, and not those of an edit"
            )
        ((t, h, w),) = each
        return t, h, w

    return grid


def _flux(model: nn.Module) -> Grid:
    def grid(arguments: Arguments) -> tuple[int, int, int]:
        """The image's rows and columns, by the places of its tokens (N, 3). Raises UserError for places of other than one image."""
        places_N3 = arguments["img_ids"]
        places_N3 = places_N3[0] if places_N3.ndim == 3 else places_N3  # an older form, which the class still takes
        height, width = (int(size) + 1 for size in places_N3[:, 1:].amax(0).tolist())
        if height * width != len(places_N3):
            raise UserError(
                f"{type(model).__name__}: sparse attention takes the places of one image's tokens, row by row; these are {len(places_N3)} "
                f"in {height} x {width}"
            )
        return 1, height, width

    return grid


def _cogvideox(model: nn.Module) -> Grid:
    config = config_of(model)
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
    "WanTransformer3DModel": _patched,
    "WanVACETransformer3DModel": _patched,
    "LTXVideoTransformer3DModel": _ltx,
    "CogVideoXTransformer3DModel": _cogvideox,
    "HunyuanVideoTransformer3DModel": _patched,
    "HunyuanVideo15Transformer3DModel": _patched,
    "MochiTransformer3DModel": _patched,
    "QwenImageTransformer2DModel": _qwen_image,
    "FluxTransformer2DModel": _flux,
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
    own = {} if known is None else known.attention  # which says how the class hides padding
    sites = {
        pattern: replace(own.get(pattern, Site(())), queries=tuple(sequences))
        for pattern, sequences in attention.items()
    }
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
