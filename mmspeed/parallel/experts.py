"""Spread experts over processes: each holds some of them whole, and rows travel (expert parallelism).

A module with experts has parameters stacked by expert and a forward `(x_TE, weights_TK, expert_TK)`; its plan names it (`ModelPlan.experts`).
Its forward then runs on the rows that come to this process, each a token of one choice, with the weights of this process's experts.

Where the plan says which dims count hidden units, processes may hold a part of each expert's (expert tensor parallelism, as in Megatron-LM).

Legend: T tokens, K experts of a token, E width, G experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mmspeed.axes import AxisName, mesh_table
from mmspeed.comm import Axis, PendingExchange
from mmspeed.compute.operators.permutation import combine, order_rows, permute
from mmspeed.config.parallel import ParallelConfig
from mmspeed.errors import UserError, divisors
from mmspeed.graphs import outside_graphs
from mmspeed.mesh import Mesh
from mmspeed.mixin import mix_in
from mmspeed.moe.copies import Lending, finish_lending, start_lending, tied
from mmspeed.moe.deepep import Buffers, DeepEpDispatcher
from mmspeed.moe.dispatch import FlatDispatcher, HierarchicalDispatcher
from mmspeed.parallel.tensor import local
from mmspeed.protocols.plan import Hidden, modules_like, plan_of
from mmspeed.torch_internals import is_sharded

from .boundaries.layout import TokenLayout
from .boundaries.linears import JoinedColumns
from .boundaries.names import described

AnyDispatcher = FlatDispatcher | HierarchicalDispatcher | DeepEpDispatcher


class SpreadExperts(nn.Module):
    """Mixed in before a module with experts: sends tokens to the processes that hold them."""

    _dispatcher: AnyDispatcher
    _joined: Mapping[
        str, tuple[JoinedColumns, int]
    ]  # parameters of which a process stores other hidden units than it takes, and their dim
    _axis: Axis  # of processes with other experts
    _lending: Lending | None = None  # copies that take a share of experts' rows

    @outside_graphs  # with the hooks that gather its weights; rows, whose number changes, would give graphs for each size
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)

    def forward(
        self, x_TE: Tensor, weights_TK: Tensor, expert_TK: Tensor, beside: Callable[..., Tensor] | None = None
    ) -> Tensor:
        """The first products of `beside` run while tokens travel, its last one while outputs do; in backward likewise."""
        dispatcher = self._dispatcher
        parts = {name: local(p) for name, p in self.named_parameters(recurse=False)}
        parts.update((name, joined.needed(parts[name], dim)) for name, (joined, dim) in self._joined.items())
        lent = {} if self._lending is None else start_lending(parts, self._lending, self._axis)
        sent: Any = dispatcher.start(x_TE, weights_TK, expert_TK)
        returning: list[Any] = []

        def compute() -> None:
            out_ZE = self._outputs(parts, lent, sent.kinds, *dispatcher.finish(sent))
            returning.append(dispatcher.start_back(sent, out_ZE))

        if beside is None:
            compute()
            return dispatcher.finish_back(sent, *returning)
        beside_TE = beside(x_TE, between=compute)
        return dispatcher.finish_back(sent, *returning) + beside_TE

    def _outputs(
        self,
        parts: Mapping[str, Tensor],
        lent: Mapping[str, PendingExchange],
        kinds: Sequence[int],
        rows_ZE: Tensor,
        gates_Z1: Tensor,
        expert_Z1: Tensor,
    ) -> Tensor:
        """The outputs of rows: by this process's experts, and by the copy that came to it, whose rows are the last kind."""
        of_rows = super().forward.__func__  # type: ignore[attr-defined]
        if not lent:
            own_ZE: Tensor = of_rows(self._with(parts), rows_ZE, gates_Z1, expert_Z1)
            return own_ZE
        copies, by_copy_Z1 = finish_lending(lent), (expert_Z1 == len(kinds) - 1).long()
        outs = []
        for weights, goes_Z1, count in ((parts, by_copy_Z1, sum(kinds[:-1])), (copies, 1 - by_copy_Z1, kinds[-1])):
            if weights is copies and (self._lending is None or not self._lending.borrows):
                continue
            some = order_rows(goes_Z1, count)
            ids_R1 = expert_Z1[some.order_R] if weights is parts else torch.zeros_like(expert_Z1[some.order_R])
            out_RE = of_rows(self._with(weights), permute(rows_ZE, some), gates_Z1[some.order_R], ids_R1)
            outs.append(combine(out_RE, some))
        return tied(sum(outs[1:], outs[0]), [*copies.values()])

    def _with(self, weights: Mapping[str, Tensor]) -> nn.Module:
        """The module as its forward sees it, with other parameters."""
        own = object.__new__(type(self))
        vars(own).update(vars(self), _parameters=dict(weights))
        return own


