"""Memory: what each way of keeping activations gives and costs, the optimizer's tiers, and budgets.

A step is forward, loss and backward of one synthetic sample. Measured for each way: bytes that the forward pass adds; the peak; bytes in
the host's memory; matrix products of the backward pass; time, as the median over rounds of the ratio to a plain step of the same round on
the same weights; and whether every gradient has the same bits as without the way.
The products of MLPs in parts have other shapes, so that a library may sum them in another order: their gradients must be close, and have
the same bits on some devices only.

python -m tests.claims.memory --full --only ways --rounds 0
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from mmspeed.bench.memory import CLOSE, BenchModel, PolicySetting, largest_distance
from mmspeed.bench.memory_tiers import NEAR, TierModelSize, TierRow, measure_tiers
from mmspeed.config.memory import ActivationPolicy
from mmspeed.log import format_bytes, setup
from mmspeed.memory import peak_bytes
from mmspeed.memory.chunks import set_chunks
from mmspeed.models.sora.model import count_parameters
from tests.support.memory_counts import MatmulCounter, kept_bytes

from .latents import parse_latent
from .memory_budget import measure_budgets

KEPT_GOAL, MATMUL_GOAL = 0.30, 0.03  # of offload_selective: share of plain's bytes, added share of matrix products
BRANCHES = ("attention", "cross_attention", "mlp")
PARTS, ARRANGEMENTS, DTYPES = ("ways", "optimizer", "budget"), ("factorised", "full"), ("float32", "bfloat16")


@dataclass(frozen=True)
class PolicyCase:
    """A case to measure: the ways of every block, and the number of parts that its MLPs split the tokens into."""

    name: str
    ways: dict[str, ActivationPolicy] = field(default_factory=dict)
    mlp_parts: int | None = None


CASES = (
    PolicyCase("plain"),
    PolicyCase("norm: recompute", {"norm": "recompute"}),
    PolicyCase("activation: recompute", {"activation": "recompute"}),
    PolicyCase("mlp: recompute", {"mlp": "recompute"}),
    PolicyCase("attention: recompute", {"attention": "recompute"}),
    PolicyCase("cross_attention: recompute", {"cross_attention": "recompute"}),
    PolicyCase("block: recompute", {"block": "recompute"}),
    PolicyCase("block: selective", {"block": "selective"}),
    PolicyCase("attention: offload", {"attention": "offload"}),
    PolicyCase("block: offload", {"block": "offload"}),
    PolicyCase("block: offload_selective", {"block": "offload_selective"}),
    PolicyCase("norm + activation: recompute", {"norm": "recompute", "activation": "recompute"}),
    PolicyCase("each branch: offload_selective", dict.fromkeys(BRANCHES, "offload_selective")),
    PolicyCase("attention: offload_selective, mlp: selective", {"attention": "offload_selective", "mlp": "selective"}),
    PolicyCase(
        "attention: offload, mlp: recompute, cross: cheap",
        {"attention": "offload", "mlp": "recompute", "cross_attention": "selective"},
    ),
    PolicyCase("mlp in 4 parts", {}, 4),
    PolicyCase("attention: offload_selective, mlp in 4 parts", {"attention": "offload_selective"}, 4),
    PolicyCase("block: recompute, mlp in 4 parts", {"block": "recompute"}, 4),
)


@dataclass(frozen=True)
class WaysSetting(PolicySetting):
    """The model, the latent and the device to measure on."""

    rounds: int = 3


@dataclass(frozen=True)
class PolicyRow:
    """The results of a case."""

    case: PolicyCase
    kept: int
    peak: int
    host: int
    forward_matmuls: int
    backward_matmuls: int
    work: int  # floating-point operations of both
    time: float | None  # of a step, as a ratio to the plain one's; None: not timed
    seconds: float | None
    equal: bool
    distance: float = 0.0  # the largest difference of a gradient from plain's, relative to the gradient's largest value

    @property
    def name(self) -> str:
        return self.case.name


@dataclass(frozen=True)
class PolicyResult:
    """All rows of a setting; the first is plain."""

    setting: WaysSetting
    parameters: int
    tokens: int
    device: str
    rows: tuple[PolicyRow, ...]

    def verdicts(self) -> list[tuple[bool, str]]:
        """The goals, each with True where it is reached."""
        plain, offloaded = self.rows[0], [row for row in self.rows if row.name == "block: offload_selective"]
        wrong = [row.name for row in self.rows if not row.equal and row.case.mlp_parts is None]
        goals = [(not wrong, "gradients bitwise equal to plain" + (f", but for {', '.join(wrong)}" if wrong else ""))]
        parts = [row for row in self.rows if row.case.mlp_parts is not None]
        if parts:
            far, bitwise = max(row.distance for row in parts), sum(row.equal for row in parts)
            close = CLOSE[self.setting.dtype]
            text = f"MLPs in parts: gradients within {far:.0e} of plain (goal {close:.0e}), {bitwise} of {len(parts)} ways bitwise"
            goals.append((far <= close, text))
        for row in offloaded:
            kept, added = row.kept / plain.kept, added_matmuls(row, plain)
            good = kept <= KEPT_GOAL and added <= MATMUL_GOAL
            goals.append(
                (
                    good,
                    f"{row.name}: {kept:.1%} of plain's bytes after forward (goal {KEPT_GOAL:.0%}), {added:+.1%} matrix products "
                    f"(goal {MATMUL_GOAL:.0%})",
                )
            )
        return goals

    def passed(self) -> bool:
        return all(passed for passed, _ in self.verdicts())

    def lines(self) -> list[str]:
        setting, plain = self.setting, self.rows[0]
        shape = "x".join(map(str, setting.latent))
        lines = [
            f"{setting.arrangement}, {setting.dtype}, width {setting.width}, {setting.depth} blocks, {self.parameters / 1e6:.0f} M "
            f"parameters, latent {shape}: {self.tokens} tokens; {self.device}, {torch.get_num_threads()} threads",
            f"{'way':<46} {'kept':>9} {'':>6} {'peak':>9} {'':>6} {'host':>9} {'matmuls':>9} {'time':>6}  equal",
        ]
        for row in self.rows:
            time_ratio = "" if row.time is None else f"{row.time:.2f}"
            lines.append(
                f"{row.name:<46} {format_bytes(row.kept):>9} {row.kept / plain.kept:>6.1%} {format_bytes(row.peak):>9} "
                f"{row.peak / plain.peak:>6.1%} {format_bytes(row.host):>9} {added_matmuls(row, plain):>+9.1%} {time_ratio:>6}  "
                f"{'bitwise' if row.equal else f'{row.distance:.0e}'}"
            )
        return lines + [f"{'PASSED' if passed else 'FAILED'}: {text}" for passed, text in self.verdicts()]


def added_matmuls(row: PolicyRow, plain: PolicyRow) -> float:
    """Additional matrix products of a step, as a share of plain's operations, or of their number if that is more and no MLP is split."""
    added = row.work / plain.work - 1
    if row.case.mlp_parts is not None:
        return added
    both = plain.forward_matmuls + plain.backward_matmuls
    return max(added, (row.forward_matmuls + row.backward_matmuls) / both - 1)


