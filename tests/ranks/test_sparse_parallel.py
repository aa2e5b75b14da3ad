"""Sparse attention over gloo processes against the oracle in one, given the plan of all: output, gradients, what is kept, bytes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mmspeed import rng
from mmspeed.comm.axis import Axis, Ledger
from mmspeed.compute.sparse import ClusterPlan, TailClusters, clustered_attention
from mmspeed.compute.sparse.module import ClusteredAttention
from mmspeed.config.sparse import SparseConfig
from mmspeed.parallel.sequence.hybrid_attention import SequenceAxes, split_heads
from mmspeed.parallel.sparse.sparse_attention import sparse_attention
from mmspeed.parallel.sparse.split_plan import SplitPlan
from mmspeed.replay import replayed
from tests.ranks.test_hybrid_attention import mesh_of
from tests.support.covers import slow_but
from tests.support.spawn import run_ranks

BATCH, WIDTH, SHAPE = 2, 8, (4, 6, 5)
TOKENS = SHAPE[0] * SHAPE[1] * SHAPE[2]


@dataclass(frozen=True)
class Case:
    """`sizes`: of the parts of all ranks; `settings`: of SparseConfig."""

    ulysses: int
    ring: int
    sizes: tuple[int, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    heads: int = 4
    mask: str = ""
    dtype: str = "float64"
    exchange: str = "collective"
    sharp: float = 2.0
    split_topics: bool = False  # queries of a rank attend to keys of the same rank only


SEED = 0
PARTS = {2: (60, 60), 4: (30, 30, 30, 30)}
UNEVEN = {2: (71, 49), 4: (13, 40, 37, 30)}
EMPTY = {2: (0, 120), 4: (50, 0, 70, 0)}
DEGREES = [(2, 1), (4, 1), (1, 2), (1, 4), (2, 2)]
RINGS = DEGREES[2:]
CASES: dict[str, Case] = {}
for u, r in DEGREES:
    n = u * r
    for tail in ("zero", "summary"):
        CASES[f"clusters-{tail}-{u}x{r}"] = Case(u, r, PARTS[n], {"tail": tail})
        CASES[f"tiles-{tail}-{u}x{r}"] = Case(u, r, UNEVEN[n], {"tail": tail, "planner": "tiles", "rule": "threshold"})
    CASES[f"masked-{u}x{r}"] = Case(u, r, UNEVEN[n], mask="random")
    if r == 1 and u == 4:
        continue
    CASES[f"blocks-{u}x{r}"] = Case(u, r, UNEVEN[n], {"planner": "tiles", "rule": "threshold"}, mask="blocks")
    CASES[f"hidden-{u}x{r}"] = Case(u, r, PARTS[n], mask="blocks")
    CASES[f"empty-{u}x{r}"] = Case(u, r, EMPTY[n], mask="random")
    CASES[f"first-{u}x{r}"] = Case(u, r, UNEVEN[n], {"keep_first_frame": True, "tail": "zero"}, mask="random")
    CASES[f"all-{u}x{r}"] = Case(u, r, UNEVEN[n], {"tau": 0.0})
    CASES[f"float32-{u}x{r}"] = Case(u, r, UNEVEN[n], dtype="float32")
    CASES[f"heads-{u}x{r}"] = Case(u, r, UNEVEN[n], heads=5, exchange="point_to_point")
for u, r in RINGS:
    n = u * r
    CASES |= {
        f"euclid-{u}x{r}": Case(u, r, UNEVEN[n], {"metric": "euclid", "tail_clusters": 1}),
        f"top-{u}x{r}": Case(u, r, UNEVEN[n], {"rule": "top", "keep": 0.2, "tau": None}, mask="random"),
        f"mass-{u}x{r}": Case(u, r, UNEVEN[n], {"rule": "mass", "mass": 0.5, "tau": None}, mask="random"),
        f"capped-{u}x{r}": Case(
            u, r, UNEVEN[n], {"max_keep": 0.1, "tau": 0.2, "keep_first_frame": True, "min_keep": 0.01}
        ),
        f"fraction-{u}x{r}": Case(u, r, UNEVEN[n], {"keep": 0.3, "tau": None}, mask="random"),
        f"tiles-top-{u}x{r}": Case(u, r, EMPTY[n], {"planner": "tiles", "keep": 0.3, "tau": None}, mask="random"),
        f"tiles-first-{u}x{r}": Case(
            u, r, UNEVEN[n], {"planner": "tiles", "keep": 0.2, "tau": None, "keep_first_frame": True}
        ),
        f"window-{u}x{r}": Case(u, r, EMPTY[n], {"planner": "window", "tau": None, "window": (1, 3, 3)}, mask="blocks"),
        f"skip-{u}x{r}": Case(u, r, EMPTY[n], {"planner": "skip", "tau": None, "stride": 3}, mask="blocks"),
        f"high-{u}x{r}": Case(u, r, PARTS[n], {"tau": 6.0, "tail": "zero"}),
        f"split-{u}x{r}": Case(u, r, PARTS[n], {"tau": 0.5, "tail": "zero"}, split_topics=True),
        f"auto-{u}x{r}": Case(u, r, EMPTY[n], {"backend": "auto"}, mask="random", dtype="float32"),
        f"bfloat16-{u}x{r}": Case(u, r, UNEVEN[n], dtype="bfloat16"),
    }


# the kinds that run over a ring of two each time; all run on four processes with `slow`
KINDS = ["clusters-zero", "clusters-summary", "tiles-top", "window", "skip", "first", "fraction", "mass", "bfloat16"]
FAST = [f"{kind}-1x2" for kind in (*KINDS, "empty", "high", "all", "split")] + ["tiles-zero-2x1"]


def axes_of(case: Case) -> SequenceAxes:
    mesh, ledger = mesh_of(case.ulysses, case.ring), Ledger()
    ring, ulysses = (Axis.of(mesh, name, ledger, case.exchange) for name in ("ring", "ulysses"))  # type: ignore[arg-type]
    return SequenceAxes(ring, ulysses)


def layer_of(case: Case) -> ClusteredAttention:
    settings = {
        "tau": 1.2,
        "cluster_size": 8,
        "tail_clusters": 7,
        "tile": (2, 3, 2),
        "min_tokens": 1,
        "backend": "masked",
    }
    layer = ClusteredAttention(SparseConfig(**{**settings, **case.settings}), way=1)
    layer.reset()
    return layer


def positions() -> Tensor:
    return torch.cartesian_prod(*(torch.arange(size) for size in SHAPE))


def whole(case: Case) -> tuple[list[Tensor], Tensor | None]:
    """q, k, v, dout of the whole sequence, and the key mask."""
    tensors = [
        rng.normal((BATCH, case.heads, TOKENS, WIDTH), SEED, "sparse", name).to(getattr(torch, case.dtype))
        for name in ("q", "k", "v", "dout")
    ]
    tensors[0] = tensors[0] * case.sharp
    if case.split_topics:
        place = torch.repeat_interleave(torch.arange(len(case.sizes)), torch.tensor(case.sizes)) // case.ulysses
        topic = torch.nn.functional.one_hot(place, WIDTH).to(tensors[0].dtype) * 30.0
        tensors[0], tensors[1] = tensors[0] + topic, tensors[1] + topic
    if not case.mask:
        return tensors, None
    mask = rng.normal((BATCH, TOKENS), SEED, "sparse", "mask") > -0.5
    mask[0] = False  # a sample that sees nothing at all
    if case.mask == "blocks":  # nothing but the last part is seen by one sample
        mask[1] = False
        mask[1, -case.sizes[-1] // 2 - 7 :] = True
    return tensors, mask


def global_plan(split: SplitPlan, axes: SequenceAxes, lengths: tuple[int, ...]) -> ClusterPlan:
    """The plan of the ring's ranks together, over all queries and keys: from who sent which rows where."""
    ring = axes.ring
    gathered: list[Any] = [None] * ring.size
    dist.all_gather_object(
        gathered, (split.plan, split.rows, split.label_GM, split.tail_centroids_GKD), group=ring.group
    )
    starts = [0, *accumulate(lengths)]
    plan, groups, tokens = split.plan, split.plan.q_index_GN.shape[0], sum(lengths)
    kept, q_index, sizes, dropped, labels = [], [], [], [], []
    means = sum(split.mean_sizes)
    for to, (theirs, rows, label, _) in enumerate(gathered):
        key_of_place = torch.full((groups * rows.table,), -1)
        for source, (_, sent, *_) in enumerate(gathered):
            of_peer = sent.row_Z.split(sent.sends)[to]
            length = max(1, lengths[source])
            places = rows.place_Z.split(rows.comes)[source]
            assert torch.equal(of_peer // length, places // rows.table)
            key_of_place[places] = of_peer % length + starts[source]
        table_GCT = theirs.kept_keys()
        kept_GCM = torch.zeros(groups, theirs.clusters, tokens, dtype=torch.bool)
        g, c, t = table_GCT.nonzero(as_tuple=True)
        kept_GCM[g, c, key_of_place.view(groups, -1)[g, t]] = True
        kept.append(kept_GCM)
        q_index.append(theirs.q_index_GN + starts[to])
        sizes.append(theirs.sizes())
        if theirs.tail is not None:
            dropped.append(theirs.tail.dropped_GCK)
            labels.append(torch.where(label == split.mean_sizes[to], means, label + sum(split.mean_sizes[:to])))
    kept_GCM = torch.cat(kept, dim=1)
    return replace(
        plan,
        queries=tokens,
        keys=tokens,
        q_index_GN=torch.cat(q_index, dim=1),
        q_offsets_GC=torch.nn.functional.pad(torch.cat(sizes, dim=1).cumsum(1), (1, 0)),
        kv_index_Z=kept_GCM.nonzero()[:, 2].int(),
        kv_offsets=torch.nn.functional.pad(kept_GCM.sum(2).flatten().cumsum(0), (1, 0)),
        tail=TailClusters(torch.cat(labels, 1), means, torch.cat(dropped, 1)) if dropped else None,
        centroids_GCD=_together([theirs.centroids_GCD for theirs, *_ in gathered]),
        tail_centroids_GKD=_together([centroids for *_, centroids in gathered]),
    )


def _together(parts: list[Any]) -> Tensor | None:
    return None if parts[0] is None else torch.cat(parts, dim=1)


def check_counts(plan: ClusterPlan, mask_BM: Tensor | None) -> None:
    """The tail counts what is dropped, and every group that has queries keeps a key that is seen."""
    kept = plan.kept_keys()
    seen = torch.ones(plan.batch, plan.keys, dtype=torch.bool) if mask_BM is None else mask_BM
    seen_G1M = seen.repeat_interleave(plan.heads, 0)[:, None]
    assert not (kept & ~seen_G1M).any()
    assert (kept.any(2) == (seen_G1M.any(2) & (plan.sizes() > 0))).all()
    if plan.tail is not None:
        here = torch.nn.functional.one_hot(plan.tail.label_GM, plan.tail.clusters + 1)[..., :-1].float()
        dropped = (seen_G1M & ~kept).float() @ here
        assert torch.equal(plan.tail.dropped_GCK, dropped)


def weights_of(plan: ClusterPlan, q_GND: Tensor, k_GMD: Tensor) -> Tensor:
    """The variance of each key's score around that of its cluster's mean, (G, M); 1 where no means stand for dropped keys."""
    if plan.tail is None or plan.tail_centroids_GKD is None:
        return torch.ones(k_GMD.shape[:2], dtype=k_GMD.dtype)
    here = torch.nn.functional.one_hot(plan.tail.label_GM, plan.tail.clusters + 1)[..., :-1].to(k_GMD.dtype)
    away = k_GMD - here @ plan.tail_centroids_GKD
    return (away.square().sum(2) * q_GND.square().mean((1, 2))[:, None] / WIDTH).clamp(min=2.0**-12)


def check_rule(
    plan: ClusterPlan, q_BAND: Tensor, k_BAMD: Tensor, mask_BM: Tensor | None, layer: ClusteredAttention
) -> None:
    """What is kept is what the rule says of the mean queries and of all keys."""
    settings, wide = layer.settings, torch.promote_types(k_BAMD.dtype, torch.float32)
    assert plan.centroids_GCD is not None
    seen = torch.ones(plan.batch, plan.keys, dtype=torch.bool) if mask_BM is None else mask_BM
    seen_G1M = seen.repeat_interleave(plan.heads, 0)[:, None]
    score = (plan.centroids_GCD @ k_BAMD.to(wide).flatten(0, 1).mT * WIDTH**-0.5).masked_fill(~seen_G1M, -torch.inf)
    count_G11 = seen_G1M.sum(2, keepdim=True)
    share = score.softmax(2).nan_to_num(0.0) * count_G11
    always = (positions()[:, 0] == 0) & seen_G1M if settings.keep_first_frame else torch.zeros_like(seen_G1M)
    live = (plan.sizes() > 0)[..., None] & seen_G1M
    kept, keep = plan.kept_keys(), layer.keep()
    if keep.by_threshold:
        weight = weights_of(plan, q_BAND.to(wide).flatten(0, 1), k_BAMD.to(wide).flatten(0, 1))[:, None]
        share, score = share * weight, score + weight.log()
    best = torch.nn.functional.one_hot(score.argmax(2), plan.keys).bool()
    rank = score.masked_fill(always, torch.inf).argsort(2, descending=True).argsort(2)
    if keep.rule == "top":
        assert torch.equal(kept, (rank < (keep.value * count_G11).round().clamp(min=1)) & live)
    elif keep.rule == "mass":
        before = share.sort(2, descending=True).values.cumsum(2).roll(1, 2) / count_G11.clamp(min=1)
        before[..., 0] = 0.0
        assert torch.equal(kept, (before.gather(2, rank) < keep.value) & live)
    elif keep.rule == "fraction":
        pairs = (plan.kept_pairs().sum(1) / (plan.heads * TOKENS * seen.sum(1).clamp(min=1))).tolist()
        assert all(abs(share - keep.value) < 0.02 for share, some in zip(pairs, seen.any(1), strict=True) if some), (
            pairs
        )
    elif keep.at_most < 1.0:
        free = score.masked_fill(always | ~(share >= keep.value), -torch.inf)
        few = free.argsort(2, descending=True).argsort(2) < (keep.at_most * count_G11).floor()
        assert torch.equal(kept, (few & free.isfinite() | always | best) & live)
        assert kept.sum(2).max() == int(keep.at_most * TOKENS) + always.sum(2).max()
    else:
        assert torch.equal(kept, ((share >= keep.value) | best | always) & live)


def run_case(case: Case) -> dict[str, Any]:
    axes, (tensors, mask), layer = axes_of(case), whole(case), layer_of(case)
    q, k, v, dout = (x.split(list(case.sizes), dim=2)[axes.rank].clone() for x in tensors)
    mine = None if mask is None else mask.split(list(case.sizes), dim=1)[axes.rank]
    seen: list[Any] = []
    first_settle = layer.record_or_replay
    layer.record_or_replay = lambda make: seen.append(first_settle(make)) or seen[-1]  # type: ignore[method-assign, func-returns-value]

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sparse_attention(q, k, v, mine, axes, case.sizes, case.sizes, positions(), layer)

    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = call(*inputs)
    forward = dict(axes.ring.ledger.bytes)
    grads = torch.autograd.grad(out, inputs, dout)
    first_plan = seen[-1][0]  # before it: whether the layer is dense
    # one process: heads of each Ulysses rank with the plan of its ring
    heads = (case.heads,) if case.ulysses == 1 else split_heads(case.heads, case.heads, case.ulysses).queries
    lengths = axes.joined(case.sizes)
    plan = first_plan if case.ring == 1 else global_plan(first_plan, axes, lengths)
    plan.check()
    place = axes.ulysses.rank
    own = [x.split(heads, dim=1)[place] for x in tensors]
    check_counts(plan, mask)
    if plan.centroids_GCD is not None and case.dtype == "float64":
        check_rule(plan, own[0], own[1], mask, layer)
    same = True
    if case.ring == 1:
        alone, context = layer_of(case), layer.context(mask, positions())
        again = alone.plan(own[0], own[1], alone.keep(), context)
        same = torch.equal(plan.kv_index_Z, again.kv_index_Z) and torch.equal(plan.q_index_GN, again.q_index_GN)
    wide = [x.double().requires_grad_() for x in own]
    right = clustered_attention(*wide[:3], plan, tail=layer.settings.tail, backend="masked").out_BAND
    truth = [right.detach(), *torch.autograd.grad(right, wide[:3], own[3].double())]
    parts: list[Any] = [None] * case.ulysses
    dist.all_gather_object(parts, truth, group=axes.ulysses.group)
    errors = []
    for got, *full in zip((out.detach(), *grads), *parts, strict=True):
        expected = torch.cat(full, dim=1)
        part = expected.split(list(case.sizes), dim=2)[axes.rank]
        assert got.shape == part.shape and got.dtype == q.dtype
        worst = (got.double() - part).abs().max().item() if part.numel() else 0.0
        errors.append(worst / expected.abs().max().item())
    # recomputation: rows travel, and nothing is decided again
    layer.record_or_replay = first_settle  # type: ignore[method-assign]
    run = replayed(call)
    once = run(*inputs)
    axes.ring.ledger.clear()
    twice = run(*inputs)
    return {
        "errors": errors,
        "same": same,
        "forward": forward,
        "expected": bytes_of(first_plan, axes, out.element_size()) if case.ring > 1 else None,
        "kept": plan.kept_pairs().sum().item() / (plan.batch * plan.heads * TOKENS * TOKENS),
        "counter": dict(layer.counter),
        "replayed": bool(torch.equal(once, twice)) and bool(torch.equal(once, out)),
        "second": dict(axes.ring.ledger.bytes),
        "sends": first_plan.rows.sends if case.ring > 1 else None,
    }


def bytes_of(split: SplitPlan, axes: SequenceAxes, element: int) -> dict[str, int]:
    """Rows that a rank sends, and their lists, from the counts of its plan."""
    others = [place for place in range(axes.ring.size) if place != axes.ring.rank]
    clusters: list[Any] = [None] * axes.ring.size
    dist.all_gather_object(clusters, split.plan.clusters, group=axes.ring.group)
    groups = split.plan.batch * split.plan.heads
    return {
        "rows": sum(split.rows.sends[place] for place in others) * 2 * WIDTH * element,
        "lists": sum(split.rows.sends[place] * -(-clusters[place] // 8) + 8 * groups for place in others),
    }


def cases_of(names: list[str]) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name in names:
        try:
            results[name] = run_case(CASES[name])
        except Exception as error:
            raise RuntimeError(f"case {name}") from error
    return results


@pytest.fixture(scope="module", params=slow_but([2, 4], [2]))
def results(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Few cases on two processes, or all on four."""
    return run_ranks(cases_of, request.param, FAST if request.param == 2 else [*CASES])


def test_equals_the_oracle(results: list[dict[str, Any]]) -> None:
    for rank, result in enumerate(results):
        for name, actual in result.items():
            # float32: sums of some 60 products in another order; bfloat16: 8 bits, of keys, and of gradients on their way
            limit = {"float32": 2e-6, "float64": 1e-10, "bfloat16": 5e-2}[CASES[name].dtype]
            assert max(actual["errors"]) < limit, (rank, name, actual["errors"])
            assert actual["same"] and actual["replayed"] and "dense" not in actual["counter"], name


def test_only_kept_rows_travel(results: list[dict[str, Any]]) -> None:
    for result in results:
        for name, actual in ((name, actual) for name, actual in result.items() if CASES[name].ring > 1):
            sent, expected = actual["forward"], actual["expected"]
            assert sent.get(("rows", "ring"), 0) == expected["rows"], name
            assert sent["lists", "ring"] == expected["lists"], name
            # made again, nothing travels: what came in the first pass is kept
            assert not any(actual["second"].values()), name


def degrees(results: list[dict[str, Any]]) -> list[str]:
    return ["1x2"] if len(results) == 2 else ["1x2", "1x4", "2x2"]


def test_fewer_rows_for_a_higher_threshold(results: list[dict[str, Any]]) -> None:
    for degree in degrees(results):
        everything, some, few = (
            sum(result[f"{name}-{degree}"]["forward"]["rows", "ring"] for result in results)
            for name in ("all", "clusters-zero", "high")
        )
        ring, element = int(degree[-1]), 8
        copies = len(results) // ring // int(degree[0])  # of the group
        assert everything == copies * (ring - 1) * BATCH * 4 * TOKENS * 2 * WIDTH * element
        assert few < some < everything


def test_nothing_is_sent_where_nothing_is_kept(results: list[dict[str, Any]]) -> None:
    for case in (result[f"split-{degree}"] for degree in degrees(results) for result in results):
        assert case["forward"].get(("rows", "ring"), 0) == 0
        assert sum(count > 0 for count in case["sends"]) == 1


def shown_over_a_ring() -> dict[str, bool]:
    """True where a key of the last rank that is not a number makes this rank's output NaN, as in dense attention; by planner and rule."""
    shown = {}
    for planner in ("clusters", "tiles"):
        for rule in (
            {"rule": "top", "keep": 0.2},
            {"rule": "mass", "mass": 0.5},
            {"rule": "threshold"},
            {"max_keep": 0.1},
        ):
            tau = {"tau": None} if rule.get("rule", "threshold") != "threshold" else {"rule": "threshold"}
            case = Case(1, 2, UNEVEN[2], {"planner": planner, "tail": "zero", **rule, **tau})
            axes, (tensors, _), layer = axes_of(case), whole(case), layer_of(case)
            tensors[1][0, 1, -2, 3] = torch.nan
            q, k, v = (x.split(list(case.sizes), dim=2)[axes.rank] for x in tensors[:3])
            out = sparse_attention(q, k, v, None, axes, case.sizes, case.sizes, positions(), layer)
            others = torch.cat((out[0, :1], out[0, 2:], out[1]))
            shown[f"{planner} {rule}"] = bool(out[0, 1].isnan().all()) and bool(others.isfinite().all())
    return shown


def test_a_key_that_is_not_a_number_is_not_hidden_by_a_ring() -> None:
    for shown in run_ranks(shown_over_a_ring, 2):
        assert len(shown) == 8 and all(shown.values()), shown
