"""Two steps of tiny models in pipeline stages, on any layout, beside the same steps of one process in float32.

Used by `tests/ranks/test_pipeline_cover.py`; one spawn of ranks computes many cases.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from mmspeed import rng
from mmspeed.config.memory import MemoryConfig
from mmspeed.config.parallel import ParallelConfig
from mmspeed.config.training import TrainConfig
from mmspeed.data import SampleUse
from mmspeed.data.sampling.pack_order import PackLength, PackSample
from mmspeed.loop.optimizers.make_optimizer import make_optimizer
from mmspeed.loop.pipeline import PipelineRunner, runner_of
from mmspeed.loop.step import Learner, train_step
from mmspeed.models.diffusers.plans import declare_known_plan
from mmspeed.models.sora.model import SoraDiT
from mmspeed.parallel import TokenLayout, parallelize, uncrossed, unwrap
from mmspeed.parallel.stages import cut_into_stages
from mmspeed.pipelines.domains.language.data import PackCollate, targets_of
from mmspeed.plan.overlap import Order
from mmspeed.plan.schedules import Pipeline
from mmspeed.protocols import Batch, Item, Term, Terms, Update
from mmspeed.shapes import Bucket
from tests.support.added_model import perturbed
from tests.support.covers import Combination, greedy, pairs
from tests.support.language_combinations import WAYS
from tests.support.language_steps import Documents, Grads, decoder_of, gaps_of, settings_of, task
from tests.support.memory_ways import keeping_of
from tests.support.sequence_steps import MODEL, Groups, Still, whole
from tests.support.video_transformers import make_inputs, make_model

# how a decoder differs from the plain one; its layers have no windows, whose numbers are of three layers
PLAIN = {"attention": "grouped", "top": "2", "shared": "0", "balance": "none", "bias": "0", "mtp": "0", "windows": "none"}  # fmt: skip
DECODERS: dict[str, Combination] = {
    "dense": {"top": "none"},
    "tied": {"top": "none"},  # its head has the weight of the embedding
    "experts": {"balance": "micro_batch"},
    "latent": {"attention": "latent", "balance": "sequence", "shared": "1", "bias": "1", "mtp": "1"},
}
SORAS = {"sora": "factorised", "sora full": "full"}
PUBLISHED = ("wan", "hunyuan", "ltx", "cogvideox")
KINDS = (*SORAS, *PUBLISHED, *DECODERS)
LAYOUTS: dict[int, dict[str, dict[str, int]]] = {
    2: {"stages": {"pp": 2}},
    4: {
        "four stages": {"pp": 4}, "shards": {"pp": 2}, "replicas": {"pp": 2, "dp_replicate": 2, "dp_shard": 1}, "tp": {"pp": 2, "tp": 2},
        "ulysses": {"pp": 2, "ulysses": 2}, "ring": {"pp": 2, "ring": 2}, "dsp": {"pp": 2, "dsp": 2}, "ep": {"pp": 2, "ep": 2},
        "etp": {"pp": 2, "etp": 2}, "ep over tp": {"pp": 2, "ep": 2, "tp": 2},
    },
    8: {
        "four of shards": {"pp": 4}, "ulysses x ring": {"pp": 2, "ulysses": 2, "ring": 2}, "dsp x ring": {"pp": 2, "dsp": 2, "ring": 2},
        "tp x ulysses": {"pp": 2, "tp": 2, "ulysses": 2}, "ep x etp": {"pp": 2, "ep": 2, "etp": 2}, "four of tp": {"pp": 4, "tp": 2},
    },
}  # fmt: skip
SCHEDULES: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "1f1b, one more": {"extra_warmup": True},
    "interleaved": {"virtual": 2},
    "interleaved, one more": {"virtual": 2, "extra_warmup": True},
    "overlap": {"schedule": "overlap", "virtual": 2},
    "zb_h1": {"schedule": "zb_h1"},
    "zbv": {"schedule": "zbv", "virtual": 2},
    "dualpipe_v": {"schedule": "dualpipe_v", "virtual": 2},
}
COUNTS: dict[str, Callable[[int], int]] = {  # micro-batches, by the processes of pp
    "1": lambda ranks: 1,
    "P": lambda ranks: ranks,
    "2P": lambda ranks: 2 * ranks,
    "3P + 1": lambda ranks: 3 * ranks + 1,
    "8P": lambda ranks: 8 * ranks,
}
SETTINGS: dict[str, Sequence[str]] = {
    "kind": KINDS,
    "schedule": [*SCHEDULES],
    "count": [*COUNTS],
    "shapes": ["one", "of steps", "of micro-batches"],
    "memory": ["kept", "recomputed", "offloaded", "states on the host", "compiled"],
}
LATENTS = ((2, 4, 4), (3, 2, 6), (1, 4, 6))  # frames, height, width
PACKS = ((7, 13, 11), (5, 9), (2, 17, 1, 3))  # lengths of documents; the rest of a pack is padding
DRAWN = 3000


def possible(case: Combination) -> bool:
    """False for axes that a model does not have, and for graphs over exchanges, which take long and are no matter of stages."""
    axes = LAYOUTS[int(case["world"])][case["layout"]].keys()
    experts = case["kind"] in ("experts", "latent") or not axes & {"ep", "etp"}
    whole = case["memory"] != "compiled" or case["layout"] in ("stages", "shards")
    return whole and experts and (case["kind"] == "sora" or "dsp" not in axes)


@cache
def cover(world: int) -> list[Combination]:
    """Combinations in which all pairs of values meet that meet in any of many drawn ones; on eight processes all values do."""
    draws, names = random.Random(world), {"world": [str(world)], "layout": [*LAYOUTS[world]], **SETTINGS}
    drawn = [{name: draws.choice(values) for name, values in names.items()} for _ in range(DRAWN)]
    cases = [case for case in drawn if possible(case)]
    return [cases[place] for place in greedy([set(case.items()) if world == 8 else pairs(case) for case in cases])]


@dataclass(frozen=True)
class Made:
    """A model, the maker of its learner, and of a micro-batch by (number, shape, weight of an item)."""

    model: nn.Module
    learner: Callable[[nn.Module, Any, Any], Learner]
    batch: Callable[[int, int, float], Batch]


def video(kind: str, depth: int) -> Made:
    """A SoraDiT or a published model."""
    if kind in SORAS:
        config = replace(MODEL, depth=depth, arrangement=SORAS[kind])  # type: ignore[arg-type]
        model: nn.Module = perturbed(SoraDiT(config))
    else:
        numbers = {"num_layers": depth // 2, "num_single_layers": depth - depth // 2}
        model = make_model(kind, **(numbers if kind == "hunyuan" else {"num_layers": depth}))
        declare_known_plan(model)

    def batch(number: int, shape: int, weight: float) -> Batch:
        items = [Item(f"{number}.{place}", source="s") for place in range(2)]
        frames, height, width = LATENTS[shape]
        what = {"number": torch.tensor([number, shape])}
        return Batch(what, items, torch.full((2,), weight), Bucket(4 * frames - 3, 8 * height, 8 * width))

    def call(model: nn.Module, batch: Batch) -> Any:
        number, shape = batch["number"].tolist()
        if kind not in SORAS:
            inputs = make_inputs(kind, frames=(4, 3, 1)[shape], text=7, seed=number)
            return batch, model(**inputs, return_dict=False)[0]
        x, text = rng.normal((2, 3, *LATENTS[shape]), 0, number), rng.normal((2, 5 + shape, 10), 0, "text", number)
        mask = torch.arange(5 + shape) < torch.tensor([[5 + shape], [3]])
        return batch, model(x, torch.tensor([0.3, 0.7]), text, mask)

    def terms(out: tuple[Batch, Tensor]) -> Terms:
        error = out[1].float() - torch.linspace(-1, 1, out[1].numel()).view_as(out[1])
        return {"loss": Term(error.square().flatten(1).mean(1), out[0].weights_I)}

    def learner(model: nn.Module, strategy: Any, optimizer: Any) -> Learner:
        runner = runner_of(model, strategy, torch.device("cpu"))
        return Learner(Update(), runner, optimizer, lambda batch: call(model, batch), terms)

    return Made(model, learner, batch)


def language(kind: str, depth: int) -> Made:
    """A decoder by the loss of its task."""
    own = PLAIN | DECODERS[kind]
    of = task(own["balance"])

    def batch(number: int, shape: int, weight: float) -> Batch:
        samples = [pack_of(2 * number + place, shape) for place in range(2)]
        return PackCollate(documents_of(shape))([(SampleUse(sample, 0, 0), weight) for sample in samples])

    def learner(model: nn.Module, strategy: Any, optimizer: Any) -> Learner:
        cpu, models = torch.device("cpu"), {"model": model}
        (made,) = of.learners(of.updates(), models, strategy, {"model": optimizer}, cpu, strategy != "none")
        return made

    return Made(
        decoder_of(replace(settings_of(own), num_hidden_layers=depth, tie_word_embeddings=kind == "tied")),
        learner,
        batch,
    )


MOST = 600  # packs of a shape that differ


@cache
def documents_of(shape: int) -> Documents:
    lengths = np.array(PACKS[shape] * MOST, dtype=np.int64)
    return Documents(lengths, np.zeros(len(lengths), np.bool_), np.zeros(len(lengths), np.int64), ["texts"])


def pack_of(number: int, shape: int) -> PackSample:
    lengths, first = PACKS[shape], number % MOST * len(PACKS[shape])
    pieces = tuple((first + place, 0, length) for place, length in enumerate(lengths))
    return PackSample(f"pack {number}", pieces, PackLength(sum(lengths) + shape))


def made(kind: str, depth: int) -> Made:
    """The model of a kind, of so many blocks."""
    return (language if kind in DECODERS else video)(kind, depth)


def parallel_of(case: Combination) -> ParallelConfig:
    """The section of the layout."""
    return ParallelConfig(**LAYOUTS[int(case["world"])][case["layout"]], **SCHEDULES[case["schedule"]])


def numbers_of(case: Combination, step: int, lanes: int) -> list[tuple[int, int]]:
    """(number, shape) of all micro-batches of a step, lane by lane in turn; a second step has one less."""
    count = max(1, COUNTS[case["count"]](parallel_of(case).pp) - step) * lanes
    shapes = {"one": [0], "of steps": [step], "of micro-batches": [0, 1, 2]}[case["shapes"]]
    return [(100 * step + number, shapes[number % len(shapes)]) for number in range(count)]


def divisors_of(numbers: Sequence[tuple[int, int]], language: bool) -> dict[str, float]:
    """Items, and tokens of packs."""
    divisors = {"samples": 2.0 * len(numbers)}
    if language:
        packs = [(pack_of(2 * number + place, shape), shape) for number, shape in numbers for place in range(2)]
        divisors["tokens"] = float(sum(targets_of(documents_of(shape), pack) for pack, shape in packs))
        divisors["real_tokens"] = float(sum(pack.tokens for pack, _ in packs))
    return divisors


def any_orders(pipeline: Pipeline, nodes: int = 60) -> dict[tuple[int, int], Order]:
    """An order for each pair of stages, of no sense."""
    drawn, stages = random.Random(7), range(pipeline.stages)
    return {pair: tuple(drawn.choices((0, 1), k=nodes)) for pair in itertools.product(stages, stages)}


def count_computed(model: nn.Module, learner: Learner) -> Counter[str]:
    """Counts, from now on, how often the gradient of each weight that waits is computed."""
    computed, gradients = Counter[str](), getattr(learner.runner, "gradients", None)
    if gradients is None:
        return computed
    leave = gradients.leave

    def counted(weight: Tensor, gradient: Callable[[], Tensor]) -> None:
        name = next((name for name, own in unwrap(model).named_parameters() if own is weight), "")

        def compute() -> Tensor:
            computed[name] += 1
            return gradient()

        leave(weight, compute)

    gradients.leave = counted
    return computed


def steps_of(case: Combination, world: int, groups: Groups, lanes: int) -> dict[str, Any]:
    """Two steps: losses and norms, and the gradients of the second one. One process computes the items of all lanes."""
    parallel = parallel_of(case)
    depth = parallel.pp * parallel.virtual + 1
    whole_model, mesh, layout, strategy, stages = made(case["kind"], depth), None, TokenLayout(), "none", None
    model, memory = whole_model.model, case["memory"] if world > 1 else "kept"
    keeping = replace(keeping_of({}), ways=WAYS.get(memory, WAYS["kept"]))
    if world > 1:
        strategy = "fsdp"
        mesh, layout = groups.of(parallel.dp_replicate, parallel.dp_shard, parallel)
        (group,) = mesh.across_stages()
        stages = cut_into_stages(model, group, Pipeline.of(parallel))
    compiled = "aot_eager" if memory == "compiled" else False
    model = parallelize(model, mesh, strategy, layout=layout, keeping=keeping, compile=compiled)  # type: ignore[arg-type]
    if case["memory"] == "states on the host":
        config = TrainConfig(lr=1e-6, warmup_steps=0)  # so little that the second gradients hardly feel roundings
        optimizer: Any = make_optimizer(
            model, config, MemoryConfig(states="host" if world > 1 else "device"), mesh=mesh
        )
    else:
        optimizer = Still(model.parameters())
    grads, update = Grads(), optimizer.step

    def keep() -> None:
        grads.update({n: whole(p.grad) for n, p in unwrap(model).named_parameters() if p.grad is not None})
        update()

    optimizer.step = keep
    learner, results = whole_model.learner(model, strategy, optimizer), []
    computed, batches_here = count_computed(model, learner), 0
    lane, share = (mesh.reader().index, 1 / parallel.group) if mesh is not None else (0, 1.0)
    for step in range(2):
        if step and isinstance(learner.runner, PipelineRunner):
            learner.runner.orders = any_orders(Pipeline.of(parallel))
        numbers = numbers_of(case, step, lanes)
        batches = [whole_model.batch(*each, share) for each in (numbers if world == 1 else numbers[lane::lanes])]
        batches_here += len(batches)
        results.append(
            train_step(
                {"model": model}, [learner], batches, divisors_of(numbers, case["kind"] in DECODERS), clip_norm=None,
                tensor=layout.tensor, mesh=mesh, group=None if world > 1 else groups.alone,
            )
        )  # fmt: skip
    return {
        "losses": [result.loss for result in results],
        "norms": [result.grad_norm for result in results],
        "terms": [result.terms for result in results],
        "counts": [{name: counts.tolist() for name, counts in result.counts.items()} for result in results],
        "grads": grads,
        "shared": [name for _, names in stages.shared for name in names] if stages is not None else [],
        "stages": stages is not None and [*stages.own],
        "uncrossed": uncrossed(unwrap(model)),
        "computed": (computed, batches_here),
    }


def off(values: Sequence[float], true: Sequence[float]) -> float:
    return max(abs(value / one - 1) for value, one in zip(values, true, strict=True))


def compared(case: Combination, world: int, groups: Groups, truths: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    """The distance of the steps of all ranks from those of one process; all is compared on the first rank."""
    parallel = parallel_of(case)
    lanes = world // (parallel.group * parallel.pp)
    got = steps_of(case, world, groups, lanes)
    mine = {name: got[name] for name in ("uncrossed", "stages", "counts", "computed")}
    every: list[Any] = [None] * world
    first_here = dist.get_rank() % (world // parallel.pp) == 0
    dist.gather_object((got["grads"] if first_here else {}, got["counts"]), every if dist.get_rank() == 0 else None)
    if dist.get_rank() > 0:
        return mine
    grads, apart = Grads(), list[str]()
    for part, _ in every:
        apart += [name for name in part if name in grads and not np.array_equal(grads[name], part[name])]
        grads |= part
    key = lanes, tuple(sorted(case.items() - {("memory", case["memory"]), ("schedule", case["schedule"])}))
    key = (*key, case["memory"] == "states on the host", parallel.virtual)
    truth = truths[key] = truths.get(key) or steps_of(case, 1, groups, lanes)
    gaps = gaps_of(grads, truth["grads"]) if grads.keys() == truth["grads"].keys() else {"": np.inf}
    worst = max(gaps, key=lambda name: gaps[name])
    equal = [name for name in grads if name in truth["grads"] and np.array_equal(grads[name], truth["grads"][name])]
    counts: list[dict[str, Any]] = [{}, {}]
    for _, part in every:
        for all_of_step, own in zip(counts, part, strict=True):
            all_of_step |= own
    return mine | {
        "missing": sorted(truth["grads"].keys() - grads.keys()),
        "more": sorted(name for name in grads.keys() - truth["grads"].keys() if grads[name].any()),
        "apart": apart,
        "losses": off(got["losses"], truth["losses"]),
        "norms": off(got["norms"], truth["norms"]),
        "terms": max(off([*a.values()], [*b.values()]) for a, b in zip(got["terms"], truth["terms"], strict=True)),
        "counted": counts == truth["counts"],
        "gap": gaps[worst],
        "worst": worst,
        "other": sorted(grads.keys() - equal),
        "shared": got["shared"],
    }


def steps(world: int, cases: list[Combination]) -> list[dict[str, Any]]:
    """The steps of many cases, each beside one process."""
    groups, truths, results = Groups(), dict[Any, dict[str, Any]](), []
    for case in cases:
        try:
            results.append(compared(case, world, groups, truths))
        except BaseException as error:
            raise AssertionError(f"{case}: {error}") from error
        groups.forget()
    return results
