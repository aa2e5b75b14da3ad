"""Measures of sampled videos, as pure functions.

Legend: F frames, H W pixels, the last dim is red, green, blue.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np
import torch

from mmspeed.device import Device
from mmspeed.errors import UserError
from mmspeed.models.weights import first_line, quiet
from mmspeed.pipelines.inference.media import evenly_spaced

CLIP_FRAMES = 8  # of a video, whose scores are averaged


def motion(frames_FHWC: np.ndarray) -> float | None:
    """The mean absolute difference of neighbouring frames, of values in 0 to 1; None for one frame."""
    return _mean_difference(frames_FHWC, 1)


def flicker(frames_FHWC: np.ndarray) -> float | None:
    """The mean absolute second difference of neighbouring frames, of values in 0 to 1; None for fewer than three frames."""
    return _mean_difference(frames_FHWC, 2)


def _mean_difference(frames_FHWC: np.ndarray, order: int) -> float | None:
    """The mean absolute difference of an order along the frames."""
    if len(frames_FHWC) <= order:
        return None
    return float(np.abs(np.diff(frames_FHWC.astype(np.int32), order, axis=0)).mean() / 255)


def diversity(videos: Sequence[np.ndarray]) -> float | None:
    """The mean distance, as mean absolute differences of values in 0 to 1, of the pairs of videos (F, H, W, 3); None for one video."""
    distances = [float(np.abs(one.astype(np.int32) - other).mean() / 255) for one, other in combinations(videos, 2)]
    return sum(distances) / len(distances) if distances else None


class ClipScore:
    """The CLIP score (Hessel et al. 2021, without its factor of 2.5): 100 times the cosine of a text and a frame, 0 where it is below."""

    def __init__(self, weights: str, device: Device) -> None:
        """Load transformers' CLIPModel. Raises UserError where `weights` is neither a folder nor a hub id of one."""
        from transformers import CLIPModel, CLIPProcessor

        self.device = device
        try:
            with quiet():
                self.model = CLIPModel.from_pretrained(weights).eval().to(device.torch_device)  # type: ignore[arg-type]
                self.processor = CLIPProcessor.from_pretrained(weights)
        except (OSError, ValueError, KeyError) as error:
            raise UserError(f"--clip {weights}: no CLIP model can be loaded: {first_line(error)}") from None

    @torch.no_grad()
    def __call__(self, prompt: str, frames_FHWC: np.ndarray) -> float:
        """The mean score of evenly spaced frames; a prompt is cut to the length that CLIP reads."""
        frames = [frames_FHWC[index] for index in evenly_spaced(len(frames_FHWC), CLIP_FRAMES)]
        inputs = self.processor(text=[prompt], images=frames, return_tensors="pt", truncation=True)
        output = self.model(**inputs.to(self.device.torch_device))
        cosine_F = torch.nn.functional.cosine_similarity(output.image_embeds, output.text_embeds)
        return float((100 * cosine_F).clamp(min=0).mean())
