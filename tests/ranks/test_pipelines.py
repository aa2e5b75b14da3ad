"""Models in pipeline stages, on torch's runtime: gradients and losses of one process, for micro-batches of several shapes in a step.

Tolerance: 1e-5 of a gradient's largest entry; parameters that all stages hold are summed over them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mmspeed import rng
from mmspeed.config.parallel import ParallelConfig
from mmspeed.errors import UserError
from mmspeed.loop.gradients import clip_gradients
from mmspeed.loop.pipeline import runner_of
from mmspeed.loop.runner import SequentialRunner
from mmspeed.models.diffusers.plans import PLANS
from mmspeed.models.language.decoder import Decoder, next_tokens
from mmspeed.models.language.shapes import SHAPES, tiny_twin
from mmspeed.models.sora.model import SoraDiT, SoraDiTConfig
from mmspeed.parallel import parallelize
from mmspeed.parallel.stages import cut_into_stages
from mmspeed.plan.schedules import Pipeline
from mmspeed.protocols import Batch, Item, Term, Terms
from mmspeed.protocols.plan import declare_plan
from mmspeed.shapes import Bucket
from tests.ranks.test_expert_states import config, home, losses, train
from tests.support.added_model import Meshes
from tests.support.foreign_steps import whole
from tests.support.spawn import run_ranks
from tests.support.video_transformers import make_inputs, make_model

__all__ = ["home"]  # a fixture
LAYOUTS = {
    2: [ParallelConfig(pp=2), ParallelConfig(pp=2, virtual=2, extra_warmup=True)],
    4: [
        ParallelConfig(pp=4), ParallelConfig(pp=2), ParallelConfig(pp=2, virtual=2, tp=2), ParallelConfig(pp=2, ulysses=2),
        ParallelConfig(pp=2, ring=2, virtual=2),
    ],
}  # fmt: skip
Made = tuple[nn.Module, list[Batch], Callable[[nn.Module, Batch], Any], Callable[[Any], Terms]]


def moved(model: nn.Module) -> nn.Module:
    """The model with weights by their names."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            around = 1.0 if p.dim() < 2 and name.endswith("weight") else 0.0
            p.copy_(rng.normal(p.shape, 0, "off", name) * 0.2 + around)
    return model


def video(count: int) -> Made:
    batches = []
    for number in range(count):
        frames, height, width = [(2, 4, 4), (3, 2, 4), (1, 4, 6)][number % 3]
        x, y = (rng.normal((2, 4, frames, height, width), 0, kind, number) for kind in ("x", "y"))
        text = rng.normal((2, 3 + number % 2, 8), 0, "text", number)
        tensors = {"x": x, "y": y, "text": text, "mask": torch.ones(text.shape[:2], dtype=torch.bool)}
        items = [Item(f"{number}.{place}", source="s") for place in range(2)]
        batches.append(Batch(tensors, items, torch.ones(2), Bucket(4 * frames - 3, 8 * height, 8 * width)))
    model = moved(SoraDiT(SoraDiTConfig(width=32, depth=4, heads=2, latent_channels=4, text_width=8)))
    times = torch.tensor([0.3, 0.7])

    def call(model: nn.Module, batch: Batch) -> Any:
        return batch, model(batch["x"], times, batch["text"], batch["mask"])

    def terms(out: tuple[Batch, Tensor]) -> Terms:
        return {"loss": Term((out[1] - out[0]["y"]).square().flatten(1).mean(1), out[0].weights_I)}

    return model, batches, call, terms


def language(count: int, **changes: Any) -> Made:
    """With experts, an auxiliary loss and a further token."""
    own = tiny_twin(SHAPES["deepseek-v3"].settings)
    assert own.experts is not None
    settings = replace(own, num_hidden_layers=4, experts=replace(own.experts, balance="micro_batch", dense=(0,)))
    settings = replace(settings, **changes)
    batches = []
    for number in range(count):
        length = 12 + 4 * (number % 3)
        ids = torch.from_numpy(np.random.default_rng(number).integers(0, 512, (1, length)))
        bounds = torch.tensor([0, 5, length], dtype=torch.int32)
        tensors = {"ids": ids, "bounds": bounds, "targets": next_tokens(ids, bounds)}
        batches.append(Batch(tensors, [Item(str(number), source="s")], torch.ones(1), Bucket(1, 8, 8)))

    def call(model: nn.Module, batch: Batch) -> Any:
        return batch, model(batch["ids"], batch["bounds"], batch["targets"])

    def terms(out: tuple[Batch, Any]) -> Terms:
        batch, found = out
        losses = found.loss_BN.sum(1) + sum(loss.sum(1) for loss, _ in found.mtp)
        return {"loss": Term(losses, batch.weights_I), "balance": Term(found.balance_B, batch.weights_I)}

    return moved(Decoder(settings)), batches, call, terms


def published(case: str, count: int) -> Made:
    """A model of diffusers by its plan."""
    depth = {"num_layers": 2, "num_single_layers": 2} if case == "hunyuan" else {"num_layers": 4}
    model = make_model(case, **depth)
    declare_plan(model, PLANS[type(model).__name__](model))
    batches = []
    for number in range(count):
        inputs = make_inputs(case, frames=3 + 2 * (number % 2), text=7, seed=number)
        empty = {"number": torch.tensor([number, number])}
        batches.append(
            Batch(empty, [Item(f"{number}.{place}", source="s") for place in range(2)], torch.ones(2), Bucket(1, 8, 8))
        )
        INPUTS[case, number] = inputs

    def call(model: nn.Module, batch: Batch) -> Any:
        return batch, model(**INPUTS[case, int(batch["number"][0])], return_dict=False)[0]

    def terms(out: tuple[Batch, Tensor]) -> Terms:
        return {"loss": Term(out[1].square().flatten(1).sum(1), out[0].weights_I)}

    return model, batches, call, terms


