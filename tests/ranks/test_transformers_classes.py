"""Plain language models of transformers over processes, by `mmspeed.accelerate_model` and by their plans, against one process in float32.

Tolerance: 1e-5 of the largest logit, and of a gradient's largest entry, since sums over processes are taken in another order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import mmspeed
from mmspeed.comm import Ledger
from mmspeed.compute.operators.cross_entropy import IGNORED
from mmspeed.config.parallel import ParallelConfig
from mmspeed.device import Device
from mmspeed.errors import UserError
from mmspeed.mesh import make_mesh
from mmspeed.models.language.decoder import next_tokens
from mmspeed.models.language.published import language_plan
from mmspeed.parallel import make_layout, parallelize, sum_shared_gradients, uncrossed
from mmspeed.protocols.plan import declare_plan
from tests.support.foreign_steps import whole, worst
from tests.support.language_models import class_logits, oracle, pack
from tests.support.spawn import run_ranks

TOLERANCE = 1e-5
PACKED, SINGLE = (5, 1, 9, 8, 16), (39,)  # 39 tokens, which no group divides


@dataclass(frozen=True)
class Case:
    """A class, and how it is split."""

    kind: str
    parallel: str = "ulysses=2"
    lengths: tuple[int, ...] = PACKED
    sharded: bool = False
    even: bool = False  # a vocabulary that two processes divide


CASES = {
    "llama, ulysses, packed": Case("llama"),
    "qwen3 tied, ulysses, one document, fsdp": Case("qwen3_tied", lengths=SINGLE, sharded=True),
    "llama, ring, one document": Case("llama", "ring=2", SINGLE),
    "deepseek, tp, packed": Case("deepseek_v3", "tp=2", even=True),
}
OTHERS = {
    "qwen3 experts, ulysses, packed, fsdp": Case("qwen3_moe", sharded=True),
    "deepseek, ulysses, packed": Case("deepseek_v3"),
    "qwen3 window, ulysses, packed": Case("qwen3_window"),
    "deepseek, ring, one document": Case("deepseek_v3", "ring=2", SINGLE),
    "qwen3 tied, tp": Case("qwen3_tied", "tp=2", SINGLE),
    "qwen3 experts, tp, packed": Case("qwen3_moe", "tp=2", even=True),
    "deepseek plain, ulysses, one document": Case("deepseek_plain", lengths=SINGLE),
}
FOUR = {"deepseek, tp and ulysses": Case("deepseek_v3", "tp=2,ulysses=2", even=True)}


def fresh(case: Case) -> Any:
    model: Any = oracle(case.kind, **({"vocab_size": 62} if case.even else {}))
    model.set_attn_implementation("sdpa")
    return model


def loss_of(model: nn.Module, lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """(logits, the mean loss of next tokens within documents)."""
    ids, pos, bounds = pack(lengths)
    logits = class_logits(model, ids, pos)
    target = next_tokens(ids, bounds)
    return logits, nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=IGNORED)


def spread(case: Case) -> tuple[nn.Module, Any, Ledger]:
    """The model on this layout: by `accelerate_model`, or where it splits weights by mmspeed's own engine."""
    model, ledger = fresh(case), Ledger()
    if "tp" not in case.parallel:
        mmspeed.accelerate_model(model, case.parallel, ledger=ledger)
        return fully_shard(model) if case.sharded else model, None, ledger
    sizes = {key: int(value) for key, _, value in (part.partition("=") for part in case.parallel.split(","))}
    parallel = ParallelConfig(**sizes)  # type: ignore[arg-type]
    mesh = make_mesh(Device("cpu", 0), parallel.axis_sizes())
    layout = make_layout(mesh, parallel, ledger)
    plan = language_plan(model)
    assert plan is not None
    declare_plan(model, plan)
    return parallelize(model, mesh, "fsdp" if len(sizes) > 1 else "none", layout=layout), layout, ledger


