"""The bench of memory: the bytes and the cost of each way of keeping activations, alone and together.

A step is forward, loss and backward of one synthetic sample. Measured for each way: bytes that the forward pass adds; the peak; bytes in
the host's memory; matrix products of the backward pass; time, as the median over rounds of the ratio to a plain step of the same round on
the same weights; the growth of the process, measured in a new process; and whether every gradient has the same bits as without the way.
The products of MLPs in parts have other shapes, so that a library may sum them in another order: their gradients must be close, and have
the same bits on some devices only.

Legend: T h w latent.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import re
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mmspeed import rng
from mmspeed.config.memory import ActivationPolicy
from mmspeed.device import Device, parse_dtype, pick
from mmspeed.log import format_bytes
from mmspeed.memory import peak_bytes, set_policies
from mmspeed.memory.chunks import set_chunks
from mmspeed.memory.offload.offloader import Offloader
from mmspeed.memory.planning.measure import MatmulCounter
from mmspeed.memory.planning.tracked import kept_bytes
from mmspeed.models.sora.model import SoraDiT, SoraDiTConfig, count_parameters
from mmspeed.parallel import autocast

CHANNELS, TEXT_WIDTH, TEXT_TOKENS = 16, 64, 32
KEPT_GOAL, MATMUL_GOAL = 0.30, 0.03  # of offload_selective: share of plain's bytes, added share of matrix products
# for MLPs in parts, the difference that another order of sums explains, relative to a gradient's largest value: sums of up to 10^4 terms,
# 100 x 2^-23, times ten for eight blocks; roundings to bfloat16, 2^-8, times eight
CLOSE = {"float32": 1e-4, "bfloat16": 3e-2}
BRANCHES = ("attention", "cross_attention", "mlp")


@dataclass(frozen=True)
class PolicyCase:
    """A case to measure: the ways of every block, and the computation of its MLPs."""

    name: str
    ways: dict[str, ActivationPolicy] = field(default_factory=dict)
    mlp_parts: int | None = None  # number of parts that the tokens are split into


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
class PolicySetting:
    """The model, the latent and the device to measure on."""

    arrangement: Literal["factorised", "full"] = "factorised"
    dtype: Literal["float32", "bfloat16"] = "float32"
    width: int = 384
    heads: int = 6
    rank: int = 64
    depth: int = 8
    latent: tuple[int, int, int] = (5, 32, 32)
    rounds: int = 3
    device: str = "auto"
    sizes: bool = True  # True: start processes to measure their growth

    @classmethod
    def full_size(cls, **changes: Any) -> PolicySetting:
        """The model of 0.7 billion parameters (XL/2), cut to 8 of its 28 blocks."""
        return cls(**{"width": 1152, "heads": 16, "rank": 256, "latent": (5, 32, 32), **changes})


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
    grown: int | None = None  # bytes by which a process grows in its first step

    @property
    def name(self) -> str:
        return self.case.name


@dataclass(frozen=True)
class PolicyResult:
    """All rows of a setting; the first is plain."""

    setting: PolicySetting
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
            f"{'way':<46} {'kept':>9} {'':>6} {'peak':>9} {'':>6} {'host':>9} {'matmuls':>9} {'time':>6} {'grown':>9}  equal",
        ]
        for row in self.rows:
            grown = "" if row.grown is None else format_bytes(row.grown)
            time_ratio = "" if row.time is None else f"{row.time:.2f}"
            lines.append(
                f"{row.name:<46} {format_bytes(row.kept):>9} {row.kept / plain.kept:>6.1%} {format_bytes(row.peak):>9} "
                f"{row.peak / plain.peak:>6.1%} {format_bytes(row.host):>9} {added_matmuls(row, plain):>+9.1%} {time_ratio:>6} "
                f"{grown:>9}  {'bitwise' if row.equal else f'{row.distance:.0e}'}"
            )
        return lines + [f"{'PASSED' if passed else 'FAILED'}: {text}" for passed, text in self.verdicts()]

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "verdicts": [{"passed": passed, "text": text} for passed, text in self.verdicts()]}


def added_matmuls(row: PolicyRow, plain: PolicyRow) -> float:
    """Additional matrix products of a step, as a share of plain's operations, or of their number if that is more and no MLP is split."""
    added = row.work / plain.work - 1
    if row.case.mlp_parts is not None:
        return added
    both = plain.forward_matmuls + plain.backward_matmuls
    return max(added, (row.forward_matmuls + row.backward_matmuls) / both - 1)


