"""Counts of a step, such as loads of experts: summed over all processes after the step's update, and handed to the modules that counted.

Legend: G counts of a module, M modules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mmspeed.comm import sum_counts
from mmspeed.parallel import unwrap
from mmspeed.protocols import CountsSteps, Models

PERCENTILES = {"min": 0.0, "p10": 0.1, "median": 0.5, "p90": 0.9, "max": 1.0}


def counting_modules(models: Models) -> dict[str, CountsSteps]:
    """The modules that count, by role and name."""
    none: set[type[nn.Module]] = set()  # classes that do not count: a model has thousands of modules of few classes
    modules: dict[str, CountsSteps] = {}
    for role, model in models.items():
        for name, module in unwrap(model).named_modules():
            if type(module) in none:
                continue
            if isinstance(module, CountsSteps):
                modules[f"{role}.{name}"] = module
            else:
                none.add(type(module))
    return modules


def place_of(name: str, models: Models) -> list[int]:
    """The place of a module, by role and name, among all modules of the models, whichever of them a pipeline's stage holds."""
    role, *parts = name.split(".")
    places, module = [list(models).index(role)], unwrap(models[role])
    for part in parts:
        places.append([child for child, _ in module.named_children()].index(part))
        module = module.get_submodule(part)
    return places


@contextmanager
def counting(modules: Mapping[str, CountsSteps], group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Let modules count the micro-batches that are computed inside, from 0; processes of the group have equally many."""
    for module in modules.values():
        module.begin_counts(partial(sum_counts, group=group))
    try:
        yield
    finally:
        for module in modules.values():
            module.end_counts()


@torch.no_grad()
def share_counts(modules: Mapping[str, CountsSteps], group: dist.ProcessGroup | None = None) -> dict[str, Tensor]:
    """Let each module change its state by the counts of all processes, which are returned, int64, by the modules' names.

    A collective call, of one exchange on the counts' device.
    """
    if not modules:
        return {}
    local = [module.step_counts() for module in modules.values()]
    totals = sum_counts(torch.cat(local), group).split([len(counts_G) for counts_G in local])
    for module, counts_G in zip(modules.values(), totals, strict=True):
        module.after_update(counts_G)
    return dict(zip(modules, totals, strict=True))


def over_ranks(counts: Mapping[str, Tensor], ranks: int) -> dict[str, object]:
    """The greatest of the sums of counts over ranks that hold equal parts of them, over their mean: its percentiles over modules, and each."""
    sums = [counts_G.double().cpu().view(ranks, -1).sum(1) for counts_G in counts.values()]
    most_M = torch.stack([sum_P.max() / sum_P.mean().clamp(min=1e-9) for sum_P in sums])
    return over_modules(most_M, list(counts))


def over_modules(most_M: Tensor, names: Sequence[str]) -> dict[str, object]:
    """The median of modules' numbers, their 95th percentile, the greatest and its module, and all in their order."""
    shares = {"p50": 0.5, "p95": 0.95, "max": 1.0}
    return {name: float(most_M.quantile(share)) for name, share in shares.items()} | _named(most_M, names)


def spread(counts: Mapping[str, Tensor]) -> dict[str, object]:
    """Percentiles over all modules' counts, each over its module's mean, the module with the greatest one, and the greatest of each."""
    names = list(counts)
    shares = [
        each_G.double() / each_G.double().mean().clamp(min=1e-9) for each_G in (counts[name].cpu() for name in names)
    ]
    values = torch.cat(shares)
    highest_M = torch.stack([share_G.max() for share_G in shares])
    row: dict[str, object] = {name: float(values.quantile(share)) for name, share in PERCENTILES.items()}
    return row | {"mean_max": float(highest_M.mean())} | _named(highest_M, names)


def _named(most_M: Tensor, names: Sequence[str]) -> dict[str, object]:
    """The module with the greatest number, and the numbers of all, in their order."""
    return {"worst": names[int(most_M.argmax())], "by_layer": [round(most, 3) for most in most_M.tolist()]}
