"""The bench of sequence parallelism, on CPU processes: what the feature costs where it does nothing, and what a split step costs.

Two questions. At degree 1, a step whose layout was made from a mesh against one with the model's own layout: the ratio must be 1. At
degree n, a step that n processes with t threads each compute together against the same step on one process with n t threads: 1 would be
free. Both sides of a ratio are measured in turns, round by round, and a ratio is made within its round, so that a machine that gets
slower meanwhile does not matter.

Where a split step's time goes is read off one more step under torch's profiler: what an exchange takes on the rank that comes to it
last is its transfer; what other ranks take longer is waiting for that one.

torchrun --nproc-per-node 2 -m tests.claims.sp

Legend: T h w latent, n ranks, t threads of a rank.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from mmspeed import rng
from mmspeed.cli.launch import cores
from mmspeed.comm import all_gather_objects, barrier
from mmspeed.config.parallel import ParallelConfig
from mmspeed.device import Device
from mmspeed.errors import UserError
from mmspeed.log import format_bytes, rank, setup
from mmspeed.mesh import make_mesh, process_group
from mmspeed.models.sora.model import SoraDiT, SoraDiTConfig
from mmspeed.parallel import TokenLayout, make_layout, parallelize
from mmspeed.plan.traffic import AttentionWorkload, places, step_traffic

from .latents import parse_latent

HEAD_WIDTH, DEPTH, CHANNELS, TEXT_WIDTH, TEXT_TOKENS = 24, 4, 16, 64, 32
NEAR = 0.03  # how far from 1 the ratio at degree 1 may be
WARM = 1
EASY = 10  # rounds of degree 1 for each round of the rest: the bound is tight, and its steps, of an eighth of the clip, are short
HEADS = ("compute", "copies", "transfer", "waiting", "gradients", "optimizer", "uneven")  # of the parts
# functions of `comm` and `parallel.ring` as the profiler names them; gradients' exchanges come under the first three too
EXCHANGES = ("_AllToAll", "_AllGather", "_ReduceScatter", "_RingAttention", "_RingAttentionBackward")


Taken = tuple[float, float]  # seconds, processors' seconds of all threads


@dataclass(frozen=True)
class LayoutScheme:
    """A way to split a step over n ranks."""

    name: str
    arrangement: str
    parallel: ParallelConfig


def schemes(ranks: int) -> list[LayoutScheme]:
    """What is measured."""
    return [
        LayoutScheme("factorised, dsp", "factorised", ParallelConfig(dsp=ranks)),
        LayoutScheme("factorised, ulysses by frames", "factorised", ParallelConfig(ulysses=ranks)),
        LayoutScheme("factorised, ulysses by space", "factorised", ParallelConfig(ulysses=ranks, shard="space")),
        LayoutScheme("full, ulysses", "full", ParallelConfig(ulysses=ranks)),
        LayoutScheme("full, ring", "full", ParallelConfig(ring=ranks)),
    ]  # fmt: skip


@dataclass(frozen=True)
class Ratio:
    """Ratios of one round each: their median, least and greatest."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, above: Iterable[float], below: Iterable[float]) -> Ratio:
        """Round by round."""
        ratios = [a / b for a, b in zip(above, below, strict=True)]
        return cls(statistics.median(ratios), min(ratios), max(ratios))

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.least:.3f} to {self.most:.3f})"


@dataclass(frozen=True)
class StepShares:
    """Shares of a step, 0..1, means over the ranks. `imbalance`: by how much the rank that computes most computes more than the mean."""

    compute: float
    copies: float
    transfer: float
    waiting: float
    gradients: float
    optimizer: float
    imbalance: float


@dataclass(frozen=True)
class SchemeRow:
    """What was found of a scheme. `to_one`: time by that of one process; `cpu_to_one`: processors' time, of all ranks together.

    Bytes are of the rank that sends most; kept bytes are those saved for the backward pass.
    """

    name: str
    seconds: float
    to_one: Ratio
    cpu_to_one: Ratio
    parts: StepShares
    ledger_bytes: int
    formula_bytes: int
    equal: bool  # on every rank, by kind and axis
    kept: float  # of what one process keeps, on the rank that keeps most