class BenchModel:
    """A model, its input, and its steps with any ways."""

    def __init__(self, setting: PolicySetting) -> None:
        self.setting = setting
        self.device = pick(setting.device)
        self.device.activate()
        config = SoraDiTConfig(
            width=setting.width,
            depth=setting.depth,
            heads=setting.heads,
            latent_channels=CHANNELS,
            text_width=TEXT_WIDTH,
            adaln_rank=setting.rank,
            arrangement=setting.arrangement,
        )
        self.model = SoraDiT(config).to(self.device.torch_device)
        fill_zeros(self.model)
        dtype = parse_dtype(setting.dtype)
        if dtype != torch.float32:
            autocast(self.model, dtype)
        inputs = [
            rng.normal((1, CHANNELS, *setting.latent), 0, "bench", "latent"),
            torch.full((1,), 0.5),
            rng.normal((1, TEXT_TOKENS, TEXT_WIDTH), 0, "bench", "text"),
            torch.ones(1, TEXT_TOKENS, dtype=torch.bool),
        ]
        self.inputs = [x.to(self.device.torch_device) for x in inputs]
        self.offloader = Offloader(self.device)

    @property
    def tokens(self) -> int:
        return self.model.tokens(self.setting.latent)

    def use(self, case: PolicyCase) -> None:
        """Use the ways of `case` in the following steps."""
        chunk = None if case.mlp_parts is None else -(-self.tokens // case.mlp_parts)
        for block in self.model.blocks:
            set_policies(block, case.ways, self.offloader.group)
            set_chunks(block, chunk)

    def forward(self) -> Tensor:
        out: Tensor = self.model(*self.inputs)
        return out.float().square().mean()

    def step(self) -> None:
        self.forward().backward()
        self.model.zero_grad(set_to_none=True)

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


def largest_distance(grads: Sequence[Tensor], truth: Sequence[Tensor]) -> float:
    """The largest difference of a gradient from the true one, relative to that one's largest value; infinite where one is missing."""
    if len(grads) != len(truth):
        return float("inf")
    return max(float((g - t).abs().max() / t.abs().max()) for g, t in zip(grads, truth, strict=True) if t.any())


def fill_zeros(model: nn.Module) -> None:
    """Fill matrices that start at zero with small random numbers: else most gradients are zero in every case."""
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and not parameter.detach().any():
            with torch.no_grad():
                parameter.copy_(0.02 * rng.normal(tuple(parameter.shape), 0, "bench", name))


def measure(
    setting: PolicySetting,
    cases: Sequence[PolicyCase] = CASES,
    progress: Callable[[str], None] = lambda text: None,
) -> PolicyResult:
    """Measure every case; the first is plain."""
    stage = BenchModel(setting)
    *_, truth = stage.counted()
    rows = []
    for case in cases:
        progress(case.name)
        stage.use(case)
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
        grown = grown_bytes(setting, case) if setting.sizes else None
        rows.append(PolicyRow(case, kept, peak, host, forward, backward, work, None, None, equal, distance, grown))
    ratios: list[list[float]] = [[] for _ in cases]
    seconds: list[list[float]] = [[] for _ in cases]
    for turn in range(setting.rounds):
        progress(f"round {turn + 1} of {setting.rounds}")
        seconds_of_cases = []
        for case in cases:
            stage.use(case)
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


def grown_bytes(setting: PolicySetting, case: PolicyCase) -> int:
    """The growth in bytes of a new process during its first steps; on an accelerator, that of its host memory."""
    with ProcessPoolExecutor(
        1, multiprocessing.get_context("spawn")
    ) as pool:  # a Pool would restart a dying process for ever
        return pool.submit(_grow, setting, case, torch.get_num_threads()).result()


def _grow(setting: PolicySetting, case: PolicyCase, threads: int) -> int:
    torch.set_num_threads(threads)
    stage = BenchModel(setting)
    stage.use(case)
    before = Device("cpu", 0).memory_bytes()
    forget_peak()
    stage.step()
    stage.step()
    return max(0, peak_resident_bytes() - before)


def forget_peak() -> None:
    """Reset `peak_resident_bytes`, where the system can (Linux)."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_resident_bytes() -> int:
    """The peak memory of this process; on Linux its own alone, unlike the usual count, which in a child begins with its parent's."""
    with suppress(OSError):
        match = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
        if match is not None:
            return int(match[1]) * 1024
    return Device("cpu", 0).peak_memory_bytes()


def to_json(results: Sequence[PolicyResult]) -> str:
    """The figures of all settings as JSON."""
    return json.dumps([each.to_dict() for each in results], indent=2)