def step(case: Case) -> dict[str, Any]:
    model, layout, ledger = spread(case)
    logits, loss = loss_of(model, case.lengths)
    averages = case.sharded  # fully_shard divides by the processes, where mmspeed's engine sums
    (loss / (1 if averages else dist.get_world_size())).backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    if layout is not None:
        sum_shared_gradients(model.parameters(), layout.tensor)
    elif not case.sharded:
        for grad in grads.values():
            dist.all_reduce(grad)
    alone = fresh(case)
    wanted, truth = loss_of(alone, case.lengths)
    truth.backward()
    error, name = worst(
        {n: whole(g) for n, g in grads.items()}, {n: p.grad for n, p in alone.named_parameters() if p.grad is not None}
    )
    return {
        "logits": float((logits - wanted).abs().max() / wanted.abs().max()),
        "loss": abs(float(loss - truth)),
        "gradient": error,
        "name": name,
        "uncrossed": uncrossed(model),
        "sent": sorted({axis for (_, axis), sent in ledger.bytes.items() if sent}),
    }


def refusal(change: Any) -> str:
    """The error of a model, or of a call, that cannot be spread."""
    model = fresh(Case("llama"))
    try:
        change(model)
    except UserError as error:
        return str(error)
    return "nothing"


def attended_by(name: str) -> Any:
    def change(model: Any) -> None:
        model.set_attn_implementation(name)
        mmspeed.accelerate_model(model, "ulysses=2")

    return change


def packed_ring(model: Any) -> None:
    loss_of(mmspeed.accelerate_model(model, "ring=2"), PACKED)


def one_token(model: Any) -> None:
    loss_of(mmspeed.accelerate_model(model, "ulysses=2"), (1,))


def with_tp(model: Any) -> None:
    mmspeed.accelerate_model(model, "tp=2")


def with_router_loss(_: Any) -> None:
    model: Any = fresh(Case("qwen3_moe"))
    model.config.output_router_logits = True
    mmspeed.accelerate_model(model, "ulysses=2")


REFUSED = {
    "eager attention": (attended_by("eager"), "its attention is 'eager'; call model.set_attn_implementation('sdpa') first"),
    "a packed ring": (packed_ring, "is not computed over parallel.ring; use parallel.ulysses"),
    "a single token": (one_token, "1 tokens of 'text' for 2 ranks; this model needs 1 on every rank"),
    "tp": (with_tp, "parallel.tp is 2: it leaves each process different weights of LlamaForCausalLM"),
    "router loss": (with_router_loss, "set output_router_logits to False"),
}  # fmt: skip


def steps(cases: dict[str, Case], refused: tuple[str, ...] = ()) -> dict[str, Any]:
    return {
        **{name: step(case) for name, case in cases.items()},
        **{name: refusal(REFUSED[name][0]) for name in refused},
    }


@cache
def on_two() -> dict[str, Any]:
    return run_ranks(steps, 2, CASES, tuple(REFUSED))[0]


def hold(case: Case, result: dict[str, Any]) -> None:
    assert max(result["logits"], result["loss"], result["gradient"]) <= TOLERANCE and not result["uncrossed"], result
    assert {part.partition("=")[0] for part in case.parallel.split(",")} <= set(result["sent"]), result


def test_two_processes_compute_what_one_does() -> None:
    for name, case in CASES.items():
        hold(case, on_two()[name])


def test_what_cannot_be_spread_is_one_line() -> None:
    for name, (_, words) in REFUSED.items():
        assert words in on_two()[name]


@pytest.mark.slow
@pytest.mark.parametrize(("world", "cases"), [(2, OTHERS), (4, FOUR)], ids=["two", "four"])
def test_other_classes_and_layouts_compute_what_one_process_does(world: int, cases: dict[str, Case]) -> None:
    for name, result in run_ranks(steps, world, cases)[0].items():
        hold(cases[name], result)
