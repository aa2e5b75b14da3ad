"""Pipelines beside torch's own stages and schedules: a step's time and memory on two processes. Ratios in one run, medians.

Both sides have the same weights, the same micro-batches and no shards, and take turns: ours is a decoder that its plan cuts, torch's the
same decoder cut by hand into plain modules. A step's wall seconds are those of the slower process; processor seconds are of both together.
Memory is counted allocation by allocation, a side alone in its processes: tensors that live before a step, and the most that it adds.

`--overlap` prints instead what exchanges of experts add to a step of published shapes, on the reckoned clock with the links of an H200, and
how long gradients of weights that wait take beside a plain backward pass, on one process (`tests/claims/overlap.py`).

Legend: B N rows and their tokens, E width, M micro-batches.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from mmspeed import rng
from mmspeed.compute.operators.cross_entropy import IGNORED
from mmspeed.config.parallel import ParallelConfig
from mmspeed.device import Device
from mmspeed.initialize import init_weights
from mmspeed.log import setup
from mmspeed.loop.pipeline import runner_of
from mmspeed.memory.planning.peak import local_bytes, peak_bytes
from mmspeed.models.language.config import DecoderSettings
from mmspeed.models.language.decoder import Decoder, next_tokens
from mmspeed.parallel import parallelize
from mmspeed.parallel.stages import cut_into_stages
from mmspeed.plan.schedules import Pipeline, stage_bounds
from mmspeed.protocols import Batch, Item, Term, Terms
from mmspeed.shapes import Bucket
from tests.claims import overlap
from tests.support.added_model import Meshes
from tests.support.foreign_steps import whole
from tests.support.spawn import run_ranks

RANKS = 2
OURS, TORCH = "mmspeed", "torch"
WARM = 2  # rounds that are not counted
TIME, MEMORY, NEAR = 1.05, 1.0, 1e-5  # goals: ratios of fixed shapes, and how far gradients may lie apart
CPU = torch.device("cpu")

Step = Callable[[], float]  # forward and backward of all micro-batches: the loss where it is known, else 0
Made = tuple[nn.Module, Step]


@dataclass(frozen=True)
class PipelineSetting:
    """Sizes of the model and of the measurement; `seeds`: of weights and tokens, each with `rounds`."""

    rounds: int = 9
    seeds: int = 3
    micro_batches: int = 8
    tokens: int = 256
    width: int = 256
    blocks: int = 8
    vocabulary: int = 2048

    @property
    def decoder(self) -> DecoderSettings:
        """A plain decoder."""
        return DecoderSettings(
            vocab_size=self.vocabulary, hidden_size=self.width, num_hidden_layers=self.blocks, num_attention_heads=4,
            intermediate_size=3 * self.width, num_key_value_heads=2, head_dim=self.width // 4,
        )  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A schedule. lengths: of micro-batches, in turn, as shares of the greatest; torch gets them padded to it."""

    name: str
    virtual: int
    lengths: tuple[float, ...] = (1.0,)

    @property
    def fixed(self) -> bool:
        """True where all micro-batches have one shape."""
        return set(self.lengths) == {1.0}


CHANGING = (1.0, 0.25, 0.5, 0.75)
CASES = (
    Case("1F1B", 1),
    Case("interleaved 1F1B", 2),
    Case("1F1B, changing shapes", 1, CHANGING),
    Case("interleaved 1F1B, changing shapes", 2, CHANGING),
)


def batches_of(case: Case, seed: int, setting: PipelineSetting) -> list[Tensor]:
    """The tokens of each micro-batch, of its own length."""
    shares = [case.lengths[number % len(case.lengths)] for number in range(setting.micro_batches)]
    return [
        (rng.normal((1, int(share * setting.tokens)), seed, "ids", number) * 1e4).long() % setting.vocabulary
        for number, share in enumerate(shares)
    ]


