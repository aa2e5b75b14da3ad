"""Masks of the loss by latent frame, made from an entry of the cache when it is read.

Legend: F frames of pixels, T latent frames.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from mmspeed.data.cache.tables import Entry
from mmspeed.errors import UserError
from mmspeed.shapes import Strides

FrameMask = Callable[[Entry, Strides], Tensor]  # weights (T,), such as bool: the latent frames that count in the loss


def distinct_frames(entry: Entry, strides: Strides) -> Tensor:
    """bool (T,), True at latent frames in which the source shows a frame other than the one before.

    The first latent frame stands for the first frame, each later one for `strides.temporal` more. Raises UserError for an entry without a
    record of its frames.
    """
    frames_F = torch.tensor(entry.frames, dtype=torch.int64)
    if len(frames_F) == 0 or (len(frames_F) - 1) % strides.temporal:
        raise UserError(
            f"train.loss_frames: distinct needs the frames taken of {entry.source}, and the cache records {len(frames_F)}; "
            "use train.loss_frames: all"
        )
    new_F = frames_F.diff() != 0
    return torch.cat((torch.ones(1, dtype=torch.bool), new_F.unflatten(0, (-1, strides.temporal)).any(dim=1)))


FRAME_MASKS: dict[Literal["all", "distinct"], FrameMask | None] = {"all": None, "distinct": distinct_frames}


def checked_mask(mask_T: Tensor, frames: int, source: str) -> Tensor:
    """The mask of a sample, checked to be of `frames` latent frames of which one counts at least, not negative. Raises UserError."""
    if mask_T.shape != (frames,) or bool((mask_T < 0).any()) or not bool((mask_T > 0).any()):
        raise UserError(
            f"the loss mask of {source} is {mask_T.tolist()}: it needs {frames} weights, none below 0 and one above 0 at least"
        )
    return mask_T
