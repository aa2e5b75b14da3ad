"""What one process of `mmspeed check --parallel` does: training steps of the small run, and what came of them.

`python -m mmspeed.pipelines.selfcheck.worker` is started by `run.py`, once for each process of the layout and once alone.
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

from mmspeed import comm
from mmspeed.config import Config, make_config
from mmspeed.data.collate import draw_quantiles
from mmspeed.data.sampling.order import Batching
from mmspeed.data.sampling.rank_batches import count_present, rank_batches
from mmspeed.device import Device
from mmspeed.loop.optimizers.build import set_learning_rate
from mmspeed.loop.step import train_step
from mmspeed.parallel import TokenLayout, unwrap
from mmspeed.parallel.tensor import local
from mmspeed.pipelines.run.build import Assembly, Placement, assemble, place
from mmspeed.pipelines.selfcheck.children import ERROR, follow_parent, write_error
from mmspeed.pipelines.selfcheck.shrink import ShrunkRun, shrink_run
from mmspeed.protocols import Batch
from mmspeed.shapes import Strides

Arrays = dict[str, "np.ndarray[Any, Any]"]

TIME_STEPS, TIME_SAMPLES, TIME_BINS = 64, 64, 10
UNEVEN_TIMES = 50.0  # chi-square of 9 degrees of freedom: even times exceed it once in ten million tries
CLIP_EPS = 1e-6  # torch's own, in the factor by which gradients are clipped


class MicroBatchDigest(NamedTuple):
    """What a rank met in a micro-batch; `digest` is of all numbers that the model gets."""

    image: bool
    names: list[str]
    weights: list[float]
    digest: str


@dataclass
class StepReport:
    """A step of one kind. `sent`: bytes of all ranks by "kind axis"; `problems` are ready to be read."""

    kind: str
    loss: float
    grad_norm: float
    sent: dict[str, int]
    problems: list[str]
    grads: Arrays = field(default_factory=dict)  # before clipping


@dataclass
class WorkerReport:
    """What a run of the small config gave. `held` and `parameters`: numbers on the rank that holds most, and of the model."""

    steps: list[StepReport]
    strategy: str
    held: int
    parameters: int
    times: list[float]  # smallest and largest model time of many draws
    problems: list[str]

    def save(self, folder: Path) -> None:
        """Write it into a folder."""
        grads = {f"{step.kind}/{name}": grad for step in self.steps for name, grad in step.grads.items()}
        save_file(grads, folder / "grads.safetensors")
        bare = replace(self, steps=[replace(step, grads={}) for step in self.steps])
        (folder / "found.json").write_text(json.dumps(asdict(bare)), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> WorkerReport:
        """What `save` wrote."""
        content = json.loads((folder / "found.json").read_text(encoding="utf-8"))
        steps = {step["kind"]: StepReport(**step) for step in content.pop("steps")}
        for name, grad in load_file(folder / "grads.safetensors").items():
            kind, _, parameter = name.partition("/")
            steps[kind].grads[parameter] = grad
        return cls(steps=list(steps.values()), **content)


def with_plain_optimizer(config: Config) -> Config:
    """The config with float32 parameters that AdamW updates after backward: layouts are compared by gradients, which that leaves whole."""
    memory = {"master": "parameters", "states": "device", "release_gradients": False, "ema": "device"}
    return config.model_copy(
        update={
            "memory": config.memory.model_copy(update=memory),
            "train": config.train.model_copy(update={"optimizer": "adamw"}),
        }
    )


def examine(mini: ShrunkRun, change: Callable[[TokenLayout], TokenLayout] | None = None) -> WorkerReport:
    """One step of each kind over all ranks of the process group; a collective call. Rank 0 has the gradients.

    It is training's own way, but that the learning rate is 0. `change` puts another token layout in place (tests break it so).
    """
    device, config = Device("cpu", 0), with_plain_optimizer(mini.config)
    placement = place(config, device)
    if change is not None:
        placement = replace(placement, layout=change(placement.layout))
    bare = mini.model()
    parts = assemble(config, bare, placement, device)
    set_learning_rate(parts.optimizer, 0.0)  # all kinds of steps meet the same weights
    mini.fill(unwrap(parts.model))
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    batching = mini.batching(bare, world)
    steps = [_step(mini, kind, parts, placement, batching, rank, world) for kind in mini.kinds]
    own = sum(local(p).numel() for p in unwrap(parts.model).parameters())
    times, problems = _times(mini, parts, batching, rank, world)
    return WorkerReport(
        steps=steps,
        strategy=placement.strategy,
        held=max(comm.all_gather_objects(own)),
        parameters=sum(p.numel() for p in unwrap(parts.model).parameters()),
        times=times,
        problems=problems,
    )


def _step(
    mini: ShrunkRun, kind: str, parts: Assembly, placement: Placement, batching: Batching, rank: int, world: int
) -> StepReport:
    draws, ledger, clip = mini.draws(kind), placement.layout.ledger, mini.config.train.clip_norm
    batches = [mini.batch(part) for part in rank_batches(draws, batching, rank, world)]
    grads: Arrays = {}
    assert isinstance(parts.optimizer, Optimizer)
    hook = parts.optimizer.register_step_pre_hook(lambda *_: grads.update(whole_gradients(unwrap(parts.model))))
    before = ledger.copy()
    result = train_step(
        parts.model,
        batches,
        parts.loss_fn,
        parts.optimizer,
        global_samples=count_present(draws),
        clip_norm=clip,
        strategy=placement.strategy,
        tensor=placement.layout.tensor,
    )
    hook.remove()
    if clip is not None:  # undone, so that a wrong norm does not make every gradient look wrong
        scale = min(1.0, clip / (result.grad_norm + CLIP_EPS))
        grads = {name: grad / scale for name, grad in grads.items()}
    sent: Counter[str] = Counter()
    for one in comm.all_gather_objects({" ".join(what): n for what, n in ledger.since(before).bytes.items() if n}):
        sent.update(one)
    everyone = [
        [MicroBatchDigest(*one) for one in row] for row in comm.all_gather_objects([_met(batch) for batch in batches])
    ]
    problems = disagreements(everyone, batching.group, batching.tensor)
    problems += other_gradients(comm.all_gather_objects({name: float(np.abs(g).sum()) for name, g in grads.items()}))
    return StepReport(kind, result.loss, result.grad_norm, dict(sent), problems, grads)


def whole_gradients(model: nn.Module) -> Arrays:
    """The gradients of all parameters that have one, gathered; a collective call where they are sharded."""
    return {
        name: (p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad).detach().float().numpy().copy()
        for name, p in model.named_parameters()
        if p.grad is not None
    }


def disagreements(everyone: Sequence[Sequence[MicroBatchDigest]], group: int, tensor: int) -> list[str]:
    """What is wrong with the micro-batches that the ranks met, by rank.

    The ranks of a group must meet the same videos with the same noise, times and captions (the tensor-parallel ones the same images),
    and of every sample the weights of all ranks must sum to 1.
    """
    found: list[str] = []
    if len({len(rows) for rows in everyone}) > 1:
        return ["ranks have different numbers of micro-batches"]
    total: defaultdict[str, float] = defaultdict(float)
    for rank, rows in enumerate(everyone):
        for number, met in enumerate(rows):
            together = tensor if met.image else group
            first = rank - rank % together
            if met != everyone[first][number]:
                found.append(
                    f"ranks {first} and {rank} compute micro-batch {number} together and meet different samples"
                )
            for name, weight in zip(met.names, met.weights, strict=True):
                total[name] += weight
    off = {name: weight for name, weight in total.items() if abs(weight - 1.0) > 1e-6}
    if off:
        name = min(off)
        found.append(f"sample {name} counts {off[name]:.4g} times over all ranks, not once ({len(off)} such samples)")
    return found


def other_gradients(everyone: Sequence[dict[str, float]], tolerance: float = 1e-4) -> list[str]:
    """Parameters of whose gradient ranks have different sums (of absolute values), though all should have the same."""
    first, found = everyone[0], []
    least = 1e-3 * max(first.values(), default=0.0)
    for rank, sums in enumerate(everyone):
        names = [n for n in first if n not in sums or abs(sums[n] - first[n]) > tolerance * max(abs(first[n]), least)]
        if names:
            found.append(f"rank {rank} has another gradient of {names[0]} than rank 0 ({len(names)} such parameters)")
    return found


def uneven(counts: Sequence[int]) -> float:
    """Chi-square of a histogram against an even one."""
    expected = sum(counts) / len(counts)
    return sum((count - expected) ** 2 for count in counts) / expected if expected else 0.0


def _times(
    mini: ShrunkRun, parts: Assembly, batching: Batching, rank: int, world: int
) -> tuple[list[float], list[str]]:
    """The range of times over many steps, and which ranks meet a part of it only: each must meet all of it evenly."""
    kind = mini.kinds[-1]
    names = [
        draw.name
        for step in range(TIME_STEPS)
        for part in rank_batches(mini.draws(kind, TIME_SAMPLES, step), batching, rank, world)
        for draw, weight in part
        if weight
    ]
    u_B = draw_quantiles(names, mini.config.seed)
    counts = torch.histc(u_B.float(), TIME_BINS, 0.0, 1.0).long().tolist()
    everyone = comm.all_gather_objects(counts)
    problems = [
        f"rank {place} meets the times unevenly: of ten equal parts of their distribution {found} samples"
        for place, found in enumerate(everyone)
        if uneven(found) > UNEVEN_TIMES
    ]
    t_B = parts.objective.time_from_quantile(u_B)
    ends = comm.all_gather_objects([t_B.min().item(), t_B.max().item()])
    return [min(low for low, _ in ends), max(high for _, high in ends)], problems


def _met(batch: Batch) -> MicroBatchDigest:
    digest = hashlib.sha256()
    for tensor in [
        *(batch.movable()[name] for name in sorted(batch.movable()) if name != "weights_B"),
        batch["quantiles"],
    ]:
        assert tensor is not None
        digest.update(tensor.contiguous().numpy().tobytes())
    names = ["/".join(map(str, name)) for name in batch.names]
    return MicroBatchDigest(batch.bucket.is_image, names, batch.weights_I.tolist(), digest.hexdigest())


def main() -> None:
    """Do the job on standard input: this rank's part of the layout's run, or the run alone."""
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
    mini = shrink_run(make_config(job["config"]), Strides(*job["strides"]))
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(job["store"], job["world"]),
        rank=job["rank"],
        world_size=job["world"],
        timeout=datetime.timedelta(seconds=job["timeout"]),
    )
    found = examine({"layout": mini, "alone": mini.alone(), "exact": mini.exact()}[job["run"]])
    if job["rank"] == 0:
        found.save(Path(job["folder"]))
    comm.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
