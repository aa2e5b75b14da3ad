"""Our plans of published classes beside what diffusers declares of them, `_cp_plan` and `_tp_plan`, where a class has these."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from diffusers.hooks.tensor_parallel import PackedRowwiseParallel

from mmspeed.models.diffusers.plans import plan_for
from mmspeed.protocols.plan import Gather, Split
from tests.support.video_transformers import make_model

CASES = ("wan", "ltx", "cogvideox", "hunyuan", "hunyuan 1.5", "mochi", "qwen, images", "flux, images")
# what diffusers splits and we do not, by case
WHOLE: Mapping[str, set[tuple[str, str]]] = {
    # text that is cross-attended to is short, and stays whole on every process
    "ltx": {("", "encoder_hidden_states"), ("", "encoder_attention_mask")},
    # only models of edits have it, which are refused
    "qwen, images": {("transformer_blocks.*", "modulate_index")},
}


def declared(model: Any) -> dict[tuple[str, str], tuple[str, int]]:
    """(module, argument or place) -> (split or gather, dim), as diffusers declares it."""
    results = {}
    for module, what in (getattr(model, "_cp_plan", None) or {}).items():
        parts = (
            what.items() if isinstance(what, Mapping) else enumerate(what if isinstance(what, list | tuple) else [what])
        )
        for key, part in parts:
            for each in part if isinstance(part, list | tuple) else [part]:
                if each is not None:
                    dim = getattr(each, "split_dim", getattr(each, "gather_dim", None))
                    results[module, str(key)] = ("gather" if hasattr(each, "gather_dim") else "split", int(dim))
    return results


def ours(model: Any) -> dict[tuple[str, str], tuple[str, int]]:
    """The same of our plan, with dims from the front."""
    plan, results = plan_for(model), {}
    for module, changes in [*plan.inputs.items(), *plan.outputs.items()]:
        for key, change in changes.items():
            if isinstance(change, Split | Gather):
                results[module, str(key)] = ("gather" if isinstance(change, Gather) else "split", change.dim)
    return results


@pytest.mark.parametrize("case", CASES)
def test_splits_are_those_that_diffusers_declares(case: str) -> None:
    model = make_model(case)
    theirs, own = declared(model), ours(model)
    missing = {key: what for key, what in theirs.items() if own.get(key) != what}
    assert missing.keys() == WHOLE.get(case, set()), missing
    assert bool(theirs) or case in ("cogvideox", "hunyuan", "hunyuan 1.5", "mochi")


@pytest.mark.parametrize("case", ["qwen, images", "flux, images"])
def test_roles_are_those_that_diffusers_declares(case: str) -> None:
    """Layers that take the channels of two others side by side are cut by both there, too, with the same widths."""
    model: Any = make_model(case)
    words, roles, joined = {"column": "colwise", "row": "rowwise"}, {}, {}
    for name, linear in plan_for(model).linears.items():
        if linear.joined:
            joined[name] = list(linear.joined)
        else:
            roles[name] = words[linear.role]
    packed = {name for name, style in model._tp_plan.items() if isinstance(style, PackedRowwiseParallel)}
    assert roles == {name: style for name, style in model._tp_plan.items() if name not in packed}
    assert joined == {name: model.get_submodule(name.replace("*", "0"))._tp_packed_row_blocks for name in packed}
    assert bool(packed) == (case == "flux, images")
