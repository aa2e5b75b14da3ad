"""The CPU kernel: group by group, the queries of a cluster with its gathered kept keys.

The means of dropped keys and the kept keys go into one call of the CPU's flash operator, with the logs of the means' counts as its
bias. Groups are dealt to Python threads that compute with one thread each: the operator's backward is parallel over batch and heads
only, and many small parallel regions are slow on a busy machine. Gradients of keys are added in the order of the groups, whichever
thread finishes first, so that bits do not depend on the number of threads. Memory beyond the results: one group's keys in each thread.

Half types are gathered into float32. Measured on a CPU without matrix units, torch 2.13: the operator's bfloat16 backward is as fast as
float32 at one shape and takes twice as long when every group has a different one; its float16 backward takes ten times as long.

Legend: B batch, A heads, G = B x A, N queries, n those of a group, M keys, m gathered means and keys, D head width, C clusters of
queries, K clusters of keys.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from mmspeed.compute.sparse.cluster_plan import ClusterMeans, ClusterPlan
from mmspeed.torch_internals import cpu_flash, cpu_flash_backward

from .kernel import Gradients, SparseKernel, explicit

ROWS = 512  # queries of a group at most: larger clusters are several groups, for balance and for the cache
SERIAL = 1 << 22  # pairs x width below which threads cost more than they save


class _QueryGroup(NamedTuple):
    """Queries of one cluster."""

    head: int
    cluster: int
    first: int  # of the head's sorted queries
    last: int
    begin: int  # of the kept keys
    end: int
    means: int  # that stand for at least one key

    @property
    def pairs(self) -> int:
        return (self.last - self.first) * (self.end - self.begin + self.means)


class _VisibleKeys(NamedTuple):
    """The keys and values that a group's queries attend to, means first."""

    k_11mD: Tensor
    v_11mD: Tensor
    bias_111m: Tensor | None
    kept: Tensor | None  # which keys; None: all, in order
    means: Tensor | None  # which means; None: all, in order, or none


