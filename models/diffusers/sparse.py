"""Which attention of diffusers' video transformers can be sparse, and how their forward's arguments tell the grid of video tokens.

A joint attention names its sequences in order; all tokens of a call that the grid does not account for are text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from mmspeed.errors import UserError
from mmspeed.models.diffusers.plans import plan_for
from mmspeed.parallel.declared.plan import Attends

Arguments = Mapping[str, Any]  # of a model's forward, by name; those that were given
Grid = Callable[[Arguments], tuple[int, int, int]]  # tokens of the video along time, height and width


@dataclass(frozen=True)
class SparseLayout:
    """The self-attention of a model, and where its tokens are.

    attention: patterns of module names, as in `named_modules()` with `*` within a name, each with the sequences that attend in it, in
    their order: ("video",), ("text", "video") or ("video", "text"). Video tokens go time by time, row by row.
    """

    attention: Mapping[str, tuple[str, ...]]
    grid: Grid

    def __post_init__(self) -> None:
        for pattern, sequences in self.attention.items():
            if isinstance(sequences, str) or tuple(sorted(sequences)) not in (("video",), ("text", "video")):
                raise UserError(
                    f"sparse attention: {pattern!r} has the sequences {sequences!r}; use ('video',), ('text', 'video') or "
                    "('video', 'text')"
                )


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
                "do not tell the grid)"
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


def layout_for(
    model: nn.Module, attention: Mapping[str, tuple[str, ...]] | None = None, grid: Grid | None = None
) -> SparseLayout:
    """The layout of a model: ours by the name of its class, or what is given. Raises UserError where there is neither."""
    known = next((own.__name__ for own in type(model).__mro__ if own.__name__ in GRIDS), None)
    if known is None and (attention is None or grid is None):
        raise UserError(
            f"sparsify_model: {type(model).__name__} is not one of {', '.join(GRIDS)}; say which modules attend to themselves, "
            "attention={'blocks.*.attn1': ('video',)}, and grid=lambda arguments: (frames, height, width) in tokens"
        )
    if attention is None:
        attention = {
            pattern: attends.queries if isinstance(attends, Attends) else tuple(attends)
            for pattern, attends in plan_for(model).attention.items()
        }
    if grid is None:
        assert known is not None
        grid = GRIDS[known](model)
    return SparseLayout(attention, grid)