def decoder_of(seed: int, setting: PipelineSetting) -> Decoder:
    """The whole model of a seed."""
    model = Decoder(setting.decoder)
    init_weights(model, seed)
    return model


# -- ours -------------------------------------------------------------------------------------------------------------------


def our_side(case: Case, seed: int, setting: PipelineSetting, meshes: Meshes) -> Made:
    """The decoder in stages, as a run makes them."""
    parallel = ParallelConfig(pp=RANKS, virtual=case.virtual)
    mesh, layout = meshes.of(parallel)
    (group,) = mesh.across_stages()
    bare = decoder_of(seed, setting)
    cut_into_stages(bare, group, Pipeline.of(parallel))
    model = parallelize(bare, mesh, "none", layout=layout)
    runner = runner_of(model, "none", CPU)
    batches = [
        Batch(
            {"ids": ids, "targets": next_tokens(ids)}, [Item(str(number), source="s")], torch.ones(1), Bucket(1, 8, 8)
        )
        for number, ids in enumerate(batches_of(case, seed, setting))
    ]

    def call(batch: Batch) -> Any:
        return batch, model(batch["ids"], None, batch["targets"])

    def terms(out: tuple[Batch, Any]) -> Terms:
        return {"loss": Term(out[1].loss_BN.sum(1), out[0].weights_I)}

    divisors = {"samples": float(len(batches))}

    def step() -> float:
        record = runner.run(call, terms, batches, divisors)
        return float(record.total("loss", CPU)) / len(batches)

    return model, step


# -- torch's ----------------------------------------------------------------------------------------------------------------


class HandCut(nn.Module):
    """Some blocks of a decoder, with the embedding before the first, and the norm and the head behind the last."""

    def __init__(self, decoder: Decoder, blocks: range) -> None:
        super().__init__()
        self.rotary = decoder.rotary
        self.embed_tokens = decoder.embed_tokens if blocks.start == 0 else None
        self.layers = nn.ModuleDict({str(place): decoder.layers[place] for place in blocks})
        last = blocks.stop == len(decoder.layers)
        self.norm = decoder.norm if last else None
        self.lm_head = decoder.lm_head if last else None

    def forward(self, x: Tensor) -> Tensor:
        """Tokens behind the blocks, (B, N, E); `x`: those before them, or ids."""
        x_BNE = x if self.embed_tokens is None else self.embed_tokens(x)
        place_BN = torch.arange(x_BNE.shape[1]).expand(x_BNE.shape[:2])
        turn_2BNH = self.rotary.tables(place_BN, x_BNE.dtype)
        for block in self.layers.values():
            x_BNE, _ = block(x_BNE, turn_2BNH, None)
        return x_BNE if self.norm is None else self.norm(x_BNE)

    def loss(self, x_BNE: Tensor, target_BN: Tensor) -> Tensor:
        """The sum of the losses of tokens."""
        assert self.lm_head is not None
        losses_BN, _ = self.lm_head(x_BNE, target_BN)
        loss: Tensor = losses_BN.sum()
        return loss


def torch_side(case: Case, seed: int, setting: PipelineSetting, meshes: Meshes) -> Made:
    """The decoder cut by hand, under torch's schedule; micro-batches are padded to the longest."""
    rank, stages = dist.get_rank(), RANKS * case.virtual
    whole_model = decoder_of(seed, setting)
    bounds = stage_bounds([1.0] * setting.blocks, Pipeline(RANKS, case.virtual))
    parts = {stage: HandCut(whole_model, bounds[stage]) for stage in range(rank, stages, RANKS)}
    del whole_model
    batches = batches_of(case, seed, setting)
    longest = max(ids.shape[1] for ids in batches)
    ids_BN = torch.cat([nn.functional.pad(ids, (0, longest - ids.shape[1])) for ids in batches])
    targets = [nn.functional.pad(next_tokens(ids), (0, longest - ids.shape[1]), value=IGNORED) for ids in batches]
    target_BN, count = torch.cat(targets), len(batches)
    ends = parts.get(stages - 1)

    def loss_of(x_BNE: Tensor, target_BN: Tensor) -> Tensor:
        assert ends is not None
        return ends.loss(x_BNE, target_BN) / count

    made: list[Any] = [PipelineStage(part, stage, stages, CPU) for stage, part in parts.items()]
    schedule: Any = (
        Schedule1F1B(made[0], count, loss_of, scale_grads=False)
        if case.virtual == 1
        else ScheduleInterleaved1F1B(made, count, loss_of, scale_grads=False)
    )

    def step() -> float:
        losses: list[Tensor] = []
        first, last = ((ids_BN,) if 0 in parts else ()), ({"target": target_BN, "losses": losses} if ends else {})
        schedule.step(*first, **last, return_outputs=False)
        return sum(float(loss.detach()) for loss in losses)

    return nn.ModuleList(parts.values()), step


