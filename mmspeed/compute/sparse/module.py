"""The sparse attention of one layer: its threshold, its dense phase, and its measurements.

Legend: B batch, A heads, G = B x A, N queries, M keys, D head width, C clusters of queries, X position axes.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor

from mmspeed.compute.attention import attention
from mmspeed.compute.autocast import autocast_alike
from mmspeed.config.sparse import SparseConfig
from mmspeed.errors import UserError
from mmspeed.graphs import outside_graphs
from mmspeed.protocols import StateRule
from mmspeed.replay import RecordedModule

from .cluster_plan import ClusterPlan, key_means, usual_tail_clusters
from .dispatch import SparseOutput, choose_kernel, clustered_attention
from .mass_histogram import ShareCounts
from .planners.clusters import plan_clusters
from .planners.patterns import plan_skip, plan_window
from .planners.selection import KeepRule, PlannerContext
from .planners.tiles import plan_tiles

Phase = Literal["sparse", "dense"]
T = TypeVar("T")

CALIBRATION = KeepRule("threshold", 1.0)  # its kept keys are not used, its observed shares are
SAMPLED_ROWS = 16  # queries of a head whose exact output the error is estimated on


@dataclass
class AttentionFlops:
    """Arithmetic of the calls that were sparse, in training: sums over forward passes."""

    dense_flops: int = 0  # those of dense attention in their place
    flops: Tensor | int = 0  # of kept pairs, and of those with means


@dataclass
class WatchedCalls:
    """Sums of the measurements of a layer's watched calls. Tensors stay on the device."""

    calls: int = 0
    all_pairs: int = 0
    kept_pairs: Tensor | int = 0
    wrong: Tensor | float = 0.0  # squared error of the sampled rows
    size: Tensor | float = 0.0  # and their squared size
    plan_seconds: float = 0.0
    shares: ShareCounts = field(default_factory=ShareCounts)


@dataclass
class WarmStarts:
    """Centroids of the plans at the last sampling step of a video, by condition (caption, empty caption).

    `sample`: where a module attends sample by sample, the number of the one that attends now.
    """

    condition: str = ""
    sample: int = 0
    starts: dict[str, tuple[Tensor, Tensor | None]] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """The key of the present call's centroids."""
        return f"{self.condition}, {self.sample}" if self.sample else self.condition


