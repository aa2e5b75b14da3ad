"""Sparse attention in diffusers' own classes, tiny and with random weights: against the plain model, and against the oracle."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import mmspeed
from mmspeed.comm import all_reduce_sum
from mmspeed.compute.sparse.cluster_plan import ClusterPlan
from mmspeed.compute.sparse.module import ClusteredAttention, clustered_layers, warm_plans
from mmspeed.errors import UserError
from mmspeed.memory.recompute.block_checkpoint import recompute
from tests.support.sparse_transformers import (
    CASES,
    FIRST,
    IMAGES,
    JOINT,
    MASKED,
    SMALL,
    TEXT,
    TOKENS,
    assert_same,
    backward,
    calls_of_samples,
    gradients,
    plain_model,
    sparse_model,
    text_of,
)
from tests.support.video_transformers import loss_of, make_inputs


def calls_of(layer: ClusteredAttention, run: Callable[[], Any]) -> list[tuple[tuple[Any, ...], Tensor]]:
    """The arguments and results of a layer's calls during `run`."""
    seen: list[tuple[tuple[Any, ...], Tensor]] = []
    handle = layer.register_forward_hook(lambda _, args, out: seen.append((args, out)))
    run()
    handle.remove()
    return seen


def plan_of(layer: ClusteredAttention, args: tuple[Any, ...]) -> ClusterPlan:
    q, k, _, mask, positions, text = args
    return layer.plan(q, k, layer.keep(), layer.context(mask, positions, text))


@pytest.mark.parametrize("case", [*CASES, "wan, a timestep a token", "hunyuan, first frame given"])
def test_a_threshold_of_0_is_the_plain_model(case: str) -> None:
    plain, inputs = plain_model(case.partition(",")[0] if case.startswith("wan") else case), make_inputs(case)
    model = copy.deepcopy(plain)
    controller = mmspeed.sparsify_model(model, {**SMALL, "tau": 0.0})
    (loss, got), (true_loss, wanted) = backward(model, inputs), backward(plain, inputs)
    assert abs(loss - true_loss) <= 1e-5 * true_loss
    assert_same(got, wanted)
    assert controller.layers and all(
        dict(layer.counter) == {"sparse_grouped": calls_of_samples(case)} for layer in controller.layers.values()
    )


PLANNERS = ["clusters", "tiles", "window", "skip"]
# all planners with the first model, and one with each other
MEETINGS = [
    (case, planner)
    for row, case in enumerate(CASES)
    for column, planner in enumerate(PLANNERS)
    if not row or row % len(PLANNERS) == column
]


@pytest.mark.parametrize(("case", "planner"), MEETINGS)
def test_kernels_agree_with_the_oracle(case: str, planner: str) -> None:
    settings: dict[str, Any] = {"planner": planner, "keep": 0.3, "tile": (2, 2, 2), "window": (1, 1, 1), "stride": 3}
    settings |= {"tail": "summary" if planner in ("clusters", "tiles") else "zero", "tail_clusters": 5}
    inputs = make_inputs(case)
    model, controller = sparse_model(case, **settings)
    oracle, by_mask = sparse_model(case, **settings, backend="masked")
    (loss, got), (true_loss, wanted) = backward(model, inputs), backward(oracle, inputs)
    assert abs(loss - true_loss) <= 1e-5 * true_loss
    assert_same(got, wanted)
    for layer, other in zip(controller.layers.values(), by_mask.layers.values(), strict=True):
        calls = calls_of_samples(case)
        assert dict(layer.counter) == {"sparse_grouped": calls} and dict(other.counter) == {"sparse_masked": calls}
        assert layer.work.flops < layer.work.dense_flops
    dense, _ = backward(plain_model(case), inputs)
    assert abs(dense - loss) > 1e-7  # something was dropped


