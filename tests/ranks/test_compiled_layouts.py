"""torch.compile under sequence and tensor parallelism: graphs are as few as exchanges ask for; gradients are those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.graphs import CountingBackend
from tests.support.sequence_steps import Case, Groups, compared
from tests.support.spawn import run_ranks

# graphs that are made for one step of a model of four blocks, and those that its forward and recomputation run
COUNTS = {
    Case(1, 1, "full", "odd", "fsdp", 2, extra="counted"): (7, 28),
    Case(1, 1, "full", "odd", "fsdp", 2, extra="counted, recomputed"): (14, 56),
    Case(1, 1, "switch", "odd", "fsdp", 2, extra="counted"): (9, 28),
    Case(2, 1, "full", "odd", "fsdp", extra="counted"): (2, 8),
    Case(1, 2, "full", "odd", "fsdp", extra="counted"): (2, 8),
    Case(2, 1, "ulysses", "odd", "fsdp", extra="counted"): (3, 6),
    Case(1, 2, "ulysses", "odd", "fsdp", extra="counted"): (3, 6),
    Case(2, 1, "switch", "odd", "fsdp", extra="counted"): (2, 4),
}


def counts() -> list[dict[str, Any]]:
    groups, truths, results = Groups(), dict[Case, Any](), []
    backend = CountingBackend()
    torch._dynamo.register_backend(backend, name="counted")
    for case in COUNTS:
        torch._dynamo.reset()
        backend.graphs = backend.runs = 0
        results.append({**compared(case, 2, groups, truths), "counts": (backend.graphs, backend.runs)})
    return results


@pytest.mark.slow
def test_graphs_go_from_one_exchange_to_the_next() -> None:
    for rank in run_ranks(counts, 2):
        assert {actual["case"]: actual["counts"] for actual in rank} == COUNTS
        assert all(max(actual["loss"], actual["norm"], actual["gap"]) < 1e-5 for actual in rank), rank
