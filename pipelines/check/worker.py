"""Run one process of `mmspeed check --parallel`: an ordinary run's first steps, of a small config, and a report on them.

`layouts.py` starts `python -m mmspeed.pipelines.check.worker` once for each process of the layout and once alone.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import sys
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from safetensors.numpy import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from mmspeed import comm
from mmspeed.config import RunConfig, make_config
from mmspeed.config.tasks import TASKS, TaskEntry
from mmspeed.device import Device
from mmspeed.errors import UserError
from mmspeed.initialize import set_parameter
from mmspeed.loop.optimizers.learning_rate import set_learning_rate
from mmspeed.loop.step import train_step
from mmspeed.models.adapters import is_adapter
from mmspeed.parallel import uncrossed, unwrap
from mmspeed.parallel.tensor import local
from mmspeed.pipelines.check.children import ERROR, follow_parent, write_error
from mmspeed.pipelines.check.exchanges import wrong_exchanges
from mmspeed.pipelines.domains.small import value_off_start
from mmspeed.pipelines.run.assembly import Assembly, Placement, assemble, place
from mmspeed.pipelines.tasks import make_task
from mmspeed.plan.schedules import Pipeline
from mmspeed.protocols import Batch, StepData, source_of

Arrays = dict[str, "np.ndarray[Any, Any]"]

CLIP_EPS = 1e-6  # torch's own, in the factor by which gradients are clipped
TIME_STEPS, TIME_BINS = 96, 10  # further steps whose times are compared with their distribution
UNEVEN_TIMES = 50.0  # chi-square of 9 degrees of freedom: uniform times exceed it once in ten million tries


class MicroBatchDigest(NamedTuple):
    """The contents of a rank's micro-batch. `splits`: whether a group computes its items together; `digest`: of all its tensors."""

    splits: bool
    names: list[str]
    weights: list[float]
    digest: str


@dataclass
class StepReport:
    """A step of one kind. `sent`: bytes of all ranks by "kind axis"; `problems` are lines of the report."""

    kind: str
    loss: float
    grad_norm: float
    sent: dict[str, int]
    problems: list[str]
    grads: Arrays = field(default_factory=dict)  # before clipping