SIDES = {OURS: our_side, TORCH: torch_side}


# -- measurement ------------------------------------------------------------------------------------------------------------


def _timed(settings: dict[str, Any], case: dict[str, Any]) -> list[dict[str, list[tuple[float, float, float]]]]:
    """By seed and side: (wall seconds, processor seconds, loss) of each round on this process, from one barrier to the next."""
    setting, own, meshes = PipelineSetting(**settings), Case(**case), Meshes()
    found = []
    for seed in range(setting.seeds):
        sides = {name: make(own, seed, setting, meshes) for name, make in SIDES.items()}
        told: dict[str, list[tuple[float, float, float]]] = {name: [] for name in sides}
        for number in range(WARM + setting.rounds):
            for name in [*sides][:: 1 if number % 2 else -1]:
                model, step = sides[name]
                model.zero_grad()
                dist.barrier()
                wall, processor = time.perf_counter(), time.process_time()
                loss = step()
                processor = time.process_time() - processor
                dist.barrier()
                if number >= WARM:
                    told[name].append((time.perf_counter() - wall, processor, loss))
        found.append(told)
    return found


def _gap(settings: dict[str, Any], case: dict[str, Any]) -> float:
    """How far the gradients of this process's blocks lie from torch's, of the greatest entry of each."""
    setting, own, meshes = PipelineSetting(**settings), Case(**case), Meshes()
    (ours, our_step), (theirs, their_step) = (make(own, 0, setting, meshes) for make in SIDES.values())
    our_step(), their_step()
    expected = {name.partition(".")[2]: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    found = {name: p.grad for name, p in ours.named_parameters() if name in expected and p.grad is not None}
    if found.keys() != expected.keys():
        raise ValueError(f"not in both: {sorted(found.keys() ^ expected.keys())}")
    return max(float(abs(whole(found[name]) - whole(grad)).max() / grad.abs().max()) for name, grad in expected.items())


def _peak(settings: dict[str, Any], case: dict[str, Any], side: str) -> int:
    """The most bytes of tensors on this process in a side's second step."""
    setting = PipelineSetting(**settings)
    model, step = SIDES[side](Case(**case), 0, setting, Meshes())
    step()
    model.zero_grad()
    gc.collect()
    resident = local_bytes(each for each in gc.get_objects() if isinstance(each, Tensor))
    dist.barrier()
    return peak_bytes(Device("cpu", 0), resident, step)


@dataclass(frozen=True)
class Row:
    """What a case gave: ratios, ours over torch's, of wall and processor seconds round by round, and of each process's memory."""

    case: Case
    walls: dict[str, list[float]]
    processors: dict[str, list[float]]
    losses: dict[str, list[float]]
    peaks: dict[str, list[int]]
    gap: float

    def ratio(self, told: dict[str, list[float]]) -> float:
        """The median of the rounds' ratios."""
        return statistics.median(a / b for a, b in zip(told[OURS], told[TORCH], strict=True))

    @property
    def memory(self) -> list[float]:
        """The ratio of each process."""
        return [a / b for a, b in zip(self.peaks[OURS], self.peaks[TORCH], strict=True)]

    def passed(self) -> bool:
        """True where gradients agree, and ratios keep their goals; those of changing shapes have none."""
        kept = self.ratio(self.walls) <= TIME and max(self.memory) <= MEMORY
        return self.gap <= NEAR and (kept or not self.case.fixed)

    def line(self) -> str:
        """The figures in words."""
        ours, theirs = (1000 * statistics.median(self.walls[name]) for name in (OURS, TORCH))
        peaks = ", ".join(
            f"{a / 2**20:.1f} MiB of {b / 2**20:.1f}" for a, b in zip(self.peaks[OURS], self.peaks[TORCH], strict=True)
        )
        ratios = ", ".join(f"{ratio:.3f}" for ratio in self.memory)
        loss = max(abs(a / b - 1) for a, b in zip(self.losses[OURS], self.losses[TORCH], strict=True))
        return (
            f"{self.case.name}: {ours:.0f} ms of {theirs:.0f}, step time {self.ratio(self.walls):.3f} (processor {self.ratio(self.processors):.3f}); "
            f"memory {ratios} ({peaks}); losses differ by {loss:.1e}, gradients by {self.gap:.1e}"
            + ("" if self.passed() else " (worse)")
        )


def rows(setting: PipelineSetting, names: list[str] | None = None) -> Iterator[Row]:
    """A row for each case, by worlds of two processes."""
    settings = asdict(setting)
    for case in CASES:
        if names and case.name not in names:
            continue
        own = asdict(case)
        gap = max(run_ranks(_gap, RANKS, settings, own))
        peaks = {side: run_ranks(_peak, RANKS, settings, own, side) for side in SIDES}
        told = run_ranks(_timed, RANKS, settings, own, timeout=3600.0)
        walls, processors, losses = (
            {side: [combine(each[column] for each in both) for both in _rounds(told, side)] for side in SIDES}
            for column, combine in ((0, max), (1, sum), (2, sum))
        )
        yield Row(case, walls, processors, losses, peaks, gap)


def _rounds(told: list[Any], side: str) -> list[Any]:
    """What both processes told of each round."""
    of_ranks = [[each for seed in rank for each in seed[side]] for rank in told]
    return list(zip(*of_ranks, strict=True))


def main() -> int:
    """Measure beside torch's stages, and print a line for each schedule; 1 where a goal is missed."""
    parser = argparse.ArgumentParser(prog="python -m tests.claims.pipeline", description=main.__doc__)
    parser.add_argument("--overlap", action="store_true", help="exposed exchanges and the split backward pass instead")
    parser.add_argument("--only", choices=[case.name for case in CASES], action="append", help="these cases alone")
    for name in ("rounds", "seeds", "micro_batches", "tokens"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(PipelineSetting, name), dest=name)
    chosen = vars(parser.parse_args())
    setup()
    torch.set_num_threads(1)
    if chosen.pop("overlap"):
        print(*overlap.model_lines(overlap.TOKENS), sep="\n", flush=True)
        ratio = overlap.split_ratio()
        passed = ratio <= overlap.SPLIT
        print(f"split backward: {ratio:.3f} of the time of a whole one, on one process")
        print(f"{_word(passed)}: split backward <= {overlap.SPLIT}")
        return int(not passed)
    found, names = [], chosen.pop("only")
    for row in rows(PipelineSetting(**chosen), names):
        print(row.line(), flush=True)
        found.append(row)
    passed = all(row.passed() for row in found)
    goals = f"step time <= {TIME}, memory <= {MEMORY} of torch's, fixed shapes; " * any(row.case.fixed for row in found)
    print(f"{_word(passed)}: {goals}gradients within {NEAR}")
    return int(not passed)


def _word(passed: bool) -> str:
    return "PASSED" if passed else "FAILED"


if __name__ == "__main__":
    raise SystemExit(main())
