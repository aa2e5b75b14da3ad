"""One training step of a small SoraDiT under any layout of sequence and tensor parallelism, beside the same step of one process.

Used by `tests/ranks/test_sequence.py`; one spawn of ranks computes many cases.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._redistribute import _gen_transform_infos
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from mmspeed import rng
from mmspeed.comm import Ledger
from mmspeed.config.parallel import ParallelConfig
from mmspeed.data.loading.collate import video_batch
from mmspeed.device import Device
from mmspeed.memory import BlockPolicies
from mmspeed.mesh import Mesh, make_mesh
from mmspeed.models import SoraDiT, SoraDiTConfig
from mmspeed.parallel import TokenLayout, make_layout, parallelize, unwrap
from mmspeed.protocols import Batch
from mmspeed.shapes import Bucket
from tests.support.covers import greedy
from tests.support.steps import train_step

RECOMPUTED = BlockPolicies.everywhere({"block": "recompute"})
EXCHANGED_AGAIN = BlockPolicies.everywhere({"block": "recompute"}, exchange_again=True)
KEEPINGS = {
    "checkpointing": RECOMPUTED,
    "compiled": RECOMPUTED,
    "exchange again": EXCHANGED_AGAIN,
    "counted, recomputed": EXCHANGED_AGAIN,
}
BACKENDS = {"compiled": "aot_eager", "counted": "counted", "counted, recomputed": "counted"}  # the last is the caller's

MODEL = SoraDiTConfig(width=48, depth=4, heads=4, latent_channels=3, text_width=10, adaln_rank=4)
SAMPLES = 3  # of a step; odd, so that lanes do not divide them

# latent (T, h, w): odd numbers of frames and places; fewer frames than ranks; an image
LATENTS = {"odd": (5, 6, 10), "few frames": (3, 2, 6), "image": (1, 6, 6)}


@dataclass(frozen=True)
class Case:
    """One layout and one kind of step."""

    ulysses: int
    ring: int
    model: str = "switch"  # switch (re-sharding over ulysses x ring processes), ulysses, space, full
    latent: str = "odd"
    strategy: str = "ddp"
    tp: int = 1
    masked: bool = False
    times: str = "samples"
    text: str = "whole"
    extra: str = ""
    dsp: int = 1  # besides ulysses and ring, of a factorised model

    def __str__(self) -> str:
        return " ".join(str(value) for value in vars(self).values() if value != "")

    @property
    def processes(self) -> int:
        """Processes that share a video's tokens."""
        return self.dsp * self.ulysses * self.ring

    @property
    def parallel(self) -> ParallelConfig:
        """The section of the layout."""
        moves = self.model == "switch"
        return ParallelConfig(
            dsp=self.processes if moves else self.dsp,
            ring=1 if moves else self.ring,
            ulysses=1 if moves else self.ulysses,
            tp=self.tp,
            shard="space" if self.model == "space" else "frames",
            shard_text=2 if self.text == "split" else None,
            ring_window=2 if self.extra == "window" else None,
            exchange="point_to_point" if self.extra == "point_to_point" else "collective",
        )


def layouts(world: int) -> list[tuple[int, int, int]]:
    """(ulysses, ring, tp) with that many ranks or fewer."""
    if world == 1:
        return [(1, 1, 1)]
    degrees = [(u, r, t) for u, r, t in itertools.product((1, 2, 4), (1, 2, 4), (1, 2)) if u * r * t <= world]
    return [d for d in degrees if d[0] * d[1] * d[2] in (1, world) or (world == 4 and d[0] * d[1] * d[2] == 2)]


def cases(world: int) -> list[Case]:
    results = []
    for (u, r, tp), model in itertools.product(layouts(world), ("switch", "ulysses", "full")):
        strategies = ("fsdp",) if tp > 1 else ("ddp", "fsdp")
        for strategy in strategies:
            results.append(Case(u, r, model, "odd", strategy, tp))
    n = world
    splits = [(n, 1), (1, n)] + ([(2, 2)] if n == 4 else [])
    for (u, r), model in itertools.product(splits, ("switch", "ulysses", "space", "full")):
        results += [
            Case(u, r, model, "few frames", "fsdp"),
            Case(u, r, model, "image", "fsdp"),
            Case(u, r, model, masked=True),
            Case(u, r, model, times="frames"),
            Case(u, r, model, text="split"),
            Case(u, r, model, masked=True, times="frames", text="split", strategy="fsdp"),
            Case(u, r, model, strategy="fsdp", extra="checkpointing"),
            Case(u, r, model, strategy="ddp", extra="accumulate"),
            Case(u, r, model, strategy="ddp", extra="point_to_point"),
        ]
    for model in ("switch", "ulysses", "full"):
        u, r = (n // 2, 1)
        results += [
            Case(u, r, model, "few frames", "fsdp", 2),
            Case(u, r, model, "image", "fsdp", 2),
            Case(u, r, model, "odd", "fsdp", 2, masked=True, times="frames", text="split", extra="exchange again"),
        ]
    if n == 4:
        results.append(Case(1, 4, "full", extra="window"))
        results.append(Case(2, 1, "full", strategy="fsdp", extra="replicate"))
        results += products()
    return list(dict.fromkeys(results))


def products() -> list[Case]:
    """Re-sharding over 2 processes times attention over 2, by Ulysses or ring, by frames or space."""
    results = []
    for (u, r), model in itertools.product(((2, 1), (1, 2)), ("ulysses", "space")):
        results += [
            Case(u, r, model, dsp=2),
            Case(u, r, model, "few frames", "fsdp", dsp=2),
            Case(u, r, model, masked=True, times="frames", text="split", strategy="fsdp", dsp=2),
        ]
    return [
        *results,
        Case(2, 1, "ulysses", "image", dsp=2),
        Case(2, 1, "ulysses", strategy="fsdp", extra="exchange again", dsp=2),
    ]


# -- one step ------------------------------------------------------------------------------------------------------------


def build(case: Case) -> SoraDiT:
    """The model with every parameter off its start, so that no zero hides anything."""
    arrangement = "full" if case.model == "full" else "factorised"
    model = SoraDiT(SoraDiTConfig(**{**vars(MODEL), "arrangement": arrangement}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter += 0.1 * rng.normal(parameter.shape, 1, "perturb", name)
    return model


def make_batch(case: Case, places: list[int], weight: float) -> Batch:
    """Samples of a step by their number; the same on any rank."""
    shape = (3, *LATENTS[case.latent])
    lengths = [7, 2, 5]  # of 7 caption tokens
    return video_batch(
        latents_BCThw=torch.stack([rng.normal(shape, 0, "latent", p) for p in places]),
        text_BLD=torch.stack([rng.normal((7, 10), 0, "text", p) for p in places]),
        text_mask_BL=torch.stack([torch.arange(7) < lengths[p] for p in places]),
        weights_B=torch.full((len(places),), weight),
        names=[(str(p), 0, 0) for p in places],
        bucket=Bucket(1 if case.latent == "image" else 5, 16, 16),
        sources=[str(p) for p in places],
        noise_BCThw=torch.stack([rng.normal(shape, 0, "noise", p) for p in places]),
        u_B=torch.tensor([rng.uniform(0, "time", p) for p in places], dtype=torch.float64),
    )


def loss_of(case: Case, model: nn.Module, batch: Batch) -> Tensor:
    """Rectified flow; with times of frames the first latent frame is given (t = 0) and not part of the loss."""
    assert batch["noise"] is not None and batch["quantiles"] is not None
    batch_size, _, frames, height, width = batch["latents"].shape
    t = batch["quantiles"].float()
    if case.times == "frames":
        t = t[:, None].repeat(1, frames)
        t[:, 0] = 0.0
    mix = t.view(batch_size, 1, -1, 1, 1)
    x = (1 - mix) * batch["latents"] + mix * batch["noise"]
    counts = torch.ones(batch_size, frames, height, width, dtype=torch.bool)
    if case.masked:  # the last frames of one sample are padding, the last columns of another
        for place, name in enumerate(batch.names):
            if name[0] == "0":
                counts[place, -(frames // 2) :] = False
            if name[0] == "1":
                counts[place, :, :, -2:] = False
    args = (x, t, batch["text"], batch["text_mask"])
    out = model(*args, counts) if case.masked else model(*args)
    error = (out - (batch["noise"] - batch["latents"])).square()
    return (error * counts[:, None]).mean(dim=(1, 2, 3, 4))


def whole(tensor: Tensor) -> np.ndarray:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().numpy().copy()


class Still(torch.optim.Optimizer):
    """Leaves the parameters as they are."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        """Nothing."""


class Groups:
    """Meshes and layouts of this process, made once: process groups are slow to make."""

    def __init__(self) -> None:
        self.meshes: dict[Any, Mesh] = {}
        self.layouts: dict[Any, TokenLayout] = {}
        self.alone, _ = dist.new_subgroups(1)  # for the truth, which each rank computes for itself

    def of(
        self, replicate: int, shard: int, parallel: ParallelConfig, nodes: Sequence[int] | None = None
    ) -> tuple[Mesh, TokenLayout]:
        sizes = replace(parallel.axis_sizes(), dp_replicate=replicate, dp_shard=shard)
        if sizes not in self.meshes:
            self.meshes[sizes] = make_mesh(Device("cpu", 0), sizes)
        if (sizes, parallel) not in self.layouts:
            self.layouts[sizes, parallel] = make_layout(self.meshes[sizes], parallel, nodes=nodes)
        return self.meshes[sizes], self.layouts[sizes, parallel]

    def forget(self) -> None:
        """End the groups of all meshes: each has threads of its own, thousands where layouts are many, which wake often."""
        _clear_sharding_prop_cache()  # has the meshes of results, and would return them for equal ones
        _gen_transform_infos.cache_clear()
        self.meshes.clear()
        self.layouts.clear()
        for group in list(dist.distributed_c10d._world.pg_map):
            if group not in (dist.group.WORLD, self.alone):
                dist.destroy_process_group(group)


def step(case: Case, world: int, groups: Groups) -> dict[str, Any]:
    """One training step over all ranks of the world: loss, norm, gradients, and what the ledger counted."""
    rank = dist.get_rank() if world > 1 else 0
    model: nn.Module = build(case)
    layout, strategy, before = TokenLayout(), "none", Ledger()
    if world > 1:
        strategy = case.strategy
        replicate = (2 if case.extra == "replicate" else 1) if strategy == "fsdp" else -1
        mesh, layout = groups.of(replicate, -1 if strategy == "fsdp" else 1, case.parallel)
        before = layout.ledger.copy()
        model = parallelize(
            model,
            mesh,
            strategy,
            layout=layout,
            keeping=KEEPINGS.get(case.extra),
            compile=BACKENDS.get(case.extra, False),
        )
    optimizer = Still(model.parameters())
    grads: dict[str, np.ndarray] = {}

    def keep(*_: Any) -> None:
        grads.update({n: whole(p.grad) for n, p in unwrap(model).named_parameters() if p.grad is not None})

    optimizer.register_step_pre_hook(keep)
    # who computes what: a group computes its videos together, images are of tensor-parallel ranks alone
    together = case.tp * (1 if case.latent == "image" else case.processes)
    lane, lanes = rank // together, world // together
    mine = list(range(lane, SAMPLES, lanes))
    rows = -(-SAMPLES // lanes)
    batches = [make_batch(case, mine, 1.0 / together) if mine else make_batch(case, [0], 0.0)]
    if case.extra == "accumulate":
        batches = [
            make_batch(case, [mine[i]], 1.0 / together) if i < len(mine) else make_batch(case, [0], 0.0)
            for i in range(rows)
        ]
    result = train_step(
        model, batches, lambda m, b: loss_of(case, m, b), optimizer,
        global_samples=SAMPLES, clip_norm=0.5, strategy=strategy,  # type: ignore[arg-type]
        tensor=layout.tensor, group=None if world > 1 else groups.alone,
    )  # fmt: skip
    return {
        "loss": result.loss,
        "norm": result.grad_norm,
        "grads": grads,
        "sent": dict(layout.ledger.since(before).bytes),
    }


def truth_of(case: Case) -> Case:
    """The same step on one process."""
    model = "full" if case.model == "full" else "switch"
    return Case(1, 1, model, case.latent, masked=case.masked, times=case.times)


def few_cases(world: int) -> list[Case]:
    """Two cases that are compared with each other, and others with each value of each field and each pair of (ulysses, ring)."""

    def facts(case: Case) -> set[Any]:
        return {*vars(case).items(), (case.ulysses, case.ring)}

    two, every = [Case(world, 1, "switch"), Case(world, 1, "ulysses")], cases(world)
    return [*two, *(every[place] for place in greedy([facts(case) for case in every], facts(two[0]) | facts(two[1])))]


def work(world: int, few: bool) -> list[dict[str, Any]]:
    groups, truths = Groups(), dict[Case, dict[str, Any]]()
    return [compared(case, world, groups, truths) for case in (few_cases if few else cases)(world)]


def compared(case: Case, world: int, groups: Groups, truths: dict[Case, dict[str, Any]]) -> dict[str, Any]:
    """How far a step of all ranks is from that of one process, which each rank computes for itself."""
    actual = step(case, world, groups)
    plain = truth_of(case)
    truth = truths[plain] = truths.get(plain) or step(plain, 1, groups)
    # attention over one frame, as an image's temporal blocks have it, gives queries no gradient but rounding
    least = 1e-3 * max(float(np.abs(grad).max()) for grad in truth["grads"].values())
    gaps = {
        name: float(np.abs(actual["grads"][name] - grad).max() / max(np.abs(grad).max(), least))
        for name, grad in truth["grads"].items()
    }
    worst = max(gaps, key=lambda name: gaps[name])
    return {
        "case": case,
        "names": actual["grads"].keys() == truth["grads"].keys(),
        "loss": abs(actual["loss"] - truth["loss"]) / truth["loss"],
        "norm": abs(actual["norm"] - truth["norm"]) / truth["norm"],
        "gap": gaps[worst],
        "worst": worst,
        "sent": actual["sent"],
    }
