"""Schedules of pipelines on sleeping clocks, beside the simulator: `python -m tests.claims.overlap` prints both steps of each schedule.

The passes of a model whose blocks sleep run on torch's runtime, in as many processes as the pipeline has ranks: a part of a block sleeps as
long as it would compute, and an exchange has come after its time, on one lane of each process. So the table, the turns of passes and the
gradients of weights that wait are those of training. A gap of more than a tenth fails.

A last case computes and exchanges its forward passes again in backward, and runs with passes that alternate and in the orders that are found.

Shares of published shapes and the time of a split backward pass are printed by `python -m tests.claims.pipeline --overlap`.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmspeed.comm import Ledger
from mmspeed.compute.wgrad import Leaves, LeavingLinear, WeightGradients
from mmspeed.config.parallel import ParallelConfig
from mmspeed.device import Device
from mmspeed.loop.pipeline import PipelineRows, PipelineRunner
from mmspeed.mixin import mix_in
from mmspeed.models.language.counts import block_work
from mmspeed.models.language.shapes import SHAPES
from mmspeed.parallel.stages import cut_into_stages
from mmspeed.plan.overlap import Part, exposed, nodes_of, step_of
from mmspeed.plan.schedules import Pipeline, ScheduleName
from mmspeed.plan.traffic import NODE, EvenRouting, token_bytes
from mmspeed.protocols import Batch, Item, Term, Terms
from mmspeed.protocols.plan import Block, ModelPlan, declare_plan
from mmspeed.shapes import Bucket
from tests.support.added_model import Meshes
from tests.support.spawn import run_ranks

UNIT = 0.03  # seconds: long beside what Python and gloo take
LAYER = (0.5, 0.5, 0.4), (0.5, 0.5, 0.5)  # forward, input's and weights' gradients of attention and of experts
FLOPS, INNER, OUTER = 400e12, 450e9, 50e9  # of an H200 at 0.4 of its peak, NVLink one way, a card of 400 Gb/s
MODELS = (("qwen3-30b-a3b", 4, 6, 2), ("deepseek-v3", 16, 2, 8))  # ranks, layers of a stage, nodes of ep
VIRTUAL: dict[ScheduleName, int] = {
    "1f1b": 1,
    "interleaved": 2,
    "zb_h1": 1,
    "zbv": 2,
    "dualpipe_v": 2,
    "overlap": 2,
}  # stages of a rank, by schedule
TOKENS, SPLIT = 8192, 1.03
WITHIN, STEPS = 0.1, 3
CASES: tuple[tuple[int, int, ScheduleName], ...] = (
    (2, 1, "1f1b"), (2, 1, "zb_h1"), (2, 2, "interleaved"), (2, 2, "zbv"), (2, 2, "dualpipe_v"), (2, 2, "overlap"),
    (4, 1, "zb_h1"), (4, 2, "interleaved"), (4, 2, "dualpipe_v"), (4, 2, "overlap"),
)  # fmt: skip


class Link:
    """Messages that come after their time, one behind another."""

    def __init__(self) -> None:
        self.ledger, self._free = Ledger(), 0.0

    def start(self, units: float) -> float:
        """Send a message; returns when it comes."""
        self._free = max(self._free, time.perf_counter()) + units * UNIT
        return self._free

    def wait(self, comes: float) -> None:
        """Give way, then wait for a message."""
        if self.ledger.gives_way is not None:
            self.ledger.gives_way("experts", lambda: sleep_until(comes))
        else:
            sleep_until(comes)


def sleep_until(comes: float) -> None:
    """Sleep until a message has come."""
    time.sleep(max(0.0, comes - time.perf_counter()))


def rest(units: float) -> None:
    """Sleep as long as something computes."""
    time.sleep(units * UNIT)


class SleepingBlock(Leaves):
    """A stage's layers."""

    def __init__(self, parts: list[Part], link: Link, again: bool) -> None:
        super().__init__()
        self.parts, self.link, self.again = parts, link, again
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Passes.apply(x, self.weight, self)  # type: ignore[no-untyped-call]
        return out