@dataclass
class WorkerReport:
    """The report on a small run. `held` and `parameters`: elements on the rank that holds most, and of the model.

    `order`: names of the model's parameters, from its input to its output; `lines` and `problems`: of all steps together.
    """

    steps: list[StepReport]
    strategy: str
    held: int
    parameters: int
    order: list[str]
    lines: list[str]
    problems: list[str]

    def save(self, folder: Path) -> None:
        """Write the report into a folder."""
        grads = {f"{step.kind}/{name}": grad for step in self.steps for name, grad in step.grads.items()}
        save_file(grads, folder / "grads.safetensors")
        bare = replace(self, steps=[replace(step, grads={}) for step in self.steps])
        (folder / "found.json").write_text(json.dumps(asdict(bare)), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> WorkerReport:
        """The report that `save` wrote."""
        content = json.loads((folder / "found.json").read_text(encoding="utf-8"))
        steps = {step["kind"]: StepReport(**step) for step in content.pop("steps")}
        for name, grad in load_file(folder / "grads.safetensors").items():
            kind, _, parameter = name.partition("/")
            steps[kind].grads[parameter] = grad
        return cls(steps=list(steps.values()), **content)


def examine(config: RunConfig, kinds: Sequence[str]) -> WorkerReport:
    """Take the first steps of a run, one of each kind, over all ranks of the process group; a collective call. Rank 0 has the gradients.

    The learning rate is 0. Raises UserError for a task whose steps have several updates, or train several roles.
    """
    device, task = Device("cpu", 0), make_task(config)
    placement = place(config, device)
    where = placement.at(device, config.run_dir)
    task.domain.open(where)
    parts = assemble(config, task, task.build(), placement, device)
    if len(parts.learners) > 1:
        raise UserError(f"--parallel compares one update, and a step of the task {task.name} has {len(parts.learners)}")
    if len(parts.roles) > 1:
        raise UserError(f"--parallel compares one model, and the task {task.name} trains {', '.join(parts.roles)}")
    set_learning_rate(parts.optimizer, 0.0)  # all steps start from the same weights
    model = unwrap(parts.model)
    if source_of(model) is None:
        for name, parameter in model.named_parameters():
            set_parameter(parameter, value_off_start(name, parameter.shape, config.seed))
    for parameter, name in [(own, name) for name, own in model.named_parameters() if is_adapter(name)]:
        set_parameter(parameter, value_off_start(name, parameter.shape, config.seed))  # of zeros A has no gradient
    with closing(task.data(where).steps(0, len(kinds) + TIME_STEPS)) as steps:
        reports = [_step(config, kind, step, parts, placement) for kind, step in zip(kinds, steps, strict=False)]
        lines, problems = times(steps)
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    for others in comm.all_gather_objects(sizes) if placement.mesh.staged else ():
        sizes |= others
    return WorkerReport(
        steps=reports,
        strategy=placement.strategy,
        held=max(comm.all_gather_objects(sum(local(p).numel() for p in model.parameters()))),
        parameters=sum(sizes.values()),
        order=list(sizes),
        lines=lines,
        problems=[*problems, *never_crossed(model)],
    )


def times(steps: Iterator[StepData]) -> tuple[list[str], list[str]]:
    """(a line, a problem for each rank with uneven times) of further steps; a collective call. Empty for items without times.

    Over many draws the times of each rank fill their distribution evenly.
    """
    quantiles: list[float] = []
    for step in steps if dist.get_world_size() > 1 else ():
        drawn = [
            item.quantile
            for batch in step.batches
            for item, weight in zip(batch.items, batch.weights_I.tolist(), strict=True)
            if weight and item.quantile is not None
        ]
        if not any(comm.all_gather_objects(bool(drawn))):
            break
        quantiles += drawn
    counts, _ = np.histogram(quantiles, TIME_BINS, (0.0, 1.0))
    by_rank = comm.all_gather_objects(counts.tolist())
    problems = [
        f"rank {rank} has uneven times: {counts} samples in ten equal parts of their distribution"
        for rank, counts in enumerate(by_rank)
        if uneven(counts) > UNEVEN_TIMES
    ]
    least = min(sum(counts) for counts in by_rank)
    return [f"times of {least} draws and more on each process"] if least else [], problems


def uneven(counts: Sequence[int]) -> float:
    """The chi-square of a histogram against a uniform one."""
    expected = sum(counts) / len(counts)
    return sum((count - expected) ** 2 for count in counts) / expected if expected else 0.0


def never_crossed(model: nn.Module) -> list[str]:
    """Boundaries of the model's plan that no process crossed in any step, and that were thus not tried; a collective call."""
    by_rank = [set(names) for names in comm.all_gather_objects(uncrossed(model))]
    return [f"the boundary {name} was never crossed" for name in sorted(set.intersection(*by_rank))]


def _step(config: RunConfig, kind: str, step: StepData, parts: Assembly, placement: Placement) -> StepReport:
    """The report on a step; it alone knows how training takes one."""
    batches, clip, model = list(step.batches), config.train.clip_norm, unwrap(parts.model)
    ledger, grads = placement.layout.ledger, Arrays()
    assert isinstance(parts.optimizer, Optimizer)
    hook = parts.optimizer.register_step_pre_hook(lambda *_: grads.update(whole_gradients(model)))
    before = ledger.copy()
    result = train_step(
        parts.models,
        parts.learners,
        batches,
        step.divisors,
        clip_norm=clip,
        tensor=placement.layout.tensor,
        weight=step.weight,
        mesh=placement.mesh,
    )
    hook.remove()
    if clip is not None:  # undone, so that a wrong norm does not make every gradient look wrong
        scale = min(1.0, clip / (result.grad_norm + CLIP_EPS))
        grads = {name: grad / scale for name, grad in grads.items()}
    by_rank_sums = comm.all_gather_objects({name: float(np.abs(g).sum()) for name, g in grads.items()})
    if placement.mesh.staged:
        own = {name: [grad.shape, grad.ravel().tolist()] for name, grad in grads.items()}
        for of_rank in comm.all_gather_objects(own):
            grads |= {name: np.array(flat, dtype=np.float32).reshape(shape) for name, (shape, flat) in of_rank.items()}
    sent: Counter[str] = Counter()
    for one in comm.all_gather_objects({" ".join(what): n for what, n in ledger.since(before).bytes.items() if n}):
        sent.update(one)
    by_rank = [
        [MicroBatchDigest(*one) for one in row] for row in comm.all_gather_objects([_met(batch) for batch in batches])
    ]
    last = by_rank[-len(by_rank) // Pipeline.of(config.parallel).ranks :]  # every stage reads the same
    problems = disagreements(last, config.parallel.together(split=True), config.parallel.together(split=False))
    problems += other_gradients(by_rank_sums, staged=placement.mesh.staged)
    splits = any(shape.splits for shape in step.counts)
    problems += wrong_exchanges(model, config.parallel, placement.layout, kind, splits, list(sent))
    return StepReport(kind, result.loss, result.grad_norm, dict(sent), problems, grads)


def whole_gradients(model: nn.Module) -> Arrays:
    """The gradients of all parameters that have one, gathered; a collective call where they are sharded."""
    return {
        name: (p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad).detach().float().numpy().copy()
        for name, p in model.named_parameters()
        if p.grad is not None
    }


def disagreements(by_rank: Sequence[Sequence[MicroBatchDigest]], group: int, tensor: int) -> list[str]:
    """Lines on wrong micro-batches of the ranks; `by_rank` has those of each rank.

    The ranks of a group must have the same items with the same numbers where items are split over the group (else the ranks of a
    tensor-parallel group), and the weights of every item must sum to 1 over all ranks.
    """
    problems: list[str] = []
    if len({len(rows) for rows in by_rank}) > 1:
        return ["ranks have different numbers of micro-batches"]
    total: defaultdict[str, float] = defaultdict(float)
    for rank, rows in enumerate(by_rank):
        for number, met in enumerate(rows):
            together = group if met.splits else tensor
            first = rank - rank % together
            if met != by_rank[first][number]:
                problems.append(
                    f"ranks {first} and {rank} compute micro-batch {number} together and have different samples"
                )
            for name, weight in zip(met.names, met.weights, strict=True):
                total[name] += weight
    off = {name: weight for name, weight in total.items() if abs(weight - 1.0) > 1e-6}
    if off:
        name = min(off)
        problems.append(
            f"sample {name} counts {off[name]:.4g} times over all ranks, not once ({len(off)} such samples)"
        )
    return problems


def other_gradients(by_rank: Sequence[dict[str, float]], tolerance: float = 1e-4, staged: bool = False) -> list[str]:
    """Lines on ranks whose sums of absolute gradients differ from those of the first of their stage, though all should have the same."""
    first, problems = by_rank[0], []
    least = 1e-3 * max(first.values(), default=0.0)
    for rank, sums in enumerate(by_rank):
        if sums.keys() != first.keys() and staged:  # a stage of other parameters
            first = sums
        names = [n for n in first if n not in sums or abs(sums[n] - first[n]) > tolerance * max(abs(first[n]), least)]
        if names:
            problems.append(
                f"rank {rank} has another gradient of {names[0]} than the first of its stage ({len(names)} such parameters)"
                if staged
                else f"rank {rank} has another gradient of {names[0]} than rank 0 ({len(names)} such parameters)"
            )
    return problems


def _met(batch: Batch) -> MicroBatchDigest:
    digest = hashlib.sha256()
    for _, tensor in sorted(batch.tensors.items()):
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    names = ["/".join(map(str, name)) for name in batch.names]
    return MicroBatchDigest(batch.shape.splits, names, batch.weights_I.tolist(), digest.hexdigest())


def main() -> None:
    """Run the job on standard input: this rank's part of the layout's run, or the run alone."""
    job = json.loads(sys.stdin.buffer.readline())
    follow_parent()
    try:
        _work(job)
    except BaseException as error:
        write_error(job[ERROR], error, traceback.format_exc())
        os._exit(1)  # an orderly end would wait for the others


def _work(job: dict[str, Any]) -> None:
    os.environ.update(RANK=str(job["rank"]), LOCAL_RANK=str(job["rank"]), WORLD_SIZE=str(job["world"]))
    TASKS[job["config"]["task"]] = TaskEntry(**job["classes"])
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(job["store"], job["world"]),
        rank=job["rank"],
        world_size=job["world"],
        timeout=datetime.timedelta(seconds=job["timeout"]),
    )
    report = examine(make_config(job["config"]), job["kinds"])
    if job["rank"] == 0:
        report.save(Path(job["folder"]))
    comm.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
