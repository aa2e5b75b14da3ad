"""Cases of the gather kernel, run by tests/unit/compute/sparse/test_sparse_triton.py in processes of their own: whether Triton interprets
or compiles is decided when its functions are first imported.

Legend: B batch, A heads, G = B x A, N queries, M keys, D head width, C clusters of queries, K clusters of keys, R ranges of keys.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import Tensor

from mmspeed import rng
from mmspeed.compute.sparse import ClusterMeans, ClusterPlan, clustered_attention, key_means
from mmspeed.compute.sparse.kernels import triton_gather
from tests.support.sparse_plans import random_plan

# name: (B, A, N, M, D, options of the plan, dtype)
CASES: dict[str, tuple[int, int, int, int, int, dict[str, Any], str]] = {
    "ragged": (1, 1, 150, 140, 16, {"clusters": 3, "tail_clusters": 70}, "float32"),
    "empty clusters": (2, 1, 70, 131, 40, {"clusters": 9, "uneven": 3.0, "tail_clusters": 5}, "float32"),
    "large clusters": (1, 1, 260, 70, 24, {"clusters": 1, "keep": 0.6, "tail_clusters": 3}, "float32"),
    "one key": (1, 1, 20, 1, 16, {"clusters": 2, "keep": 1.5, "tail_clusters": 1}, "float32"),
    "one query": (1, 2, 1, 33, 16, {"clusters": 3, "tail_clusters": 2}, "float32"),
    "no key": (1, 1, 20, 30, 16, {"clusters": 2, "keep": 0.0, "tail_clusters": 2}, "float32"),
    "few keys": (1, 2, 40, 70, 16, {"clusters": 4, "keep": 0.02, "tail_clusters": 3}, "float32"),
    "all keys": (1, 1, 66, 67, 32, {"clusters": 3, "keep": 1.5, "tail_clusters": 4}, "float32"),
    "always kept": (1, 1, 60, 300, 16, {"clusters": 5, "keep": 0.1, "tail_clusters": 6, "always": 40}, "float32"),
    "masked": (2, 1, 50, 80, 16, {"clusters": 3, "tail_clusters": 4, "masked": True}, "float32"),
    "strided": (2, 2, 50, 60, 16, {"clusters": 3, "tail_clusters": 4, "strided": True}, "float32"),
    "bfloat16": (1, 2, 100, 90, 32, {"clusters": 5, "tail_clusters": 9}, "bfloat16"),
    "float16": (1, 1, 100, 90, 64, {"clusters": 5, "tail_clusters": 9}, "float16"),
}


def _plan(case: str) -> ClusterPlan:
    batch, heads, queries, keys, _, options, _ = CASES[case]
    options = {key: value for key, value in options.items() if key != "strided"}
    if options.pop("masked", False):
        mask = torch.arange(keys).expand(batch, -1) >= torch.tensor([[0], [keys // 2]])
        options["key_mask_BM"] = mask
    if "always" in options:
        options["always_keep_M"] = torch.arange(keys) < options.pop("always")
    return random_plan(batch, heads, queries, keys, **options)


def _inputs(case: str) -> tuple[Tensor, ...]:
    """q, k, v and dout."""
    batch, heads, queries, keys, width, options, dtype = CASES[case]

    def draw(name: str, rows: int) -> Tensor:
        shape = (batch, rows, heads, width) if "strided" in options else (batch, heads, rows, width)
        x = rng.normal(shape, 0, "triton", name).to(getattr(torch, dtype))
        return x.transpose(1, 2) if "strided" in options else x

    return draw("q", queries), draw("k", keys), draw("v", keys), draw("dout", queries)


def computed(case: str, tail: str, backend: str) -> list[Tensor]:
    """out, lse, dq, dk, dv, and gradients of the means where there are any."""
    plan, (q, k, v, dout) = _plan(case), _inputs(case)
    assert plan.tail is not None
    means = key_means(k, v, plan.tail)
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v, means.k_BAKD, means.v_BAKD)]
    summary = ClusterMeans(*leaves[3:]) if tail == "summary" else None
    done = clustered_attention(*leaves[:3], plan, tail=tail, means=summary, backend=backend)  # type: ignore[arg-type]
    assert done.stats.backend == backend
    wanted = leaves if summary is not None else leaves[:3]
    return [done.out_BAND, done.lse_BAN, *torch.autograd.grad(done.out_BAND, wanted, dout)]


def errors(case: str, tail: str) -> list[float]:
    """Largest differences to the oracle, in parts of the largest value."""
    results = []
    for got, right in zip(computed(case, tail, "triton"), computed(case, tail, "masked"), strict=True):
        if not torch.equal(got.isinf(), right.isinf()) or got.dtype != right.dtype:
            results.append(float("inf"))
            continue
        got, right = (
            got.detach().double().nan_to_num(posinf=0, neginf=0, nan=1e9),
            right.detach().double().nan_to_num(neginf=0),
        )
        results.append(float((got - right).abs().max() / right.abs().max().clamp(min=0.1)))
    return results


def same_bits(case: str) -> bool:
    """Whether two calls give the same."""
    one, two = computed(case, "summary", "triton"), computed(case, "summary", "triton")
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def uneven_cuts() -> dict[str, Any]:
    """Of a plan with keys that everyone keeps: whether the cuts of its lists are right, and the largest share of the work in a range."""
    plan = _plan("always kept")
    count = 6
    cuts = triton_gather.cuts(plan, count).long()
    lengths = plan.lengths().flatten()
    ends = cuts[:, 0].eq(0).all() and cuts[:, -1].eq(lengths).all() and (cuts.diff(dim=1) >= 0).all()
    below, above = [-1] * count, [plan.keys] * count  # of each inner cut, the keys nearest to it on its two sides
    for keys, row in zip(plan.kv_index_Z.split(lengths.tolist()), cuts.tolist(), strict=True):
        for i in range(1, count):
            below[i] = max(below[i], *keys[: row[i]].tolist(), -1)
            above[i] = min(above[i], *keys[row[i] :].tolist(), plan.keys)
    one_bound = all(low < high for low, high in zip(below, above, strict=True))
    work = (cuts.diff(dim=1) * plan.sizes().flatten()[:, None]).sum(dim=0).double()
    return {"ends": bool(ends), "one_bound": one_bound, "most": float(work.max() / work.mean())}


def interpreted(cases: list[str]) -> dict[str, Any]:
    """The results of these cases, on which test_sparse_triton.py asserts."""
    report: dict[str, Any] = {}
    for case in cases:
        for tail in ("zero", "summary"):
            report[f"{case} {tail}"] = errors(case, tail)
    return report | {"same bits": same_bits("few keys"), "cuts": uneven_cuts()}


def compile_for(capability: int, dtype: str, width: int, block: int) -> dict[str, Any]:
    """Compiles all kernels for a device that need not be there: bytes of fast memory, and whether they use its matrix units."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from mmspeed.compute.sparse.kernels import triton_backward, triton_forward

    q = torch.empty(1, 1, 1, width, dtype=getattr(torch, dtype))
    launch = triton_gather.shape_for(q.to("meta"), block).launch(BLOCK_Q=block, BLOCK_K=triton_gather.KEY_BLOCK)
    of_keys = triton_gather.key_launch(q.to("meta"))
    small = {"num_warps": 4, "num_stages": 2}
    kernels = {
        triton_forward.forward: launch | {"TAIL": True},
        triton_backward.query_gradient: launch | {"TAIL": True},
        triton_backward.key_gradient: dict(of_keys),
        triton_backward.mean_gradient: dict(of_keys),
        triton_backward.count_work: small | {"BLOCK": 512},
        triton_backward.cut_lists: small | {"BLOCK": 64},
    }
    element = {"float32": "*fp32", "float16": "*fp16", "bfloat16": "*bf16"}[dtype]
    types = dict.fromkeys(("q", "k", "v", "out", "dout", "dq", "mean_k", "mean_v"), element)
    types |= dict.fromkeys(("lse", "delta", "dropped", "dk", "dv"), "*fp32") | {
        "scale": "fp32",
        "natural_scale": "fp32",
    }
    types |= dict.fromkeys(("row_of", "place_of", "kv_index", "cuts", "work", "bounds"), "*i32")
    types |= dict.fromkeys(("q_index", "q_offsets", "kv_offsets"), "*i64")
    report = {}
    for kernel, constants in kernels.items():
        options = {key: constants.pop(key) for key in ("num_warps", "num_stages")}
        signature: dict[str, Any] = {
            name: "constexpr" if name in constants else ("i32",) * 3 if name.endswith("_strides") else types.get(name, "i32")
            for name in kernel.arg_names
        }  # fmt: skip
        constants = {name: value for name, value in constants.items() if name in signature}
        place = {name: number for number, name in enumerate(kernel.arg_names)}
        whole = [(place[name],) for name, kind in signature.items() if "*" in kind]  # 16 bytes, as torch's tensors are
        whole += [(place[name], i) for name, kind in signature.items() for i in range(3) if isinstance(kind, tuple)]
        hints = {at: [["tt.divisibility", 16]] for at in whole}
        source = ASTSource(kernel, signature, {(place[name],): v for name, v in constants.items()}, hints)
        built = compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        report[kernel.__name__] = {"memory": built.metadata.shared, "matrix": "mma" in built.asm["ptx"]}
    return report


if __name__ == "__main__":
    print(
        json.dumps(
            compile_for(int(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:]))
            if sys.argv[1].isdigit()
            else interpreted(sys.argv[1:])
        )
    )
