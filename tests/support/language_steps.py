"""Steps of tiny decoders through the loss of the language task, on any layout, beside the same step of one process in float32.

Used by `tests/ranks/test_language_cover.py`; one spawn of ranks computes many cases.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from mmspeed import replay, rng
from mmspeed.comm import even_sizes
from mmspeed.config.language import LanguageConfig
from mmspeed.config.parallel import ParallelConfig
from mmspeed.data import SampleUse
from mmspeed.data.sampling.pack_order import PackLength, PackSample
from mmspeed.loop.step import train_step
from mmspeed.models.language.config import DecoderSettings
from mmspeed.models.language.decoder import Decoder
from mmspeed.models.language.experts import BiasedRouter, Router
from mmspeed.models.language.shapes import SHAPES, tiny_twin
from mmspeed.parallel import TokenLayout, parallelize, uncrossed, unwrap
from mmspeed.parallel.document_shares import share_documents
from mmspeed.parallel.experts import spread_modules
from mmspeed.pipelines.domains.language.data import PackCollate, targets_of
from mmspeed.pipelines.domains.language.domain import LanguageDomain
from mmspeed.pipelines.tasks import Task, as_task
from mmspeed.plan.traffic import RankCoordinates, Traffic
from mmspeed.protocols import Batch
from tests.support.covers import Combination
from tests.support.decoder_traffic import DecoderWorkload, PackedWorkload, decoder_traffic, packed_traffic
from tests.support.expert_traffic import both, sent_far
from tests.support.expert_traffic import traffic_of as traffic_of_choices
from tests.support.language_combinations import EXPERTS, KEY_HEADS, PACKS, WAYS
from tests.support.memory_ways import keeping_of
from tests.support.sequence_steps import Groups, Still, whole

ALONE = {
    "world": "1",
    "tp": "1",
    "ulysses": "1",
    "ring": "1",
    "data": "shards",
    "ep": "1",
    "inner": "none",
    "etp": "1",
    "edp": "1",
}
Grads = dict[str, npt.NDArray[Any]]
Draws = list[tuple[SampleUse, float]]  # of a micro-batch, with weights


@dataclass(frozen=True)
class Documents:
    """Documents of these lengths with ids of their own; of every third one only later tokens have a loss."""

    lengths: npt.NDArray[np.int64]
    held_out: npt.NDArray[np.bool_]
    source: npt.NDArray[np.int64]
    sources: list[str]
    marked: ClassVar[bool] = True

    def ids(self, document: int, begin: int = 0, count: int | None = None) -> npt.NDArray[np.int64]:
        ids = np.random.default_rng(document).integers(0, 512, int(self.lengths[document]))
        return ids[begin : None if count is None else begin + count]

    def ids_of(self, pieces: Iterable[tuple[int, int, int]]) -> list[npt.NDArray[Any]]:
        return [self.ids(*piece) for piece in pieces]

    def trained(self, document: int, begin: int = 0, count: int | None = None) -> npt.NDArray[np.bool_] | None:
        if document % 3:
            return None
        length = int(self.lengths[document])
        return (np.arange(length) >= length // 2)[begin : None if count is None else begin + count]


def packs_named(name: str) -> tuple[Documents, list[PackSample]]:
    """The documents and the packs of a kind."""
    longest = max(map(sum, PACKS[name]))
    lengths = np.array([length for pack in PACKS[name] for length in pack], dtype=np.int64)
    documents = Documents(lengths, np.zeros(len(lengths), np.bool_), np.zeros(len(lengths), np.int64), ["texts"])
    samples, number = [], 0
    for place, pack in enumerate(PACKS[name]):
        pieces = tuple((number + part, 0, length) for part, length in enumerate(pack))
        samples.append(PackSample(f"pack {place}", pieces, PackLength(longest)))
        number += len(pack)
    return documents, samples


def settings_of(case: Combination) -> DecoderSettings:
    """The settings of a tiny decoder of three blocks, two of them with experts where it has any, and two with windows."""
    grouped = case["attention"] == "grouped"
    twin = tiny_twin(SHAPES["qwen3-30b-a3b" if grouped else "deepseek-v3"].settings)
    known = twin.experts
    assert known is not None and known.num_experts == EXPERTS
    if case["top"] == "none":
        known = None
    else:
        top, balance = int(case["top"]), None if case["balance"] == "none" else case["balance"]
        groups = (1, 1) if top > known.top_k else (known.n_group, known.topk_group)
        known = replace(
            known, top_k=top, n_group=groups[0], topk_group=groups[1], norm_topk_prob=top > 1, balance=balance,
            n_shared_experts=int(case["shared"]), router_bias=case["bias"] == "1", dense=(0,),
        )  # fmt: skip
    return replace(
        twin,
        experts=known,
        num_nextn_predict_layers=int(case["mtp"]),
        first_std=0.1,
        num_attention_heads=8,
        num_key_value_heads=KEY_HEADS if grouped else 8,
        windows=(4, None, 9) if case["windows"] == "short" else (),
    )


def decoder_of(settings: DecoderSettings) -> nn.Module:
    """The decoder; biases of its routers are such that they decide."""
    model = Decoder(settings)
    for name, router in model.named_modules():
        if isinstance(router, BiasedRouter):
            router.e_score_correction_bias.copy_(0.1 * rng.normal((EXPERTS,), 0, name))
    return model


@cache
def task(balance: str) -> Task:
    """The task with every term; of decoders without that loss, too."""
    texts = {"sources": [{"path": "none.txt"}], "cache": "none"}
    model = {} if balance == "none" else {"shape": "tiny-qwen3-30b-a3b", "balance": balance}
    objective = {"z_loss": 1e-3, "balance": 0.5}
    config = LanguageConfig.model_validate(
        {"task": "language", "name": "cover", "texts": texts, "model": model, "objective": objective}
    )
    return as_task(LanguageDomain(config), config)


def parallel_of(case: Combination) -> ParallelConfig:
    """The section of the layout."""
    degrees = {name: int(case[name]) for name in ("tp", "ulysses", "ring", "ep", "etp")}
    return ParallelConfig(**degrees, ep_inner=None if case["inner"] == "none" else int(case["inner"]))


def nodes_of(case: Combination) -> list[int]:
    """The node of each process: as `inner` has it, else there are two, or one of which all share experts."""
    world, etp, inner = int(case["world"]), int(case["etp"]), case["inner"]
    size = max(world // 2, etp) if inner == "none" else int(inner) * etp
    return [rank // size for rank in range(world)]


class Routes:
    """The experts of this process's tokens, call by call; recomputations are not among them."""

    def __init__(self, model: nn.Module) -> None:
        self.chosen = list[torch.Tensor]()
        for router in (module for module in model.modules() if isinstance(module, Router)):
            router.register_forward_hook(self._take)

    def _take(self, router: nn.Module, _: Any, output: tuple[torch.Tensor, ...]) -> None:
        record = replay._CURRENT.get()
        if record is None or not record.later:
            self.chosen.append(output[1])


