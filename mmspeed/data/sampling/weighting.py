"""Weights of steps in the gradients of an epoch: a step's mean counts as much as the samples or tokens in it. Functions of counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mmspeed.config.training import Weighting
from mmspeed.errors import UserError
from mmspeed.protocols import ShapeClass

from .sampler import Sampler
from .schedule import EpochSchedule

SizeOf = Callable[[ShapeClass], float]


def size_of(weighting: Weighting, tokens: SizeOf) -> SizeOf:
    """The function that tells how much a sample of a bucket counts in its step's mean: its tokens, or 1."""
    return tokens if weighting == "token" else lambda bucket: 1.0


@dataclass(frozen=True)
class StepWeights:
    """The weights of the steps of an order: a step's size over the mean size of the steps of its epoch, as planned at its beginning.

    So each sample (by `sample`) or token (by `token`) has the same factor in all gradients of an epoch, whatever shares its step, and an
    elastic resume in the middle does not change it. Lost samples count in the plan, not in a step. `step`: every weight is 1.
    `tokens`: of a sample of a bucket, in the mean.
    """

    weighting: Weighting
    order: Sampler[Any]
    tokens: SizeOf

    def weight(self, step: int, samples: int, tokens: float) -> float:
        """The weight of an optimizer step with so many samples and tokens; 1 for one without samples, which is left out.

        Raises UserError for a step of samples without tokens, by `token`.
        """
        if self.weighting == "step" or not samples:
            return 1.0
        size = tokens if self.weighting == "token" else float(samples)
        if not size > 0:
            raise UserError(f"step {step + 1} has no token that counts: use objective.weighting: sample")
        return size / self.order.mean_of_epoch(step, size_of(self.weighting, self.tokens))


def gradient_shares(
    plan: EpochSchedule, buckets: Sequence[ShapeClass], weighting: Weighting, tokens: SizeOf
) -> dict[ShapeClass, float]:
    """Each bucket's share of the factors that samples have in the gradients of an epoch; they sum to 1.

    `buckets` lists the buckets by the plan's numbers. A sample's factor is its part of its step's mean, times the step's weight.
    """
    size = plan.count * np.array([size_of(weighting, tokens)(bucket) for bucket in buckets])[plan.bucket]
    of_step = np.add.reduceat(size, plan.offsets[:-1])
    step = np.repeat(np.arange(plan.steps), np.diff(plan.offsets))
    weight = np.ones(plan.steps) if weighting == "step" else of_step / of_step.mean()
    factor = np.bincount(plan.bucket, size / of_step[step] * weight[step], len(buckets))
    return dict(zip(buckets, (factor / factor.sum()).tolist(), strict=True))