def _groups(plan: ClusterPlan, tail: bool) -> list[_QueryGroup]:
    """The groups of a plan, head by head, the largest first. Clusters without queries or without keys give no group."""
    clusters, offsets = plan.clusters, plan.kv_offsets.tolist()
    means_GC = [[0] * clusters] * (plan.batch * plan.heads)
    if tail and plan.tail is not None:
        means_GC = plan.tail.dropped_GCK.count_nonzero(dim=2).tolist()
    groups: list[_QueryGroup] = []
    for head, bounds in enumerate(plan.q_offsets_GC.tolist()):
        cut: list[_QueryGroup] = []
        for cluster in range(clusters):
            begin, end = offsets[head * clusters + cluster : head * clusters + cluster + 2]
            start, queries, means = bounds[cluster], bounds[cluster + 1] - bounds[cluster], means_GC[head][cluster]
            parts = -(-queries // ROWS) if end - begin + means else 0
            places = [start + queries * part // max(1, parts) for part in range(parts + 1)]
            cut += [_QueryGroup(head, cluster, *part, begin, end, means) for part in itertools.pairwise(places)]
        groups += sorted(cut, key=lambda group: -group.pairs)
    return groups


class _GroupedCall:
    """Queries, keys, values and means by head, in one width (the operator has only one), and the groups."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, plan: ClusterPlan, means: ClusterMeans | None) -> None:
        self.width, self.value_width = q.shape[-1], v.shape[-1]
        self.q, self.k, self.v = (self.by_head(x) for x in (q, k, v))
        self.wide = torch.promote_types(q.dtype, torch.float32)  # dtype of the computation
        self.plan = plan
        self.clusters = 0  # K
        if means is not None and plan.tail is not None:
            self.clusters = plan.tail.clusters
            self.mean_k, self.mean_v = self.by_head(means.k_BAKD), self.by_head(means.v_BAKD)
            self.counts_GCK = plan.tail.dropped_GCK
            self.log_counts_GCK = self.counts_GCK.to(self.wide).log()
        self.groups = _groups(plan, self.clusters > 0)

    def by_head(self, x_BAND: Tensor) -> Tensor:
        """A tensor in the shape (G, N, common width)."""
        x_GND, wanted = x_BAND.detach().flatten(0, 1), max(self.width, self.value_width)
        return x_GND if x_GND.shape[-1] == wanted else F.pad(x_GND, (0, wanted - x_GND.shape[-1]))

    def queries(self, group: _QueryGroup) -> Tensor:
        """The indices of the group's queries in their head."""
        return self.plan.q_index_GN[group.head, group.first : group.last]

    def take(self, x_GND: Tensor, head: int, rows: Tensor) -> Tensor:
        """Rows of a head, (1, 1, n, D)."""
        return x_GND[head].index_select(0, rows).to(self.wide)[None, None]

    def run(self, work: Callable[[int, _QueryGroup, _Scratch], None]) -> None:
        """Run `work` on each group, with its number, on as many threads as torch may use."""
        queue: Iterator[tuple[int, _QueryGroup]] = enumerate(self.groups)

        def serve() -> None:
            scratch = _Scratch(self)
            try:
                with torch.no_grad(), torch.autocast("cpu", enabled=False):
                    for number, group in queue:
                        work(number, group, scratch)
            finally:
                for _ in queue:  # empties the queue, so that after an error the others stop too
                    pass

        def serve_alone() -> None:
            torch.set_num_threads(1)
            serve()

        threads = torch.get_num_threads()
        workers = min(threads, len(self.groups))
        if workers < 2 or sum(group.pairs for group in self.groups) * self.q.shape[-1] < SERIAL:
            serve()
            return
        try:
            with ThreadPoolExecutor(workers, thread_name_prefix="sparse-attention") as pool:
                for future in [pool.submit(serve_alone) for _ in range(workers)]:
                    future.result()
        finally:
            torch.set_num_threads(threads)  # the workers' setting would also apply to later threads


class _Scratch:
    """The buffers in which a thread gathers keys and values, group after group."""

    def __init__(self, call: _GroupedCall) -> None:
        self.call = call
        rows = max((group.means + group.end - group.begin for group in call.groups), default=0)
        self.k_mD, self.v_mD = (x.new_empty(rows, x.shape[-1], dtype=call.wide) for x in (call.k, call.v))
        self.bias_m = call.q.new_zeros(rows, dtype=call.wide) if call.clusters else None
        self.head = -1  # the head whose means are all at the front

    def seen(self, group: _QueryGroup) -> _VisibleKeys:
        """Keys, values and bias of a group, valid until the next call."""
        call, head, few, many = self.call, group.head, group.means, group.end - group.begin
        if few == 0 and many == call.plan.keys:
            k_11MD, v_11MD = (x_GMD[head].to(call.wide)[None, None] for x_GMD in (call.k, call.v))
            return _VisibleKeys(k_11MD, v_11MD, None, None, None)
        kept = call.plan.kv_index_Z[group.begin : group.end].long()
        k_mD, v_mD = self.k_mD[: few + many], self.v_mD[: few + many]
        bias_111m, means = None, None
        if few and self.bias_m is not None:
            bias_K = call.log_counts_GCK[head, group.cluster]
            if few < call.clusters:
                means, self.head = call.counts_GCK[head, group.cluster].nonzero()[:, 0], -1
                _take(call.mean_k[head], means, k_mD[:few])
                _take(call.mean_v[head], means, v_mD[:few])
                bias_K = bias_K[means]
                self.bias_m[few : call.clusters].zero_()
            elif self.head != head:
                self.head = head
                k_mD[:few].copy_(call.mean_k[head])
                v_mD[:few].copy_(call.mean_v[head])
            self.bias_m[:few].copy_(bias_K)
            bias_111m = self.bias_m[None, None, None, : few + many]
        elif many:
            self.head = -1
        _take(call.k[head], kept, k_mD[few:])
        _take(call.v[head], kept, v_mD[few:])
        return _VisibleKeys(k_mD[None, None], v_mD[None, None], bias_111m, kept, means)


class _Turns:
    """A queue that runs steps in the order of their numbers. A step that comes early waits; its thread does not."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.early: dict[int, Callable[[], None]] = {}
        self.next = 0
        self.busy = False

    def put(self, number: int, step: Callable[[], None]) -> None:
        """Run the step and those that waited for it, or leave it to the thread of the step before."""
        with self.lock:
            self.early[number] = step
        while True:
            with self.lock:
                if self.busy or self.next not in self.early:
                    return
                due, self.busy = self.early.pop(self.next), True
            due()
            with self.lock:
                self.next, self.busy = self.next + 1, False


def _refuses(q: Tensor, k: Tensor, v: Tensor, plan: ClusterPlan, means: ClusterMeans | None) -> str:
    return "" if q.device.type == "cpu" else f"tensors on {q.device.type}"


def _take(x_MD: Tensor, rows: Tensor, out_mD: Tensor) -> None:
    """Copy rows into `out_mD`, in its dtype."""
    if x_MD.dtype == out_mD.dtype:
        torch.index_select(x_MD, 0, rows, out=out_mD)
    else:
        out_mD.copy_(x_MD.index_select(0, rows))


def _forward(
    q_BAND: Tensor, k_BAMD: Tensor, v_BAMD: Tensor, plan: ClusterPlan, means: ClusterMeans | None, scale: float
) -> tuple[Tensor, Tensor]:
    call = _GroupedCall(q_BAND, k_BAMD, v_BAMD, plan, means)
    out_GND = q_BAND.new_zeros(*call.q.shape[:2], call.value_width)
    lse_GN = q_BAND.new_full(call.q.shape[:2], -torch.inf, dtype=call.wide)

    def work(number: int, group: _QueryGroup, scratch: _Scratch) -> None:
        rows, seen = call.queries(group), scratch.seen(group)
        # scaled here, not by the operator: its backward rounds scaled scores differently from its forward, and beyond 1e9 their
        # difference overflows exp(score - lse)
        q_11nD = call.take(call.q, group.head, rows).mul_(scale)
        out_11nD, lse_11n = cpu_flash(q_11nD, seen.k_11mD, seen.v_11mD, attn_mask=seen.bias_111m, scale=1.0)
        out_GND[group.head].index_copy_(0, rows, out_11nD[0, 0, :, : call.value_width].to(out_GND.dtype))
        lse_GN[group.head].index_copy_(0, rows, lse_11n[0, 0])

    call.run(work)
    return out_GND.unflatten(0, q_BAND.shape[:2]), lse_GN.unflatten(0, q_BAND.shape[:2])


def _backward(
    dout_BAND: Tensor,
    q_BAND: Tensor,
    k_BAMD: Tensor,
    v_BAMD: Tensor,
    out_BAND: Tensor,
    lse_BAN: Tensor,
    plan: ClusterPlan,
    means: ClusterMeans | None,
    scale: float,
) -> Gradients:
    call = _GroupedCall(q_BAND, k_BAMD, v_BAMD, plan, means)
    out_GND, dout_GND, lse_GN = call.by_head(out_BAND), call.by_head(dout_BAND), lse_BAN.flatten(0, 1)
    dq_GND = q_BAND.new_zeros(*call.q.shape[:2], call.width)
    both = (call.width, call.value_width)
    dkeys = [q_BAND.new_zeros(*call.k.shape[:2], width, dtype=call.wide) for width in both]
    dmeans = [q_BAND.new_zeros(len(call.k), call.clusters, width, dtype=call.wide) for width in both]
    turns = _Turns()

    def add(group: _QueryGroup, seen: _VisibleKeys, parts: tuple[Tensor, Tensor]) -> None:
        few = group.means
        for dkey_GMD, dmean_GKD, part_11mD in zip(dkeys, dmeans, parts, strict=True):
            part_mD = part_11mD[0, 0, :, : dkey_GMD.shape[-1]]
            _add(dkey_GMD[group.head], seen.kept, part_mD[few:])
            if few:
                _add(dmean_GKD[group.head], seen.means, part_mD[:few])

    def work(number: int, group: _QueryGroup, scratch: _Scratch) -> None:
        rows, seen = call.queries(group), scratch.seen(group)
        dout_11nD, q_11nD, out_11nD = (call.take(x_GND, group.head, rows) for x_GND in (dout_GND, call.q, out_GND))
        lse_11n = lse_GN[group.head].index_select(0, rows)[None, None]
        q_11nD.mul_(scale)
        k_11mD, v_11mD, bias = seen[:3]
        dq_11nD, *parts = cpu_flash_backward(
            dout_11nD, q_11nD, k_11mD, v_11mD, out_11nD, lse_11n, 0.0, False, attn_mask=bias, scale=1.0
        )
        dq_GND[group.head].index_copy_(0, rows, dq_11nD[0, 0, :, : call.width].mul_(scale).to(dq_GND.dtype))
        turns.put(number, lambda: add(group, seen, (parts[0], parts[1])))

    call.run(work)
    dk_BAMD, dv_BAMD = (x.to(q_BAND.dtype).unflatten(0, q_BAND.shape[:2]) for x in dkeys)
    of_means = [x.to(q_BAND.dtype).unflatten(0, q_BAND.shape[:2]) for x in dmeans]
    return (
        dq_GND.unflatten(0, q_BAND.shape[:2]),
        dk_BAMD,
        dv_BAMD,
        ClusterMeans(*of_means) if means is not None else None,
    )


def _add(total_MD: Tensor, rows: Tensor | None, part_mD: Tensor) -> None:
    if rows is None:
        total_MD.add_(part_mD)
    else:
        total_MD.index_add_(0, rows, part_mD)


GROUPED = SparseKernel("grouped", _refuses, explicit(_forward, _backward))
