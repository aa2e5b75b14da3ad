"""Config section of sparse attention."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from .inputs import Section


class SparseConfig(Section):
    """Sparse self-attention: each group of queries attends to some of the keys. Images and short videos stay dense."""

    planner: Literal["clusters", "tiles", "window", "skip"] | None = Field(
        None,
        description="Grouping of queries that share their kept keys. `clusters`: similar queries. `tiles`: neighbours in space and time. `window` and `skip`: fixed patterns, for comparison. Null: `tiles` in a run that begins from scratch, unless another key needs clusters or a threshold; else `clusters`.",
    )
    rule: Literal["threshold", "top", "mass"] | None = Field(
        None,
        description="Rule that selects the kept keys of a group. `threshold`: those whose probability is above one threshold, which captures the most for a budget; set so that `keep` or `error` is met. `top`: the same share for every group. `mass`: the fewest that hold the share `mass` of the probability. Null: `threshold` for clusters, `top` for tiles.",
    )
    keep: float = Field(0.15, gt=0, le=1, description="Share of the query-key pairs that is kept.")
    tau: float | None = Field(
        None,
        ge=0,
        description="Fixed threshold, as a multiple of 1 / keys, in place of one adjusted to reach `keep`; 0 keeps all. With clusters and `tail: summary` it is compared with probability x variance of the score around that of the key's mean.",
    )
    error: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Relative error of the output that the threshold is adjusted to reach, in place of `keep`; estimated on sampled queries.",
    )
    mass: float = Field(0.9, gt=0, le=1, description="Share of the probability that is kept, with `rule: mass`.")
    min_keep: float = Field(0.01, ge=0, le=1, description="Lowest share of pairs that adjusting to `error` may reach.")
    max_keep: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Largest share of the keys that one group keeps, beyond those that are always kept.",
    )
    tail: Literal["zero", "summary"] = Field(
        "summary",
        description="Treatment of dropped keys. `zero`: they are ignored. `summary`: the means of their clusters replace them, weighted by their number.",
    )
    cluster_size: int = Field(
        128,
        ge=1,
        description="Approximate number of queries in a cluster. Smaller clusters are closer to dense attention and slower.",
    )
    tail_clusters: int | None = Field(
        None,
        ge=1,
        description="Clusters of keys of the summary tail; null: one for every 128 keys, fewer beyond 16,384. With tiles, the tiles serve as clusters.",
    )
    metric: Literal["logit", "euclid"] = Field(
        "logit",
        description="Similarity of queries: `logit`: of their scores over the keys; `euclid`: of the queries themselves, by distance.",
    )
    iterations: int = Field(3, ge=0, description="Iterations of k-means for each plan.")
    tile: tuple[int, int, int] = Field((4, 4, 4), description="Tokens of a tile along time, height and width.")
    window: tuple[int, int, int] = Field(
        (3, 3, 3), description="With `planner: window`, number of tiles that a tile attends to along each axis; odd."
    )
    stride: int = Field(
        4,
        ge=1,
        description="With `planner: skip`, the step between tokens that attend to each other; blocks alternate between two skip patterns.",
    )
    spans: Literal["all", "spatial", "temporal"] = Field(
        "all", description="Blocks of a factorised model that are sparse; a full one has one kind."
    )
    dense_first: int = Field(1, ge=0, description="Number of first blocks that stay dense.")
    dense_last: int = Field(1, ge=0, description="Number of last blocks that stay dense.")
    dense_steps: int = Field(
        100,
        ge=0,
        description="First training steps, in which all attention is dense; the threshold is found in the last of them.",
    )
    ramp_steps: int = Field(0, ge=0, description="Steps after these over which the kept share falls from 1 to `keep`.")
    min_tokens: int = Field(
        1024, ge=1, description="Shorter sequences stay dense: planning would cost more than it saves."
    )
    keep_first_frame: bool = Field(False, description="Every query also keeps the tokens of the first latent frame.")
    update_every: int = Field(
        10,
        ge=1,
        description="Steps between two measurements of the kept share and the error, each with an adjustment of the threshold.",
    )
    backend: str = Field(
        "auto",
        description="Kernel: `auto`, `grouped`, `triton`, `flex`, `varlen`, `npu_block`, `npu_tnd`, or `masked`, which computes all pairs.",
    )

    @property
    def grouping(self) -> Literal["clusters", "tiles", "window", "skip"]:
        """The value of `planner`; clusters if it is null."""
        return self.planner or "clusters"

    @property
    def selection(self) -> Literal["threshold", "top", "mass"]:
        """The value of `rule`, or the planner's default."""
        return self.rule or ("top" if self.grouping == "tiles" else "threshold")

    @property
    def steered(self) -> bool:
        """True if a threshold is adjusted to measurements."""
        return self.grouping in ("clusters", "tiles") and self.selection == "threshold" and self.tau is None

    @model_validator(mode="after")
    def _fits(self) -> SparseConfig:
        chooses = self.grouping in ("clusters", "tiles")
        if not chooses and self.rule is not None:
            raise ValueError(f"rule goes with planner: clusters or tiles; {self.planner} is a fixed pattern")
        if self.tau is not None and self.error is not None:
            raise ValueError("tau fixes the threshold and error adjusts it: use one of them")
        if (self.tau is not None or self.error is not None) and (not chooses or self.selection != "threshold"):
            raise ValueError("tau and error go with rule: threshold")
        if self.steered and self.dense_steps < 1:
            raise ValueError("dense_steps is at least 1: the threshold is found in a dense step; or fix tau")
        if min(self.tile) < 1:
            raise ValueError(f"tile {list(self.tile)} has a size below 1")
        if min(self.window) < 1 or any(size % 2 == 0 for size in self.window):
            raise ValueError(
                f"window {list(self.window)} has a size that is not odd: a tile attends to equally many on both sides"
            )
        aims = self.tau is None and self.selection != "mass"
        if aims and self.max_keep < (self.min_keep if self.error is not None else self.keep):
            raise ValueError(
                f"max_keep {self.max_keep} caps every group below the requested share; raise it or lower keep"
            )
        return self


# keys of the section that apply only to clusters, or to a threshold
ASK_FOR_CLUSTERS = ("rule", "tau", "error", "cluster_size", "tail_clusters", "metric", "iterations")


def planner_from_scratch(sparse: dict[str, Any]) -> dict[str, Any]:
    """The section of a run that begins from scratch: without a planner it gets tiles, which learn better then (docs/status.md)."""
    explicit = any(sparse.get(key) is not None for key in ("planner", *ASK_FOR_CLUSTERS))
    return sparse if explicit else {**sparse, "planner": "tiles"}
