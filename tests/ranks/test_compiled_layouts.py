"""torch.compile with recomputation under sequence and tensor parallelism: there are graphs, as few as shapes ask for, and the
gradients are those of one process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.sequence_steps import Case, Groups, compared
from tests.spawn import run_ranks

# each layout meets images, few and many frames, and then again what it has met
LAYOUTS = [("switch", 2, 1, 1), ("ulysses", 1, 2, 1), ("full", 1, 1, 2)]
LATENTS = ("odd", "few frames", "image", "odd", "image")


def work() -> list[dict[str, Any]]:
    import torch._dynamo.utils

    counters, groups, truths, found = torch._dynamo.utils.counters, Groups(), dict[Case, Any](), []
    for model, ulysses, ring, tp in LAYOUTS:
        torch._dynamo.reset()
        counters.clear()
        for latent in LATENTS:
            case = Case(ulysses, ring, model, latent, "fsdp", tp, extra="compiled")
            one = compared(case, 2, groups, truths)
            frames = counters["frames"]
            found.append({**one, "graphs": counters["stats"]["unique_graphs"], "frames": dict(frames)})
    return found


@pytest.mark.slow
def test_graphs_are_made_and_gradients_stay() -> None:
    for rank in run_ranks(work, 2, timeout=900):
        for found in rank:
            assert max(found["loss"], found["norm"], found["gap"]) < 1e-5, found
        for start in range(0, len(rank), len(LATENTS)):
            graphs = [found["graphs"] for found in rank[start : start + len(LATENTS)]]
            # a block is some ten graphs between its exchanges; of two spans, with and without gradient, of fixed and of any length
            assert 0 < graphs[0] and graphs[-1] <= 80, graphs
            assert graphs[2] == graphs[3] == graphs[4], graphs
