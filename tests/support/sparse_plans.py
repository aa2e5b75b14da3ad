"""Plans of sparse attention made by dice, of any shapes, clusters of any size, any share of kept keys; and how results are compared.

Legend: B batch, A heads, G = B x A, N queries, M keys, D head width, C clusters of queries, K clusters of keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mmspeed import rng
from mmspeed.compute.sparse import ClusterMeans, ClusterPlan, TailClusters, clustered_attention, key_means

# of the oracle's largest number: sums of up to a few hundred products; half types round probabilities and results
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2}


def random_plan(
    batch: int,
    heads: int,
    queries: int,
    keys: int,
    *,
    clusters: int = 4,
    keep: float = 0.3,
    min_keep: int = 0,
    tail_clusters: int = 0,
    key_mask_BM: Tensor | None = None,
    always_keep_M: Tensor | None = None,
    uneven: float = 1.0,
    seed: int = 0,
) -> ClusterPlan:
    """A plan that `check` passes; the same for the same arguments.

    keep: share of the keys that a cluster keeps, about; at least `min_keep` of those that are not masked.
    tail_clusters: K; 0: a plan without a tail. Clusters of keys may be empty.
    key_mask_BM: bool, True at keys that count; others are in no list and no cluster.
    always_keep_M: bool, True at keys that every cluster keeps.
    uneven: how much the clusters' shares of the queries differ: 0 none, 1 from a fifth to three times the mean, 3 with empty ones.
    """
    groups, dice = batch * heads, torch.Generator().manual_seed(rng.key64(seed, "random_plan"))
    share_GC = (torch.randn(groups, clusters, generator=dice) * 0.7 * uneven).exp()
    cluster_GN = torch.zeros(groups, queries, dtype=torch.long)
    if groups and queries:
        cluster_GN = torch.multinomial(share_GC, queries, replacement=True, generator=dice)
    counts_GC = torch.zeros(groups, clusters, dtype=torch.long).scatter_add_(1, cluster_GN, torch.ones_like(cluster_GN))
    seen_GM = torch.ones(groups, keys, dtype=torch.bool)
    if key_mask_BM is not None:
        seen_GM = key_mask_BM.repeat_interleave(heads, dim=0)
    luck_GCM = torch.rand(groups, clusters, keys, generator=dice).masked_fill(~seen_GM[:, None], 2.0)
    kept_GCM = luck_GCM < keep
    if min_keep:
        luckiest = luck_GCM.topk(min(min_keep, keys), dim=2, largest=False).indices
        kept_GCM.scatter_(2, luckiest, True)
    if always_keep_M is not None:
        kept_GCM |= always_keep_M
    kept_GCM &= seen_GM[:, None]
    tail = None
    if tail_clusters:
        label_GM = torch.randint(0, tail_clusters, (groups, keys), generator=dice).masked_fill(~seen_GM, tail_clusters)
        tail = TailClusters(label_GM, tail_clusters, _dropped(kept_GCM, label_GM, tail_clusters))
    plan = ClusterPlan(
        batch,
        heads,
        queries,
        keys,
        q_index_GN=cluster_GN.argsort(dim=1, stable=True),
        q_offsets_GC=_offsets(counts_GC),
        kv_index_Z=kept_GCM.nonzero()[:, 2].int(),
        kv_offsets=_offsets(kept_GCM.sum(dim=2).view(1, -1))[0],
        tail=tail,
        tau_G=torch.ones(groups),
    )
    plan.check()
    return plan


def all_kept(
    batch: int, heads: int, queries: int, keys: int, *, clusters: int = 4, tail_clusters: int = 0, seed: int = 0
) -> ClusterPlan:
    """A plan that drops no key: dense attention."""
    return random_plan(batch, heads, queries, keys, clusters=clusters, keep=1.5, tail_clusters=tail_clusters, seed=seed)


PLANS: dict[str, dict[str, Any]] = {
    "plain": {"clusters": 5},
    "ragged": {"queries": 101, "keys": 67, "clusters": 7},
    "one cluster": {"clusters": 1},
    "a cluster for each query": {"clusters": 60, "uneven": 0.3},
    "empty clusters": {"clusters": 40, "uneven": 3.0},
    "one kept key": {"clusters": 4, "keep": 0.0, "min_keep": 1},
    "no kept key": {"clusters": 4, "keep": 0.0},
    "all kept": {"clusters": 4, "keep": 1.5},
    "one query": {"queries": 1, "clusters": 1},
    "one key": {"keys": 1, "clusters": 3, "keep": 0.5},
    "many means": {"clusters": 3, "tail_clusters": 90},
}


def plan_of(name: str, **more: Any) -> ClusterPlan:
    arguments = {"queries": 60, "keys": 72, "tail_clusters": 6, **PLANS[name], **more}
    return random_plan(2, 2, arguments.pop("queries"), arguments.pop("keys"), **arguments)


def qkv(
    plan: ClusterPlan, width: int = 8, dtype: torch.dtype = torch.float32, value_width: int | None = None, seed: int = 0
) -> list[Tensor]:
    """Queries, keys and values that ask for gradients."""
    sizes = {"q": (plan.queries, width), "k": (plan.keys, width), "v": (plan.keys, value_width or width)}
    draws = [rng.normal((plan.batch, plan.heads, *size), seed, "sparse", name) for name, size in sizes.items()]
    return [draw.to(dtype).requires_grad_() for draw in draws]


def gradients(out_BAND: Tensor, tensors: list[Tensor], seed: int = 0) -> list[Tensor]:
    """Of queries, keys and values, for one draw of the output's gradient."""
    dout_BAND = rng.normal(out_BAND.shape, seed, "sparse", "dout").to(out_BAND.dtype)
    return list(torch.autograd.grad(out_BAND, tensors, dout_BAND))