@pytest.mark.parametrize(
    ("case", "planner"), [(case, PLANNERS[place % len(PLANNERS)]) for place, case in enumerate(JOINT)]
)
def test_text_is_kept_by_all_and_keeps_all(case: str, planner: str) -> None:
    model, controller = sparse_model(case, planner=planner, keep=0.3, tail="zero", tile=(2, 2, 2), window=(1, 1, 1))
    layer = next(iter(controller.layers.values()))
    calls = calls_of(layer, lambda: loss_of(model, make_inputs(case)))
    # of Mochi, sample by sample without padding: three of the first one's tokens of text count
    texts = [TEXT // 2, TEXT] if case == "mochi" else [text_of(case)]
    grid = (1, 5, 9) if case in IMAGES else (5, 3, 3)
    for text, (args, out) in zip(texts, calls, strict=True):
        q, k, v, mask_BM, positions_NX, text_M = args
        first = slice(0, text) if case in FIRST else slice(TOKENS, TOKENS + text)
        assert text_M.sum() == text and text_M[first].all()
        assert positions_NX[~text_M].tolist() == [list(place) for place in product(*map(range, grid))]
        kept_BANM = plan_of(layer, args).kept_mask()
        seen_BM = torch.ones(len(q), TOKENS + text, dtype=torch.bool) if mask_BM is None else mask_BM
        assert (mask_BM is not None) == (case in MASKED)
        of_text_BANL = kept_BANM[..., text_M]
        assert torch.equal(of_text_BANL, seen_BM[:, None, None, text_M].expand_as(of_text_BANL))
        for_text_BALM = kept_BANM[:, :, text_M]
        assert torch.equal(for_text_BALM, seen_BM[:, None, None].expand_as(for_text_BALM))
        assert not kept_BANM[:, :, ~text_M][..., ~text_M].all(dim=-1).any()  # video queries drop keys of the video
        dense = F.scaled_dot_product_attention(q, k, v, attn_mask=seen_BM[:, None, None])
        assert torch.allclose(out[:, :, text_M], dense[:, :, text_M], atol=1e-5)
        assert not torch.allclose(out[:, :, ~text_M], dense[:, :, ~text_M], atol=1e-5)


def test_the_first_frame_can_be_kept_beside_the_text() -> None:
    model, controller = sparse_model("cogvideox", keep=0.1, keep_first_frame=True)
    layer = next(iter(controller.layers.values()))
    ((args, _),) = calls_of(layer, lambda: loss_of(model, make_inputs("cogvideox")))
    assert plan_of(layer, args).kept_mask()[..., : TEXT + 9].all()


@pytest.mark.parametrize("case", ["wan", "hunyuan"])
def test_blocks_at_the_ends_stay_dense(case: str) -> None:
    _, controller = sparse_model(case)
    every = {"wan": ["blocks.1.attn1"], "hunyuan": ["transformer_blocks.1.attn", "single_transformer_blocks.0.attn"]}
    assert list(controller.layers) == every[case]
    _, all_of_them = sparse_model(case, dense_first=0, dense_last=0)
    assert len(all_of_them.layers) == (4 if len(every[case]) == 2 else 3)
    assert [layer.way for layer in all_of_them.layers.values()][:3] == [0, 1, 0]
    with pytest.raises(UserError, match="all would stay dense"):
        sparse_model(case, dense_first=0, dense_last=9)


@pytest.mark.parametrize("case", ["wan", "hunyuan"])
def test_images_are_dense(case: str) -> None:
    inputs = make_inputs(case, frames=1)
    model, controller = sparse_model(case, keep=0.1)
    (loss, got), (true_loss, wanted) = backward(model, inputs), backward(plain_model(case), inputs)
    assert loss == true_loss
    assert_same(got, wanted, within=0.0)
    assert all(dict(layer.counter) == {"dense": 1} for layer in controller.layers.values())


@pytest.mark.parametrize("case", [*CASES][1::4])
def test_checkpoints_keep_what_was_decided(case: str) -> None:
    """Thresholds and phases that change before the backward, and forwards of other sizes, do not change a gradient."""
    others = ({"text": 5}, {"text": 3}) if case in IMAGES else ({"frames": 1}, {"frames": 3, "seed": 2})
    sizes = [make_inputs(case), *(make_inputs(case, **other) for other in others)]
    model, controller = sparse_model(case, keep=0.3)
    once = [backward(model, inputs)[1] for inputs in sizes]
    wanted = {name: sum(each[name] for each in once if name in each) for name in once[0]}
    again, other = sparse_model(case, keep=0.3)
    again.enable_gradient_checkpointing()  # type: ignore[operator]
    loss = sum(loss_of(again, inputs) for inputs in sizes)
    for layer in other.layers.values():
        layer.tau.fill_(3.0)
        layer.phase = "dense"
    loss.backward()  # type: ignore[union-attr]
    assert_same(gradients(again), wanted)  # type: ignore[arg-type]
    for layer, twice in zip(controller.layers.values(), other.layers.values(), strict=True):
        n = calls_of_samples(case)
        wanted_calls = {"sparse_grouped": 6} if case in IMAGES else {"sparse_grouped": 4 * n, "dense": 2}
        assert twice.counter == wanted_calls  # it was computed twice,
        assert twice.work.dense_flops == layer.work.dense_flops  # and planned once
        layer.tau.fill_(3.0)
    changed = backward(model, sizes[0])[1]  # such a threshold would have changed it
    assert any(not torch.allclose(changed[name], once[0][name], rtol=1e-3, atol=1e-7) for name in changed)


@pytest.mark.parametrize(("when", "reentrant"), [("before", False), ("after", True)])
def test_a_scripts_own_checkpoint_function_is_taken_too(when: str, reentrant: bool) -> None:
    _, wanted = backward(sparse_model("wan", keep=0.3)[0], make_inputs("wan"))
    model = plain_model("wan")

    def own(block: Any, *args: Any) -> Any:
        return checkpoint(block, *args, use_reentrant=reentrant)

    if when == "before":
        model.enable_gradient_checkpointing(own)  # type: ignore[operator]
    controller = mmspeed.sparsify_model(model, {**SMALL, "keep": 0.3})
    if when == "after":
        model.enable_gradient_checkpointing(own)  # type: ignore[operator]
    loss = loss_of(model, make_inputs("wan"))
    controller.layers["blocks.1.attn1"].tau.fill_(3.0)
    loss.backward()
    assert_same(gradients(model), wanted)
    model.disable_gradient_checkpointing()  # type: ignore[operator]
    before = controller.layers["blocks.1.attn1"].counter["sparse_grouped"]
    loss_of(model, make_inputs("wan")).backward()
    assert controller.layers["blocks.1.attn1"].counter["sparse_grouped"] == before + 1


def test_a_checkpoint_that_keeps_nothing_is_refused_and_ours_is_taken() -> None:
    model, _ = sparse_model("wan", keep=0.3)
    block: Any = model.blocks[1]  # type: ignore[index, union-attr]
    own = block.forward
    block.forward = lambda *args: checkpoint(own, *args, use_reentrant=False)
    loss = loss_of(model, make_inputs("wan"))
    with pytest.raises(UserError, match="computed again in backward"):
        loss.backward()
    del block.forward
    _, wanted = backward(model, make_inputs("wan"))
    recompute(block)
    assert_same(backward(model, make_inputs("wan"))[1], wanted)


def test_autocast() -> None:
    model, controller = sparse_model("hunyuan", keep=0.3)
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(model, make_inputs("hunyuan"))
    loss.backward()
    exact, _ = backward(sparse_model("hunyuan", keep=0.3)[0], make_inputs("hunyuan"))
    assert abs(loss.item() - exact) < 0.02 * exact
    assert all(dict(layer.counter) == {"sparse_grouped": 1} for layer in controller.layers.values())


@pytest.mark.parametrize("case", ["wan", "hunyuan"])
def test_saved_and_loaded_as_the_plain_class(case: str, tmp_path: Path) -> None:
    model: Any
    model, controller = sparse_model(case, keep=0.3)
    plain = plain_model(case)
    assert set(model.state_dict()) == set(plain.state_dict())
    assert type(model).__name__ == type(plain).__name__
    model.load_state_dict(plain.state_dict())  # strict, both ways
    plain.load_state_dict(model.state_dict())
    model.save_pretrained(tmp_path)
    loaded, keys = type(plain).from_pretrained(tmp_path, output_loading_info=True)  # type: ignore[attr-defined]
    assert not keys["unexpected_keys"] and not keys["missing_keys"] and not clustered_layers(loaded)
    for layer in controller.layers.values():
        layer.tau.fill_(1.5)
    saved = json.loads(json.dumps(controller.state_dict()))
    again = mmspeed.sparsify_model(loaded.train(), controller.settings)
    assert all(torch.isnan(layer.tau) for layer in again.layers.values())
    again.load_state_dict(saved)
    assert loss_of(loaded, make_inputs(case)).item() == loss_of(model, make_inputs(case)).item()
    saved["blocks.9.attn1"] = saved.popitem()[1]
    with pytest.raises(UserError, match="other layers"):
        again.load_state_dict(saved)


def test_a_copy_computes_by_itself() -> None:
    model, controller = sparse_model("cogvideox", keep=0.3)
    twin = copy.deepcopy(model)
    loss = loss_of(twin, make_inputs("cogvideox", frames=3))
    assert not controller.layers["transformer_blocks.1.attn1"].counter
    assert loss == loss_of(model, make_inputs("cogvideox", frames=3))


@pytest.mark.parametrize("case", ["wan", "hunyuan 1.5", "mochi", "qwen, images"])
def test_the_controller_reaches_its_share(case: str) -> None:
    model, controller = sparse_model(case, keep=0.4, update_every=1, cluster_size=4)
    kept = []
    for step in range(8):
        controller.before_step(step)
        loss_of(model, make_inputs(case, seed=step)).backward()
        assert controller.after_step(all_reduce_sum)
        kept.append([row.kept for row in controller.rows])
    assert kept[0] == [None] * len(controller.layers)  # dense
    text = (1 - TOKENS / (TOKENS + text_of(case))) if case in JOINT else 0.0  # share of the queries that keep all
    n, off = calls_of_samples(case), 0.08 if case == "hunyuan 1.5" else 0.06  # a quarter of its text is padding
    for share in kept[-1]:
        assert share is not None and abs(share - (0.4 + 0.6 * text)) < off
    assert [row.layer for row in controller.rows] == list(controller.layers)
    assert all(row.error is not None and row.error < 0.5 for row in controller.rows)
    assert all(
        layer.counter["dense"] == n and layer.counter["sparse_grouped"] == 7 * n for layer in controller.layers.values()
    )
    assert controller.saved_flops(all_reduce_sum) > 0


def test_a_pipeline_samples_with_warm_plans() -> None:
    """Diffusers' own WanPipeline: each condition keeps its own clusters from step to step."""
    from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline

    model, controller = sparse_model("wan", keep=0.5)
    layer = controller.layers["blocks.1.attn1"]
    pipe: Any = WanPipeline(None, None, None, FlowMatchEulerDiscreteScheduler(), model.eval())
    pipe.set_progress_bar_config(disable=True)
    texts = make_inputs("wan")["encoder_hidden_states"]
    conditions: list[set[str]] = []

    def look(_pipe: Any, step: int, _time: Any, _given: Any) -> dict[str, Any]:
        assert layer.warm is not None
        conditions.append(set(layer.warm.starts))
        return {}

    def sample() -> Tensor:
        return pipe(
            prompt_embeds=texts[:1], negative_prompt_embeds=texts[1:], height=48, width=48, num_frames=17,
            num_inference_steps=3, output_type="latent", latents=make_inputs("wan")["hidden_states"][:1],
            callback_on_step_end=look, return_dict=False,
        )[0]  # fmt: skip

    with warm_plans(model):
        warm = sample()
    assert conditions == [{"cond", "uncond"}] * 3 and layer.warm is None
    assert layer.counter == {"sparse_grouped": 6}
    assert warm.isfinite().all() and warm.shape == (1, 4, 5, 6, 6)