def draws_of(case: Combination, lane: int, lanes: int, share: float) -> list[Draws]:
    """The micro-batches of a lane, of two packs at most, each of which counts `share`; a filler, which counts nothing, where there are none."""
    _, samples = packs_named(case["packs"])
    uses = [(SampleUse(sample, 0, 0), share) for sample in samples[lane::lanes]] or [(SampleUse(samples[0], 0, 0), 0.0)]
    return [uses[begin : begin + 2] for begin in range(0, len(uses), 2)]


def draws_of_all(case: Combination, lanes: int) -> list[Draws]:
    """The micro-batches of all lanes, one after another; in one, where the statistics of experts are of all that lanes have met."""
    each = [draws_of(case, lane, lanes, 1.0) for lane in range(lanes)]
    if case["balance"] == "global_batch":
        return [[draw for part in parts for draw in part] for parts in zip(*each, strict=True)]
    return [part for parts in each for part in parts]


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill all memory that is given out with NaN, and with the greatest whole number."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def poisons() -> bool:
    """True where rows beyond the last offset of a grouped product are NaN in poisoned memory."""
    with poisoned():
        out = F.grouped_mm(torch.ones(8, 16), torch.ones(2, 16, 16), offs=torch.tensor([2, 5], dtype=torch.int32))
    return bool(out[5:].isnan().all()) and not out[:5].isnan().any()


READERS = ("tolist", "item", "numpy", "cpu", "nonzero", "__bool__", "__int__", "__index__", "__float__")


