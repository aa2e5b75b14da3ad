"""Sparse attention beside dense attention on given queries, keys and values: error, memory and speedup, planning included.

Every method and dense attention are measured in turns, round by round, and ratios are taken within a round, so that a machine that slows
down meanwhile does not matter; medians count. On a CPU the ratio of processors' time is given beside that of the clock, since other work
on the machine disturbs it less.

Legend: B batch, A heads, N tokens, D head width, X position axes.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mmspeed import rng
from mmspeed.compute.sparse import ClusterPlan, clustered_attention
from mmspeed.compute.sparse.dispatch import check_backend
from mmspeed.device import Device
from mmspeed.errors import UserError
from mmspeed.log import get_logger
from mmspeed.memory.planning.peak import peak_bytes

from .attention_plans import PLANNERS, TAILS, Method

log = get_logger("bench")

KEEPS = (0.05, 0.1, 0.2)
WARM = 1

Inputs = tuple[Tensor, Tensor, Tensor]
Taken = tuple[float, float]  # seconds, processors' seconds of all threads


@dataclass(frozen=True)
class AttentionBenchSetting:
    """The methods to measure, and how."""

    keeps: tuple[float, ...] = KEEPS
    planners: tuple[str, ...] = PLANNERS
    tails: tuple[str, ...] = TAILS
    backend: str = "auto"
    device: str = "auto"
    rounds: int = 3
    cluster_size: int | None = None

    def check(self) -> None:
        """Raises UserError for settings that cannot be measured."""
        for option, values, known in (("planner", self.planners, PLANNERS), ("tail", self.tails, TAILS)):
            for value in values:
                if value not in known:
                    raise UserError(f"--{option} {value} is not one of {', '.join(known)}")
        for keep in self.keeps:
            if not 0 < keep <= 1:
                raise UserError(f"--keep {keep:g} is not a share of the pairs: above 0, at most 1")
        check_backend(self.backend, "--backend")


def ask(keep: str | None, planner: str | None, tail: str | None) -> dict[str, Any]:
    """The fields of `AttentionBenchSetting` from the options of a command line. Raises UserError for words that are no numbers."""
    fields: dict[str, Any] = {}
    try:
        if keep is not None:
            fields["keeps"] = tuple(float(word) for word in keep.split(","))
    except ValueError as error:
        raise UserError(f"--keep takes numbers with commas between them: {error}") from None
    if planner is not None:
        fields["planners"] = tuple(word.strip() for word in planner.split(","))
    if tail is not None:
        fields["tails"] = tuple(word.strip() for word in tail.split(","))
    return fields


@dataclass(frozen=True)
class Speedup:
    """A speedup over dense attention, by the clock and by processors' time (CPUs only)."""

    wall: float
    cpu: float | None = None

    def least(self) -> float:
        """The smaller of both, since other work on a machine may distort the clock's either way."""
        return self.wall if self.cpu is None else min(self.wall, self.cpu)

    def __str__(self) -> str:
        return f"{self.wall:.2f}x" if self.cpu is None else f"{self.wall:.2f}x ({self.cpu:.2f})"


@dataclass(frozen=True)
class AttentionRow:
    """A method at a length. Errors are relative, in the L2 norm, against dense attention; times are of a whole call of all heads.

    Errors and the kept share are means over videos; all else is of the first.
    """

    tokens: int
    keep: float  # requested share
    planner: str
    tail: str
    cluster_size: int
    kept: float  # share of pairs
    pairs: int  # that the kernel computed, including means and padding
    backend: str
    error: float  # of the output
    gradient_errors: tuple[float, float, float]  # dq, dk, dv, for a gradient of white noise
    warm_error: float | None  # of the output, by a plan with the centroids of the same video under other noise
    plan_seconds: float
    warm_seconds: float | None
    both_seconds: float  # forward + backward, planning included
    forward: Speedup  # planning included, as in `both`
    both: Speedup
    peak_bytes: int  # beyond the inputs, forward + backward
    dense_peak_bytes: int
    throughput: float  # kept pairs per second, without planning, relative to dense attention
    errors: tuple[float, ...] = ()  # of the output, of each video


@dataclass(frozen=True)
class VideoErrors:
    """The kept share and the errors of a method on one video: as in `AttentionRow`."""

    kept: float
    error: float
    gradient_errors: tuple[float, float, float]
    warm_error: float | None


