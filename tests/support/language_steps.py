"""Steps of tiny decoders through the loss of the language task, on any layout, beside the same step of one process in float32.

Used by `tests/ranks/test_language_cover.py`; one spawn of ranks computes many cases.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import nn

from mmspeed import replay
from mmspeed.comm import Axis, even_sizes
from mmspeed.config.language import LanguageConfig
from mmspeed.config.parallel import ParallelConfig
from mmspeed.data import SampleUse
from mmspeed.data.sampling.pack_order import PackLength, PackSample
from mmspeed.loop.step import train_step
from mmspeed.memory import BlockPolicies
from mmspeed.models.language.config import Balance, DecoderSettings
from mmspeed.models.language.decoder import Decoder
from mmspeed.models.language.experts import Router
from mmspeed.models.language.shapes import SHAPES, tiny_twin
from mmspeed.parallel import TokenLayout, parallelize, uncrossed, unwrap
from mmspeed.parallel.document_shares import share_documents
from mmspeed.pipelines.domains.language.data import PackCollate, targets_of
from mmspeed.pipelines.domains.language.domain import LanguageDomain
from mmspeed.pipelines.tasks import Task, as_task
from mmspeed.plan.traffic import NodeRows, RankCoordinates, Traffic, expert_traffic, node_traffic
from mmspeed.protocols import Batch
from tests.support.covers import Combination
from tests.support.decoder_traffic import DecoderWorkload, PackedWorkload, decoder_traffic, packed_traffic
from tests.support.memory_ways import keeping_of
from tests.support.sequence_steps import Groups, Still, whole

LENGTH = 31  # of a pack, which no group divides
# lengths of the documents of four packs; the rest of a pack is padding
PACKS: dict[str, tuple[tuple[int, ...], ...]] = {
    "odd": ((7, 13, 11), (5, 9, 17), (3, 19, 8), (23, 6)),
    "one token": ((1, 17, 2, 9), (1, 1, 29), (30, 1), (1,)),
    "whole": ((LENGTH,),) * 4,
    "many": ((2,) * 15 + (1,), (1,) * LENGTH, (3,) * 10, (5, 4, 3, 2, 1, 6, 7)),
}
# processes that share a pack and those with other packs: (tp, ulysses, ring, replicas, strategy, ep, ep_inner)
LAYOUTS: dict[int, dict[str, tuple[int, int, int, int, str, int, int | None]]] = {
    1: {"one process": (1, 1, 1, 1, "none", 1, None)},
    2: {
        "fsdp": (1, 1, 1, 1, "fsdp", 1, None),
        "replicas": (1, 1, 1, 2, "ddp", 1, None),
        "tp": (2, 1, 1, 1, "fsdp", 1, None),
        "ulysses": (1, 2, 1, 1, "fsdp", 1, None),
        "ring": (1, 1, 2, 1, "fsdp", 1, None),
        "ep": (1, 1, 1, 1, "fsdp", 2, None),
        "ep over tp": (2, 1, 1, 1, "fsdp", 2, None),
        "ep over ulysses": (1, 2, 1, 1, "fsdp", 2, None),
        "ep over ring": (1, 1, 2, 1, "fsdp", 2, None),
    },
    4: {
        "fsdp x tp": (2, 1, 1, 1, "fsdp", 1, None),
        "fsdp x ulysses": (1, 2, 1, 1, "fsdp", 1, None),
        "fsdp x ring": (1, 1, 2, 1, "fsdp", 1, None),
        "replicas x fsdp": (1, 1, 1, 2, "fsdp", 1, None),
        "replicas x tp": (2, 1, 1, 2, "fsdp", 1, None),
        "replicas x ulysses": (1, 2, 1, 2, "fsdp", 1, None),
        "replicas x ring": (1, 1, 2, 2, "ddp", 1, None),
        "tp x ulysses": (2, 2, 1, 1, "fsdp", 1, None),
        "tp x ring": (2, 1, 2, 1, "fsdp", 1, None),
        "ulysses x ring": (1, 2, 2, 1, "fsdp", 1, None),
        "ulysses of four": (1, 4, 1, 1, "fsdp", 1, None),
        "ring of four": (1, 1, 4, 1, "fsdp", 1, None),
        "ep of four": (1, 1, 1, 1, "fsdp", 4, None),
        "ep of two nodes": (1, 1, 1, 1, "fsdp", 4, 2),
        "ep of two nodes over tp": (2, 1, 1, 1, "fsdp", 4, 2),
        "ep of nodes of one": (1, 1, 1, 1, "fsdp", 4, 1),
        "replicas x ep of a node": (1, 1, 1, 2, "fsdp", 2, 2),
        "edp x ep": (1, 1, 1, 1, "fsdp", 2, None),
        "replicas x ep": (1, 1, 1, 2, "fsdp", 2, None),
        "fsdp x tp, ep of four": (2, 1, 1, 1, "fsdp", 4, None),
        "fsdp x ulysses, edp x ep": (1, 2, 1, 1, "fsdp", 2, None),
        "tp x ring, ep of four": (2, 1, 2, 1, "fsdp", 4, None),
    },
}
WAYS: dict[str, dict[str, Any]] = {
    "kept": {},
    "recomputed": {"block": "recompute"},
    "offloaded": {"block": "offload"},
    "by regions": {"attention": "recompute", "mlp": "offload"},
}
SETTINGS = {
    "layout": [name for layouts in LAYOUTS.values() for name in layouts],
    "attention": ["grouped", "latent"],
    "experts": ["none", "replicated", "balanced"],
    "mtp": ["0", "1"],
    "memory": [*WAYS],
    "packs": [*PACKS],
    "windows": ["none", "short"],
}


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
    """The documents and the four packs of a kind."""
    lengths = np.array([length for pack in PACKS[name] for length in pack], dtype=np.int64)
    documents = Documents(lengths, np.zeros(len(lengths), np.bool_), np.zeros(len(lengths), np.int64), ["texts"])
    samples, number = [], 0
    for place, pack in enumerate(PACKS[name]):
        pieces = tuple((number + part, 0, length) for part, length in enumerate(pack))
        samples.append(PackSample(f"pack {place}", pieces, PackLength(LENGTH)))
        number += len(pack)
    return documents, samples


@cache
def settings_of(attention: str, experts: str, mtp: str, windows: str) -> DecoderSettings:
    """The settings of a tiny decoder of three blocks, two of them with experts where it has any, and two with windows."""
    twin = tiny_twin(SHAPES["qwen3-30b-a3b" if attention == "grouped" else "deepseek-v3"].settings)
    assert twin.experts is not None
    balance: Balance | None = "sequence" if experts == "balanced" else None
    known = None if experts == "none" else replace(twin.experts, balance=balance, dense=(0,))
    key_heads = 4 if attention == "grouped" else 8
    seen = (4, None, 9)[: twin.num_hidden_layers] if windows == "short" else ()
    return replace(
        twin,
        experts=known,
        num_nextn_predict_layers=int(mtp),
        first_std=0.1,
        num_attention_heads=8,
        num_key_value_heads=key_heads,
        windows=seen,
    )


@cache
def task() -> Task:
    """The task with every term."""
    tree: dict[str, Any] = {
        "task": "language",
        "name": "cover",
        "texts": {"sources": [{"path": "none.txt"}], "cache": "none"},
    }
    config = LanguageConfig.model_validate(tree | {"objective": {"z_loss": 1e-3, "balance": 0.5}})
    return as_task(LanguageDomain(config), config)


def possible(case: Combination) -> bool:
    """False where experts would be spread in a model without any."""
    return case["experts"] != "none" or "ep" not in case["layout"].replace("replicas", "")


def layout_of(case: Combination) -> tuple[ParallelConfig, int, str]:
    """(section of the layout, replicas, strategy)."""
    known = {name: layout for layouts in LAYOUTS.values() for name, layout in layouts.items()}
    tp, ulysses, ring, replicas, strategy, ep, inner = known[case["layout"]]
    return ParallelConfig(tp=tp, ulysses=ulysses, ring=ring, ep=ep, ep_inner=inner), replicas, strategy


class Routes:
    """The experts of this process's tokens, call by call; recomputations are not among them."""

    def __init__(self, model: nn.Module, layout: TokenLayout) -> None:
        self.layout, self.chosen = layout, list[torch.Tensor]()
        for router in (module for module in model.modules() if isinstance(module, Router)):
            router.register_forward_hook(self._take)

    def _take(self, router: nn.Module, _: Any, output: tuple[torch.Tensor, ...]) -> None:
        record = replay._CURRENT.get()
        if record is None or not record.later:
            self.chosen.append(output[1])

    def traffic(self, width: int, experts: int) -> Traffic:
        """The bytes of all calls, by the formulas."""
        total, axis, nodes = Traffic(), self.layout.experts, self.layout.nodes
        for expert_TK in self.chosen:
            loads_G = torch.bincount(expert_TK.flatten(), minlength=experts)
            if nodes is None:
                sends_P = loads_G.view(axis.size, -1).sum(1)
                total += expert_traffic(sends_P.tolist(), swapped(sends_P, axis), axis.rank, experts, width, 4)
                continue
            outer, inner = nodes
            node_TK = expert_TK // (experts // outer.size)
            out_O = torch.stack([(node_TK == node).any(1).sum() for node in range(outer.size)])
            loads_OH = loads_G.view(outer.size, -1)
            here_OH = torch.empty_like(loads_OH)
            dist.all_to_all_single(here_OH, loads_OH, group=outer.group)
            out_I = here_OH.sum(0).view(inner.size, -1).sum(1)
            rows = NodeRows(
                out_O.tolist(), swapped(out_O, outer), out_I.tolist(), swapped(out_I, inner), outer.rank, inner.rank
            )
            total += node_traffic(rows, experts, width, expert_TK.shape[1], 4)
        return total