def results(tensors: list[Tensor], plan: ClusterPlan, **options: Any) -> list[Tensor]:
    """out, lse, dq, dk, dv."""
    got = clustered_attention(*tensors, plan, **options)  # type: ignore[arg-type]
    return [got.out_BAND.detach(), got.lse_BAN, *gradients(got.out_BAND, tensors)]


def error(got: Tensor, right: Tensor, least: float = 0.3) -> float:
    """Largest difference, as a share of the largest right number; infinities have to agree.

    Results of draws of order one that are all below `least` have all but cancelled: they are measured against `least`.
    """
    assert got.shape == right.shape and torch.equal(got.isinf(), right.isinf()) and not got.isnan().any()
    got, right = (x.double().masked_fill(right.isinf(), 0.0) for x in (got, right))
    largest = right.abs().max().item() if right.numel() else 0.0
    return (got - right).abs().max().item() / max(largest, least) if right.numel() else 0.0


def alike(got: list[Tensor], right: list[Tensor], tolerance: float) -> None:
    """That two lists of `results` agree."""
    for name, x, y in zip(("out", "lse", "dq", "dk", "dv"), got, right, strict=True):
        assert error(x, y) <= tolerance, f"{name}: {error(x, y):.2e}"


def draw(plan: ClusterPlan, width: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and dout."""
    rows = {"q": plan.queries, "k": plan.keys, "v": plan.keys, "dout": plan.queries}
    return [rng.normal((*plan.shape[:2], n, width), 0, "sparse", name).to(dtype) for name, n in rows.items()]


def near(got: Tensor, right: Tensor, limit: float) -> bool:
    """True for the same type, the same infinities, and numbers that differ by a share of the largest (of 0.1 where all are smaller)."""
    if got.dtype != right.dtype or not torch.equal(got.isinf(), right.isinf()):
        return False
    both = right.isfinite()
    got, right = got.detach()[both].double(), right.detach()[both].double()
    return not both.any() or bool((got - right).abs().max() <= limit * right.abs().max().clamp(min=0.1))


def with_oracle(
    attend: Callable[..., tuple[Tensor, Tensor]],
    plan: ClusterPlan,
    tensors: list[Tensor],
    tail: Any,
    limit: float,
    scale: float | None = None,
) -> None:
    """Hold (out, lse) of q, k, v and means, and all gradients, beside the oracle's. tensors: as of `draw`."""
    q, k, v, dout = tensors
    assert plan.tail is not None
    means, results = key_means(k, v, plan.tail), []
    for oracle in (False, True):
        leaves = [x.detach().clone().requires_grad_() for x in (q, k, v, means.k_BAKD, means.v_BAKD)]
        summary = ClusterMeans(*leaves[3:]) if tail == "summary" else None
        if oracle:
            out, lse, _ = clustered_attention(
                *leaves[:3], plan, tail=tail, means=summary, scale=scale, backend="masked"
            )
        else:
            out, lse = attend(*leaves[:3], summary)
        wanted = leaves if summary is not None else leaves[:3]
        results.append([out, lse, *torch.autograd.grad(out, wanted, dout, materialize_grads=True)])
    assert all(near(got, right, limit) for got, right in zip(*results, strict=True))


def _offsets(counts: Tensor) -> Tensor:
    return torch.nn.functional.pad(counts.cumsum(dim=1), (1, 0))


def _dropped(kept_GCM: Tensor, label_GM: Tensor, tail_clusters: int) -> Tensor:
    """How many keys of each cluster of keys a cluster of queries drops, float32."""
    groups, clusters, _ = kept_GCM.shape
    counts = torch.zeros(groups, clusters, tail_clusters + 1)
    counts.scatter_add_(2, label_GM[:, None].expand(-1, clusters, -1), (~kept_GCM).float())
    return counts[..., :tail_clusters].contiguous()
