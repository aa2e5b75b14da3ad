"""Spread experts over processes: each holds some of them whole, and rows travel (expert parallelism).

A module with experts has parameters stacked by expert and a forward `(x_TE, weights_TK, expert_TK)`; its plan names it (`ModelPlan.experts`).
Its forward then runs on the rows that come to this process, each a token of one choice, with the weights of this process's experts.

Legend: T tokens, K experts of a token, E width, G experts.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from mmspeed.axes import AxisName
from mmspeed.comm import Axis
from mmspeed.config.parallel import ParallelConfig
from mmspeed.errors import UserError
from mmspeed.graphs import outside_graphs
from mmspeed.mesh import Mesh
from mmspeed.mixin import mix_in
from mmspeed.moe.dispatch import FlatDispatcher, HierarchicalDispatcher
from mmspeed.parallel.tensor import local
from mmspeed.protocols.plan import modules_like, plan_of

from .boundaries.names import described


def _with_own(module: nn.Module) -> nn.Module:
    """The module as its forward sees it: parameters are this process's part of them."""
    own = object.__new__(type(module))
    vars(own).update(vars(module), _parameters={name: local(p) for name, p in module.named_parameters(recurse=False)})
    return own


AnyDispatcher = FlatDispatcher | HierarchicalDispatcher


class SpreadExperts(nn.Module):
    """Mixed in before a module with experts: sends tokens to the processes that hold them."""

    _dispatcher: AnyDispatcher

    @outside_graphs  # with the hooks that gather its weights; rows, whose number changes, would give graphs for each size
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)

    def forward(self, x_TE: Tensor, weights_TK: Tensor, expert_TK: Tensor) -> Tensor:
        dispatcher, of_rows = self._dispatcher, super().forward.__func__  # type: ignore[attr-defined]
        sent: Any = dispatcher.start(x_TE, weights_TK, expert_TK)
        out_ZE: Tensor = of_rows(_with_own(self), *dispatcher.finish(sent))
        return dispatcher.finish_back(sent, dispatcher.start_back(sent, out_ZE))


def spread_experts(model: nn.Module, mesh: Mesh, axis: Axis, nodes: tuple[Axis, Axis] | None = None) -> None:
    """Leave each process of an axis its part of the experts, in place; before the model is sharded.

    nodes: the same processes as (nodes, those of a node), between which a token crosses once.

    Raises UserError for a model without experts, for parameters that are not stacked by expert, and for numbers that do not divide.
    """
    from torch.distributed.tensor import DTensor, Shard

    for name, module in _named(model, axis):
        own = dict(module.named_parameters(recurse=False))
        count = _checked(name, module, own, mesh)
        for each, whole in own.items():
            part = whole.detach().chunk(axis.size)[axis.rank].clone()
            split = DTensor.from_local(part, mesh.submesh(AxisName.EP), [Shard(0)], run_check=False)
            module.register_parameter(each, nn.Parameter(split, requires_grad=whole.requires_grad))
        dispatcher = FlatDispatcher(axis, count) if nodes is None else HierarchicalDispatcher(*nodes, count)
        mix_in(module, SpreadExperts, rename=False)._dispatcher = dispatcher


def spread_modules(model: nn.Module) -> list[nn.Module]:
    """The modules whose experts are spread over processes."""
    return [module for module in model.modules() if isinstance(module, SpreadExperts)]


def sharded_dim(parameter: Tensor, over: int) -> int:
    """The dim of a process's stacked weights that the processes with the same experts share: the first behind that of experts to divide."""
    return next(dim for dim in range(1, parameter.dim()) if parameter.shape[dim] % over == 0)


def check_experts(count: int, parallel: ParallelConfig, where: str) -> None:
    """Raise UserError where `parallel.ep` processes cannot hold equal numbers of `count` experts; 0: a model without any."""
    ep = parallel.ep
    if ep > 1 and count == 0:
        raise UserError(f"parallel.ep {ep}: {where} has no experts; leave ep out")
    if count % ep:
        fits = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
        raise UserError(f"parallel.ep {ep} does not divide the {count} experts of {where}: use one of {fits}")


def _named(model: nn.Module, axis: Axis) -> list[tuple[str, nn.Module]]:
    plan = plan_of(model)
    if plan is None or not plan.experts:
        check_experts(0, ParallelConfig(ep=axis.size), f"the plan of {type(model).__name__}")
    assert plan is not None
    return [each for pattern in plan.experts for each in modules_like(model, pattern, "plan, experts")]


def _checked(name: str, module: nn.Module, own: dict[str, nn.Parameter], mesh: Mesh) -> int:
    """The number of experts of a module."""
    where, counts = described(name, module), {len(p) if p.dim() > 1 else 0 for p in own.values()}
    inner = next((child for child, part in module.named_children() if next(part.parameters(), None) is not None), None)
    if len(counts) != 1 or 0 in counts or inner is not None:
        raise UserError(
            f"parallel.ep: {where} has experts in the plan; such a module has parameters stacked by expert alone"
        )
    (count,), ep, edp = counts, mesh.size(AxisName.EP), mesh.size(AxisName.EDP)
    check_experts(count, ParallelConfig(ep=ep), name)
    for each, parameter in own.items():
        if all(size % edp for size in parameter.shape[1:]):
            raise UserError(
                f"parallel.ep {ep} leaves {edp} processes with the same experts, which divide no dim of {name}.{each} "
                f"{tuple(parameter.shape)}: raise ep or dp_replicate"
            )
    return count
