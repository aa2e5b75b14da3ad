"""The learning-rate schedule."""

from __future__ import annotations

import math

from torch import Tensor

from mmspeed.config.training import TrainConfig

from .make_optimizer import AnyOptimizer


def learning_rate(step: int, cfg: TrainConfig) -> float:
    """Learning rate of optimizer step `step` (from 0).

    Warm-up rises in equal parts and reaches `lr` at step `warmup_steps`; the cosine (Loshchilov and Hutter, 2017)
    reaches `min_lr_ratio * lr` at the last step of the run, as does the straight line at the end of `wsd` (Hu et al. 2024).
    """
    if step < cfg.warmup_steps:
        return cfg.lr * (step + 1) / (cfg.warmup_steps + 1)
    if cfg.schedule == "constant":
        return cfg.lr
    if cfg.schedule == "wsd":
        falling = max(1, round(cfg.decay_share * cfg.steps))  # steps below `lr`
        share = min(1.0, max(0.0, (cfg.steps - 1 - step) / falling))
        return cfg.lr * (cfg.min_lr_ratio + (1 - cfg.min_lr_ratio) * share)
    span = cfg.steps - 1 - cfg.warmup_steps
    progress = min(1.0, (step - cfg.warmup_steps) / span) if span > 0 else 1.0
    share = 0.5 * (1 + math.cos(math.pi * progress))
    return cfg.lr * (cfg.min_lr_ratio + (1 - cfg.min_lr_ratio) * share)


def set_learning_rate(optimizer: AnyOptimizer, lr: float) -> None:
    """Set every group's learning rate; done before each step, so the schedule has no state to save."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):  # of compiled updates
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr
