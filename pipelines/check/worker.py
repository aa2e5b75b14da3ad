"""Run one process of `mmspeed check --parallel`: training steps of the small task, and a report on them.

`run.py` starts `python -m mmspeed.pipelines.check.worker` once for each process of the layout and once alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from mmspeed import comm, rng
from mmspeed.config import RunConfig, make_config
from mmspeed.config.parallel import ParallelConfig
from mmspeed.config.tasks import TASKS, TaskEntry, referred
from mmspeed.device import Device
from mmspeed.errors import UserError
from mmspeed.initialize import initial_value, set_parameter
from mmspeed.loop.optimizers.learning_rate import set_learning_rate
from mmspeed.loop.step import train_step
from mmspeed.parallel import uncrossed, unwrap
from mmspeed.parallel.tensor import local
from mmspeed.pipelines.check.children import ERROR, follow_parent, write_error
from mmspeed.pipelines.run.assembly import Assembly, Placement, assemble, place
from mmspeed.pipelines.tasks import as_task, make_task
from mmspeed.protocols import Batch, CheckTask, RunPlace

Arrays = dict[str, "np.ndarray[Any, Any]"]

OFF_START = 0.1  # standard deviation of scales and biases around their ones and zeros
CLIP_EPS = 1e-6  # torch's own, in the factor by which gradients are clipped


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
    """The report on a run of the small task. `held` and `parameters`: elements on the rank that holds most, and of the model.

    `lines`: the task's lines on its draws.
    """

    steps: list[StepReport]
    strategy: str
    held: int
    parameters: int
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


def alone(config: RunConfig) -> RunConfig:
    """The config on one process."""
    return config.model_copy(update={"parallel": ParallelConfig()})


def exact(config: RunConfig) -> RunConfig:
    """The config on one process in float32."""
    device = config.device.model_copy(update={"dtype": "float32"})
    return alone(config).model_copy(update={"device": device})


RUNS: dict[str, Callable[[RunConfig], RunConfig]] = {"layout": lambda config: config, "alone": alone, "exact": exact}


def with_plain_optimizer(config: RunConfig) -> RunConfig:
    """The config with float32 parameters that AdamW updates after backward: this leaves the gradients whole, to be compared."""
    memory = {"master": "parameters", "states": "device", "release_gradients": False, "ema": "device"}
    return config.model_copy(
        update={
            "memory": config.memory.model_copy(update=memory),
            "train": config.train.model_copy(update={"optimizer": "adamw"}),
        }
    )


def examine(check: CheckTask) -> WorkerReport:
    """Take a step of each kind over all ranks of the process group; a collective call. Rank 0 has the gradients.

    The steps are those of training, with a learning rate of 0.
    Raises UserError for a task whose steps have several updates, or train several roles.
    """
    device = Device("cpu", 0)
    check = check.with_config(with_plain_optimizer(check.config))
    config, task = check.config, check.task()
    placement = place(config, device)
    parts = assemble(config, as_task(task, config), task.build(), placement, device)
    if len(parts.learners) > 1:
        raise UserError(f"--parallel compares one update, and a step of the task {task.name} has {len(parts.learners)}")
    if len(parts.roles) > 1:
        raise UserError(f"--parallel compares one model, and the task {task.name} trains {', '.join(parts.roles)}")
    set_learning_rate(parts.optimizer, 0.0)  # all kinds of steps start from the same weights
    model = unwrap(parts.model)
    fill(model, config.seed)
    where = placement.at(device, config.run_dir)
    steps = [_step(check, kind, parts, placement, where) for kind in check.kinds]
    problems, lines = check.problems(where)
    problems = [*problems, *never_crossed(model)]
    return WorkerReport(
        steps=steps,
        strategy=placement.strategy,
        held=max(comm.all_gather_objects(sum(local(p).numel() for p in model.parameters()))),
        parameters=sum(p.numel() for p in model.parameters()),
        lines=lines,
        problems=problems,
    )


def never_crossed(model: nn.Module) -> list[str]:
    """Boundaries of the model's plan that no process crossed in any step, and that were thus not tried; a collective call."""
    by_rank = [set(names) for names in comm.all_gather_objects(uncrossed(model))]
    return [f"the boundary {name} was never crossed" for name in sorted(set.intersection(*by_rank))]


def fill(model: nn.Module, seed: int) -> None:
    """Give every parameter a value off its start, drawn by name: the zeros of a fresh model would hide most gradients."""
    for name, parameter in model.named_parameters():
        shape = parameter.shape
        value = initial_value(name, shape, seed, zero=False) if shape else torch.zeros(())
        if parameter.dim() < 2:  # matrices are drawn already
            value = value + OFF_START * rng.normal(shape, seed, "off start", name)
        set_parameter(parameter, value)


def _step(check: CheckTask, kind: str, parts: Assembly, placement: Placement, where: RunPlace) -> StepReport:
    data, ledger, config = check.step(kind, where), placement.layout.ledger, check.config
    batches, clip = list(data.batches), config.train.clip_norm
    grads: Arrays = {}
    assert isinstance(parts.optimizer, Optimizer)
    hook = parts.optimizer.register_step_pre_hook(lambda *_: grads.update(whole_gradients(unwrap(parts.model))))
    before = ledger.copy()
    result = train_step(
        parts.models,
        parts.learners,
        batches,
        data.divisors,
        clip_norm=clip,
        tensor=placement.layout.tensor,
        weight=data.weight,
    )
    hook.remove()
    if clip is not None:  # undone, so that a wrong norm does not make every gradient look wrong
        scale = min(1.0, clip / (result.grad_norm + CLIP_EPS))
        grads = {name: grad / scale for name, grad in grads.items()}
    sent: Counter[str] = Counter()
    for one in comm.all_gather_objects({" ".join(what): n for what, n in ledger.since(before).bytes.items() if n}):
        sent.update(one)
    by_rank = [
        [MicroBatchDigest(*one) for one in row] for row in comm.all_gather_objects([_met(batch) for batch in batches])
    ]
    problems = disagreements(by_rank, config.parallel.together(split=True), config.parallel.together(split=False))
    problems += other_gradients(comm.all_gather_objects({name: float(np.abs(g).sum()) for name, g in grads.items()}))
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


def other_gradients(by_rank: Sequence[dict[str, float]], tolerance: float = 1e-4) -> list[str]:
    """Lines on ranks whose sums of absolute gradients differ from rank 0's, by parameter, though all should have the same."""
    first, problems = by_rank[0], []
    least = 1e-3 * max(first.values(), default=0.0)
    for rank, sums in enumerate(by_rank):
        names = [n for n in first if n not in sums or abs(sums[n] - first[n]) > tolerance * max(abs(first[n]), least)]
        if names:
            problems.append(
                f"rank {rank} has another gradient of {names[0]} than rank 0 ({len(names)} such parameters)"
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
    import datetime

    import torch.distributed as dist

    os.environ.update(RANK=str(job["rank"]), LOCAL_RANK=str(job["rank"]), WORLD_SIZE=str(job["world"]))
    TASKS[job["config"]["task"]] = TaskEntry(**job["classes"])
    config = make_config(job["config"])
    if job["builder"] is not None:
        check: CheckTask = referred(job["builder"])(config, job["known"])
    else:
        check = make_task(config).domain.shrunk(job["known"])
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(job["store"], job["world"]),
        rank=job["rank"],
        world_size=job["world"],
        timeout=datetime.timedelta(seconds=job["timeout"]),
    )
    report = examine(check.with_config(RUNS[job["run"]](check.config)))
    if job["rank"] == 0:
        report.save(Path(job["folder"]))
    comm.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