@contextmanager
def reads_within(modules: Iterable[nn.Module]) -> Iterator[list[str]]:
    """Count what the host reads of tensors while these modules compute."""
    reads, depth = list[str](), [0]
    for module in modules:
        module.register_forward_pre_hook(lambda *_: depth.__setitem__(0, depth[0] + 1))
        module.register_forward_hook(lambda *_: depth.__setitem__(0, depth[0] - 1), always_call=True)

    def counted(name: str) -> Any:
        plain = getattr(torch.Tensor, name)

        def read(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
            reads.extend([name] * (depth[0] > 0))
            return plain(tensor, *args, **options)

        return patch.object(torch.Tensor, name, read)

    with ExitStack() as stack:
        for name in READERS:
            stack.enter_context(counted(name))
        yield reads


def step(case: Combination, world: int, groups: Groups, lanes: int) -> dict[str, Any]:
    """A step over all ranks of the world: loss, loads, gradients, bytes sent and those that the formulas give. One process computes all lanes."""
    settings, parallel = settings_of(case), parallel_of(case)
    model, layout, mesh, strategy = decoder_of(settings), TokenLayout(), None, "none"
    keeping = keeping_of({})
    keeping = replace(keeping, ways=WAYS[case["memory"]], exchange_again=case["memory"] == "exchanged again")
    if world > 1:
        strategy = "ddp" if case["data"] == "ddp" else "fsdp"
        replicas, shard = {"shards": (1, -1), "replicas": (2, -1), "ddp": (-1, 1)}[case["data"]]
        mesh, layout = groups.of(replicas, shard, parallel, nodes_of(case))
    before = layout.ledger.copy()
    routes = Routes(model)
    model = parallelize(model, mesh, strategy, layout=layout, keeping=keeping)  # type: ignore[arg-type]
    optimizer, grads = Still(model.parameters()), Grads()

    def keep(*_: Any) -> None:
        grads.update({n: whole(p.grad) for n, p in unwrap(model).named_parameters() if p.grad is not None})

    optimizer.register_step_pre_hook(keep)
    together, rank = parallel.group, dist.get_rank() if world > 1 else 0
    documents, samples = packs_named(case["packs"])
    draws = draws_of(case, rank // together, lanes, 1 / together) if world > 1 else draws_of_all(case, lanes)
    batches = [PackCollate(documents)(part) for part in draws]
    divisors = {
        "samples": float(len(samples)),
        "tokens": float(sum(targets_of(documents, sample) for sample in samples)),
        "real_tokens": float(sum(sample.tokens for sample in samples)),
    }
    models, of = {"model": model}, task(case["balance"])
    learners = of.learners(of.updates(), models, strategy, {"model": optimizer}, torch.device("cpu"))  # type: ignore[arg-type]
    with reads_within(spread_modules(model)) as reads:
        result = train_step(
            models, learners, batches, divisors, clip_norm=None, tensor=layout.tensor,
            group=None if world > 1 else groups.alone,
        )  # fmt: skip
    sent = layout.ledger.since(before)
    due = sum((traffic_of(settings, batch, parallel, layout) for batch in batches), Traffic())
    far, experts, spread = Traffic(), settings.experts, len(spread_modules(model))
    if spread:
        assert experts is not None
        sizes = EXPERTS, settings.hidden_size, experts.moe_intermediate_size, 4
        every, far = traffic_of_choices(routes.chosen, layout, *sizes)
        due += every
    return {
        "loss": result.loss,
        "terms": result.terms,
        "grads": grads,
        "counts": {name: counts.tolist() for name, counts in result.counts.items()},
        "biases": {name: b.tolist() for name, b in unwrap(model).named_buffers() if name.endswith("correction_bias")},
        "sent": {key: count for key, count in sent.bytes.items() if key[0] != "all_reduce" and count},
        "due": both(due),
        "sent far": sent_far(sent),
        "due far": both(far),
        "reads": reads,
        "layers": len(routes.chosen) if spread else 0,
        "tokens": min((len(expert_TK) for expert_TK in routes.chosen), default=None),
        "uncrossed": uncrossed(unwrap(model)),
    }


def traffic_of(settings: DecoderSettings, batch: Batch, parallel: ParallelConfig, layout: TokenLayout) -> Traffic:
    """The bytes that this process sends for a micro-batch, by the formulas; gradients of shared parameters are summed apart."""
    rows, columns = batch["ids"].shape
    packs = rows if settings.experts is not None and settings.experts.balance == "sequence" else 1
    sizes: Sequence[int] = even_sizes(columns, parallel.ulysses)
    shared, longest = tuple[int, ...](), 0
    if parallel.ring > 1:
        shares = share_documents(tuple(batch["bounds"].diff().tolist()), parallel.ring)
        sizes, shared, rows = layout.near_sizes(shares.sizes), shares.shared_sizes, 1
        longest = max(shares.cut_lengths, default=0)
    latent, mtp = settings.latent, settings.num_nextn_predict_layers
    place = RankCoordinates(layout.axes.ring.rank, layout.axes.ulysses.rank, layout.tensor.rank)
    work = PackedWorkload(
        rows,
        tuple(sizes),
        shared,
        settings.num_attention_heads,
        settings.num_attention_heads if latent is not None else settings.num_key_value_heads,
        settings.head_dim if latent is None else latent.plain + latent.rotary,
        settings.head_dim if latent is None else latent.value,
        settings.num_hidden_layers + mtp,
        element_size=4,
        windowed=sum(window is not None and window < longest - 1 for window in settings.windows),
    )
    dense = [block for block in range(settings.num_hidden_layers + mtp) if not settings.has_experts(block)]
    balanced, sums = 0, 0
    if settings.experts is not None and settings.experts.balance is not None:
        balanced, sums = settings.num_hidden_layers + mtp - len(dense), packs * 2 * settings.experts.num_experts
    split = settings.num_hidden_layers + mtp + len(dense)
    main = DecoderWorkload(
        rows, settings.hidden_size, split, 1, 4, z_loss=True, balanced=balanced, balance_sums=sums
    )  # fmt: skip
    traffic = packed_traffic(work, parallel, place)
    for each in (
        main,
        *[replace(main, split=0, z_loss=False, balanced=0)] * mtp,
    ):  # the z-loss is of next tokens alone
        traffic += decoder_traffic(each, sizes, parallel.tp, place, layout.hybrid.rank)
    return traffic


def gaps_of(got: Grads, true: Grads) -> dict[str, float]:
    """The greatest distance of each gradient, over its largest entry, and at least 1e-3 of that of all; infinite where one is no number."""
    least = 1e-3 * max((float(np.abs(grad).max()) for grad in true.values()), default=0.0)
    return {
        name: float(np.nan_to_num(np.abs(got[name] - grad), nan=np.inf).max() / max(np.abs(grad).max(), least))
        for name, grad in true.items()
    }


def compared(
    case: Combination, world: int, groups: Groups, truths: dict[Any, dict[str, Any]], poison: bool
) -> dict[str, Any]:
    """The distance of a step of all ranks from that of one process; the gradients are compared on the first rank, routers' last."""
    lanes = world // parallel_of(case).group
    with poisoned() if poison else ExitStack():
        got = step(case, world, groups, lanes)
    results = {name: got[name] for name in OF_ALL}
    if dist.get_rank() > 0:
        return results
    plain = case | ALONE | {"memory": "kept"}
    key = lanes, *sorted(plain.items())
    truth = truths[key] = truths.get(key) or step(plain, 1, groups, lanes)
    routers = {name: grad for name, grad in truth["grads"].items() if name.endswith(".gate.weight")}
    others = {name: grad for name, grad in truth["grads"].items() if name not in routers}
    gaps, of_routers = gaps_of(got["grads"], others), gaps_of(got["grads"], routers)
    worst, stacked = max(gaps, key=lambda name: gaps[name]), [name for name in others if ".experts." in name]
    idle = {name: ~truth["grads"][name].any((1, 2)) for name in stacked if truth["grads"][name].ndim == 3}
    return results | {
        "names": got["grads"].keys() == truth["grads"].keys(),
        "terms": all(
            got["terms"][n] == pytest.approx(value, rel=1e-5, abs=1e-9) for n, value in truth["terms"].items()
        ),
        "loss": abs(got["loss"] / truth["loss"] - 1),
        "counts": got["counts"] == truth["counts"] and got["biases"] == truth["biases"],
        "idle": sum(int(idle_G.sum()) for idle_G in idle.values()),
        "idle gradients": any(got["grads"][name][idle_G].any() for name, idle_G in idle.items()),
        "gap": gaps[worst],
        "worst": worst,
        "routers": max(of_routers.values(), default=0.0),
    }


OF_ALL = ("sent", "due", "sent far", "due far", "reads", "layers", "tokens", "uncrossed")


def steps(world: int, cases: list[Combination], poison: bool) -> list[dict[str, Any]]:
    """The steps of many cases, each beside one process. `poison`: memory that is not written is NaN."""
    assert not poison or poisons()
    groups, truths, results = Groups(), dict[Any, dict[str, Any]](), []
    for case in cases:
        results.append(compared(case, world, groups, truths, poison))
        groups.forget()
    return results
