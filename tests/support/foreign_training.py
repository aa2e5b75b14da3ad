"""One training step of a published video transformer by the pipeline's own parts, on any layout, and what proves that techniques ran.

Used by `tests/ranks/test_foreign_train.py`; one spawn of ranks computes several combinations.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from mmspeed.compute.sparse.module import clustered_layers
from mmspeed.config import Config
from mmspeed.device import pick
from mmspeed.loop.gradients import clip_gradients
from mmspeed.memory.chunked import chunked_mlp
from mmspeed.mesh import process_group
from mmspeed.models.families.hunyuan_video15 import HunyuanVideo15Call
from mmspeed.models.families.wan import WanCall
from mmspeed.parallel import parallelize, sum_shared_gradients, uncrossed, unwrap
from mmspeed.pipelines.domains.video.published import PublishedVideoDomain
from mmspeed.pipelines.run import assembly
from mmspeed.pipelines.run.assembly import Placement, assemble, place
from mmspeed.pipelines.tasks import Task, as_task
from mmspeed.pipelines.tuning.memory_search import policies_under_budget
from mmspeed.protocols import Batch, Inputs, ModelCall, RunPlace, StepData, blocks_of
from mmspeed.shapes import as_bucket
from tests.support.published import load, published_config

Combination = dict[str, str]

ODD = "data.buckets=[{frames: 9, height: 48, width: 48}, {frames: 1, height: 48, width: 48}]"
EXACT = "tau: 0, min_tokens: 1, cluster_size: 8, dense_first: 0, dense_last: 0, dense_steps: 0"
# the share of keys of acceptance, by the kernels and by dense attention under the mask of the plan
THIRD = "planner: tiles, keep: 0.3, tile: [1, 2, 2], min_tokens: 1, dense_first: 0, dense_last: 0, dense_steps: 0"
HALF = "planner: tiles, keep: 0.5, tile: [1, 2, 2], min_tokens: 1, dense_first: 0, dense_last: 1, dense_steps: 0"

# setting -> value -> keys of the config. What is not a key of it is done by `Techniques`.
OVERRIDES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "layout": {
        "alone": (),
        "fsdp": ("parallel.strategy=fsdp",),
        "ddp": ("parallel.strategy=ddp",),
        "hsdp": ("parallel.strategy=fsdp", "parallel.dp_replicate=2"),
        "tp": ("parallel.strategy=fsdp", "parallel.tp=2"),
        "tp4": ("parallel.strategy=fsdp", "parallel.tp=4"),
        "ulysses": ("parallel.strategy=fsdp", "parallel.ulysses=2"),
        "ring": ("parallel.strategy=fsdp", "parallel.ring=2"),
        "ring4": ("parallel.strategy=fsdp", "parallel.ring=4"),
        "ulysses ddp": ("parallel.strategy=ddp", "parallel.ulysses=2"),
        "ring ddp": ("parallel.strategy=ddp", "parallel.ring=2"),
        "ulysses hsdp": ("parallel.strategy=fsdp", "parallel.ulysses=2", "parallel.dp_replicate=2"),
        "ulysses x ring ddp": ("parallel.strategy=ddp", "parallel.ulysses=2", "parallel.ring=2"),
        "ulysses x ring": ("parallel.strategy=fsdp", "parallel.ulysses=2", "parallel.ring=2"),
        "tp x ulysses": ("parallel.strategy=fsdp", "parallel.tp=2", "parallel.ulysses=2"),
        "tp x ring": ("parallel.strategy=fsdp", "parallel.tp=2", "parallel.ring=2"),
    },
    "keeping": {
        "all": (),
        "block": ("memory.activation_policy.block=recompute",),
        "again": ("memory.activation_policy.block=recompute", "memory.exchange_again=true"),
        "selective": ("memory.activation_policy.block=selective",),
        "regions": tuple(f"memory.activation_policy.{r}=recompute" for r in ("attention", "cross_attention", "mlp")),
        "offload": ("memory.activation_policy.block=offload", "memory.offload_from=1"),
        "chunks": ("memory.mlp_chunk=8",),
        "chunks, block": ("memory.mlp_chunk=8", "memory.activation_policy.block=recompute"),
        "compiled": ("train.compile=true",),
        "compiled, block": ("train.compile=true", "memory.activation_policy.block=recompute"),
        "budget": (),
    },
    "sparse": {
        "no": (),
        "all kept": (f"model.sparse={{{EXACT}}}",),
        "half": (f"model.sparse={{{HALF}}}",),
        "30 %": (f"model.sparse={{{THIRD}}}",),
        "30 %, by the mask": (f"model.sparse={{{THIRD}, backend: masked}}",),
    },
    "shape": {"video": (), "odd": (ODD,), "image": ()},
    "text": {
        "given": (),
        "some": ("train.caption_dropout=0.5",),
        "none": ("train.caption_dropout=1.0",),
        "long": ("text.max_tokens=512",),
    },
    "micro": {"3": (), "2": ("train.micro_batch_size=2",), "1": ("train.micro_batch_size=1",)},
}
DATA = ("shape", "text")  # settings that one process has too
LONG = (131, 77)  # tokens of captions, odd and uneven
# Captions of few tokens are filled up to few: among 512, of which most are zeros, gradients of cross-attention cancel to rounding
CALLS: Mapping[str, ModelCall] = {
    "wan": WanCall(text_tokens=9),
    "hunyuan15": HunyuanVideo15Call(glyph_tokens=9, image_tokens=3),
}


TOLERANCE = 1e-5  # of a gradient's largest entry


@dataclass
class Step:
    """What a step gave on one process of it: its share of the loss, whole gradients, their norm, and counters."""

    loss: float
    gradients: dict[str, np.ndarray]
    norm: float
    counters: dict[str, Any]


def overrides(combination: Combination, folder: Path, settings: Sequence[str] | None = None) -> tuple[str, ...]:
    """The keys of the config that a combination sets."""
    results = [key for name in settings or combination for key in OVERRIDES[name][combination[name]]]
    if combination["shape"] == "odd":
        results.append(f"data.cache={folder / ('long' if combination['text'] == 'long' else 'odd')}")
    return tuple(results)


def take_step(
    folder: str,
    name: str,
    combination: Combination,
    settings: Sequence[str] | None = None,
    dtype: torch.dtype = torch.float32,
    data_keys: tuple[str, ...] = (),
) -> Step:
    """A step of a combination, or of some settings of it alone, on however many ranks call this.

    `data_keys`: keys of the config that name other data than the usual.
    With float64 weights and latents as `dtype`, on one process, its gradients show the rounding of those in float32.
    """
    label = re.sub("[^a-z0-9-]", "_", "-".join(combination.values()))
    config = published_config(
        Path(folder), name, f"name={label}", *overrides(combination, Path(folder), settings), *data_keys
    )
    device, techniques = pick("cpu"), Techniques()
    with process_group(device), techniques.watched():
        # the class's own for long captions: Wan attends to 512 tokens
        call = None if combination["text"] == "long" else CALLS.get(name)
        domain = InNumbers(config, lambda: load(Path(folder), name), call=call)
        domain.dtype = dtype
        task = as_task(domain, config)
        placement = place(config, device)
        where = placement.at(device, config.run_dir)
        domain.open(where)
        choice = None
        if settings is None and combination["keeping"] == "budget":
            choice = under_a_tight_budget(config, task, where)
        parts = assemble(config, task, task.build(), placement, device, choice)
        if dtype == torch.float64:
            parts.model.double()
        techniques.of(parts.model)
        task.prepare(parts.models, where)
        only = all(bucket.is_image for bucket in config.buckets)
        data, batches = wanted_step(domain, where, only or combination["shape"] == "image")
        record = parts.learners[0].run(batches, data.divisors, 1.0)
        sum_shared_gradients(parts.model.parameters(), placement.layout.tensor)
        count = data.divisors["samples"]
        assert count is not None
        loss = sum(float(record.total(kind, device.torch_device)) for kind in record.kinds) / count
        gradients = {}
        for key, parameter in parts.model.named_parameters():
            if not parameter.requires_grad:  # training never reaches it
                continue
            assert parameter.grad is not None, key
            whole = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
            gradients[key.removeprefix("module.")] = whole.detach().clone().numpy()
        norm = float(clip_gradients([parts.model], None, placement.mesh))
        counters = techniques.counters(parts.model, placement)
        if choice is not None:
            counters["budget"] = sorted({way for ways in choice for way in ways.values()})
        counters["micro-batches"] = len(batches)
        return Step(loss, gradients, norm, counters)


class InNumbers(PublishedVideoDomain):
    """The video task with latents of a number type."""

    dtype: torch.dtype

    def inputs(self, model: nn.Module, batch: Batch, *more: Any, **given: Any) -> Inputs:
        return super().inputs(model, batch.to(batch.weights_I.device, self.dtype), *more, **given)


def wanted_step(task: PublishedVideoDomain, where: RunPlace, images: bool) -> tuple[StepData, list[Batch]]:
    """The first step of images alone, or of videos, and this process's micro-batches of it."""
    for data in task.data(where).steps(0, 12):
        if {as_bucket(shape).is_image for shape in data.counts} == {images}:
            return data, list(data.batches)
    raise AssertionError("no such step")


