"""Ways of spans where a model is spread over devices: the gradients of the plain step to the bit, and no exchange more than it makes.

What the ledger counts, by exchange and axis, and what the sharding engine does, by operator, are those of the plain step, however much is
computed again.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode

from mmspeed.axes import AxisSizes
from mmspeed.config.parallel import ParallelConfig
from mmspeed.device import Device
from mmspeed.memory.offload.offloader import Offloader
from mmspeed.mesh import make_mesh
from mmspeed.parallel import TokenLayout, make_layout, parallelize, unwrap
from mmspeed.parallel.tensor import sum_shared_gradients
from tests.support.memory_ways import (
    BRANCHES,
    LARGE,
    Step,
    Ways,
    keeping_of,
    make_inputs,
    make_model,
    name_of,
    run_step,
)
from tests.support.spawn import run_ranks

WAYS: list[Any] = [
    *({"block": way} for way in LARGE),
    *(dict.fromkeys(BRANCHES, way) for way in ("recompute", "offload_selective")),
    {"norm": "recompute", "activation": "recompute"},
    {"attention": "offload_selective", "cross_attention": "recompute", "activation": "recompute"},
]
# strategy, arrangement, parallel, more
CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "fsdp": ("fsdp", "factorised", {}, {}),
    "fsdp bfloat16": ("fsdp", "full", {}, {"dtype": torch.bfloat16}),
    "ddp": ("ddp", "factorised", {}, {}),
    "tp": ("fsdp", "factorised", {"tp": 2}, {"masked": True}),
    "ulysses": ("fsdp", "full", {"ulysses": 2}, {"masked": True}),
    "switch": ("fsdp", "factorised", {"dsp": 2}, {"frames": True}),
}


class Bench:
    """A case's meshes, made once, and its steps."""

    def __init__(self, case: tuple[str, str, dict[str, Any], dict[str, Any]]) -> None:
        self.strategy, self.arrangement, self.parallel, self.more = case
        config = ParallelConfig(**self.parallel)
        shard = 1 if self.strategy == "ddp" else -1
        self.mesh = make_mesh(
            Device("cpu", 0),
            AxisSizes(**{**config.sizes(), "dp_replicate": -1 if shard == 1 else 1, "dp_shard": shard}),
        )
        spread = config.group > 1
        self.layout = make_layout(self.mesh, config) if spread else TokenLayout()
        options = {key: value for key, value in self.more.items() if key in ("masked", "frames")}
        self.inputs = make_inputs(**options)

    def step(self, ways: Ways) -> dict[str, Any]:
        swap = Offloader(Device("cpu", 0), 1 << 10)
        ready = parallelize(
            make_model(self.arrangement),
            self.mesh,
            self.strategy,  # type: ignore[arg-type]
            layout=self.layout,
            compute_dtype=self.more.get("dtype", torch.float32),
            keeping=keeping_of(ways, swap),
        )
        before, engine = self.layout.ledger.copy(), CommDebugMode()
        with engine:
            actual: Step = run_step(ready, self.inputs, swap)
        sent = dict(+Counter(self.layout.ledger.since(before).bytes))
        sum_shared_gradients(unwrap(ready).parameters(), self.layout.tensor)
        grads = {name: grad.numpy() for name, grad in actual.grads.items()}
        return {
            "loss": actual.loss,
            "grads": grads,
            "sent": {" ".join(kind): count for kind, count in sent.items()},
            "engine": {str(operator): count for operator, count in engine.get_comm_counts().items()},
            "products": (actual.forward, actual.backward),
            "moved": actual.moved,
        }


def differs(actual: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    names = [name for name, grad in wanted["grads"].items() if (actual["grads"][name] != grad).any()]
    wrong = [] if actual["loss"] == wanted["loss"] else ["loss"]
    wrong += ["names"] if actual["grads"].keys() != wanted["grads"].keys() else []
    return wrong + names


def measure(names: list[str]) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name in names:
        bench = Bench(CASES[name])
        plain = bench.step({})
        rows = []
        for ways in WAYS:
            step = bench.step(ways)
            counted = {k: step[k] for k in ("sent", "engine", "products", "moved")}
            rows.append((name_of(ways), differs(step, plain), counted))
        results[name] = {"plain": {k: plain[k] for k in ("sent", "engine", "products")}, "rows": rows}
    dist.barrier()
    return results


def check(ranks: list[dict[str, Any]]) -> None:
    wrong = []
    for rank, of_rank in enumerate(ranks):
        for case, actual in of_rank.items():
            plain = actual["plain"]
            for ways, other, step in actual["rows"]:
                where = f"rank {rank}, {case}, {ways}"
                if other:
                    wrong.append(f"{where}: other gradients of {other[:3]}")
                if step["sent"] != plain["sent"] or step["engine"] != plain["engine"]:
                    wrong.append(
                        f"{where}: sent {step['sent']} {step['engine']}, plain {plain['sent']} {plain['engine']}"
                    )
                if (step["moved"] > 0) != ("offload" in ways):
                    wrong.append(f"{where}: {step['moved']} bytes to the host")
                extra = step["products"][1] - plain["products"][1]
                if ("recompute" in ways and "norm" not in ways) != (extra > 0) or extra < 0:
                    wrong.append(f"{where}: {extra} products more")
    assert not wrong, "\n".join(wrong[:20])


@pytest.mark.slow
@pytest.mark.parametrize("names", [["fsdp bfloat16", "tp", "ulysses"], ["fsdp", "ddp", "switch"]], ids=" ".join)
def test_no_exchange_is_made_again_on_two_ranks(names: list[str]) -> None:
    ranks = run_ranks(measure, 2, names)
    check(ranks)
    alone = ("fsdp", "fsdp bfloat16", "ddp")
    assert all(of_rank[name]["plain"]["sent"] or name in alone for of_rank in ranks for name in names)
