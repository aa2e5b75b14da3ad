"""Held-out loss at fixed (sample, timestep quantile, noise), and videos sampled while training.

Legend: B batch, C T h w latent, Q quantiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn

from mmspeed import comm, rng
from mmspeed.data import DatasetCache, Draw, Sample, assemble
from mmspeed.device import Device
from mmspeed.pipelines.assemble import Placement
from mmspeed.pipelines.objective import Objective

Item = TypeVar("Item")


@dataclass(frozen=True)
class HeldOutLoss:
    """Mean held-out loss, over all and by timestep quantile (from near the data to near noise)."""

    mean: float
    by_quantile: tuple[float, ...]
    samples: int


def shares(items: list[Item], placement: Placement) -> list[tuple[Item, bool]]:
    """This rank's items, those of its group, filled up so that all have the same number; the flag is False for fillers.

    Sharded models need every rank in every forward pass.
    """
    if not items:
        return []
    lane, lanes = placement.reader.index, placement.reader.count
    rounds = -(-len(items) // lanes)
    return [
        (items[index], True) if index < len(items) else (items[-1], False)
        for index in range(lane, rounds * lanes, lanes)
    ]


def held_out_loss(
    model: nn.Module,
    cache: DatasetCache,
    samples: list[Sample],
    objective: Objective,
    quantiles: int,
    seed: int,
    device: Device,
    placement: Placement,
) -> HeldOutLoss | None:
    """The unweighted loss of held-out samples at the middles of `quantiles` equal parts of the training distribution.

    Noise is keyed by (sample, quantile), the caption is the first, nothing is dropped: the figure of two steps differs by the weights
    alone. None when there are no samples. The mean over ranks is exact (sums and counts are reduced).
    """
    if not samples:
        return None
    sums = [0.0] * quantiles
    was_training = model.training
    model.eval()
    with torch.no_grad():
        for sample, real in shares(samples, placement):
            batch = assemble(cache, [(Draw(sample, 0, 0), 1.0)], seed=seed, caption_dropout=0.0)
            batch = batch.to(device.torch_device, torch.float32)
            for q in range(quantiles):
                noise = rng.normal(batch.latents_BCThw.shape[1:], seed, "val_noise", sample.key, q)[None]
                noise = noise.to(batch.latents_BCThw)
                u_B = torch.tensor([(q + 0.5) / quantiles], dtype=torch.float64)
                t_B = objective.time_from_quantile(u_B).float()
                x_t, target = objective.training_pair(batch.latents_BCThw, noise, t_B)
                prediction = model(x_t, device.to_device(t_B), batch.text_BLD, batch.text_mask_BL)
                if real and placement.first:
                    sums[q] += (prediction.float() - target.float()).square().mean().item()
    model.train(was_training)
    totals = comm.all_reduce_sum(sums)
    by_quantile = tuple(total / len(samples) for total in totals)
    return HeldOutLoss(sum(by_quantile) / quantiles, by_quantile, len(samples))
