"""MLPs in parts, and the memory report, on sharded and split models: four ranks.

Each layout is compared with itself without parts; that it is equal to one process is shown elsewhere. The bits are the same where this
machine computes the cut products with the bits of the whole ones, which it is asked first; else a few of float32's last bits differ: sums
of up to 512 terms in another order, 20 x 2^-23, with room of a factor of four.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from mmspeed import rng
from mmspeed.axes import AxisSizes
from mmspeed.config.parallel import ParallelConfig
from mmspeed.device import Device
from mmspeed.memory import BlockPolicies, peak_bytes
from mmspeed.memory.planning.measure import MatmulCounter
from mmspeed.memory.planning.report import CATEGORIES, MemoryReport
from mmspeed.memory.planning.tracked import measure_step
from mmspeed.mesh import make_mesh
from mmspeed.models import SoraDiT, SoraDiTConfig
from mmspeed.parallel import make_layout, parallelize, sum_shared_gradients
from tests.support.machine import parts_have_the_bits_of_the_whole
from tests.support.mlps import PlainMlp
from tests.support.spawn import run_ranks

pytestmark = pytest.mark.slow

CPU = Device("cpu", 0)
MODEL: dict[str, Any] = {"width": 96, "depth": 2, "heads": 4, "latent_channels": 4, "text_width": 16, "adaln_rank": 8}
RECOMPUTED = {"block": "recompute"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp": {},
    "tp": {"tp": 2},
    "sequence": {"ulysses": 2, "ring": 2},
    "all": {"ulysses": 2, "tp": 2},
}
# the ways of a layout in each run; both of all with `slow`
WAYS: dict[str, list[dict[str, str]]] = {"fsdp": [{}], "tp": [RECOMPUTED], "sequence": [{}], "all": [RECOMPUTED]}
WORLD, CHUNK = 4, 50
TOKENS = 2 * 4 * 8 * 8
PARTS = {
    "fsdp": TOKENS // CHUNK + 1,
    "tp": TOKENS // CHUNK + 1,
    "sequence": TOKENS // 4 // CHUNK + 1,
    "all": TOKENS // 2 // CHUNK + 1,
}


def step(name: str, keeping: BlockPolicies | None) -> tuple[dict[str, Tensor], int, int]:
    """Gradients, bytes that the layout exchanged, and matrix products."""
    sizes = LAYOUTS[name]
    mesh = make_mesh(CPU, AxisSizes(**sizes))
    layout = make_layout(mesh, ParallelConfig(**sizes))
    model = SoraDiT(SoraDiTConfig(**MODEL))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter += 0.1 * rng.normal(parameter.shape, 1, "perturb", key)
    model = parallelize(model, mesh, "fsdp", layout=layout, keeping=keeping)  # type: ignore[assignment]
    inputs = (
        rng.normal((2, 4, 4, 16, 16), 0, "latent"),
        torch.tensor([0.2, 0.7]),
        rng.normal((2, 8, 16), 0, "text"),
        torch.ones(2, 8, dtype=torch.bool),
    )

    def work() -> None:
        model(*inputs).square().mean().backward()
        sum_shared_gradients(model.parameters(), layout.tensor)

    with MatmulCounter() as count:
        work()
    grads = {
        key: (p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad).clone()
        for key, p in model.named_parameters()
        if p.grad is not None
    }
    return grads, layout.ledger.total(), count.total


def bits_of_the_whole(name: str) -> bool:
    """Whether this machine gives the products of a layout's MLPs, cut into parts, the bits of the whole ones."""
    sizes, width = LAYOUTS[name], MODEL["width"]
    tokens = TOKENS // (sizes.get("ulysses", 1) * sizes.get("ring", 1))
    g = torch.Generator().manual_seed(0)
    asked = []
    for _ in range(4):
        mlp = PlainMlp(width, 4 * width // sizes.get("tp", 1), width)
        inputs = torch.randn(2, tokens, width, generator=g)
        asked.append(parts_have_the_bits_of_the_whole(mlp, inputs[0], inputs[1], CHUNK))
    return all(asked)


def compare(every: bool) -> dict[tuple[str, str], tuple[float, int, int, bool]]:
    """Of each layout and ways, against the same without parts: the largest difference of a gradient, bytes and products beyond, and
    whether the machine's products have the same bits."""
    results = {}
    for name in LAYOUTS:
        plain, sent, products = step(name, None)
        for ways in [{}, RECOMPUTED] if every else WAYS[name]:
            again = step(name, BlockPolicies((ways,))) if ways else (plain, sent, products)  # type: ignore[arg-type]
            keeping = BlockPolicies((ways,), mlp_chunk=CHUNK)  # type: ignore[arg-type]
            grads, sent_in_parts, smaller = step(name, keeping)
            assert grads.keys() == plain.keys()
            worst = max(float((grads[key] - v).abs().max() / v.abs().max()) for key, v in plain.items() if v.numel())
            alike = bits_of_the_whole(name)
            results[name, "".join(ways)] = (worst, sent_in_parts - again[1], smaller - again[2], alike)
    return results


@pytest.fixture(scope="module", params=[False, True], ids=["some", "every"])
def compared(request: pytest.FixtureRequest) -> list[dict[tuple[str, str], tuple[float, int, int, bool]]]:
    return run_ranks(compare, WORLD, request.param)


def test_parts_give_the_same_gradients_and_exchange_nothing_more(compared: Any) -> None:
    for rank in compared:
        assert {name for name, _ in rank} == LAYOUTS.keys()
        for (name, ways), (difference, exchanged, products, _) in rank.items():
            more, where = PARTS[name] - 1, (name, ways, difference)
            # what one rank computes otherwise comes to the others with the exchanges
            alike = all(other[name, ways][3] for other in compared)
            assert difference <= (0 if alike else 1e-5), where
            assert exchanged == 0, where
            # of each part; its first one again and one of backward, and four of each part of the units
            assert products >= MODEL["depth"] * 4 * more, where


def reported() -> tuple[MemoryReport, int, int]:
    """The report of a sharded step, bytes of this rank's shards, and torch's own count of the peak."""
    model = parallelize(SoraDiT(SoraDiTConfig(**MODEL)), make_mesh(CPU), "fsdp")
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    inputs = (torch.randn(2, 4, 4, 16, 16), torch.tensor([0.2, 0.7]), torch.randn(2, 8, 16), torch.ones(2, 8).bool())

    def work() -> None:
        model(*inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    work()
    shards = sum(p.to_local().nbytes for p in model.parameters())  # type: ignore[attr-defined]
    counted = peak_bytes(CPU, 3 * shards, work)
    return measure_step(model, optimizer, work, device=CPU, setting="shards"), shards, counted


def test_a_sharded_steps_report_tells_shards_and_what_was_gathered() -> None:
    """Collectives' buffers are seen by the allocator alone."""
    for report, shards, counted in run_ranks(reported, WORLD):
        assert list(report.categories) == list(CATEGORIES)
        assert shards <= report.categories["parameters"] < 4 * shards + 1
        assert 2 * shards <= report.categories["optimizer"] < 2.01 * shards
        assert abs(report.peak - counted) < 0.06 * counted, (report, counted)
        kept = [layer.kept for layer in report.layers if layer.name.startswith("blocks.")]
        assert len(kept) == 2 and min(kept) > 0
