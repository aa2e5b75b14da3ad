"""Diffusers' video transformers on a ring x ulysses group, against one process in float32: loss and every gradient.

Tolerance: 1e-5 of a gradient's largest entry (of the model's largest, times 1e-3, where a gradient is smaller than that:
key biases have none but rounding). Sums over keys and over ranks are taken in another order than one process takes them.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from mmspeed.comm import Ledger
from mmspeed.errors import UserError
from mmspeed.models.diffusers.plans import plan_for
from mmspeed.parallel import autocast, sequence_parallel
from tests.support.foreign_steps import worst
from tests.support.spawn import run_ranks
from tests.support.video_transformers import loss_of, make_inputs, make_model

TOLERANCE = 1e-5
Results = dict[str, Any]


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def mean_over_ranks(grads: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    for grad in grads.values():
        dist.all_reduce(grad)
        grad /= dist.get_world_size()
    return grads


def compare(case: str, ulysses: int, ring: int, recompute: bool = False) -> Results:
    """One case at one layout of all processes."""
    mesh = init_device_mesh("cpu", (ring, ulysses), mesh_dim_names=("ring", "ulysses"))
    inputs, alone = make_inputs(case, seed=1), make_model(case)
    model, ledger = copy.deepcopy(alone), Ledger()
    true = loss_of(alone, inputs)
    true.backward()
    if recompute:
        model.enable_gradient_checkpointing()  # type: ignore[operator]
    names = list(model.state_dict())
    sequence_parallel(model, mesh, plan_for(model), ledger=ledger)
    assert list(model.state_dict()) == names
    loss = loss_of(model, inputs)
    loss.backward()
    error, name = worst(mean_over_ranks(gradients(model)), gradients(alone))
    return {
        "loss": abs(float(loss.detach() - true.detach())) / abs(float(true.detach())),
        "gradient": error,
        "name": name,
        "calls": {f"{kind} {axis}": count for (kind, axis), count in ledger.calls.items()},
    }


def image_step(case: str) -> Results:
    """An image a rank, each its own: what is computed, and the calls counted."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ring",))
    inputs = make_inputs(case, frames=1, seed=10 + dist.get_rank())
    alone = make_model(case)
    model, ledger = copy.deepcopy(alone), Ledger()
    sequence_parallel(model, mesh, plan_for(model), ledger=ledger)
    loss_of(alone, inputs).backward()
    loss_of(model, inputs).backward()
    error, name = worst(gradients(model), gradients(alone))
    return {"gradient": error, "name": name, "calls": dict(ledger.calls)}


def saved(folder: str) -> Results:
    """`save_pretrained` of a sequence-parallel model that computes in bfloat16, read back as the plain class; and a deep copy (an EMA) that
    computes."""
    import diffusers

    import mmspeed

    plain = make_model("wan")
    model = mmspeed.accelerate_model(copy.deepcopy(plain), "ulysses=2")
    own = f"{folder}/{dist.get_rank()}"
    inputs = make_inputs("wan")
    with torch.no_grad():
        true, copied = loss_of(plain, inputs), loss_of(copy.deepcopy(model), inputs)
    autocast(model, torch.bfloat16)
    model.save_pretrained(own)  # type: ignore[operator]
    back = diffusers.WanTransformer3DModel.from_pretrained(own)
    return {
        "written": json.loads((Path(own) / "config.json").read_text())["_class_name"],
        "class": type(back).__name__,
        "equal": all(torch.equal(v, plain.state_dict()[k]) for k, v in back.state_dict().items()),
        "copied": abs(float(copied - true)),
    }


def failures() -> dict[str, str]:
    """The messages to the user, by what went wrong."""
    import mmspeed

    messages = {}

    def catch(name: str, act: Any) -> None:
        with pytest.raises(UserError) as caught:
            act()
        messages[name] = str(caught.value)

    def forward(case: str, prepare: Any = None, **inputs: Any) -> None:
        model = mmspeed.accelerate_model(make_model(case), {"ring": 2})
        if prepare is not None:
            prepare(model)
        loss_of(model, make_inputs(case, **inputs))

    catch("other inputs", lambda: forward("wan", seed=dist.get_rank()))
    catch("short text", lambda: forward("hunyuan", text=1))
    catch("processes", lambda: mmspeed.accelerate_model(make_model("wan"), "ulysses=3"))
    catch("tensor parallel", lambda: mmspeed.accelerate_model(make_model("wan"), "tp=2"))
    catch("unknown model", lambda: mmspeed.accelerate_model(nn.Linear(1, 1), "ring=2"))
    twice = mmspeed.accelerate_model(make_model("wan"), "ring=2")
    catch("twice", lambda: mmspeed.accelerate_model(twice, "ring=2"))
    hooked = make_model("wan")
    hooked.blocks[0].forward = hooked.blocks[0].forward  # type: ignore[method-assign, union-attr, index]
    catch("replaced forward", lambda: mmspeed.accelerate_model(hooked, "ring=2"))
    catch("other kernel", lambda: forward("wan", prepare=_attend_by_hand))
    return messages


