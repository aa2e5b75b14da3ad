"""Embedding and head with rows of the vocabulary on each tensor-parallel process: loss, gradients and bytes against one process in float32.

Tolerance: 1e-5 of a gradient's largest entry, since sums over processes are taken in another order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from mmspeed.comm import Ledger, ledger
from mmspeed.compute.registry import counting
from mmspeed.config.parallel import ParallelConfig
from mmspeed.device import Device
from mmspeed.errors import UserError
from mmspeed.mesh import layout_of, make_mesh
from mmspeed.models.language.config import DecoderSettings
from mmspeed.models.language.decoder import Decoder, DecoderOutput, next_tokens
from mmspeed.models.language.shapes import SHAPES, tiny_twin
from mmspeed.parallel import make_layout, parallelize, sum_shared_gradients, uncrossed
from mmspeed.parallel.document_shares import share_documents
from mmspeed.parallel.tensor import local
from mmspeed.plan.traffic import RankCoordinates, gradient_traffic
from tests.support.decoder_traffic import DecoderWorkload, decoder_traffic
from tests.support.foreign_steps import whole, worst
from tests.support.spawn import run_ranks

TOLERANCE = 1e-5
LENGTHS = (1, 17, 2, 9, 14)  # one document of a token; 43 tokens, which no group divides
VOCABULARY = 256  # so that a head's logits would be more bytes than all that is exchanged for the loss


@dataclass(frozen=True)
class Case:
    """A shape's tiny twin."""

    shape: str
    changes: tuple[tuple[str, Any], ...] = ()

    @property
    def settings(self) -> DecoderSettings:
        twin = tiny_twin(SHAPES[self.shape].settings)
        return replace(twin, vocab_size=VOCABULARY, first_std=0.1, **dict(self.changes))


TWO = {
    "untied": Case("qwen3-8b"),
    "tied, further tokens": Case("qwen3-0.6b", changes=(("num_nextn_predict_layers", 1),)),
}


def outputs(model: torch.nn.Module, targets: bool = True) -> DecoderOutput:
    ids = torch.randint(0, VOCABULARY, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(2))
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0)
    output: DecoderOutput = model(ids, bounds, next_tokens(ids, bounds) if targets else None)
    return output


def backward(model: torch.nn.Module, share: float) -> float:
    """The loss of a pack, further tokens and z-loss included, times a share; its gradients are added."""
    output = outputs(model)
    loss = torch.zeros(())
    for loss_BN, lse_BN in ((output.loss_BN, output.lse_BN), *output.mtp):
        assert loss_BN is not None and lse_BN is not None
        loss = loss + loss_BN.mean() + 1e-2 * lse_BN.square().mean()
    (loss * share).backward()
    return float(loss.detach())


def step(case: Case) -> dict[str, Any]:
    parallel = ParallelConfig(tp=2)
    mesh = make_mesh(Device("cpu", 0), parallel.axis_sizes())
    layout, settings = make_layout(mesh, parallel, Ledger()), case.settings
    model = parallelize(Decoder(settings), mesh, "none", layout=layout)
    with ledger(layout.tensor, layout.whole) as counted, counting() as calls:
        loss = backward(model, 1 / dist.get_world_size())  # shards of the data have the same pack
        shared = [p for p in model.parameters() if layout_of(p).replicas and p.grad is not None]
        shared = [p for p in shared if layout.tensor.name in layout_of(p).replicas]
        sum_shared_gradients(model.parameters(), layout.tensor)
    sent = {key: count for key, count in counted.bytes.items() if count}
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    alone = Decoder(settings)
    wanted = backward(alone, 1.0)
    error, name = worst(
        {n: whole(grad) for n, grad in grads.items()},
        {n: p.grad for n, p in alone.named_parameters() if p.grad is not None},
    )
    experts = settings.experts is not None
    dense = sum(
        not (experts and settings.has_experts(place))
        for place in range(settings.num_hidden_layers + settings.num_nextn_predict_layers)
    )
    work = DecoderWorkload(
        1,
        settings.hidden_size,
        settings.num_hidden_layers + settings.num_nextn_predict_layers + dense,
        1 + settings.num_nextn_predict_layers,
        4,
        z_loss=True,
    )
    place = RankCoordinates(tp=layout.tensor.rank)
    seen = layout.near_sizes(share_documents(LENGTHS, 1).sizes)
    traffic = decoder_traffic(work, seen, 2, place, layout.hybrid.rank)
    held = sum(local(p.grad).numel() * 4 for p in shared if p.grad is not None)
    formula = traffic.forward + traffic.backward + gradient_traffic(held, 2)
    with torch.no_grad():
        logits, right = outputs(model, targets=False).logits_BNV, outputs(alone, targets=False).logits_BNV
    assert logits is not None and right is not None
    return {
        "loss": abs(loss - wanted) / wanted,
        "gradient": (error, name),
        "logits": float((logits - right).abs().max() / right.abs().max()),
        "sent": sent,
        "formula": dict(formula),
        "calls": calls["linear_log_sums.chunked"],
        "rows": [len(local(p)) for n, p in model.named_parameters() if n in ("embed_tokens.weight", "lm_head.weight")],
        "uncrossed": uncrossed(model),
    }


def refused(settings: DecoderSettings) -> str:
    parallel = ParallelConfig(tp=2)
    mesh = make_mesh(Device("cpu", 0), parallel.axis_sizes())
    try:
        parallelize(Decoder(settings), mesh, "none", layout=make_layout(mesh, parallel, Ledger()))
    except UserError as error:
        return str(error)
    return ""


def steps(odd: DecoderSettings) -> dict[str, Any]:
    return {**{name: step(case) for name, case in TWO.items()}, "odd": refused(odd)}


@cache
def on_two() -> list[dict[str, Any]]:
    return run_ranks(steps, 2, replace(TWO["untied"].settings, vocab_size=255))


def hold(case: Case, ranks: list[dict[str, Any]]) -> None:
    for result in ranks:
        assert result["loss"] <= TOLERANCE and result["gradient"][0] <= TOLERANCE, result
        assert result["logits"] <= TOLERANCE and not result["uncrossed"], result
        assert result["calls"] == 1 + case.settings.num_nextn_predict_layers, result
        assert result["sent"] == result["formula"], result
    assert ranks[0]["sent"].get(("all_gather", "tp"), 0) > 0


def test_two_processes_with_half_the_vocabulary_compute_what_one_does() -> None:
    for name, case in TWO.items():
        ranks = [result[name] for result in on_two()]
        hold(case, ranks)
        assert all(rows == VOCABULARY // 2 for result in ranks for rows in result["rows"])


def test_logits_are_never_gathered_for_a_loss() -> None:
    """All bytes of a step over `tp` but the shared gradients' are fewer than those of one gather of float32 logits and its gradient."""
    settings, result = TWO["untied"].settings, on_two()[0]["untied"]
    exchanged = sum(count for (kind, _), count in result["sent"].items() if kind != "all_reduce")
    blocks = 4 * 2 * settings.num_hidden_layers * (22 + 21) * settings.hidden_size * 4 // 2
    logits = 2 * 43 * VOCABULARY // 2 * 4
    assert exchanged - blocks < logits


def test_a_vocabulary_that_tp_does_not_divide_is_refused_by_name() -> None:
    assert on_two()[0]["odd"] == "parallel.tp 2 does not divide the 255 channels of embed_tokens"
