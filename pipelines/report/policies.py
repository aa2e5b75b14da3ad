"""List the regions of a model's blocks that can have an activation policy, and check a config's policies against them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from mmspeed.config import RunConfig
from mmspeed.memory.recompute.policy import check_keeping
from mmspeed.memory.recompute.regions import regions_of
from mmspeed.pipelines.tasks import Task
from mmspeed.protocols import blocks_of, parts_of


def policy_lines(task: Task, config: RunConfig, models: Mapping[str, nn.Module] | None = None) -> list[str]:
    """A line for each kind of block that learns: its regions that can have a policy, and advice on norms and activations.

    models: the task's, by role; None: those that its domain outlines. Raises UserError for settings of
    `memory` that name a region that a block lacks, with the nearest name.
    """
    if models is None:
        models = task.domain.outlines()
    learning = dict.fromkeys(update.role for update in task.updates())
    lines = []
    for role in (role for role in learning if role in models):
        kinds = {type(block).__name__: block for _, block in blocks_of(models[role])}
        for name, block in kinds.items():
            check_keeping(block, config.memory.activation_policy, config.memory.mlp_chunk, config.train.compile is True)
            lines.append(f"{role}: memory.activation_policy of {name}: {_regions(block)}")
    return lines


def _regions(block: nn.Module) -> str:
    """The regions in words."""
    regions = parts_of(block).regions
    named = ", ".join(("block", *regions_of(block)))
    if any(region.small for region in regions.values()):
        return named
    return f"{named}; no module makes a norm or an activation alone: `selective` computes them again, and keeps products and attention"