class ClusteredAttention(RecordedModule):
    """Self-attention in which groups of queries attend to their most relevant keys; see `SparseConfig`.

    Where `settings` control a threshold, `tau` holds it (a buffer, declared as state of the run): a `SparsityController` sets it in
    training, and sampling uses it as it is. While it is not set (NaN), each sample gets its own threshold for the share `keep`.

    Args:
        way: the variant of this block in a fixed pattern that alternates between two (Skiparse).
        frames: True where its sequences cover several frames.
    """

    tau: Tensor
    state_buffers: ClassVar[Mapping[str, StateRule]] = {"tau": "kept"}

    def __init__(self, settings: SparseConfig, way: Literal[0, 1] = 0, frames: bool = True) -> None:
        super().__init__()
        self.settings, self.way, self.frames = settings, way, frames
        self.phase: Phase = "sparse"
        self.keep_now = settings.keep
        self.watching = False
        self.offset = 0  # of the sampled rows
        self.work, self.seen = AttentionFlops(), WatchedCalls()
        self.counter: Counter[str] = Counter()  # calls by kernel, "dense" for dense ones
        self.warm: WarmStarts | None = None
        self.register_buffer("tau", torch.tensor(math.nan))

    def reset(self) -> None:
        """Set the threshold of a new model: the config's, or none yet."""
        self.tau.fill_(math.nan if self.settings.tau is None else self.settings.tau)

    def extra_repr(self) -> str:
        return f"{self.settings.grouping}, tail={self.settings.tail}, {self.phase}"

    def dense(self, q_BAND: Tensor, k_BAMD: Tensor, v_BAMD: Tensor, key_mask_BM: Tensor | None) -> Tensor:
        """Dense attention, used where no keys are left out."""
        return attention(q_BAND, k_BAMD, v_BAMD, key_mask_BM)

    def is_dense(self, tokens: int) -> bool:
        """True where a sequence of `tokens` tokens has dense attention now."""
        return self.phase == "dense" or tokens < self.settings.min_tokens

    def keep(self) -> KeepRule:
        """The present rule for keeping keys."""
        settings = self.settings
        if settings.selection == "mass":
            return KeepRule("mass", settings.mass, at_most=settings.max_keep)
        if settings.selection == "top":
            return KeepRule("top", self.keep_now, at_most=settings.max_keep)
        tau = float(self.tau)
        if math.isnan(tau):
            return KeepRule("fraction", self.keep_now, at_most=settings.max_keep)
        return KeepRule("threshold", tau, at_most=settings.max_keep)

    def context(self, key_mask_BM: Tensor | None, positions_NX: Tensor, text_M: Tensor | None = None) -> PlannerContext:
        """The planner's context of a call. Text tokens are keys that are always kept, and queries that keep every key."""
        always_M = positions_NX[:, 0] == 0 if self.settings.keep_first_frame and self.frames else None
        if text_M is not None:
            always_M = text_M if always_M is None else always_M | text_M
        observe = self.seen.shares.add if self.watching and self.training else None
        return PlannerContext(key_mask_BM, always_M, full_queries_N=text_M, positions_NX=positions_NX, observe=observe)

    def forward(
        self,
        q_BAND: Tensor,
        k_BAMD: Tensor,
        v_BAMD: Tensor,
        key_mask_BM: Tensor | None,
        positions_NX: Tensor,
        text_M: Tensor | None = None,
    ) -> Tensor:
        """The result of `attend`; see there."""
        return self.attend(q_BAND, k_BAMD, v_BAMD, key_mask_BM, positions_NX, text_M)

    @outside_graphs
    def attend(
        self,
        q_BAND: Tensor,
        k_BAMD: Tensor,
        v_BAMD: Tensor,
        key_mask_BM: Tensor | None,
        positions_NX: Tensor,
        text_M: Tensor | None = None,
    ) -> Tensor:
        """Self-attention of a whole sequence: `out_BAND`.

        `positions_NX` are integers, frame first, -1 at text; `key_mask_BM` is bool, True at keys that count. `text_M`, where text
        attends jointly: bool, True at its tokens, which keep all keys and are kept by all queries.
        """
        # plans are made from the inputs of kernels, as after the exchanges of sequence parallelism
        q_BAND, k_BAMD, v_BAMD = autocast_alike(q_BAND, k_BAMD, v_BAMD)
        context = self.context(key_mask_BM, positions_NX, text_M)
        dense, first = self.record_or_replay(lambda: self.is_dense(q_BAND.shape[2]))
        if dense:
            if first and self.calibrates(q_BAND.shape[2]):
                self.plan(q_BAND.detach(), k_BAMD.detach(), CALIBRATION, context)
            self.counter["dense"] += 1
            return self.dense(q_BAND, k_BAMD, v_BAMD, key_mask_BM)
        plan, first = self.record_or_replay(lambda: self.timed(lambda: self.plan(q_BAND, k_BAMD, self.keep(), context)))
        attended = self.compute(q_BAND, k_BAMD, v_BAMD, plan)
        if first:
            self.note(plan, attended)
            if self.watching and self.training:
                self.compare(q_BAND, k_BAMD, v_BAMD, key_mask_BM, attended.out_BAND)
        return attended.out_BAND

    def compute(self, q: Tensor, k: Tensor, v: Tensor, plan: ClusterPlan, **options: Any) -> SparseOutput:
        """Attention by a plan, with this layer's tail and kernel."""
        tail = self.settings.tail
        return clustered_attention(
            q, k, v, plan, tail=tail, backend=self.settings.backend, counter=self.counter, **options
        )

    def plan(self, q_BAND: Tensor, k_BAMD: Tensor, keep: KeepRule, context: PlannerContext) -> ClusterPlan:
        """The plan of this layer's planner for whole sequences."""
        settings, summary = self.settings, self.settings.tail == "summary"
        if settings.grouping == "tiles":
            return plan_tiles(q_BAND, k_BAMD, keep, context, tile=settings.tile, tail=summary)
        if settings.grouping == "window":
            return plan_window(q_BAND, k_BAMD, context, tile=settings.tile, window=settings.window, tail=summary)
        clusters = self.tail_clusters(k_BAMD.shape[2])
        if settings.grouping == "skip":
            return plan_skip(q_BAND, k_BAMD, context, stride=settings.stride, way=self.way, tail_clusters=clusters)
        start, tail_start = self.warm_start()
        plan = plan_clusters(
            q_BAND,
            k_BAMD,
            keep,
            context,
            cluster_size=settings.cluster_size,
            metric=settings.metric,
            iterations=settings.iterations if start is None else 0,
            start_GCD=start,
            tail_clusters=clusters,
            tail_start_GKD=tail_start,
        )
        self.carry_over(plan.centroids_GCD, plan.tail_centroids_GKD)
        return plan

    def tail_clusters(self, keys: int) -> int:
        """Number of clusters of keys whose means replace dropped keys; 0: none."""
        return 0 if self.settings.tail == "zero" else (self.settings.tail_clusters or usual_tail_clusters(keys))

    def try_out(self, device: torch.device, dtype: torch.dtype, width: int) -> None:
        """Raises UserError where the kernel that the settings name does not support plans like this layer's on a device."""
        settings = self.settings
        grid = tuple(2 * size for size in settings.tile)
        positions_NX = torch.cartesian_prod(*(torch.arange(size, device=device) for size in grid))
        x_BAND = torch.zeros(1, 1, len(positions_NX), width, device=device, dtype=dtype)
        x_BAND[..., 0, 0] = 1.0
        plan = self.plan(x_BAND, x_BAND, KeepRule("top", 0.5), self.context(None, positions_NX))
        means = key_means(x_BAND, x_BAND, plan.tail) if settings.tail == "summary" and plan.tail is not None else None
        try:
            choose_kernel(x_BAND, x_BAND, x_BAND, plan, means, settings.backend)
        except ValueError as error:
            raise UserError(f"model.sparse.backend {settings.backend}, planner {settings.grouping}: {error}") from None

    def timed(self, plan: Callable[[], T]) -> T:
        """The result of `plan()`, with its time recorded when this call is watched; an accelerator is then synchronized with."""
        if not (self.watching and self.training):
            return plan()
        wait = self.tau.device.type != "cpu"
        started = _now(wait)
        result = plan()
        self.seen.plan_seconds += _now(wait) - started
        return result

    def note(self, plan: ClusterPlan, attended: SparseOutput) -> None:
        """Count the work of a call."""
        if not self.training:
            return
        work, seen, pair = self.work, self.seen, 4 * attended.out_BAND.shape[-1]
        work.dense_flops += pair * math.prod(plan.shape)
        work.flops = work.flops + pair * useful_pairs(plan, self.settings.tail == "summary")
        if self.watching:
            seen.calls += 1
            seen.all_pairs += math.prod(plan.shape)
            seen.kept_pairs = seen.kept_pairs + plan.kept_pairs().sum()

    @torch.no_grad()
    def compare(
        self, q_BAND: Tensor, k_BAMD: Tensor, v_BAMD: Tensor, key_mask_BM: Tensor | None, out_BAND: Tensor
    ) -> None:
        """Add the error of a few rows of an output, relative to dense attention of these rows to all keys."""
        rows = self.sampled_rows(q_BAND.shape[2], q_BAND.device)
        exact = self.dense(q_BAND[:, :, rows], k_BAMD, v_BAMD, key_mask_BM)
        self.add_error(out_BAND[:, :, rows], exact)

    def sampled_rows(self, queries: int, device: torch.device) -> Tensor:
        """Evenly spaced queries for estimating the error; others at other steps."""
        count = min(SAMPLED_ROWS, queries)
        return (torch.arange(count, device=device) * queries // count + self.offset) % queries

    def add_error(self, out: Tensor, exact: Tensor) -> None:
        """Add to the squared error and the squared size of sampled rows."""
        self.seen.wrong = self.seen.wrong + (out.float() - exact.float()).square().sum()
        self.seen.size = self.seen.size + exact.float().square().sum()

    def calibrates(self, tokens: int) -> bool:
        """True where a plan is made for its shares alone, to derive a threshold while attention is still dense."""
        looks = self.watching and self.training and self.phase == "dense"
        return looks and self.settings.steered and tokens >= self.settings.min_tokens

    def warm_start(self) -> tuple[Tensor | None, Tensor | None]:
        """Centroids of queries and of keys at the previous sampling step."""
        return (None, None) if self.warm is None else self.warm.starts.get(self.warm.key, (None, None))

    def carry_over(self, centroids_GCD: Tensor | None, tail_centroids_GKD: Tensor | None) -> None:
        """Keep centroids for the next sampling step."""
        if self.warm is not None and centroids_GCD is not None:
            self.warm.starts[self.warm.key] = (centroids_GCD, tail_centroids_GKD)


def useful_pairs(plan: ClusterPlan, tail: bool) -> Tensor:
    """Number of pairs in the attention: kept ones, and those of queries with means that stand for at least one key."""
    pairs = plan.kept_pairs().sum()
    if tail and plan.tail is not None:
        pairs = pairs + (plan.sizes() * (plan.tail.dropped_GCK > 0).sum(dim=2)).sum()
    return pairs


def _now(wait: bool) -> float:
    if wait:
        torch.accelerator.synchronize()
    return time.perf_counter()


def clustered_layers(model: torch.nn.Module) -> dict[str, ClusteredAttention]:
    """The sparse attentions of a model, by the name of the module that holds them."""
    layers = {name: part for name, part in model.named_modules() if isinstance(part, ClusteredAttention)}
    return {name.removesuffix(".attend"): part for name, part in layers.items()}


@contextmanager
def warm_plans(model: torch.nn.Module) -> Iterator[Callable[[str], None]]:
    """Begin each sampling step's clusters with those of the step before, inside, for one video.

    Yields a function that sets the condition (caption, empty caption) of the model's next call.
    """
    layers = clustered_layers(model).values()
    for layer in layers:
        layer.warm = WarmStarts()

    def use(condition: str) -> None:
        for layer in layers:
            assert layer.warm is not None
            layer.warm.condition = condition

    try:
        yield use
    finally:
        for layer in layers:
            layer.warm = None
