"""What one process of `mmspeed check --parallel` does: training steps of the small run, and what came of them.

`python -m mmspeed.pipelines.selfcheck_worker` is started by `selfcheck.py`, once for each process of the layout and once alone.
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
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mmspeed import comm
from mmspeed.config import make_config
from mmspeed.data import count_present, draw_quantiles, share
from mmspeed.data.order import Batching
from mmspeed.device import Device
from mmspeed.loop.optim import set_learning_rate
from mmspeed.loop.step import train_step
from mmspeed.parallel import TokenLayout, unwrap
from mmspeed.pipelines.assemble import Assembly, Placement, assemble, place
from mmspeed.pipelines.children import ERROR, follow_parent, write_error
from mmspeed.pipelines.miniature import Miniature, miniature
from mmspeed.protocol import Batch
from mmspeed.shapes import Strides

Arrays = dict[str, "np.ndarray[Any, Any]"]

TIME_STEPS, TIME_SAMPLES, TIME_BINS = 64, 64, 10
UNEVEN_TIMES = 50.0  # chi-square of 9 degrees of freedom: even times exceed it once in ten million tries
CLIP_EPS = 1e-6  # torch's own, in the factor by which gradients are clipped


class Met(NamedTuple):
    """What a rank met in a micro-batch; `digest` is of all numbers that the model gets."""

    image: bool
    names: list[str]
    weights: list[float]
    digest: str


@dataclass
class StepFound:
    """A step of one kind. `sent`: bytes of all ranks by "kind axis"; `problems` are ready to be read."""

    kind: str
    loss: float
    grad_norm: float
    sent: dict[str, int]
    problems: list[str]
    grads: Arrays = field(default_factory=dict)  # before clipping


@dataclass
class Found:
    """What a run of the small config gave. `held` and `parameters`: numbers on the rank that holds most, and of the model."""

    steps: list[StepFound]
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
    def load(cls, folder: Path) -> Found:
        """What `save` wrote."""
        content = json.loads((folder / "found.json").read_text(encoding="utf-8"))
        steps = {step["kind"]: StepFound(**step) for step in content.pop("steps")}
        for name, grad in load_file(folder / "grads.safetensors").items():
            kind, _, parameter = name.partition("/")
            steps[kind].grads[parameter] = grad
        return cls(steps=list(steps.values()), **content)


def examine(mini: Miniature, change: Callable[[TokenLayout], TokenLayout] | None = None) -> Found:
    """One step of each kind over all ranks of the process group; a collective call. Rank 0 has the gradients.

    It is training's own way, but that the learning rate is 0. `change` puts another token layout in place (tests break it so).
    """
    device, config = Device("cpu", 0), mini.config
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
    own = sum(_local(p).numel() for p in unwrap(parts.model).parameters())
    times, problems = _times(mini, parts, batching, rank, world)
    return Found(
        steps=steps,
        strategy=placement.strategy,
        held=max(comm.all_gather_objects(own)),
        parameters=sum(p.numel() for p in unwrap(parts.model).parameters()),
        times=times,
        problems=problems,
    )


def _step(
    mini: Miniature, kind: str, parts: Assembly, placement: Placement, batching: Batching, rank: int, world: int
) -> StepFound:
    draws, ledger, clip = mini.draws(kind), placement.layout.ledger, mini.config.train.clip_norm
    batches = [mini.batch(part) for part in share(draws, batching, rank, world)]
    grads: Arrays = {}
    hook = parts.optimizer.register_step_pre_hook(lambda *_: grads.update(whole_gradients(unwrap(parts.model))))
    before = ledger.copy()
    result = train_step(
        parts.model,
        batches,
        parts.loss_fn,
        parts.optimizer,
        global_samples=count_present(draws),
        world=world,
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
    met = [Met(*row) for row in comm.all_gather_objects([]) for row in row]
    everyone = [[Met(*one) for one in row] for row in comm.all_gather_objects([list(_met(b)) for b in batches])]
    problems = disagreements(everyone, batching.group, batching.tensor) + _other_gradients(grads)
    return StepFound(kind, result.loss, result.grad_norm, dict(sent), problems + [str(m) for m in met], grads)
