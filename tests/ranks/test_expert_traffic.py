"""Bytes of a layer of experts on 2 x 2 processes, 16 experts and 6 of a token: those of the formulas, exchange by exchange and link by link."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mmspeed import rng
from mmspeed.config.parallel import ParallelConfig
from mmspeed.models.language.experts import Experts
from mmspeed.models.language.shapes import SHAPES, tiny_twin
from mmspeed.parallel.experts import spread_experts
from mmspeed.plan.traffic import EvenRouting
from mmspeed.protocols.plan import Hidden, ModelPlan, declare_plan
from tests.support.expert_traffic import both, sent_far, traffic_of
from tests.support.sequence_steps import Groups
from tests.support.spawn import run_ranks

EXPERTS, TOP, WIDTH, HIDDEN, TOKENS = 16, 6, 512, 16, 1500
LAYOUTS = {
    "flat": ParallelConfig(ep=4),
    "by node": ParallelConfig(ep=4, ep_inner=2),
    "parts of experts": ParallelConfig(ep=2, etp=2),
    "parts of experts by node": ParallelConfig(ep=2, ep_inner=1, etp=2),
}
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class Layer(nn.Module):
    """Experts by themselves."""

    def __init__(self) -> None:
        super().__init__()
        twin = tiny_twin(SHAPES["qwen3-30b-a3b"].settings).experts
        assert twin is not None
        self.experts = Experts(WIDTH, replace(twin, num_experts=EXPERTS, moe_intermediate_size=HIDDEN))
        nn.init.zeros_(self.experts.gate_up_proj)
        nn.init.zeros_(self.experts.down_proj)
        declare_plan(self, ModelPlan(blocks=(), experts={"experts": HIDDEN_DIMS}))


HIDDEN_DIMS = {"gate_up_proj": Hidden(1, 2), "down_proj": Hidden(2)}


def exchanged() -> dict[tuple[str, str], Any]:
    """(sent, due, sent to other nodes, due) of a forward and backward pass of each layout and number type."""
    groups, results, rank = Groups(), dict[tuple[str, str], Any](), dist.get_rank()
    chosen_TK = rng.normal((TOKENS, EXPERTS), 0, "choices", rank).topk(TOP).indices
    for name, parallel in LAYOUTS.items():
        mesh, layout = groups.of(1, -1, parallel, [0, 0, 1, 1])
        for of, dtype in DTYPES.items():
            layer, before = Layer().to(dtype), layout.ledger.copy()
            spread_experts(layer, mesh, layout)
            x_TE = torch.zeros(TOKENS, WIDTH, dtype=dtype, requires_grad=True)
            gates_TK = torch.full((TOKENS, TOP), 1 / TOP, requires_grad=True)
            layer.experts(x_TE, gates_TK, chosen_TK).sum().backward()
            sent = layout.ledger.since(before)
            due, far = traffic_of([chosen_TK], layout, EXPERTS, WIDTH, HIDDEN, dtype.itemsize)
            results[name, of] = +sent.bytes, both(due), sent_far(sent), both(far)
    return results


def test_bytes_of_experts_are_those_of_the_formulas_by_link() -> None:
    ranks = run_ranks(exchanged, 4)
    for rank in ranks:
        for case, (sent, due, far, due_far) in rank.items():
            assert sent == due and far == due_far, case
    flat, by_node = (
        [sum(rank[name, "bfloat16"][2][kind, axis] for rank in ranks) for kind in ("combine", "dispatch")]
        for name, axis in (("flat", "ep"), ("by node", "ep_outer"))
    )
    rows, one = [sent[0] // (2 * 2 * WIDTH) for sent in (flat, by_node)], EvenRouting(EXPERTS, TOP).rows_between(2)
    assert abs(rows[1] / rows[0] / (one[1] / one[0]) - 1) <= 0.01 and abs(one[1] / one[0] - 0.332) < 5e-4
    assert sum(by_node) / sum(flat) <= 0.36
