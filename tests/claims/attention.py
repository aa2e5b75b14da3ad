"""Sparse attention on synthetic video: its error and speedup relative to dense attention, planning included.

Errors depend on the video, so they are means over several.

python -m tests.claims.attention --tokens 16384 --keep 0.05,0.1 --planner clusters,tiles

Legend: B batch, A heads, N tokens, D head width, X position axes.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch

from mmspeed.bench.attention_bench import AttentionBenchSetting, AttentionRow, LengthBench, MethodCase, VideoErrors, ask
from mmspeed.bench.attention_data import Grid, make_qkv, oracle_share
from mmspeed.bench.attention_plans import PLANNERS, Method, method
from mmspeed.compute.sparse import key_means
from mmspeed.compute.sparse.dispatch import KERNELS
from mmspeed.compute.sparse.module import ClusteredAttention
from mmspeed.config.sparse import SparseConfig
from mmspeed.device import Device, parse_dtype, pick
from mmspeed.log import format_bytes, get_logger, setup

log = get_logger("bench")

FULL_TOKENS, FULL_KEEPS = (4_096, 16_384, 32_768), (0.03, 0.05, 0.1, 0.2, 0.3)


@dataclass(frozen=True)
class SyntheticSetting(AttentionBenchSetting):
    """The cases to measure.

    seeds: the videos that errors are means over; times and memory are those of the first.
    """

    tokens: tuple[int, ...] = (4_096, 16_384)
    planners: tuple[str, ...] = ("clusters", "tiles")
    heads: int = 4
    width: int = 64
    dtype: str = "float32"
    seeds: int = 3

    def methods(self, tokens: int) -> list[Method]:
        """The methods to measure at a length."""
        cases = [(planner, tail, keep) for keep in self.keeps for planner in self.planners for tail in self.tails]
        return [method(*case, grid_of(tokens), self.cluster_size) for case in cases]


def with_mean_errors(row: AttentionRow, others: Sequence[VideoErrors]) -> AttentionRow:
    """The row with means over its own video and others."""
    videos = [VideoErrors(row.kept, row.error, row.gradient_errors, row.warm_error), *others]
    dq, dk, dv = (fmean(video.gradient_errors[i] for video in videos) for i in range(3))
    warm = [video.warm_error for video in videos if video.warm_error is not None]
    return replace(
        row,
        kept=fmean(video.kept for video in videos),
        error=fmean(video.error for video in videos),
        gradient_errors=(dq, dk, dv),
        warm_error=fmean(warm) if warm else None,
        errors=tuple(video.error for video in videos),
    )


@dataclass(frozen=True)
class AttentionResult:
    """The results of the bench. `oracle`: by length, the share of the keys that holds 90 % of a query's mass, by head."""

    rows: list[AttentionRow]
    oracle: dict[int, list[float]]
    dense: dict[int, dict[str, float]]  # seconds of dense attention, by length: forward, both
    kernels: dict[str, str]  # the reason why a kernel cannot run here; empty where it can
    setting: SyntheticSetting
    device: Device

    def lines(self) -> list[str]:
        """Head and tables."""
        return [*self.head(), *table(self.rows)]

    def head(self) -> list[str]:
        """The conditions of the measurement."""
        cpu, asked = self.device.kind == "cpu", self.setting
        threads = f", {torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}" if cpu else ""
        lines = [
            f"{asked.heads} heads of width {asked.width}, {asked.dtype}, {self.device.name}{threads}; medians of {asked.rounds} rounds",
            "faster: than dense attention in the same round, planning included"
            + ("; in brackets by processors' time" if cpu else ""),
            f"errors and kept shares: means over {asked.seeds} video{'s' * (asked.seeds > 1)}",
            "kernels: "
            + ", ".join(name + (f" (not here: {why})" if why else "") for name, why in self.kernels.items()),
        ]
        for tokens, shares in self.oracle.items():
            times = self.dense[tokens]
            lines.append(
                f"{tokens:,} tokens: 90 % of a query's mass lies on {', '.join(f'{share:.0%}' for share in shares)} of the keys, by head;"
                f" dense attention {times['forward'] * 1e3:.0f} ms forward, {times['both'] * 1e3:.0f} ms with backward"
            )
        return [*lines, ""]


COLUMNS: tuple[tuple[str, Callable[[AttentionRow], str]], ...] = (
    ("planner", lambda row: row.planner),
    ("tail", lambda row: row.tail),
    ("kept", lambda row: f"{row.kept:.3f}"),
    ("error", lambda row: f"{row.error:.3f}"),
    ("of videos", lambda row: f"{min(row.errors):.3f} to {max(row.errors):.3f}" if len(row.errors) > 1 else ""),
    ("dq, dk, dv", lambda row: " ".join(f"{error:.2f}" for error in row.gradient_errors)),
    ("warm", lambda row: "" if row.warm_error is None else f"{row.warm_error:.3f}"),
    ("forward", lambda row: str(row.forward)),
    ("with backward", lambda row: str(row.both)),
    ("plan ms", lambda row: f"{row.plan_seconds * 1e3:.1f}"),
    ("warm ms", lambda row: "" if row.warm_seconds is None else f"{row.warm_seconds * 1e3:.1f}"),
    ("memory", lambda row: f"{format_bytes(row.peak_bytes)} ({row.peak_bytes / max(1, row.dense_peak_bytes):.2f}x)"),
    ("throughput", lambda row: f"{row.throughput:.0%}"),
    ("pairs", lambda row: f"{row.pairs / 1e6:.1f} M"),
    ("kernel", lambda row: row.backend),
)