def under_a_tight_budget(config: Config, task: Task, where: RunPlace) -> Any:
    """The policies that are chosen under a budget between what a step takes at least and what it takes without one.

    None where these are the same within a hundredth, since a model of two blocks may take most in the update: then nothing is to be chosen.
    """

    def chosen(label: str, budget: int) -> tuple[Any, dict[str, Any]]:
        memory = config.memory.model_copy(update={"budget": budget})
        under = config.model_copy(update={"memory": memory, "name": f"{config.name}-{label}"})
        policies = policies_under_budget(under, task, where.__class__(**{**vars(where), "folder": under.run_dir}))
        return policies, json.loads((under.run_dir / "memory.json").read_text())

    _, roomy = chosen("roomy", 10**9)
    peak, least = roomy["measured"]["peak_bytes"], roomy["least_bytes"]
    if peak - least < peak // 100:
        return None
    choice, _ = chosen("tight", peak - (peak - least) // 4)
    return choice


class Techniques:
    """Counts what techniques did in a step. Graphs are made by torch's `eager` backend: the compiler itself is not what is tested."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()  # of modules whose names end so, and of parts of MLPs
        self.keeping: Any = None
        self.attentions = 0  # of the model's blocks

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, blocks are compiled without a compiler, and parts of MLPs are counted."""
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()

        def spread(*args: Any, compile: bool = False, keeping: Any = None, **options: Any) -> nn.Module:
            self.keeping = keeping
            return parallelize(*args, compile="eager" if compile else False, keeping=keeping, **options)

        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(assembly, "parallelize", spread))
            stack.enter_context(mock.patch("mmspeed.memory.chunks.chunked_mlp", self.counted(chunked_mlp, "chunked")))
            yield

    def counted(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self.calls[name] += 1
            return function(*args)

        return call

    def of(self, model: nn.Module) -> None:
        """Count the calls of one layer of each block; graphs are left alone."""
        self.attentions = 0
        blocks = [block for _, block in blocks_of(unwrap(model))]
        for name, module in (named for block in blocks for named in block.named_modules()):
            for layer in ("attn.to_q", "attn1.to_q", "attn2.to_q"):
                if name == layer:
                    self.attentions += 1
                    module.register_forward_pre_hook(partial(self._called, layer))

    def _called(self, layer: str, module: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling():
            self.calls[layer] += 1

    def counters(self, model: nn.Module, placement: Placement) -> dict[str, Any]:
        """What proves that techniques ran."""
        bare, sizes = unwrap(model), Counter[str]()
        for parameter in bare.parameters():
            if isinstance(parameter, DTensor):
                for placed, name in zip(parameter.placements, parameter.device_mesh.mesh_dim_names or (), strict=True):
                    sizes[f"{'sharded' if isinstance(placed, Shard) else 'whole'} {name}"] += 1
        sparse: Counter[str] = Counter()
        for layer in clustered_layers(bare).values():
            sparse.update({"dense" if kind == "dense" else "sparse": n for kind, n in layer.counter.items()})
        groups = self.keeping.groups if self.keeping is not None else None
        return {
            "calls": dict(self.calls),
            "attentions": self.attentions,
            "ledger": {f"{kind} {axis}": n for (kind, axis), n in placement.layout.ledger.bytes.items()},
            "uncrossed": uncrossed(bare),
            "sharded blocks": sum(isinstance(block, FSDPModule) for _, block in blocks_of(bare)),
            "replicated": type(model).__name__ == "DistributedDataParallel",
            "placed": dict(sizes),
            "sparse": dict(sparse),
            "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
            "offloaded": groups.__self__.moved_out if groups is not None else 0,
        }


def take_steps(
    folder: str, name: str, combinations: list[Combination], data_keys: tuple[str, ...] = ()
) -> list[tuple[float, Any, float, Any]]:
    """Of each combination what `take_step` gave, as plain values; the error of one names it."""
    results = []
    for combination in combinations:
        try:
            step = take_step(folder, name, combination, data_keys=data_keys)
        except Exception as error:
            raise AssertionError(f"{combination}: {error}") from error
        results.append((step.loss, step.gradients, step.norm, step.counters))
    return results


def differences(
    truth: Step, ranks: Sequence[Any], floor: Callable[[str], float], exact: Callable[[], Step]
) -> list[str]:
    """The differences of ranks, as of `take_steps`, from the step of one process: loss, norms and gradients beyond `TOLERANCE`.

    floor: of a gradient, the share of the largest entry of all below which its own is not looked at. exact: makes the step of one process
    in float64; a gradient further off than the tolerance is rounding where that is as near to the ranks as to the one process.
    """
    wrong = []
    loss = sum(rank[0] for rank in ranks)
    if abs(loss - truth.loss) > TOLERANCE * truth.loss:
        wrong.append(f"loss {loss}, of one process {truth.loss}")
    largest = max(np.abs(value).max() for value in truth.gradients.values())
    for number, (_, gradients, norm, _) in enumerate(ranks):
        if abs(norm - truth.norm) > TOLERANCE * truth.norm:
            wrong.append(f"rank {number}: norm {norm}, of one process {truth.norm}")
        assert gradients.keys() == truth.gradients.keys()
        errors = {
            key: np.abs(gradients[key] - value).max() / max(np.abs(value).max(), floor(key) * largest)
            for key, value in truth.gradients.items()
        }
        far = sorted(((error, key) for key, error in errors.items() if error > TOLERANCE), reverse=True)
        if far:
            precise = exact().gradients
            rounding = {key: np.abs(truth.gradients[key] - precise[key]).max() for _, key in far}
            far = [
                (error, key) for error, key in far if np.abs(gradients[key] - precise[key]).max() > 2 * rounding[key]
            ]
        if far:
            wrong.append(f"rank {number}: {len(far)} of {len(errors)} gradients are wrong: {far[:3]}")
    return wrong
