"""Exchanges that a step must make at a layout, and axes over which it may send nothing, by the model's plan and the layout."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from mmspeed.compute.sparse.module import clustered_layers
from mmspeed.config.parallel import ParallelConfig
from mmspeed.parallel import TokenLayout
from mmspeed.parallel.stages import everywhere
from mmspeed.protocols import ModelPlan, plan_of

# axes of the processes that split a sample's tokens
OF_A_SEQUENCE = ("sequence", "dsp", "ring", "ring_outer", "ulysses")


def wrong_exchanges(
    model: nn.Module, parallel: ParallelConfig, layout: TokenLayout, kind: str, splits: bool, sent: Sequence[str]
) -> list[str]:
    """Lines on exchanges, as "kind axis", that a step's did not make or should not. splits: it has samples whose tokens are split."""
    plan = plan_of(model)
    wanted = [] if plan is None else expected(plan, parallel, layout, splits, bool(clustered_layers(model)))
    if any(parameter.requires_grad for _, parameter in everywhere(model)):
        wanted.append("all_reduce pp")
    problems = [f"no {what} was sent, so the layout did not take part" for what in wanted if what not in sent]
    silent = () if splits else OF_A_SEQUENCE
    return problems + [
        f"{kind} take no part in it, yet {what} was sent" for what in sent if what.rpartition(" ")[2] in silent
    ]


def expected(
    plan: ModelPlan, parallel: ParallelConfig, layout: TokenLayout, splits: bool, sparse: bool = False
) -> list[str]:
    """The exchanges that a step must make, as "kind axis": else an axis of the layout does nothing.

    Over a ring sparse attention sends rows of the kept keys instead of all; the parts of packed documents may lie on one process each.
    """
    exchanges = [f"{what} tp" for what in ("all_gather", "reduce_scatter", "all_reduce") if parallel.tp > 1]
    over = ["ep"] if layout.nodes is None else [axis.name for axis in layout.nodes if axis.size > 1]
    exchanges += [f"{what} {axis}" for what in ("counts", "dispatch", "combine") for axis in over if parallel.ep > 1]
    exchanges += [f"{what} pp" for what in ("activations", "gradients") if parallel.pp > 1]
    exchanges += [f"{what} etp" for what in ("all_gather", "reduce_scatter") if parallel.etp > 1]
    if not splits or parallel.sequence == 1:
        return exchanges
    exchanges.append("all_gather sequence")  # the prediction, or the losses, from all
    if any(block.attends == layout.crossing(plan.factorised) for block in plan.blocks):
        exchanges += ["all_to_all ulysses"] if parallel.ulysses > 1 else []
        if parallel.ring > 1 and plan.packed is None:
            outer = parallel.ring_window is not None and parallel.ring_window < parallel.ring
            exchanges += ["rows ring"] if sparse else ["ring ring", *(["ring ring_outer"] if outer else [])]
    if parallel.dsp > 1 and plan.factorised:
        exchanges.append("all_to_all dsp")
    return exchanges
