"""Recomputation of whole blocks outside of regions, over devices: gradients of the plain step to the bit, and its exchanges, no more.

The forms are those of `recompute`: torch's own way, the reentrant one, and that one around the graphs of torch.compile, which is held
against a plain step of the same graphs. What the sharding engine gathers is its own affair.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mmspeed.memory import BlockPolicies, recompute
from tests.ranks.test_memory_ways import CASES, FOUR, Bench, differs
from tests.support.spawn import run_ranks

SLOW = pytest.mark.slow


@dataclass(frozen=True)
class Recomputed(BlockPolicies):
    """`recompute` of every block, as a script of one's own calls it."""

    reentrant: bool = False

    def apply(self, block: nn.Module, number: int, compiled: bool = False, around_graphs: bool = False) -> None:
        recompute(block, self.reentrant, self.exchange_again)


def measure(names: list[str], four: bool, compiled: bool) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name in names:
        bench = Bench((FOUR if four else CASES)[name])
        plain = bench.step({})
        forms = {"torch's own": bench.step({}, keeping=Recomputed())}
        if bench.strategy != "ddp":
            forms["reentrant"] = bench.step({}, keeping=Recomputed(reentrant=True))
        again = {"reentrant": bench.step({}, keeping=Recomputed(reentrant=True, exchange_again=True))["sent"]}
        of_form = {form: (differs(step, plain), step["sent"], step["products"]) for form, step in forms.items()}
        if compiled:
            torch._dynamo.reset()
            graphs = bench.step({}, compile="eager")
            both = bench.step({"block": "recompute"}, compile="eager")
            wrong = [*differs(both, graphs), *(["compiled sent"] if graphs["sent"] != plain["sent"] else [])]
            of_form["graphs"] = wrong, both["sent"], both["products"]
            again["graphs"] = bench.step({"block": "recompute"}, again=True, compile="eager")["sent"]
        results[name] = {"plain": plain["sent"], "products": plain["products"], "forms": of_form, "again": again}
    dist.barrier()
    return results


def check(ranks: list[dict[str, Any]], exchanges: bool = True) -> None:
    for rank, of_rank in enumerate(ranks):
        for name, actual in of_rank.items():
            assert bool(actual["plain"]) == exchanges
            for form, (wrong, sent, products) in actual["forms"].items():
                where = rank, name, form
                assert not wrong, (*where, wrong)
                assert sent == actual["plain"], (*where, sent, actual["plain"])
                assert products[1] > actual["products"][1], where  # it was recomputed
            for form, sent in actual["again"].items():
                more = sum(sent.values()) - sum(actual["plain"].values())
                inside = exchanges and name != "switch"  # re-sharding is around a block, and never made again
                assert (more > 0) == inside, (rank, name, form, sent, actual["plain"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "compiled"),
    [
        pytest.param(["tp", "ring"], False, marks=SLOW),
        (["ulysses"], True),  # and what is done without graphs
        pytest.param(["tp", "ring", "switch", "heads", "sparse ring", "sparse ulysses"], True, marks=SLOW),
    ],
    ids=str,
)
def test_two_ranks(names: list[str], compiled: bool) -> None:
    check(run_ranks(measure, 2, names, False, compiled))


@pytest.mark.slow
@pytest.mark.parametrize("names", [["fsdp"], ["ddp"]], ids=str)
def test_engines_alone(names: list[str]) -> None:
    check(run_ranks(measure, 2, names, False, False), exchanges=False)


@pytest.mark.parametrize(
    ("names", "compiled"),
    [
        pytest.param(["hybrid"], False, marks=SLOW),
        pytest.param(["hybrid", "tp and ulysses", "tp and ring", "uneven"], True, marks=SLOW),
    ],
    ids=str,
)
def test_four_ranks(names: list[str], compiled: bool) -> None:
    check(run_ranks(measure, 4, names, True, compiled))