class _Passes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, block: SleepingBlock) -> Tensor:
        ctx.block = block
        for part in block.parts:
            rest(part.forward)
            block.link.wait(block.link.start(part.exchange))
        return x + 1

    @staticmethod
    def again(block: SleepingBlock) -> None:
        for part in block.parts if block.again else ():
            rest(part.forward)
            block.link.wait(block.link.start(part.exchange))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        block, gradients = ctx.block, ctx.block._gradients
        _Passes.again(block)
        block.link.wait(block.link.start(block.parts[-1].exchange))
        for place in reversed(range(len(block.parts))):
            part = block.parts[place]
            rest(part.input)
            if gradients is None:
                rest(part.weights)
            else:
                gradients.leave(block.weight, lambda units=part.weights: _slept(units))
            if place:
                block.link.wait(block.link.start(block.parts[place - 1].exchange))
        return grads[0], torch.ones(1) if gradients is None else None, None


def _slept(units: float) -> Tensor:
    rest(units)
    return torch.ones(1)


class SleepingModel(nn.Module):
    """Blocks that sleep."""

    def __init__(self, stages: int, parts: list[Part], link: Link, again: bool) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.zeros(1))
        self.blocks = nn.ModuleList(SleepingBlock(parts, link, again) for _ in range(stages))
        declare_plan(self, ModelPlan(tuple(Block(f"blocks.{place}") for place in range(stages)), carried=("x",)))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.start
        for block in self.blocks:
            x = block(x)
        return x


@dataclass(frozen=True)
class Clocked:
    """A step in units: run on sleeping clocks, and simulated."""

    case: tuple[int, int, ScheduleName]
    ran: float
    simulated: float

    @property
    def gap(self) -> float:
        """How far the run is from the simulation, in parts of it."""
        return self.ran / self.simulated - 1


def parts_of(exchange: float) -> list[Part]:
    """Two layers."""
    return [Part(*each, exchange) for each in LAYER] * 2


def clocked(
    case: tuple[int, int, ScheduleName], batches: int, exchange: float, again: bool = False, file: Path | None = None
) -> float:
    """The seconds of a step, on this process. again: it has recomputed blocks. file: of orders that are searched after the first step."""
    ranks, virtual, schedule = case
    link = Link()
    model = SleepingModel(ranks * virtual, parts_of(exchange), link, again)
    parallel = ParallelConfig(pp=ranks, virtual=virtual, schedule=schedule)
    mesh, _ = Meshes().of(parallel)
    stages = cut_into_stages(model, mesh.across_stages()[0], Pipeline.of(parallel))
    stages.axis = replace(stages.axis, ledger=link.ledger)
    runner = PipelineRunner(model, stages, torch.device("cpu"))
    items = [Batch({"x": torch.zeros(1)}, [Item("0", source="s")], torch.ones(1), Bucket(1, 8, 8))] * batches

    def terms(out: Tensor) -> Terms:
        return {"loss": Term(out, torch.ones(1))}

    first = file if torch.distributed.get_rank() == 0 else None
    rows, taken = PipelineRows(runner, Device("cpu", 0), lambda step: step == 1, first), []
    for step in range(1 + STEPS):  # the first makes what the others use
        if file is not None:
            rows.before_step(step)
        torch.distributed.barrier()
        begun = time.perf_counter()
        runner.run(lambda batch: model(batch["x"]), terms, items, {"samples": float(batches)})
        torch.distributed.barrier()
        taken.append(time.perf_counter() - begun)
        if file is not None and not step:
            rows.row()
    return min(taken[1:])  # what else runs on the machine only adds


def recomputed(case: tuple[int, int, ScheduleName], batches: int, exchange: float, file: Path) -> tuple[float, ...]:
    """Steps with recomputed blocks: of passes that alternate, in the orders that are found, and simulated in the best ones."""
    ranks, virtual, schedule = case
    pipeline, nodes = Pipeline(ranks, virtual, 0, schedule), nodes_of(parts_of(exchange))
    again = nodes._replace(backward=(*nodes.forward, *nodes.backward))
    ran = [max(run_ranks(clocked, ranks, case, batches, exchange, True, each, timeout=500)) for each in (None, file)]
    return (*(each / UNIT for each in ran), step_of(pipeline, batches, [again] * pipeline.stages).step)


def measured(case: tuple[int, int, ScheduleName], batches: int, exchange: float) -> Clocked:
    """Both steps of a case."""
    ranks, virtual, schedule = case
    ran = max(run_ranks(clocked, ranks, case, batches, exchange, timeout=500)) / UNIT
    pipeline = Pipeline(ranks, virtual, 0, schedule)
    simulated = step_of(pipeline, batches, [nodes_of(parts_of(exchange))] * pipeline.stages).step
    return Clocked(case, ran, simulated)


