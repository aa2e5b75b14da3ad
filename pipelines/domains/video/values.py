"""The values of a diffusion model's prediction.

Legend: B clips of a micro-batch, C channels, T h w latent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from mmspeed.pipelines.diffusion.objective import Objective, mean_error
from mmspeed.protocols import Batch, Given, Term, Values


@dataclass(frozen=True)
class VideoValues(Values):
    """The values of a prediction; a unit is a clip.

    Args:
        tensors: x (the noisy latents, B C T h w), time (B,) on the CPU; target and weight (B,), unless inputs were given without a target;
            mask (B, T), the frames that count, where not all do.
        term_of: (value_B, batch, trains) -> the term.
    """

    prediction_BCThw: Tensor
    tensors: Mapping[str, Tensor]
    batch: Batch
    term_of: Callable[[Tensor, Batch, bool], Term]
    objective: Callable[[], Objective]  # of the part, and of the batch's size

    @cached_property
    def _errors(self) -> Tensor:
        if "target" not in self.tensors:
            raise ValueError("a prediction at a given time has no loss")
        return mean_error(self.prediction_BCThw, self.tensors["target"], self.tensors.get("mask"))

    @property
    def loss(self) -> Term:
        """The loss of each clip (B,), float32, with its time."""
        return self.term(self._errors * self.tensors["weight"])

    def term(self, value_U: Tensor, trains: bool = True) -> Term:
        return replace(self.term_of(value_U, self.batch, trains), time_I=self.tensors["time"])

    def errors(self) -> tuple[Tensor, Tensor]:
        return self._errors, torch.arange(len(self._errors), device=self._errors.device)

    def prediction(self) -> Tensor:
        return self.prediction_BCThw

    def made(self, noise_I: Callable[[Sequence[int]], Tensor], quantile_I: Tensor) -> Given:
        """The clean latents in the prediction, with other noise at another time."""
        objective = self.objective()
        x0_BCThw = objective.clean(self.tensors["x"], self.prediction_BCThw, self.tensors["time"])
        t_B = objective.time_from_quantile(quantile_I).float()
        x_BCThw, target_BCThw = objective.training_pair(x0_BCThw, noise_I(x0_BCThw.shape[1:]).to(x0_BCThw), t_B)
        return Given(x_BCThw, t_B, target_BCThw)