def table(rows: list[AttentionRow]) -> list[str]:
    """A table for each length, aligned."""
    lines = []
    for tokens in dict.fromkeys(row.tokens for row in rows):
        cells = [[cell(row) for _, cell in COLUMNS] for row in rows if row.tokens == tokens]
        wide = [max(len(line[i]) for line in [[name for name, _ in COLUMNS], *cells]) for i in range(len(COLUMNS))]
        lines.append(f"{tokens:,} tokens")
        for line in [[name for name, _ in COLUMNS], *cells]:
            lines.append("  ".join(text.ljust(width) for text, width in zip(line, wide, strict=True)).rstrip())
        lines.append("")
    return lines


def bench_attention(setting: SyntheticSetting) -> AttentionResult:
    """Measure all cases. Raises UserError for settings that cannot be measured here."""
    setting.check()
    device = pick(setting.device)
    device.activate()
    if setting.backend != "auto":
        for planner in setting.planners:
            settings = SparseConfig.model_validate({"planner": planner, "backend": setting.backend})
            ClusteredAttention(settings).try_out(device.torch_device, parse_dtype(setting.dtype), setting.width)
    rows: list[AttentionRow] = []
    oracles, dense, kernels = {}, {}, {}
    for tokens in setting.tokens:
        length = synthetic(setting, device, tokens)
        oracles[tokens] = [float(share) for share in oracle_share(length.q, length.k)]
        methods = setting.methods(tokens)
        measured = length.run(methods, setting.rounds)
        others = []
        for seed in range(1, setting.seeds):
            log.info(f"{tokens:,} tokens: errors of video {seed + 1} of {setting.seeds}")
            others.append(video_errors(synthetic(setting, device, tokens, seed), methods))
        rows += [with_mean_errors(row, errors) for row, *errors in zip(measured, *others, strict=True)]
        dense[tokens] = length.dense_seconds
        kernels = refused_kernels(length, methods[0])
    return AttentionResult(rows, oracles, dense, kernels, setting, device)


def synthetic(setting: SyntheticSetting, device: Device, tokens: int, seed: int = 0) -> LengthBench:
    """Synthetic video of a length, and the same video under other noise."""
    dtype, grid = parse_dtype(setting.dtype), grid_of(tokens)
    q, k, v, positions_NX = make_qkv(grid, setting.heads, setting.width, seed)
    other = make_qkv(grid, setting.heads, setting.width, seed, look=1)[:2]
    q, k, v, other_q, other_k = (x.to(device.torch_device, dtype) for x in (q, k, v, *other))
    return LengthBench(q, k, v, positions_NX.to(device.torch_device), device, setting.backend, (other_q, other_k))


def video_errors(length: LengthBench, methods: Sequence[Method]) -> list[VideoErrors]:
    """The kept share and the errors of each method on a video, without timing any."""
    exact = length.dense(backward=True)
    return [MethodCase(length, each).errors(exact) for each in methods]


def refused_kernels(length: LengthBench, chosen: Method) -> dict[str, str]:
    """The reason why each kernel cannot run here, by name; empty where it can."""
    plan = chosen.plan(length.q, length.k, length.positions)
    means = None if plan.tail is None else key_means(length.k, length.v, plan.tail)
    return {name: kernel.refuses(length.q, length.k, length.v, plan, means) for name, kernel in KERNELS.items()}


def grid_of(tokens: int) -> Grid:
    """The grid (t, h, w), t <= h <= w, of `tokens` tokens that is nearest to a cube: 16384 is 16 x 32 x 32."""
    best: Grid = (1, 1, tokens)
    for t in range(1, round(tokens ** (1 / 3)) + 1):
        if tokens % t:
            continue
        rest = tokens // t
        h = next(h for h in range(math.isqrt(rest), 0, -1) if rest % h == 0)
        if h >= t and _surface((t, h, rest // h)) < _surface(best):
            best = (t, h, rest // h)
    return best


def _surface(grid: Grid) -> int:
    t, h, w = grid
    return t * h + h * w + t * w


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(prog="python -m tests.claims.attention", description=main.__doc__)
    parser.add_argument("--tokens", metavar="N,...", help="lengths; default 4096,16384")
    parser.add_argument("--keep", metavar="SHARE,...", help="shares of pairs to keep; default 0.05,0.1,0.2")
    parser.add_argument("--planner", metavar="NAME,...", help="clusters, tiles, window, skip")
    parser.add_argument("--tail", metavar="NAME,...", help="zero, summary; default both")
    parser.add_argument("--full", action="store_true", help="the whole set: up to 32,768 tokens, all planners")
    for name in ("heads", "width", "rounds", "seeds", "cluster-size"):
        key = name.replace("-", "_")
        parser.add_argument(f"--{name}", type=int, default=getattr(SyntheticSetting, key))
    for name in ("backend", "device", "dtype"):
        parser.add_argument(f"--{name}", default=getattr(SyntheticSetting, name))
    chosen = parser.parse_args()
    setup()
    whole: dict[str, Any] = {"tokens": FULL_TOKENS, "keeps": FULL_KEEPS, "planners": PLANNERS}
    fields = (whole if chosen.full else {}) | ask(chosen.keep, chosen.planner, chosen.tail)
    if chosen.tokens is not None:
        fields["tokens"] = tuple(int(word) for word in chosen.tokens.split(","))
    for key in ("heads", "width", "rounds", "seeds", "cluster_size", "backend", "device", "dtype"):
        fields[key] = getattr(chosen, key)
    result = bench_attention(SyntheticSetting(**fields))
    print("\n".join(result.lines()))


if __name__ == "__main__":
    main()