def _attend_by_hand(model: nn.Module) -> None:
    """Attention processors that call no scaled_dot_product_attention, as flash kernels do not."""

    class ByHand:
        def __call__(self, attn: Any, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            return attn.to_out[0](attn.to_v(hidden_states))

    for block in model.blocks:  # type: ignore[union-attr]
        block.attn1.processor = ByHand()  # type: ignore[union-attr]


# attention to videos and to text apart, joint attention, joint attention without padding, and a control's blocks beside the video's
TWO = {
    "wan 2x1": ("wan", 2, 1),
    "hunyuan 1x2": ("hunyuan", 1, 2),
    "mochi 1x2": ("mochi", 1, 2),
    "wan vace 2x1": ("wan vace", 2, 1),
}


def on_two(folder: str) -> dict[str, Any]:
    results: dict[str, Any] = {name: compare(*layout) for name, layout in TWO.items()}
    results["wan, recomputed 2x1"] = compare("wan", 2, 1, recompute=True)
    return {"cases": results, "image": image_step("wan"), "saved": saved(folder), "failures": failures()}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_ranks(on_two, 2, str(tmp_path_factory.mktemp("saved")))[0]


def hold(actual: Results) -> None:
    assert actual["loss"] <= TOLERANCE and actual["gradient"] <= TOLERANCE, actual
    assert any("ulysses" in call or "ring" in call for call in actual["calls"]), "nothing was exchanged"


def test_two_ranks(two: dict[str, Any]) -> None:
    for name in TWO:
        actual = two["cases"][name]
        hold(actual)
        ours, other = ("ulysses", "ring") if name.endswith("2x1") else ("ring", "ulysses")
        kinds = {call.split()[0] for call in actual["calls"]}
        assert not [call for call in actual["calls"] if call.endswith(other)]
        assert ("all_to_all" in kinds) == (ours == "ulysses") and ("ring" in kinds) == (ours == "ring"), actual["calls"]


def test_blocks_that_are_recomputed_exchange_once(two: dict[str, Any]) -> None:
    actual = two["cases"]["wan, recomputed 2x1"]
    hold(actual)
    assert actual["calls"] == two["cases"]["wan 2x1"]["calls"]


def test_calls_are_those_of_the_formula(two: dict[str, Any]) -> None:
    """Two layers: an exchange before attention and one after, and both again in backward; text is not exchanged."""
    calls = two["cases"]["wan 2x1"]["calls"]
    assert calls == {"all_to_all ulysses": 8, "all_gather sequence": 1, "reduce_scatter sequence": 1}


def test_images_are_not_exchanged(two: dict[str, Any]) -> None:
    assert two["image"]["gradient"] == 0 and two["image"]["calls"] == {}


def test_saved_models_are_of_the_plain_class(two: dict[str, Any]) -> None:
    assert two["saved"]["written"] == two["saved"]["class"] == "WanTransformer3DModel" and two["saved"]["equal"]
    assert two["saved"]["copied"] < 1e-6


FAILURES = {
    "other inputs": "encoder_hidden_states, hidden_states, timestep differ between the 2 ranks",
    "short text": "1 tokens of 'text' for 2 ranks; this model needs 1 on every rank: pad to 2",
    "processes": "does not divide the 2 processes",
    "tensor parallel": "parallel.tp is 2",
    "unknown model": "Linear: no plan is known",
    "twice": "sequence-parallel already",
    "replaced forward": "spread the model over processes, or make it sparse, before",
    "other kernel": "set_attention_backend('native')",
}


def test_errors_say_what_to_do(two: dict[str, Any]) -> None:
    assert two["failures"].keys() == FAILURES.keys()
    for name, words in FAILURES.items():
        assert words in two["failures"][name]