class WaysModel(BenchModel):
    """The model, with counts and times of its steps."""

    @property
    def tokens(self) -> int:
        return self.model.tokens(self.setting.latent)

    def use_case(self, case: PolicyCase) -> None:
        """Use the ways of `case` in the following steps."""
        self.use(case.ways)
        for block in self.model.blocks:
            set_chunks(block, None if case.mlp_parts is None else -(-self.tokens // case.mlp_parts))

    def seconds(self) -> float:
        self.device.synchronize()
        start = time.perf_counter()
        self.step()
        self.device.synchronize()
        return time.perf_counter() - start

    def counted(self) -> tuple[int, int, int, list[Tensor]]:
        """Matrix products of forward and of backward, operations of both, and the gradients."""
        with MatmulCounter() as count:
            loss = self.forward()
            forward = count.total
            loss.backward()
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        self.model.zero_grad(set_to_none=True)
        return forward, count.total - forward, count.work, grads


def measure(
    setting: WaysSetting,
    cases: Sequence[PolicyCase] = CASES,
    progress: Callable[[str], None] = lambda text: None,
) -> PolicyResult:
    """Measure every case; the first is plain."""
    stage = WaysModel(setting)
    *_, truth = stage.counted()
    rows = []
    for case in cases:
        progress(case.name)
        stage.use_case(case)
        forward, backward, work, grads = stage.counted()
        equal = len(grads) == len(truth) and all(map(torch.equal, grads, truth))
        distance = 0.0 if equal else largest_distance(grads, truth)
        del grads
        gc.collect()
        before = stage.offloader.moved_out
        kept = kept_bytes(stage.device, stage.model, stage.forward, stage.inputs)
        host = stage.offloader.moved_out - before
        resident = sum(p.numel() * p.element_size() for p in stage.model.parameters())
        peak = peak_bytes(stage.device, resident, stage.step)
        rows.append(PolicyRow(case, kept, peak, host, forward, backward, work, None, None, equal, distance))
    ratios: list[list[float]] = [[] for _ in cases]
    seconds: list[list[float]] = [[] for _ in cases]
    for turn in range(setting.rounds):
        progress(f"round {turn + 1} of {setting.rounds}")
        seconds_of_cases = []
        for case in cases:
            stage.use_case(case)
            stage.step()  # the first step of a way fills its pool
            seconds_of_cases.append(stage.seconds())
        for place, one in enumerate(seconds_of_cases):
            ratios[place].append(one / seconds_of_cases[0])
            seconds[place].append(one)
    timed = tuple(
        replace(row, time=statistics.median(ratio), seconds=statistics.median(each)) if ratio else row
        for row, ratio, each in zip(rows, ratios, seconds, strict=True)
    )
    return PolicyResult(setting, count_parameters(stage.model), stage.tokens, stage.device.name, timed)


def tier_lines(rows: list[TierRow]) -> list[str]:
    """The lines of a table, and the verdict on all tiers."""
    text = [f"{'optimizer':<48} {'device B':>9} {'meant':>6} {'host B':>7} {'s/step':>8} {'time':>6}  equal"]
    for row in rows:
        equal = {None: "-", True: "bitwise", False: "NO"}[row.equal]
        text.append(
            f"{row.name:<48} {row.device:>9.3f} {row.wanted:>6.0f} {row.host:>7.3f} {row.seconds:>8.4f} {row.time:>6.2f}  {equal}"
        )
    good = all(row.passed() for row in rows)
    text.append(
        f"{'PASSED' if good else 'FAILED'}: bytes a parameter between steps within {NEAR:.0%}, tiers bitwise equal"
    )
    return text


def main() -> int:
    """Measure, and print a table for each part when it is done; 1 where a goal is missed."""
    parser = argparse.ArgumentParser(prog="python -m tests.claims.memory", description=main.__doc__)
    parser.add_argument("--full", action="store_true", help="8 blocks of the model of 0.7 B; without --rounds 0 hours")
    for name, known in (("only", PARTS), ("arrangement", ARRANGEMENTS), ("dtype", DTYPES)):
        parser.add_argument(f"--{name}", nargs="+", choices=known, default=known)
    parser.add_argument("--latent", metavar="TxHxW", help="default 5x32x32, with --full 5x16x16")
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds; 0: nothing is timed")
    parser.add_argument("--device", default="auto")
    asked = parser.parse_args()
    setup()
    full, device, sizes = asked.full, asked.device, {"width": 1152, "heads": 16, "rank": 256}
    passed = True

    def show(lines: list[str], good: bool) -> None:
        nonlocal passed
        tell("")
        print("\n".join(lines), end="\n\n", flush=True)
        passed = passed and good

    for arrangement in asked.arrangement if "ways" in asked.only else ():
        for dtype in asked.dtype:
            setting = WaysSetting(
                arrangement=arrangement,
                dtype=dtype,
                latent=parse_latent(asked.latent or ("5x16x16" if full else "5x32x32")),
                device=device,
                rounds=asked.rounds,
                **(sizes if full else {}),
            )
            ways = measure(setting, progress=tell)
            show(ways.lines(), ways.passed())
    if "optimizer" in asked.only:
        size = TierModelSize(depth=8, **sizes) if full else TierModelSize()
        rows = measure_tiers(size, rounds=max(1, asked.rounds), device=device, progress=tell)
        show(tier_lines(rows), all(row.passed() for row in rows))
    for arrangement in asked.arrangement if "budget" in asked.only else ():
        budgets = measure_budgets(arrangement, device=device, full=full, progress=tell)
        show(budgets.lines(), budgets.passed())
    return 0 if passed else 1


def tell(text: str) -> None:
    """Show what is measured, on a terminal."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
