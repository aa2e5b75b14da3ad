"""The controller of a model's sparse attentions in training: their dense steps, kept shares and thresholds.

All its decisions are functions of the step and of sums over all ranks, so they are the same on every rank, in any layout, and after a
resume. Thresholds are buffers of the layers, and so part of checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from mmspeed.config.sparse import SparseConfig

from .mass_histogram import threshold
from .module import AttentionFlops, ClusteredAttention, WatchedCalls, clustered_layers

Reduce = Callable[[list[float]], list[float]]  # sum over all ranks

SMOOTHING = 0.3  # share of the way to its target that a threshold moves, in the log
FIRST_STEPS = 3  # sparse steps that are all watched, until the threshold is stable
GAIN = (
    0.5  # of the control towards an error: the log of the error falls about this much slower than that of the threshold
)


@dataclass(frozen=True)
class LayerRow:
    """The measurements of a layer's watched calls, over all ranks."""

    layer: str
    kept: float | None  # share of pairs
    error: float | None  # relative, of the sampled rows; None without a comparison
    plan_ms: float | None  # a call
    tau: float | None
    step: int  # the watched step of training


def keep_at(settings: SparseConfig, step: int) -> float:
    """The target of the kept share at step number `step` (from 0): 1 while dense, falling linearly over the ramp."""
    since = step - settings.dense_steps
    if since < 0:
        return 1.0
    if since >= settings.ramp_steps:
        return settings.keep
    return 1.0 + (settings.keep - 1.0) * (since + 1) / (settings.ramp_steps + 1)


def watched_at(settings: SparseConfig, step: int) -> bool:
    """True for a step whose calls are measured."""
    since = step - settings.dense_steps
    if since < 0:
        return since == -1 and settings.steered
    if since < settings.ramp_steps + FIRST_STEPS:
        return True
    return since % settings.update_every == 0


def next_tau(
    settings: SparseConfig,
    tau: float,
    counts: Sequence[float],
    error: float | None,
    keep: float,
    smoothing: float = SMOOTHING,
) -> float:
    """The next threshold: the one that would have kept the share `keep`, or, with `settings.error`, a move towards that error.

    NaN means no threshold yet, and stays NaN where no pairs were counted.
    """
    counts = list(counts)
    wanted = threshold(counts, keep)
    if wanted is None:
        return tau
    if math.isnan(tau) or tau <= 0 or wanted <= 0:
        return wanted
    if settings.error is None:
        return math.exp(math.log(tau) + smoothing * (math.log(wanted) - math.log(tau)))
    if error is None or not 0 < error < math.inf:
        return tau
    moved = math.exp(math.log(tau) + GAIN * (math.log(settings.error) - math.log(error)))
    least, most = threshold(counts, settings.max_keep), threshold(counts, settings.min_keep)
    return min(max(moved, least or 0.0), most if most is not None else moved)


class SparsityController:
    """The controller of the sparse attentions of a model through training. Every rank makes the same calls."""

    def __init__(self, layers: dict[str, ClusteredAttention], settings: SparseConfig) -> None:
        self.layers, self.settings = layers, settings
        self.rows: list[LayerRow] = []
        self._keep_next, self._step, self._smoothing = settings.keep, 0, SMOOTHING

    @classmethod
    def of(cls, model: nn.Module) -> SparsityController | None:
        """The controller of a model; None where all its attention is dense."""
        layers = clustered_layers(model)
        return cls(layers, next(iter(layers.values())).settings) if layers else None

    def before_step(self, step: int) -> None:
        """Set the layers for step number `step` (from 0)."""
        settings = self.settings
        self._step = step + 1  # as in logs, where the first is 1
        self._keep_next = keep_at(settings, max(step + 1, settings.dense_steps))
        # while the share falls, the threshold moves all the way to its target
        self._smoothing = 1.0 if step < settings.dense_steps + settings.ramp_steps else SMOOTHING
        for layer in self.layers.values():
            layer.phase = "dense" if step < settings.dense_steps else "sparse"
            layer.keep_now = keep_at(settings, step)
            layer.watching = watched_at(settings, step)
            layer.offset = step * 7919  # other rows at every watched step
            if settings.tau is not None:
                layer.reset()  # the starting weights of a run may include another threshold

    def after_step(self, reduce: Reduce, finite: bool = True) -> bool:
        """Read the layers' measurements and move their thresholds. True where the step was watched, so that `rows` is new.

        A step that was not `finite` on any rank updates nothing, and its measurements are dropped.
        """
        layers = list(self.layers.values())
        if not layers[0].watching:
            return False
        if not finite:
            for layer in layers:
                layer.seen = WatchedCalls()
            return False
        sums = [_sums(layer.seen, self.settings.steered) for layer in layers]
        total = iter(reduce([value for each in sums for value in each]))
        self.rows = []
        for name, layer in self.layers.items():
            self.rows.append(self._read(name, layer, [next(total) for _ in sums[0]]))
            layer.seen = WatchedCalls()
        return True

    def saved_flops(self, reduce: Reduce) -> float:
        """Forward FLOPs of dense attention that were not computed since the last call, over all ranks.

        Kept pairs and those of means count as computed; planning does not, nor do pairs that a kernel computes as padding.
        """
        saved = 0.0
        for layer in self.layers.values():
            saved += layer.work.dense_flops - float(layer.work.flops)
            layer.work = AttentionFlops()
        return reduce([saved])[0]

    def _read(self, name: str, layer: ClusteredAttention, sums: list[float]) -> LayerRow:
        calls, all_pairs, kept, wrong, size, seconds = sums[:6]
        error = math.sqrt(wrong / size) if size > 0 else None
        if self.settings.steered:
            tau = next_tau(self.settings, float(layer.tau), sums[6:], error, self._keep_next, self._smoothing)
            layer.tau.fill_(tau)
        tau = float(layer.tau)
        return LayerRow(
            name,
            kept / all_pairs if all_pairs else None,
            error,
            seconds / calls * 1e3 if calls else None,
            None if math.isnan(tau) else tau,
            self._step,
        )


def _sums(seen: WatchedCalls, steered: bool) -> list[float]:
    """The numbers of a layer that are summed over ranks."""
    plain = [seen.calls, seen.all_pairs, seen.kept_pairs, seen.wrong, seen.size, seen.plan_seconds]
    return [float(value) for value in plain] + (seen.shares.values() if steered else [])
