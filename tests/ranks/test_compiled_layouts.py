"""torch.compile under sequence and tensor parallelism: graphs are as few as exchanges and shapes ask for, and the gradients are those of
one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.graphs import CountingBackend
from tests.support.sequence_steps import Case, Groups, compared
from tests.support.spawn import run_ranks

# each layout meets images, few and many frames, and then again what it has met
LAYOUTS = [("switch", 2, 1, 1), ("ulysses", 1, 2, 1), ("full", 1, 1, 2)]
LATENTS = ("odd", "few frames", "image", "odd", "image")


def work() -> list[dict[str, Any]]:
    import torch._dynamo.utils

    counters, groups, truths, results = torch._dynamo.utils.counters, Groups(), dict[Case, Any](), []
    for model, ulysses, ring, tp in LAYOUTS:
        torch._dynamo.reset()
        counters.clear()
        for latent in LATENTS:
            case = Case(ulysses, ring, model, latent, "fsdp", tp, extra="compiled")
            one = compared(case, 2, groups, truths)
            frames = counters["frames"]
            results.append({**one, "graphs": counters["stats"]["unique_graphs"], "frames": dict(frames)})
    return results


@pytest.mark.slow
def test_graphs_are_made_and_gradients_stay() -> None:
    for rank in run_ranks(work, 2, timeout=900):
        for actual in rank:
            assert max(actual["loss"], actual["norm"], actual["gap"]) < 1e-5, actual
        for start in range(0, len(rank), len(LATENTS)):
            graphs = [actual["graphs"] for actual in rank[start : start + len(LATENTS)]]
            # a block is some ten graphs between its exchanges; of two spans, with and without gradient, of fixed and of any length
            assert 0 < graphs[0] and graphs[-1] <= 80, graphs
            assert graphs[2] == graphs[3] == graphs[4], graphs


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


def counts(cases: list[Case]) -> list[dict[str, Any]]:
    groups, truths, results = Groups(), dict[Case, Any](), []
    backend = CountingBackend()
    torch._dynamo.register_backend(backend, name="counted")
    for case in cases:
        torch._dynamo.reset()
        backend.graphs = backend.runs = 0
        results.append({**compared(case, 2, groups, truths), "counts": (backend.graphs, backend.runs)})
    return results


@pytest.mark.slow
@pytest.mark.parametrize("cases", [[*COUNTS][::4], [*COUNTS]], ids=["two", "all"])
def test_graphs_go_from_one_exchange_to_the_next(cases: list[Case]) -> None:
    for rank in run_ranks(counts, 2, cases):
        assert {actual["case"]: actual["counts"] for actual in rank} == {case: COUNTS[case] for case in cases}
        assert all(max(actual["loss"], actual["norm"], actual["gap"]) < 1e-5 for actual in rank), rank