def swapped(sends_P: torch.Tensor, axis: Axis) -> list[int]:
    """The counts that come from the processes of an axis."""
    comes_P = torch.empty_like(sends_P)
    if axis.size == 1:
        return list(sends_P.tolist())
    dist.all_to_all_single(comes_P, sends_P, group=axis.group)
    return list(comes_P.tolist())


def batches_of(case: Combination, lane: int, lanes: int, share: float) -> list[Batch]:
    """The micro-batches of a lane, of two packs at most; each pack counts `share` on every process that computes it."""
    documents, samples = packs_named(case["packs"])
    mine = samples[lane::lanes]
    collate = PackCollate(documents)
    parts = [mine[begin : begin + 2] for begin in range(0, len(mine), 2)]
    return [collate([(SampleUse(sample, 0, 0), share) for sample in part]) for part in parts]


def step(case: Combination, world: int, groups: Groups) -> dict[str, Any]:
    """A step over all ranks of the world: loss, gradients, bytes sent and those that the formulas give."""
    settings = settings_of(case["attention"], case["experts"], case["mtp"], case["windows"])
    model: nn.Module = Decoder(settings)
    parallel, replicas, strategy = layout_of(case)
    layout, mesh, keeping = TokenLayout(), None, BlockPolicies()
    if WAYS[case["memory"]]:
        keeping = keeping_of(WAYS[case["memory"]])
    if world > 1:
        shard = 1 if strategy == "ddp" else -1
        mesh, layout = groups.of(-1 if strategy == "ddp" else replicas, shard, parallel)
    before = layout.ledger.copy()
    routes = Routes(model, layout)
    model = parallelize(model, mesh, strategy, layout=layout, keeping=keeping)  # type: ignore[arg-type]
    optimizer, grads = Still(model.parameters()), dict[str, npt.NDArray[Any]]()

    def keep(*_: Any) -> None:
        grads.update({n: whole(p.grad) for n, p in unwrap(model).named_parameters() if p.grad is not None})

    optimizer.register_step_pre_hook(keep)
    together, rank = parallel.group, dist.get_rank() if world > 1 else 0
    batches = batches_of(case, rank // together, world // together, 1 / together)
    documents, samples = packs_named(case["packs"])
    divisors = {"samples": 4.0, "tokens": float(sum(targets_of(documents, sample) for sample in samples))}
    models, updates = {"model": model}, task().updates()
    learners = task().learners(updates, models, strategy, {"model": optimizer}, torch.device("cpu"))  # type: ignore[arg-type]
    result = train_step(
        models, learners, batches, divisors, clip_norm=None, tensor=layout.tensor,
        group=None if world > 1 else groups.alone,
    )  # fmt: skip
    sent = {key: count for key, count in layout.ledger.since(before).bytes.items() if key[0] != "all_reduce" and count}
    due = sum((traffic_of(settings, batch, parallel, layout) for batch in batches), Traffic())
    if parallel.ep > 1 and settings.experts is not None:
        due += routes.traffic(settings.hidden_size, settings.experts.num_experts)
    return {
        "loss": result.loss,
        "terms": result.terms,
        "grads": grads,
        "sent": sent,
        "due": dict(+(due.forward + due.backward)),
        "uncrossed": uncrossed(unwrap(model)),
    }


def traffic_of(settings: DecoderSettings, batch: Batch, parallel: ParallelConfig, layout: TokenLayout) -> Traffic:
    """The bytes that this process sends for a micro-batch, by the formulas; gradients of shared parameters are summed apart."""
    rows, columns = batch["ids"].shape
    packs = rows
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


def compared(case: Combination, world: int, groups: Groups, truths: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    """The distance of a step of all ranks from that of one process; the gradients are compared on the first rank."""
    got = step(case, world, groups)
    results = {"sent": got["sent"], "due": got["due"], "uncrossed": got["uncrossed"]}
    if dist.get_rank() > 0:
        return results
    plain = case | {"layout": "one process", "memory": "kept"}
    key = tuple(sorted(plain.items()))
    truth = truths[key] = truths.get(key) or step(plain, 1, groups)
    least = 1e-3 * max(float(np.abs(grad).max()) for grad in truth["grads"].values())
    gaps = {
        name: float(np.abs(got["grads"][name] - grad).max() / max(np.abs(grad).max(), least))
        for name, grad in truth["grads"].items()
    }
    worst = max(gaps, key=lambda name: gaps[name])
    return results | {
        "names": got["grads"].keys() == truth["grads"].keys(),
        "terms": max(abs(got["terms"][name] / value - 1) for name, value in truth["terms"].items()),
        "loss": abs(got["loss"] / truth["loss"] - 1),
        "gap": gaps[worst],
        "worst": worst,
    }


def steps(world: int, cases: list[Combination]) -> list[dict[str, Any]]:
    """The steps of many cases, each beside one process."""
    groups, truths = Groups(), dict[Any, dict[str, Any]]()
    return [compared(case, world, groups, truths) for case in cases]
