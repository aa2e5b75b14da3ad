"""The optimizer and the course of the learning rate."""

from __future__ import annotations

import math
from typing import Any

from torch import nn
from torch.optim import AdamW, Optimizer

from mmspeed.config.schema import TrainConfig
from mmspeed.parallel import is_split


def make_optimizer(model: nn.Module, cfg: TrainConfig) -> AdamW:
    """AdamW (Loshchilov and Hutter, 2019) over the parameters that train; weight decay on matrices only.

    Make it after `parallelize`: sharding replaces the parameters.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = []
    for split in (False, True):  # apart: torch's foreach kernels take tensors of one mesh
        some = [p for p in parameters if is_split(p) == split]
        groups += [
            {"params": [p for p in some if p.ndim >= 2], "weight_decay": cfg.weight_decay},
            {"params": [p for p in some if p.ndim < 2], "weight_decay": 0.0},
        ]
    # foreach: one launch for many tensors on every kind of device, and on shards, where torch's own default is a loop
    return AdamW([g for g in groups if g["params"]], lr=cfg.lr, betas=cfg.betas, eps=cfg.eps, foreach=True)


def learning_rate(step: int, cfg: TrainConfig) -> float:
    """Learning rate of optimizer step `step` (from 0).

    Warm-up rises in equal parts and reaches `lr` at step `warmup_steps`; the cosine (Loshchilov and Hutter, 2017)
    reaches `min_lr_ratio * lr` at the last step of the run.
    """
    if step < cfg.warmup_steps:
        return cfg.lr * (step + 1) / (cfg.warmup_steps + 1)
    if cfg.schedule == "constant":
        return cfg.lr
    span = cfg.steps - 1 - cfg.warmup_steps
    progress = min(1.0, (step - cfg.warmup_steps) / span) if span > 0 else 1.0
    share = 0.5 * (1 + math.cos(math.pi * progress))
    return cfg.lr * (cfg.min_lr_ratio + (1 - cfg.min_lr_ratio) * share)


def set_learning_rate(optimizer: Optimizer, lr: float) -> None:
    """Set every group's learning rate; done before each step, so the schedule has no state to save."""
    for group in optimizer.param_groups:
        group["lr"] = lr