INPUTS: dict[tuple[str, int], Any] = {}
PUBLISHED = ("wan", "ltx", "cogvideox", "hunyuan")
MODELS: dict[str, Callable[[int], Made]] = {"video": video, "language": language}
MODELS |= {case: partial(published, case) for case in PUBLISHED}


def compared(kind: str, parallel: ParallelConfig, count: int, meshes: Meshes) -> tuple[float, str, float, float]:
    """The farthest gradient of this process's parameters and its name, the gap of the norm, and that of the terms."""
    divisors = {"samples": 2.0 * count}
    model, batches, call, terms = MODELS[kind](count)
    single, share = MODELS[kind](count)[0], 1 / (parallel.group)
    truth = SequentialRunner(single, "none").run(lambda batch: call(single, batch), terms, batches, divisors)
    norm = float(torch.stack([p.grad.norm() for p in single.parameters() if p.grad is not None]).norm())
    mesh, layout = meshes.of(parallel)
    lanes, lane = mesh.reader().count, mesh.reader().index
    (group,) = mesh.across_stages()
    cut_into_stages(model, group, Pipeline.of(parallel))
    model = parallelize(model, mesh, "fsdp", layout=layout)
    own = [replace(batch, weights_I=batch.weights_I * share) for batch in batches[lane::lanes]]
    runner = runner_of(model, "fsdp", torch.device("cpu"))
    for _ in range(2):  # two steps of one runner
        model.zero_grad()
        record = runner.run(lambda batch: call(model, batch), terms, own, divisors)
    from mmspeed.parallel import sum_shared_gradients

    sum_shared_gradients(model.parameters(), layout.tensor)
    found = clip_gradients([model], None, mesh)
    expected = dict(single.named_parameters())
    gaps = [(0.0, "")]
    for name, p in model.named_parameters():
        one = expected[name].grad
        if one is not None and p.grad is not None:
            gaps.append((float(abs(whole(p.grad) - one.numpy()).max() / max(float(one.abs().max()), 1e-12)), name))
        elif one is not None and float(one.abs().max()) > 0:
            gaps.append((1.0, f"{name} has no gradient"))
    total = truth.total("loss", torch.device("cpu"))
    last = mesh.knows_loss and lanes * parallel.group == 1
    term = float(abs(record.total("loss", torch.device("cpu")) / total - 1)) if last else 0.0
    return (*max(gaps), abs(float(found) / norm - 1), term)


def all_compared(kinds: list[str], counts: list[int]) -> list[Any]:
    meshes, world = Meshes(), torch.distributed.get_world_size()
    results = []
    for parallel in LAYOUTS[world]:
        for kind in kinds:
            for count in counts:
                lanes = world // parallel.group // parallel.pp
                results.append((kind, str(parallel.sizes()), count, *compared(kind, parallel, count * lanes, meshes)))
    return results


@pytest.mark.parametrize(
    "world, counts",
    [
        (2, [3]),
        pytest.param(2, [1, 2, 4, 7, 16], marks=pytest.mark.slow),
        pytest.param(4, [1, 4, 13], marks=pytest.mark.slow),
    ],
)
def test_stages_compute_the_gradients_of_one_process(world: int, counts: list[int]) -> None:
    for rank in run_ranks(all_compared, world, ["video", "language"], counts):
        for kind, sizes, count, gap, name, norm, term in rank:
            most = 1e-5 * max(1, count / 8)  # roundings of many micro-batches add up
            assert gap <= most and norm <= 1e-5 and term <= 1e-5, (kind, sizes, count, gap, name, norm, term)


@pytest.mark.slow
def test_stages_of_published_models_compute_the_gradients_of_one_process() -> None:
    for rank in run_ranks(all_compared, 2, list(PUBLISHED), [3]):
        for kind, sizes, count, gap, name, norm, term in rank:
            assert gap <= 1e-5 and norm <= 1e-5 and term <= 1e-5, (kind, sizes, count, gap, name, norm, term)


def test_a_run_goes_through_stages_and_back(home: Path) -> None:
    own = ("model.num_hidden_layers=4", "train.micro_batch_size=1")
    run_ranks(train, 1, str(home), [("pipe-whole", (*own, "train.steps=6"))])
    staged, uneven = ("parallel.pp=2", "parallel.virtual=2"), ("parallel.pp=2", "parallel.stages=[1,3]")
    for steps, world, layout in ((2, 2, staged), (4, 1, ()), (6, 2, uneven)):
        run_ranks(train, world, str(home), [("pipe", (*own, *layout, f"train.steps={steps}"))])
    assert losses(home, "pipe") == pytest.approx(losses(home, "pipe-whole"), rel=2e-5)


@pytest.mark.parametrize(
    "overrides, words",
    [
        (("parallel.virtual=2",), "set pp"),
        (("parallel.stages=[4]",), "set pp, or leave stages out"),
        (("parallel.pp=2", "parallel.stages=[4]"), "write 2 numbers"),
        (("parallel.pp=2", "parallel.stages=[0,4]"), r"write \[1, 4\]"),
        (("parallel.pp=2", "parallel.strategy=ddp"), "fsdp"),
        (("parallel.pp=2", "memory.budget=1GiB"), "budget"),
    ],
)
def test_what_stages_do_not_go_with_is_refused(home: Path, overrides: tuple[str, ...], words: str) -> None:
    with pytest.raises(UserError, match=words):
        config(home, *overrides)
