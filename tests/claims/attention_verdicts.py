"""Results of the bench of sparse attention, and verdicts on its goals: figures only, no measuring."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean

from mmspeed.bench.attention import AttentionRow, VideoErrors
from mmspeed.log import format_bytes

LINEAR = 1.25  # growth of memory relative to that of tokens that still counts as linear
# (tokens, kept, greatest error, least speedup forward, the same forward + backward); None: no goal
GOALS = (
    (16_384, 0.1, 0.05, 4.0, 5.5),
    (32_768, 0.1, None, 4.6, 6.4),
    (32_768, 0.05, 0.08, None, 10.0),
)
PEAK, WARM_PLAN, TAIL_GAIN, RULE_GAIN, EQUAL_TIME, THROUGHPUT = 1.8, 0.08, 2.5, 0.92, 0.5, 0.6


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
class GoalVerdict:
    """A goal, whether it is reached, and the figures."""

    goal: str
    passed: bool
    figures: str

    def line(self) -> str:
        return f"{'PASSED' if self.passed else 'FAILED'}  {self.goal}: {self.figures}"


@dataclass(frozen=True)
class AttentionResult:
    """The results of the bench. `oracle`: by length, the share of the keys that holds 90 % of a query's mass, by head."""

    rows: list[AttentionRow]
    oracle: dict[int, list[float]]
    dense: dict[int, dict[str, float]]  # seconds of dense attention, by length: forward, both
    kernels: dict[str, str]  # the reason why a kernel cannot run here; empty where it can
    device: str
    device_name: str
    threads: int
    load: float
    heads: int
    width: int
    dtype: str
    rounds: int
    seeds: int = 1  # videos that errors are means over
    verdicts: list[GoalVerdict] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "verdicts", verdicts(self.rows, self.device))

    def passed(self) -> bool:
        """True where all goals are reached whose rows were measured."""
        return all(verdict.passed for verdict in self.verdicts)

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "passed": self.passed()}, indent=2)

    def lines(self) -> list[str]:
        """Head, tables, verdicts."""
        return [*self.head(), *table(self.rows), *(verdict.line() for verdict in self.verdicts)]

    def head(self) -> list[str]:
        """The conditions of the measurement."""
        threads = f", {self.threads} threads, load {self.load:.1f}" if self.device == "cpu" else ""
        lines = [
            f"{self.heads} heads of width {self.width}, {self.dtype}, {self.device_name}{threads}; medians of {self.rounds} rounds",
            "faster: than dense attention in the same round, planning included"
            + ("; in brackets by processors' time" if self.device == "cpu" else ""),
            f"errors and kept shares: means over {self.seeds} video{'s' * (self.seeds > 1)}",
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


def find(rows: Iterable[AttentionRow], tokens: int, keep: float, planner: str, tail: str) -> AttentionRow | None:
    """The row of a case, if it was measured."""
    wanted = (tokens, planner, tail)
    return next((r for r in rows if (r.tokens, r.planner, r.tail) == wanted and math.isclose(r.keep, keep)), None)


def verdicts(rows: list[AttentionRow], device: str) -> list[GoalVerdict]:
    """Verdicts on the goals whose rows were measured. Speedups are goals of CPUs; of accelerators, the share of dense throughput is."""
    reached: list[GoalVerdict | None] = []
    for tokens, keep, error, forward, both in GOALS:
        row = find(rows, tokens, keep, "clusters", "summary")
        if row is not None:
            reached += _speed_and_error(row, error, forward, both, device == "cpu")
    reached += [_equal_time(rows, tokens) for tokens in (16_384, 32_768)]
    reached.append(_memory(rows))
    reached.append(_linear(rows))
    reached += _at_16k(rows)
    reached += _rules(rows)
    if device != "cpu":
        reached += [_throughput(row) for row in rows if (row.planner, row.tail) == ("clusters", "summary")]
    return [verdict for verdict in reached if verdict is not None]


def _name(row: AttentionRow) -> str:
    return f"{row.planner} + {row.tail}, {row.tokens:,} tokens, {row.keep:.0%} kept"


def _speed_and_error(
    row: AttentionRow, error: float | None, forward: float | None, both: float | None, speeds: bool
) -> list[GoalVerdict]:
    goals = []
    if error is not None:
        goals.append(GoalVerdict(f"{_name(row)}: error at most {error}", row.error <= error, f"{row.error:.4f}"))
    for goal, measured, what in ((forward, row.forward, "forward"), (both, row.both, "forward + backward")):
        if goal is not None and speeds:
            goals.append(GoalVerdict(f"{_name(row)}: {what} at least {goal}x", measured.least() >= goal, str(measured)))
    return goals


def error_at(rows: list[AttentionRow], seconds: float) -> tuple[float, bool]:
    """(the error of a method at a given time, True where the time is within its rows).

    Interpolated between two rows, linearly in the logarithms of time and error; beyond them, extrapolated from the last two. Needs at
    least two rows.
    """
    curve: list[AttentionRow] = []
    for row in sorted(rows, key=lambda row: row.both_seconds):
        if not curve or row.error < curve[-1].error:  # a slower and worse row is no choice
            curve.append(row)
    if len(curve) < 2:
        return curve[0].error, False
    last = len(curve) - 1
    right = next((i for i, row in enumerate(curve) if row.both_seconds >= seconds), last)
    low, high = curve[max(right, 1) - 1], curve[max(right, 1)]
    slope = math.log(high.error / low.error) / math.log(high.both_seconds / low.both_seconds)
    error = low.error * (seconds / low.both_seconds) ** slope
    return error, curve[0].both_seconds <= seconds <= curve[-1].both_seconds


def _equal_time(rows: list[AttentionRow], tokens: int) -> GoalVerdict | None:
    ours = find(rows, tokens, 0.1, "clusters", "summary")
    tiles = [row for row in rows if (row.tokens, row.planner, row.tail) == (tokens, "tiles", "zero")]
    if ours is None or len(tiles) < 2:
        return None
    theirs, inside = error_at(tiles, ours.both_seconds)
    ratio = ours.error / theirs
    note = "" if inside else ", beyond the kept shares that were measured"
    summed = [row for row in rows if (row.tokens, row.planner, row.tail) == (tokens, "tiles", "summary")]
    beside = ""
    if len(summed) >= 2:
        beside = f"; of tiles with our tail: {ours.error / error_at(summed, ours.both_seconds)[0]:.2f}"
    return GoalVerdict(
        f"{_name(ours)}: in the time of forward + backward, at most {EQUAL_TIME} of the error of the most important tiles",
        ratio <= EQUAL_TIME,
        f"{ours.error:.4f} against {theirs:.4f}, interpolated by time between the tiles' kept shares{note}: {ratio:.2f}{beside}",
    )


def _memory(rows: list[AttentionRow]) -> GoalVerdict | None:
    sparse = [row for row in rows if row.planner == "clusters" and row.tokens >= 16_384 and row.keep <= 0.1]
    if not sparse:
        return None
    worst = max(sparse, key=lambda row: row.peak_bytes / row.dense_peak_bytes)
    ratio = worst.peak_bytes / worst.dense_peak_bytes
    return GoalVerdict(
        f"memory beyond the inputs at most {PEAK}x of dense attention's, to 10 % kept",
        ratio <= PEAK,
        f"{ratio:.2f}x ({_name(worst)}: {format_bytes(worst.peak_bytes)})",
    )


def _linear(rows: list[AttentionRow]) -> GoalVerdict | None:
    at = {
        row.tokens: row
        for row in rows
        if (row.planner, row.tail) == ("clusters", "summary") and math.isclose(row.keep, 0.1)
    }
    if len(at) < 2:
        return None
    steps = [(at[a], at[b]) for a, b in zip(sorted(at), sorted(at)[1:], strict=False)]
    growth = [(b.peak_bytes / a.peak_bytes) / (b.tokens / a.tokens) for a, b in steps]
    return GoalVerdict(
        "memory grows as the tokens do, at 10 % kept",
        max(growth) <= LINEAR,
        ", ".join(f"{a.tokens:,} to {b.tokens:,}: {g:.2f} of it" for (a, b), g in zip(steps, growth, strict=True)),
    )


def _at_16k(rows: list[AttentionRow]) -> list[GoalVerdict]:
    goals = []
    ours, zero = (find(rows, 16_384, 0.1, "clusters", tail) for tail in ("summary", "zero"))
    if ours is not None and ours.warm_seconds is not None:
        share = ours.warm_seconds / ours.both_seconds
        goal = f"{_name(ours)}: a warm plan at most {WARM_PLAN:.0%} of forward + backward"
        goals.append(GoalVerdict(goal, share <= WARM_PLAN, f"{share:.1%}"))
    if ours is not None and zero is not None:
        gain = zero.error / ours.error
        goal = f"the summary's error at most 1/{TAIL_GAIN} of that without a tail, 16,384 tokens, 10% kept"
        goals.append(GoalVerdict(goal, gain >= TAIL_GAIN, f"1/{gain:.2f}"))
    return goals


def _rules(rows: list[AttentionRow]) -> list[GoalVerdict]:
    """Verdicts on one threshold for all clusters against other rules for the same clusters."""
    goals = []
    ours = find(rows, 4_096, 0.1, "clusters", "zero")
    for planner, rule in (("clusters-mass", "the same mass"), ("clusters-top", "the same number")):
        theirs = find(rows, 4_096, 0.1, planner, "zero")
        if ours is not None and theirs is not None:
            ratio = ours.error / theirs.error
            goal = f"one threshold: at most {RULE_GAIN} of the error of {rule} for each cluster, 4,096 tokens, 10% kept"
            goals.append(
                GoalVerdict(goal, ratio <= RULE_GAIN, f"{ratio:.2f} (kept {ours.kept:.3f} against {theirs.kept:.3f})")
            )
    return goals


def _throughput(row: AttentionRow) -> GoalVerdict:
    goal = f"{_name(row)}: at least {THROUGHPUT:.0%} of dense throughput on kept pairs"
    return GoalVerdict(goal, row.throughput >= THROUGHPUT, f"{row.throughput:.0%}")
