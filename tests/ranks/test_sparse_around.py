"""What goes on around sparse attention over processes: the dense phase, watching, recomputation, warm starts, autocast, compile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mmspeed.compute.attention import attention
from mmspeed.compute.sparse.mass_histogram import threshold
from mmspeed.compute.sparse.module import WarmStarts, WatchedCalls
from mmspeed.parallel.sparse.sparse_attention import sparse_attention
from mmspeed.replay import replayed
from tests.ranks.test_hybrid_attention import mesh_of
from tests.ranks.test_sparse_parallel import EMPTY, TOKENS, Case, axes_of, layer_of, positions, whole
from tests.support.spawn import run_ranks

pytestmark = pytest.mark.slow


def around_it(ulysses: int, ring: int) -> dict[str, Any]:
    """Dense phase, watching, checkpointing, warm starts, autocast, compile."""
    case = Case(ulysses, ring, EMPTY[4], {"tail": "summary", "tau": None}, mask="random", dtype="float32")
    axes, (tensors, mask), layer = axes_of(case), whole(case), layer_of(case)
    assert mask is not None
    q, k, v, dout = (x.split(list(case.sizes), dim=2)[axes.rank].clone() for x in tensors)
    mine = mask.split(list(case.sizes), dim=1)[axes.rank]

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sparse_attention(q, k, v, mine, axes, case.sizes, case.sizes, positions(), layer)

    def summed(value: Tensor) -> Tensor:
        value = value.clone().double()
        dist.all_reduce(value, group=mesh_of(ulysses, ring)["ring", "ulysses"]._flatten().get_group())
        return value

    results: dict[str, Any] = {}
    dense = attention(*tensors[:3], mask)
    own = dense.split(list(case.sizes), dim=2)[axes.rank]
    layer.phase, layer.watching = "dense", True
    results["dense"] = torch.allclose(call(q, k, v), own, atol=1e-5) and layer.counter["dense"] == 1
    counts = summed(torch.tensor(layer.seen.shares.values()))
    # every query meets every key that counts once; a sample that sees nothing counts none
    results["counted"] = counts.sum().item() == case.heads * TOKENS * mask.sum().item()
    layer.tau.fill_(threshold(counts.tolist(), 0.3) or 0.0)
    layer.phase, layer.seen = "sparse", WatchedCalls()
    out = call(q, k, v)
    results["kept"] = (
        summed(torch.as_tensor(layer.seen.kept_pairs)) / summed(torch.tensor(layer.seen.all_pairs))
    ).item()
    rows = torch.arange(min(16, q.shape[2])) * q.shape[2] // max(1, min(16, q.shape[2]))
    if ulysses == 1:
        wrong = (out - own)[:, :, rows].square().sum()
        results["error"] = torch.allclose(summed(torch.as_tensor(layer.seen.wrong)), summed(wrong), rtol=1e-3)
    layer.watching = False

    def grads(function: Any) -> list[Tensor]:
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        out = function(*inputs)
        return [out.detach(), *torch.autograd.grad(out, inputs, dout)]

    plain = grads(call)
    again = grads(lambda *x: checkpoint(replayed(call), *x, use_reentrant=False))
    results["checkpoint"] = all(map(torch.equal, plain, again))
    compiled = grads(torch.compile(lambda *x: call(*(t * 1.0 for t in x)) * 1.0, backend="aot_eager"))
    results["compile"] = all(torch.allclose(a, b, atol=1e-6) for a, b in zip(plain, compiled, strict=True))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = call(q, k, v)
    results["autocast"] = half.dtype == torch.bfloat16
    results["rounded"] = (summed((half - plain[0]).square().sum()) / summed(plain[0].square().sum())).sqrt().item()
    layer.warm = WarmStarts("caption")
    cold = call(q, k, v)
    start = layer.warm.starts["caption"][0]
    warm = call(q, k, v)
    assert start is not None
    moved = summed((start - layer.warm.starts["caption"][0]).abs().sum()) / summed(start.abs().sum())  # type: ignore[operator]
    error = [(summed((x - own).square().sum()) / summed(own.square().sum())).sqrt().item() for x in (cold, warm)]
    results["warm"] = (moved.item(), *error)
    return results


def both() -> list[dict[str, Any]]:
    return [around_it(1, 4), around_it(2, 2)]


def test_around_it() -> None:
    for result in run_ranks(both, 4):
        for row in result:
            assert row["dense"] and row["counted"]
            # counts of bins, of few keys, and the key that is kept at least
            assert abs(row["kept"] - 0.3 * 0.33) < 0.05, row["kept"]
            assert row.get("error", True)
            assert row["checkpoint"] and row["compile"] and row["autocast"]
            assert row["rounded"] < 0.2  # 8 bits, and keys near the threshold
            moved, cold, warm = row["warm"]
            assert 0 < moved < 0.5 and warm < 1.3 * cold, row["warm"]
