"""The planners that the bench of sparse attention compares, by name, each with a requested share of the pairs.

clusters    content clusters, one threshold over all of them (the default)
tiles       tiles of the grid, the same number of tiles for each (as in VSA)
window      tiles, those around each tile
skip        every stride-th token (Skiparse)

Legend: B batch, A heads, G = B x A, N tokens, D head width, C clusters of queries, K clusters of keys, X position axes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product

from torch import Tensor

from mmspeed.compute.sparse import ClusterPlan
from mmspeed.compute.sparse.cluster_plan import usual_tail_clusters
from mmspeed.compute.sparse.planners.clusters import plan_clusters
from mmspeed.compute.sparse.planners.patterns import plan_skip, plan_window
from mmspeed.compute.sparse.planners.selection import KeepRule, PlannerContext
from mmspeed.compute.sparse.planners.tiles import plan_tiles

from .attention_data import Grid

PLANNERS = ("clusters", "tiles", "window", "skip")
TAILS = ("zero", "summary")


@dataclass(frozen=True)
class Method:
    """A planner, its tail and its requested share. Tiles and windows are in tokens and in tiles along (t, h, w)."""

    planner: str
    tail: str
    keep: float
    cluster_size: int
    tail_clusters: int
    tile: Grid
    window: Grid = (1, 1, 1)

    @property
    def clustered(self) -> bool:
        """True where a plan can begin with the clusters of another one."""
        return self.planner.startswith("clusters")

    def rule(self) -> KeepRule:
        """The rule by which a group keeps keys."""
        return KeepRule("fraction" if self.planner == "clusters" else "top", self.keep)

    def plan(
        self, q_BAND: Tensor, k_BAND: Tensor, positions_NX: Tensor, start: ClusterPlan | None = None
    ) -> ClusterPlan:
        """A plan; with `start`, one whose clusters are those around the centroids of another plan."""
        context = PlannerContext(positions_NX=positions_NX)
        summary = self.tail == "summary"
        if self.planner == "tiles":
            return plan_tiles(q_BAND, k_BAND, self.rule(), context, tile=self.tile, tail=summary)
        if self.planner == "window":
            return plan_window(q_BAND, k_BAND, context, tile=self.tile, window=self.window, tail=summary)
        tail_clusters = self.tail_clusters if summary else 0
        if self.planner == "skip":
            stride = max(1, round(1 / self.keep))
            return plan_skip(q_BAND, k_BAND, context, stride=stride, way=0, tail_clusters=tail_clusters)
        return plan_clusters(
            q_BAND,
            k_BAND,
            self.rule(),
            context,
            cluster_size=self.cluster_size,
            iterations=3 if start is None else 0,
            start_GCD=None if start is None else start.centroids_GCD,
            tail_clusters=tail_clusters,
            tail_start_GKD=None if start is None else start.tail_centroids_GKD,
        )


def cluster_size_of(tokens: int) -> int:
    """Queries of a cluster: those of the study at this length."""
    return 256 if tokens >= 16_384 else 128 if tokens >= 2_048 else 32


def tile_of(grid: Grid) -> Grid:
    """The tile of a grid: 4 x 4 x 4 tokens, or fewer on shorter axes."""
    return tuple(min(4, size) for size in grid)  # type: ignore[return-value]


def window_of(grid: Grid, tile: Grid, keep: float) -> Grid:
    """The odd numbers of tiles along (t, h, w) of which a query sees the share of tiles nearest to `keep`.

    Among those within about a tenth of the nearest, the one whose axes are most similar.
    """
    tiles = [-(-size // edge) for size, edge in zip(grid, tile, strict=True)]
    sizes = [range(1, count + 1 + (count % 2 == 0), 2) for count in tiles]

    def miss(window: tuple[int, ...]) -> tuple[int, int]:
        shares = [min(1.0, size / count) for size, count in zip(window, tiles, strict=True)]
        return round(5 * abs(math.log(math.prod(shares) / keep))), max(window) - min(window)

    return min(product(*sizes), key=miss)  # type: ignore[return-value]


def method(planner: str, tail: str, keep: float, grid: Grid, cluster_size: int | None = None) -> Method:
    """A method with the sizes that fit a grid."""
    tokens, tile = math.prod(grid), tile_of(grid)
    return Method(
        planner=planner,
        tail=tail,
        keep=keep,
        cluster_size=cluster_size or cluster_size_of(tokens),
        tail_clusters=usual_tail_clusters(tokens),
        tile=tile,
        window=window_of(grid, tile, keep),
    )