def spread_experts(model: nn.Module, mesh: Mesh | None, layout: TokenLayout) -> None:
    """Leave each process its part of the experts, in place; before the model is sharded.

    mesh: None: the parts stay plain tensors, where a step is told from shapes by one process alone.

    Raises UserError for a model without experts, for parameters that are not stacked by expert, and for numbers that do not divide.
    """
    from torch.distributed.tensor import DTensor, Shard

    axis, etp, edp = layout.experts, layout.etp, 1 if mesh is None else mesh.size(AxisName.EDP)
    buffers = Buffers(axis)
    views = (AxisName.EP, AxisName.ETP) if etp.size > 1 else (AxisName.EP,)
    submesh = None if mesh is None else mesh.submesh(*views)
    for name, module, hidden, count in _with_experts(model, ParallelConfig(ep=axis.size, etp=etp.size)):
        joined = {}
        for each, whole in dict(module.named_parameters(recurse=False)).items():
            part, placements = whole.detach().chunk(axis.size)[axis.rank], [Shard(0)]
            if etp.size > 1:
                dim, tensors = hidden[each].dim, hidden[each].joined
                part, placements = part.chunk(etp.size, dim)[etp.rank], [Shard(0), Shard(dim)]
                if tensors > 1:
                    joined[each] = JoinedColumns(etp, (whole.shape[dim] // tensors,) * tensors), dim
            _check_shared(part.shape, axis.size, edp, f"{name}.{each}")
            split: Tensor = part.clone()
            if submesh is not None:
                split = DTensor.from_local(split, submesh, placements, run_check=False)
            module.register_parameter(each, nn.Parameter(split, requires_grad=whole.requires_grad))
        spread = mix_in(module, SpreadExperts, rename=False)
        spread._joined, spread._axis = joined, axis
        if layout.ep_backend == "deepep":
            spread._dispatcher = DeepEpDispatcher(buffers, count)
        elif layout.nodes is None:
            spread._dispatcher = FlatDispatcher(axis, count, etp)
        else:
            spread._dispatcher = HierarchicalDispatcher(*layout.nodes, count, etp)


def spread_modules(model: nn.Module) -> list[SpreadExperts]:
    """The modules whose experts are spread over processes."""
    return [module for module in model.modules() if isinstance(module, SpreadExperts)]


def sharded_dim(parameter: Tensor, over: int) -> int | None:
    """The dim of a process's stacked weights that the processes with the same ones share: the first behind that of experts to divide.

    One that `etp` splits comes last. None: none divides.
    """
    part, placements = local(parameter), parameter.placements if is_sharded(parameter) else ()
    dims = sorted(range(1, part.dim()), key=lambda dim: any(at.is_shard(dim) for at in placements))
    return next((dim for dim in dims if part.shape[dim] % over == 0), None)


def check_experts(parallel: ParallelConfig, where: str, count: int, hidden: int | None = None) -> None:
    """Raise UserError where processes cannot hold equal numbers of `count` experts, or of the `hidden` units of each; 0: no experts."""
    for key, degree, what, whole in (
        ("ep", parallel.ep, f"{count} experts", count),
        ("etp", parallel.etp, f"{hidden} hidden units of an expert", hidden),
    ):
        if degree > 1 and count == 0:
            raise UserError(f"parallel.{key} {degree}: {where} has no experts; leave {key} out")
        if whole is not None and whole % degree:
            raise UserError(
                f"parallel.{key} {degree} does not divide the {what} of {where}: use one of {divisors(whole)}"
            )


def check_spread(model: nn.Module, parallel: ParallelConfig, world: int) -> None:
    """Raise UserError where `world` processes cannot hold a model's experts as `spread_experts` lays them; no weight is read."""
    if parallel.ep * parallel.etp == 1:
        return
    edp = mesh_table(world, parallel.axis_sizes()).sizes[AxisName.EDP]
    for name, module, hidden, _ in _with_experts(model, parallel):
        for each, whole in module.named_parameters(recurse=False):
            sizes = [whole.shape[0] // parallel.ep, *whole.shape[1:]]
            if parallel.etp > 1:
                sizes[hidden[each].dim] //= parallel.etp
            _check_shared(sizes, parallel.ep, edp, f"{name}.{each}")


def _with_experts(
    model: nn.Module, parallel: ParallelConfig
) -> Iterator[tuple[str, nn.Module, Mapping[str, Hidden], int]]:
    """Yield (name, module, the hidden dims of its parameters, the number of experts) of each module with experts, once it fits."""
    plan = plan_of(model)
    if plan is None or not plan.experts:
        check_experts(parallel, f"the plan of {type(model).__name__}", 0)
        return
    for pattern, hidden in plan.experts.items():
        for name, module in modules_like(model, pattern, "plan, experts"):
            yield name, module, hidden, _checked(name, module, hidden, parallel)


def _check_shared(part: Sequence[int], ep: int, edp: int, where: str) -> None:
    """Raise UserError where `edp` processes divide no dim of the stacked weights, of these sizes, that each of `ep` has."""

    def divide(over: int) -> bool:
        return any(size % over == 0 for size in part[1:])

    if divide(edp):
        return
    experts, devices = part[0] * ep, ep * edp
    fits = [str(n) for n in range(1, devices + 1) if devices % n == experts % n == 0 and divide(devices // n)]
    use = f"use ep {' or '.join(fits)}, or" if fits else "use"
    raise UserError(
        f"parallel.ep {ep} leaves {edp} processes with the same experts, which divide no dim of their part {tuple(part)} of {where}: "
        f"{use} {edp} times the dp_replicate"
    )


def _checked(name: str, module: nn.Module, hidden: Mapping[str, Hidden], parallel: ParallelConfig) -> int:
    """The number of experts of a module."""
    own = dict(module.named_parameters(recurse=False))
    where, counts = described(name, module), {len(p) if p.dim() > 1 else 0 for p in own.values()}
    inner = next((child for child, part in module.named_children() if next(part.parameters(), None) is not None), None)
    if len(counts) != 1 or 0 in counts or inner is not None:
        raise UserError(
            f"parallel.ep: {where} has experts in the plan; such a module has parameters stacked by expert alone"
        )
    (count,) = counts
    if parallel.etp > 1 and hidden.keys() != own.keys():
        missing = ", ".join(sorted(own.keys() ^ hidden.keys()))
        raise UserError(
            f"parallel.etp: the plan must say which dim of each parameter of {where} counts hidden units: {missing}"
        )
    check_experts(parallel, name, count)
    for number in {own[each].shape[at.dim] // at.joined for each, at in hidden.items()}:
        check_experts(parallel, name, count, number)
    return count