class LengthBench:
    """Queries, keys and values of one length, and the measurements on them.

    `other`: queries and keys for the starting clusters of warm plans; those of the same video under other noise, as in sampling.
    """

    def __init__(
        self,
        q_BAND: Tensor,
        k_BAND: Tensor,
        v_BAND: Tensor,
        positions_NX: Tensor,
        device: Device,
        backend: str = "auto",
        other: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        self.q, self.k, self.v, self.positions = q_BAND, k_BAND, v_BAND, positions_NX
        self.device, self.backend, self.other = device, backend, other or (q_BAND, k_BAND)
        self.tokens = q_BAND.shape[2]
        self.dout = rng.normal(v_BAND.shape, 0, "bench attention", "gradient").to(v_BAND)
        self.dense_backend = fastest_dense(q_BAND, k_BAND, v_BAND, self.dout, device)
        self.dense_seconds = {"forward": math.nan, "both": math.nan}

    def run(self, methods: Sequence[Method], rounds: int) -> list[AttentionRow]:
        """A row for each method, measured round by round."""
        cases = [MethodCase(self, chosen) for chosen in methods]
        exact = self.dense(backward=True)
        log.info(f"{self.tokens:,} tokens: {len(cases)} cases, {rounds} rounds")
        for case in cases:
            case.look(exact)
        del exact
        dense_peak = peak_extra_bytes(self.device, lambda: self.dense(backward=True))
        dense: dict[str, list[Taken]] = {"forward": [], "both": []}
        for _ in range(rounds):
            dense["forward"].append(self.taken(lambda: self.dense(backward=False)))
            dense["both"].append(self.taken(lambda: self.dense(backward=True)))
            for case in cases:
                case.measure()
        self.dense_seconds = {name: statistics.median(t[0] for t in times) for name, times in dense.items()}
        return [case.row(dense, dense_peak) for case in cases]

    def leaves(self) -> Inputs:
        return _leaves(self.q, self.k, self.v)

    def dense(self, backward: bool) -> list[Tensor]:
        """The results of dense attention, [out] or [out, dq, dk, dv]."""
        with self.dense_backend():
            if not backward:
                with torch.no_grad():
                    return [F.scaled_dot_product_attention(self.q, self.k, self.v)]
            leaves = self.leaves()
            out = F.scaled_dot_product_attention(leaves[0], leaves[1], leaves[2])
            return [out.detach(), *torch.autograd.grad(out, leaves, self.dout)]

    def taken(self, work: Callable[[], Any]) -> Taken:
        """The time of `work`, up to its completion on the device."""
        self.device.synchronize()
        started, used = time.perf_counter(), time.process_time()
        work()
        self.device.synchronize()
        return time.perf_counter() - started, time.process_time() - used


class MethodCase:
    """A method at one length."""

    def __init__(self, length: LengthBench, chosen: Method) -> None:
        self.length, self.method = length, chosen
        self.start: ClusterPlan | None = None
        self.times: dict[str, list[Taken]] = {"cold": [], "warm": [], "forward": [], "both": []}

    def look(self, exact: Sequence[Tensor]) -> None:
        """Measure errors, kept share and memory, which do not depend on time; this also warms up for the timings."""
        length, q = self.length, self.length.q
        self.video = self.errors(exact)
        plan = self.plan()
        if length.device.kind == "cpu":
            gathered = gathered_bytes(plan, self.tail == "summary", q.shape[-1], q.element_size())
            del plan
            with one_thread():
                self.peak = peak_extra_bytes(length.device, lambda: self.sparse(backward=True))
            self.peak += (torch.get_num_threads() - 1) * gathered
        else:
            del plan
            self.peak = peak_extra_bytes(length.device, lambda: self.sparse(backward=True))

    def errors(self, exact: Sequence[Tensor]) -> VideoErrors:
        """The kept share and the errors, against dense attention's results and gradients; makes the start of warm plans."""
        length, q, k = self.length, self.length.q, self.length.k
        stats, results = self.sparse(backward=True)
        out_error, *gradients = (relative_error(result, truth) for result, truth in zip(results, exact, strict=True))
        self.pairs, self.backend = int(stats.pairs), stats.backend
        warm_error = None
        if self.method.clustered:
            # in sampling, a warm start comes from the same video with other noise
            self.start = self.method.plan(length.other[0], length.other[1], length.positions)
            warm = self.method.plan(q, k, length.positions, self.start)
            with torch.no_grad():
                out = clustered_attention(q, k, length.v, warm, tail=self.tail, backend=length.backend).out_BAND
            warm_error = relative_error(out, exact[0])
        return VideoErrors(
            float(stats.kept_BA.mean()), out_error, (gradients[0], gradients[1], gradients[2]), warm_error
        )

    @property
    def tail(self) -> Any:
        return self.method.tail

    def plan(self, start: ClusterPlan | None = None) -> ClusterPlan:
        return self.method.plan(self.length.q, self.length.k, self.length.positions, start)

    def sparse(self, backward: bool) -> tuple[Any, list[Tensor]]:
        """The results of sparse attention, (stats, [out]) or (stats, [out, dq, dk, dv]), planning included."""
        length = self.length
        q, k, v = leaves = length.leaves() if backward else (length.q, length.k, length.v)
        with nullcontext() if backward else torch.no_grad():
            plan = self.plan()
            out, _, stats = clustered_attention(q, k, v, plan, tail=self.tail, backend=length.backend)
        if not backward:
            return stats, [out]
        return stats, [out.detach(), *torch.autograd.grad(out, leaves, length.dout)]

    def measure(self) -> None:
        """Measure one round."""
        taken = self.length.taken
        self.times["forward"].append(taken(lambda: self.sparse(backward=False)))
        self.times["both"].append(taken(lambda: self.sparse(backward=True)))
        self.times["cold"].append(taken(self.plan))
        if self.start is not None:
            self.times["warm"].append(taken(lambda: self.plan(self.start)))

    def row(self, dense: dict[str, list[Taken]], dense_peak: int) -> AttentionRow:
        on_cpu = self.length.device.kind == "cpu"
        median = {name: statistics.median(t[0] for t in times) if times else None for name, times in self.times.items()}
        speeds = {name: speed(dense[name], self.times[name], on_cpu) for name in ("forward", "both")}
        assert median["cold"] is not None and median["both"] is not None
        compute = max(median["both"] - median["cold"], 1e-9)
        dense_both = statistics.median(t[0] for t in dense["both"])
        return AttentionRow(
            tokens=self.length.tokens,
            keep=self.method.keep,
            planner=self.method.planner,
            tail=self.method.tail,
            cluster_size=self.method.cluster_size if self.method.clustered else math.prod(self.method.tile),
            kept=self.video.kept,
            pairs=self.pairs,
            backend=self.backend,
            error=self.video.error,
            gradient_errors=self.video.gradient_errors,
            warm_error=self.video.warm_error,
            plan_seconds=median["cold"],
            warm_seconds=median["warm"],
            both_seconds=median["both"],
            forward=speeds["forward"],
            both=speeds["both"],
            peak_bytes=self.peak,
            dense_peak_bytes=dense_peak,
            throughput=self.video.kept * dense_both / compute,
            errors=(self.video.error,),
        )


def speed(dense: Sequence[Taken], sparse: Sequence[Taken], cpu: bool) -> Speedup:
    """The speedup: the median of the ratios of each round."""

    def ratio(which: int) -> float:
        return statistics.median(a[which] / max(b[which], 1e-9) for a, b in zip(dense, sparse, strict=True))

    return Speedup(ratio(0), ratio(1) if cpu else None)


def relative_error(output: Tensor, exact: Tensor) -> float:
    """The relative error |found - exact| / |exact| in the L2 norm."""
    output, exact = output.detach().float(), exact.detach().float()
    return float((output - exact).norm() / exact.norm().clamp(min=1e-30))


def _leaves(*tensors: Tensor) -> Inputs:
    q, k, v = (x.detach().requires_grad_() for x in tensors)
    return q, k, v


def fastest_dense(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, device: Device) -> Callable[[], Any]:
    """A context in which dense attention uses its fastest operator on this device, forward and backward together."""
    if device.kind == "cpu":
        return nullcontext
    from torch.nn.attention import SDPBackend, sdpa_kernel

    best: tuple[float, Callable[[], Any]] = (math.inf, nullcontext)
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
        leaves = _leaves(q, k, v)
        try:
            for turn in range(WARM + 2):
                device.synchronize()
                started = time.perf_counter()
                with sdpa_kernel(backend):
                    torch.autograd.grad(F.scaled_dot_product_attention(leaves[0], leaves[1], leaves[2]), leaves, dout)
                device.synchronize()
                seconds = time.perf_counter() - started
                if turn >= WARM and seconds < best[0]:
                    best = (seconds, partial(sdpa_kernel, backend))
        except RuntimeError:  # it does not support this width or dtype
            continue
    return best[1]


def peak_extra_bytes(device: Device, work: Callable[[], Any]) -> int:
    """The most memory in use at one time during `work` beyond what was in use before."""
    device.synchronize()
    before = 0 if device.kind == "cpu" else device.memory_bytes()
    return peak_bytes(device, 0, work) - before


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread inside, since its count of CPU allocations sees only one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def gathered_bytes(plan: ClusterPlan, tail: bool, width: int, element_size: int) -> int:
    """The most bytes that each further CPU thread holds: gathered keys and values of a cluster, and their gradients."""
    rows = int(plan.lengths().max()) + (plan.tail.clusters if tail and plan.tail is not None else 0)
    return 4 * rows * width * element_size