@dataclass(frozen=True)
class SpResult:
    """What the bench found. `degree_one`: a step with a layout from a mesh of one, by one with the model's own."""

    ranks: int
    threads: int
    tokens: int
    width: int
    rounds: int
    degree_one: Ratio
    cpu_degree_one: Ratio
    rows: list[SchemeRow]

    @property
    def free(self) -> bool:
        """Whether the feature costs nothing where it does nothing."""
        return abs(self.degree_one.median - 1) <= NEAR

    def passed(self) -> bool:
        """Whether bytes are those of the formulas."""
        return all(row.equal for row in self.rows)

    def lines(self) -> list[str]:
        """The table."""
        wide = max(len(row.name) for row in self.rows)
        lines = [
            f"a step of {self.tokens:,} tokens, width {self.width}, depth {DEPTH}, float32; medians of {self.rounds} rounds",
            f"degree 1, layout of a mesh / the model's own: time {self.degree_one}, processors' time {self.cpu_degree_one}"
            f"  {'PASS' if self.free else 'FAIL'} (time 1 +- {NEAR:.2f})",
            f"{self.ranks} processes x {self.threads} threads / one process x {self.ranks * self.threads} threads:",
            "  ".join(
                ["", " " * wide, f"{'s':>6}", f"{'time':<22}", f"{'processors':<22}", *HEADS, f"{'sent':>9}", "  kept"]
            ),
        ]
        for row in self.rows:
            shares = [f"{share:>{len(head)}.1%}" for head, share in zip(HEADS, asdict(row.parts).values(), strict=True)]
            ratios = [f"{row.to_one!s:<22}", f"{row.cpu_to_one!s:<22}"]
            cells = [
                f"{row.name:<{wide}}",
                f"{row.seconds:>6.2f}",
                *ratios,
                *shares,
                f"{format_bytes(row.ledger_bytes):>9}",
            ]
            wrong = [] if row.equal else [f"FAILED: the formula says {row.formula_bytes:,}"]
            lines.append("  ".join(["", *cells, f"{row.kept:>6.1%}", *wrong]))
        return lines


def bench_sp(latent: tuple[int, int, int], width: int, rounds: int) -> SpResult:
    """Measure in the launcher's processes; all get the same result. Raises UserError for one process, or sizes that do not fit."""
    device = Device("cpu", 0)
    if width % HEAD_WIDTH or width < HEAD_WIDTH:
        raise UserError(f"--width {width} is no multiple of the head width {HEAD_WIDTH}")
    with process_group(device):
        if dist.get_world_size() < 2:
            raise UserError("this claim needs two processes at least: start it with torchrun --nproc-per-node 2")
        return _SchemeBench(device, latent, width, rounds).run()