def layer_of(name: str, tokens: int, nodes: int) -> list[Part]:
    """A layer of a published shape: attention, then experts over that many nodes, by the rates above. Attention's pairs are causal."""
    settings = SHAPES[name].settings
    experts, width = settings.experts, settings.hidden_size
    assert experts is not None
    used = experts.top_k + experts.n_shared_experts
    of_experts = 6.0 * tokens * width * experts.moe_intermediate_size * used
    products = block_work(settings, tokens).blocks[settings.num_hidden_layers - 1] - of_experts
    latent = settings.latent
    widths = 2 * settings.head_dim if latent is None else latent.plain + latent.rotary + latent.value
    pairs = float(tokens) ** 2 * settings.num_attention_heads * widths
    routing = EvenRouting(experts.num_experts, experts.top_k, experts.n_group, experts.topk_group)
    sent = token_bytes(routing, nodes * NODE, NODE, width, 2)[1]  # by way of nodes; of four exchanges
    exchange = max(sent.between / OUTER, sent.within / INNER) * tokens / 4
    return [
        Part((products + pairs) / FLOPS, (products + 2 * pairs) / FLOPS, products / FLOPS, exchange),
        Part(of_experts / FLOPS, of_experts / FLOPS, of_experts / FLOPS, exchange),
    ]


def model_lines(tokens: int) -> Iterator[str]:
    """What exchanges add to a step of published shapes."""
    yield f"{FLOPS / 1e12:.0f} TFLOP/s, {INNER / 1e9:.0f} GB/s within a node of {NODE}, {OUTER / 1e9:.0f} GB/s between nodes; {tokens:,} tokens"
    for name, ranks, layers, nodes in MODELS:
        parts = layer_of(name, tokens, nodes)
        share = parts[0].exchange * 4 / sum(part.forward + part.input + part.weights for part in parts)
        yield f"{name}: pp {ranks}, {2 * layers} layers a rank, ep {nodes * NODE}; exchanges take {share:.2f} of what a layer computes"
        for count in (8 * ranks, 16 * ranks):
            shares = []
            for schedule, virtual in VIRTUAL.items():
                stages = [nodes_of(parts * (2 * layers // virtual))] * virtual * ranks
                share = exposed(Pipeline(ranks, virtual, 0, schedule), count, stages).share
                shares.append(f"{schedule} {share:.1%}")
            yield f"  {count} micro-batches: {', '.join(shares)} exposed"


def split_ratio(rounds: int = 60) -> float:
    """Processor time of forward and backward of linear layers whose gradients wait, beside plain ones: the median of the rounds' ratios."""
    torch.set_num_threads(1)
    layers = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
    waiting, gradients = copy.deepcopy(layers), WeightGradients()
    for layer in waiting:
        mix_in(layer, LeavingLinear)._gradients = gradients
    x = torch.randn(512, 512, requires_grad=True)

    def seconds(model: nn.Module) -> float:
        begun = time.process_time()
        model(x).sum().backward()
        gradients.take()()
        return time.process_time() - begun

    ratios = []
    for number in range(rounds):
        taken = {model: seconds(model) for model in ((layers, waiting) if number % 2 else (waiting, layers))}
        ratios.append(taken[waiting] / taken[layers])
    return statistics.median(ratios)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--exchange", type=float, default=0.25)
    parser.add_argument("--per-rank", type=int, default=4, help="micro-batches for each rank")
    chosen = parser.parse_args()
    print(f"{'ranks':>5} {'virtual':>7} {'schedule':>12} {'micro-batches':>13} {'ran':>8} {'simulated':>9} {'gap':>7}")
    worst = 0.0
    for case in CASES:
        count = chosen.per_rank * case[0]
        found = measured(case, count, chosen.exchange)
        worst = max(worst, abs(found.gap))
        print(f"{case[0]:>5} {case[1]:>7} {case[2]:>12} {count:>13} {found.ran:>8.1f} {found.simulated:>9.1f} {found.gap:>7.1%}", flush=True)  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        case, file = CASES[5], Path(folder) / "pipeline.json"
        alternating, ran, simulated = recomputed(case, chosen.per_rank * case[0], 2 * chosen.exchange, file)
        order = json.loads(file.read_text())["orders"][0]["nodes"]
    worst = max(worst, abs(ran / simulated - 1))
    print(f"recomputed, exchanges of {2 * chosen.exchange:g}: {ran:.1f} in the order {order}, {alternating:.1f} alternating, {simulated:.1f} simulated")  # fmt: skip
    print(f"{'PASS' if worst <= WITHIN else 'FAIL'}: the farthest is {worst:.1%} away, of {WITHIN:.0%}")


if __name__ == "__main__":
    main()
