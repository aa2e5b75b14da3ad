"""Add sparse self-attention to a model that was written without it: the layers, by its plan.

`mmspeed.parallel.boundaries` connects attentions to these layers, and records their plans for recomputation. Names in the state dict stay
as they were: thresholds are buffers that are not in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from mmspeed.compute.sparse.dispatch import check_backend
from mmspeed.compute.sparse.module import ClusteredAttention, clustered_layers
from mmspeed.config.sparse import SparseConfig
from mmspeed.errors import UserError
from mmspeed.mixin import mix_in
from mmspeed.parallel.boundaries.apply import put_sparse_sites
from mmspeed.parallel.boundaries.attention_sites import SPARSE_LAYER
from mmspeed.parallel.boundaries.boundary import Grid
from mmspeed.protocols.plan import ModelPlan, modules_like


class _SparseModel(nn.Module):
    """Mixed in before a model's own class."""

    @contextmanager
    def cache_context(self, name: str, **kwargs: Any) -> Iterator[None]:
        """Note the caption that diffusers' pipelines call the model with, for `warm_plans`."""
        with super().cache_context(name, **kwargs):  # type: ignore[misc]
            for layer in clustered_layers(self).values():
                if layer.warm is not None:
                    layer.warm.condition = name
            yield


def sparsify(model: nn.Module, plan: ModelPlan, grid: Grid, settings: SparseConfig) -> dict[str, ClusteredAttention]:
    """Make the self-attention of `model` sparse, in place, and return its sparse layers by the names of their modules.

    Among the modules that the plan names, in the model's order, the first `dense_first` and the last `dense_last` stay dense.
    Raises UserError for a plan that does not fit the model, and where nothing would be sparse; the model is then unchanged.
    """
    modules = _self_attention(model, plan)
    check_backend(settings.backend, "model.sparse.backend")
    chosen = range(settings.dense_first, len(modules) - settings.dense_last)
    if not chosen:
        raise UserError(
            f"sparse attention: {type(model).__name__} has {len(modules)} self-attentions, and all would stay dense: lower dense_first "
            f"({settings.dense_first}) or dense_last ({settings.dense_last})"
        )
    layers = {}
    for place in chosen:
        name, module = modules[place]
        layer = ClusteredAttention(settings, way=1 if (place % 2) else 0).train(module.training)
        layer.reset()
        parameter = next(module.parameters(), None)
        if parameter is not None and not parameter.is_meta:  # a threshold has its value from the beginning on
            layer.to(parameter.device)
        layer.register_buffer("tau", layer.tau, persistent=False)  # saved models are of the plain class
        module.add_module(SPARSE_LAYER, layer)
        layers[name] = layer
    try:
        put_sparse_sites(model, plan, grid)
    except UserError:
        for name in layers:
            delattr(model.get_submodule(name), SPARSE_LAYER)
        raise
    mix_in(model, _SparseModel, rename=False)  # diffusers writes the name into a checkpoint's config
    return layers


def _self_attention(model: nn.Module, plan: ModelPlan) -> list[tuple[str, nn.Module]]:
    """The modules whose attention a plan allows to be sparse, in the model's order."""
    modules: dict[str, nn.Module] = {}
    for pattern, site in plan.attention.items():
        if site.sparse:
            modules.update(modules_like(model, pattern, "sparse attention"))
    return [(name, module) for name, module in model.named_modules() if name in modules]


def is_context_parallel(transformer: nn.Module) -> bool:
    """True where diffusers' own context parallelism was enabled for a transformer: its attention processors then have a config."""
    processors = (getattr(module, "processor", None) for module in transformer.modules())
    return any(getattr(processor, "_parallel_config", None) for processor in processors)