class _SchemeBench:
    """One run of the bench; every rank has one and makes the same calls."""

    def __init__(self, device: Device, latent: tuple[int, int, int], width: int, rounds: int) -> None:
        self.device, self.latent, self.width, self.rounds = device, latent, width, rounds
        self.ranks, self.rank = dist.get_world_size(), dist.get_rank()
        self.threads = max(1, cores() // self.ranks)
        torch.set_num_threads(self.threads)
        self.heads = width // HEAD_WIDTH
        if self.heads < self.ranks:
            raise UserError(f"--width {width} has {self.heads} heads, fewer than {self.ranks} ranks: make it larger")
        self.group = dist.group.WORLD

    def run(self) -> SpResult:
        compared = schemes(self.ranks)
        steps = {a: _BenchStep(self.config(a), self.latent) for a in ("factorised", "full")}  # of one process
        frames, height, width = (max(1, size // 2) for size in self.latent)
        eighth = (frames, height + height % 2, width + width % 2)
        degree_one = self.degree_one(self.config("factorised"), eighth)
        rows = [self.row(scheme, steps[scheme.arrangement]) for scheme in compared]
        tokens = math.prod(steps["full"].config.grid(self.latent))
        return SpResult(self.ranks, self.threads, tokens, self.width, self.rounds, *degree_one, rows)

    def config(self, arrangement: str) -> SoraDiTConfig:
        return SoraDiTConfig(
            self.width, DEPTH, self.heads, CHANNELS, TEXT_WIDTH, adaln_rank=32, arrangement=arrangement  # type: ignore[arg-type]
        )  # fmt: skip

    def degree_one(self, config: SoraDiTConfig, latent: tuple[int, int, int]) -> tuple[Ratio, Ratio]:
        """Of seconds and of processors' seconds. The first rank computes; the others wait."""
        layout = make_layout(make_mesh(self.device), ParallelConfig())
        of_mesh, plain = _BenchStep(config, latent, layout), _BenchStep(config, latent)
        on: list[Taken] = []
        off: list[Taken] = []
        for number in range(WARM + EASY * self.rounds):
            order = [(of_mesh, on), (plain, off)]
            for chosen, times in order if number % 2 else order[::-1]:
                taken = self.alone(lambda chosen=chosen: chosen.run(None), self.threads)  # type: ignore[misc]
                if number >= WARM:
                    times.append(taken)
        return tuple(Ratio.of([t[i] for t in on], [t[i] for t in off]) for i in (0, 1))  # type: ignore[return-value]

    def row(self, scheme: LayoutScheme, plain: _BenchStep) -> SchemeRow:
        """All of one scheme, beside a step of one process."""
        mesh = make_mesh(self.device, scheme.parallel.axis_sizes())
        layout = make_layout(mesh, scheme.parallel)
        step = _BenchStep(plain.config, self.latent, layout)
        split: list[Taken] = []
        one: list[Taken] = []
        for number in range(WARM + self.rounds):
            taken = self.together(lambda: step.run(self.group))
            alone = self.alone(lambda: plain.run(None), self.ranks * self.threads)
            if number >= WARM:
                split.append(taken)
                one.append(alone)
        kept = step.kept_bytes() / plain.kept_bytes()
        layout.ledger.clear()
        step.run(self.group)
        sent = +layout.ledger.bytes
        wanted = step_traffic(self.work(scheme, step), scheme.parallel, list(places(scheme.parallel))[self.rank])
        mine = {"sent": sent.total(), "wanted": wanted.total(), "equal": sent == wanted, "kept": kept}
        everyone = all_gather_objects(mine, self.group)
        return SchemeRow(
            name=scheme.name,
            seconds=statistics.median(taken[0] for taken in split),
            to_one=Ratio.of([t[0] for t in split], [t[0] for t in one]),
            cpu_to_one=Ratio.of([t[1] for t in split], [t[1] for t in one]),
            parts=self.parts(step),
            ledger_bytes=max(times["sent"] for times in everyone),
            formula_bytes=max(times["wanted"] for times in everyone),
            equal=all(times["equal"] for times in everyone),
            kept=max(times["kept"] for times in everyone),
        )

    def work(self, scheme: LayoutScheme, step: _BenchStep) -> AttentionWorkload:
        config = step.config
        spans = tuple(config.span(block) for block in range(config.depth))
        return AttentionWorkload(
            1, config.grid(self.latent), config.width, config.heads, spans, config.patch_values, TEXT_TOKENS, element_size=4
        )  # fmt: skip

    def together(self, work: Callable[[], Any]) -> Taken:
        """All ranks, each with its own threads: seconds of the slowest."""
        barrier(self.group)
        everyone = all_gather_objects(_timed(work), self.group)
        return max(taken[0] for taken in everyone), sum(taken[1] for taken in everyone)

    def alone(self, work: Callable[[], Any], threads: int) -> Taken:
        """The first rank with so many threads, while the others wait."""
        barrier(self.group)
        taken = (0.0, 0.0)
        if self.rank == 0:
            torch.set_num_threads(threads)
            taken = _timed(work)
            torch.set_num_threads(self.threads)
        times = all_gather_objects(taken, self.group)[0]
        return times[0], times[1]

    def parts(self, step: _BenchStep) -> StepShares:
        """Of one step under the profiler."""
        barrier(self.group)
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else some versions tell of each start and stop
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            phases = step.run(self.group)
        calls = [_blocked(event) for event in recorded.events() if event.name in EXCHANGES]
        everyone = all_gather_objects({"phases": phases, "calls": calls}, self.group)
        return parts_of(everyone)


def _timed(work: Callable[[], Any]) -> Taken:
    started, used = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - started, time.process_time() - used


def parts_of(everyone: list[dict[str, Any]]) -> StepShares:
    """From what each rank found: `phases`, seconds by name, and `calls`, (seconds blocked, seconds of copies) of each exchange in order."""
    steps = [sum(rank["phases"].values()) for rank in everyone]
    blocked = [[call[0] for call in rank["calls"]] for rank in everyone]
    copies = [sum(call[1] for call in rank["calls"]) for rank in everyone]
    transfer = sum(map(min, zip(*blocked, strict=True)))
    work = [
        rank["phases"]["model"] - sum(waits) - copied
        for rank, waits, copied in zip(everyone, blocked, copies, strict=True)
    ]
    whole, n = statistics.mean(steps), len(everyone)

    def share(seconds: Iterable[float]) -> float:
        return sum(seconds) / n / whole

    return StepShares(
        compute=share(work),
        copies=share(copies),
        transfer=transfer / whole,
        waiting=share(sum(waits) - transfer for waits in blocked),
        gradients=share(rank["phases"]["gradients"] for rank in everyone),
        optimizer=share(rank["phases"]["optimizer"] for rank in everyone),
        imbalance=max(work) / statistics.mean(work) - 1,
    )


def _blocked(event: Any) -> tuple[float, float]:
    """Seconds of an exchange outside of torch's operators (it waits for messages, or is in Python), and in those that pack and unpack.

    A ring's own operators are compute: attention, and sums of outputs and gradients.
    """
    operators = [child for child in event.cpu_children if child.name.startswith("aten::")]
    blocked = event.cpu_time_total - sum(child.cpu_time_total for child in operators)
    copies = sum(child.cpu_time_total for child in operators) if not event.name.startswith("_Ring") else 0.0
    return blocked / 1e6, copies / 1e6


class _BenchStep:
    """A training step of one video on a layout: forward, backward, sum of gradients over the ranks, AdamW."""

    def __init__(self, config: SoraDiTConfig, latent: tuple[int, int, int], layout: TokenLayout | None = None) -> None:
        self.config = config
        self.layout = layout if layout is not None else TokenLayout()
        self.model = SoraDiT(config)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.add_(0.02 * rng.normal(parameter.shape, 0, "bench", name))  # no gate is 0
        parallelize(self.model, None, "none", layout=self.layout)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, fused=True)
        shape = (1, CHANNELS, *latent)
        self.latents, self.noise = rng.normal(shape, 0, "latent"), rng.normal(shape, 0, "noise")
        self.text = rng.normal((1, TEXT_TOKENS, TEXT_WIDTH), 0, "text")
        self.mask = torch.ones(1, TEXT_TOKENS, dtype=torch.bool)

    def loss(self) -> Tensor:
        mixed = 0.5 * (self.latents + self.noise)
        out = self.model(mixed, torch.tensor([0.5]), self.text, self.mask)
        return (out - (self.noise - self.latents)).square().mean() / self.layout.whole.size

    def run(self, group: Any) -> dict[str, float]:
        """One step; the seconds of its phases. Gradients are summed over `group`, if there is one."""
        times = [time.perf_counter()]
        self.loss().backward()
        times.append(time.perf_counter())
        if group is not None:
            grads: list[Tensor] = [p.grad for p in self.model.parameters() if p.grad is not None]
            flat = torch.cat([grad.reshape(-1) for grad in grads])
            dist.all_reduce(flat, group=group)
            for grad, summed in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
                grad.copy_(summed.view_as(grad))
        times.append(time.perf_counter())
        self.optimizer.step()
        self.optimizer.zero_grad()
        times.append(time.perf_counter())
        names = ("model", "gradients", "optimizer")
        return {name: end - start for name, start, end in zip(names, times, times[1:], strict=False)}

    def kept_bytes(self) -> int:
        """Memory that the forward pass saves for the backward pass, parameters apart."""
        own = {p.untyped_storage().data_ptr() for p in self.model.parameters()}
        storages: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = self.loss()  # alive, so that no two storages have one address
        del loss
        return sum(size for place, size in storages.items() if place not in own)


def main() -> int:
    """Measure in torchrun's processes; 1 when bytes differ from the formulas."""
    parser = argparse.ArgumentParser(prog="torchrun -m tests.claims.sp", description=main.__doc__)
    parser.add_argument("--latent", metavar="TxHxW", default="8x32x32", help="latent of the clip that a step trains on")
    parser.add_argument("--width", type=int, default=192, help="width of the model, a multiple of 24")
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds; medians count")
    chosen = parser.parse_args()
    setup()
    result = bench_sp(parse_latent(chosen.latent), chosen.width, chosen.rounds)
    if rank() == 0:
        print("\n".join(result.lines()))
    return 0 if result.passed() else 1


if __name__ == "__main__":
    raise SystemExit(main())
