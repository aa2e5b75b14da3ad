"""Published video transformers under their plans: tensor and sequence parallelism, sparse attention, recomputation, chunks together.

Loss and every gradient against one process in float32. Tolerance: 1e-5 of a gradient's largest entry, since sums over keys, heads and
processes are taken in another order; recomputation and the order of backwards change no bit.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from mmspeed.memory import BlockPolicies
from tests.support.foreign_steps import REGIONS, Case, Groups, compared
from tests.support.spawn import run_ranks

TOLERANCE = 1e-5
WHOLE, PARTS = BlockPolicies.everywhere({"block": "recompute"}), BlockPolicies.everywhere(REGIONS)  # type: ignore[arg-type]
PARTS_OF_JOINT = BlockPolicies.everywhere({"attention": "recompute", "mlp": "recompute"})
ATTENTION = BlockPolicies.everywhere({"attention": "recompute"})
AGAIN = BlockPolicies.everywhere({"block": "recompute"}, exchange_again=True)
SELECTIVE = BlockPolicies.everywhere({"block": "selective"})
CHUNKS = BlockPolicies(mlp_chunk=16)
I2V = {"image_dim": 8, "added_kv_proj_dim": 48}
BOTH = ({}, {"frames": 3, "text": 5})

TP = Case(tp=2)
ULYSSES, RING = Case(ulysses=2), Case(ring=2)
LTX, LTX_RING = Case("ltx", ulysses=2), Case("ltx", ring=2)
# what backward finds changes no bit of these
PLAIN = {"tp": TP, "ulysses": ULYSSES, "ring": RING, "ltx ulysses": LTX, "ltx ring": LTX_RING}
WAYS: dict[str, dict[str, Any]] = {
    "blocks recomputed": {"keeping": WHOLE},
    "exchanged again": {"keeping": AGAIN},
    "selective": {"keeping": SELECTIVE},
    "regions recomputed": {"keeping": PARTS},
    "checkpointing of diffusers": {"checkpointing": True},
}
SAME = {f"{name}, {way}": replace(case, **how) for name, case in PLAIN.items() for way, how in WAYS.items()}
TWO: dict[str, Case] = {
    **PLAIN,
    **SAME,
    "tp, a timestep a token": replace(TP, model="wan, a timestep a token"),
    "tp, an image": replace(TP, batches=({"frames": 1},)),
    "tp, image to video": replace(TP, options=I2V),
    "tp, compiled and recomputed": replace(TP, compile="eager", keeping=WHOLE),
    "tp, two micro-batches, regions": replace(TP, batches=BOTH, keeping=PARTS),
    "tp, two keys of five": replace(TP, sparse="before", tau=1.0),
    "ulysses, an image": replace(ULYSSES, batches=({"frames": 1},)),
    "ulysses, image to video": replace(ULYSSES, options=I2V),
    "ulysses, two micro-batches": replace(ULYSSES, batches=BOTH, keeping=WHOLE),
    "ulysses, sharded": replace(ULYSSES, strategy="fsdp"),
    "ulysses, sparse, regions": replace(ULYSSES, sparse="before", keeping=PARTS, batches=BOTH),
    # over Ulysses a process plans its own heads, as one process with the same threshold would
    "ulysses, two keys of five": replace(ULYSSES, sparse="after", tau=1.0),
    "ring, sparse afterwards": replace(RING, sparse="after", batches=({"frames": 3},)),
    "ring, sparse, recomputed": replace(RING, sparse="before", keeping=WHOLE),
    "ltx ulysses, chunks": replace(LTX, keeping=CHUNKS),
    "ltx ring, two micro-batches": replace(LTX_RING, batches=BOTH, keeping=PARTS),
    "ltx ring, an image": replace(LTX_RING, batches=({"frames": 1},)),
    "ltx tp, a timestep a token, chunks": Case("ltx, a timestep a token", tp=2, keeping=CHUNKS),
    "hunyuan 1.5 tp, recomputed": Case("hunyuan 1.5", tp=2, batches=({"frames": 3},), keeping=WHOLE),
    "mochi tp": Case("mochi", tp=2),
    "qwen tp, regions": Case("qwen, images", tp=2, batches=({"text": 5},), keeping=PARTS_OF_JOINT),
    "flux tp": Case("flux, images", tp=2, batches=({}, {"text": 5})),
    "flux tp, exchanged again": Case("flux, images", tp=2, batches=({},), keeping=AGAIN),
    "flux tp, compiled": Case("flux, images", tp=2, batches=({},), compile="eager"),
    "hunyuan tp": Case("hunyuan, first frame given", tp=2, batches=({"frames": 3},)),
    "hunyuan tp, regions": Case("hunyuan", tp=2, batches=({},), keeping=ATTENTION),
    "cogvideox tp": Case("cogvideox", tp=2),
    "cogvideox tp, less text than processes": Case("cogvideox", tp=2, batches=({"text": 1},), keeping=WHOLE),
}
FSDP: dict[str, Any] = {"strategy": "fsdp"}
FOUR: dict[str, Case] = {
    "tp x ulysses, odd lengths": Case(tp=2, ulysses=2, batches=({"frames": 3},), **FSDP),
    "tp x ulysses, recomputed": Case(tp=2, ulysses=2, keeping=WHOLE, **FSDP),
    "tp x ulysses, an image": Case(tp=2, ulysses=2, batches=({"frames": 1},), **FSDP),
    "tp x ring, sparse": Case(tp=2, ring=2, sparse="before", **FSDP),
    "ulysses x ring, sparse": Case(ulysses=2, ring=2, sparse="before"),
    "tp 4": Case(tp=4),
    "ltx tp x ring": Case("ltx", tp=2, ring=2, **FSDP),
    "mochi tp x ulysses": Case("mochi", tp=2, ulysses=2, **FSDP),
    "flux tp 4": Case("flux, images", tp=4, batches=({},)),
    "hunyuan tp 4": Case("hunyuan, first frame given", tp=4, batches=({},)),
    "cogvideox tp x ring": Case("cogvideox", tp=2, ring=2, batches=({"text": 1, "frames": 3},), **FSDP),
    "ltx ulysses x ring, sparse, recomputed": Case("ltx", ulysses=2, ring=2, sparse="before", keeping=WHOLE),
}
# of two processes; the others take minutes
FAST = {
    *("tp", "ring", "tp, blocks recomputed", "tp, a timestep a token", "ring, sparse, recomputed", "flux tp", "cogvideox tp"),
}  # fmt: skip


def computed(cases: dict[str, Case]) -> dict[str, Any]:
    """What each case gave; of the ways of recomputation, whether their gradients are those without to the bit."""
    groups = Groups()
    results: dict[str, Any] = {}
    grads: dict[str, Any] = {}
    for name, case in cases.items():
        try:
            results[name] = compared(case, groups)
        except Exception as error:
            raise AssertionError(f"{name}: {error}") from error
        grads[name] = results[name].pop("grads")
        plain = name.partition(",")[0]
        if name in SAME:
            results[name]["same"] = all(torch.equal(grads[name][key], value) for key, value in grads[plain].items())
            results[name]["plain calls"] = results[plain]["calls"]
    return results


@pytest.fixture(scope="module", params=[True, pytest.param(False, marks=pytest.mark.slow)], ids=["few", "all"])
def two(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Cases on two processes."""
    return run_ranks(computed, 2, {name: case for name, case in TWO.items() if name in FAST or not request.param})[0]


def hold(case: Case, actual: dict[str, Any]) -> None:
    assert actual["loss"] <= TOLERANCE and actual["gradient"] <= TOLERANCE, actual
    image = case.batches[0].get("frames") == 1
    assert actual["calls"] or (image and case.tp == 1), "nothing was exchanged"
    assert actual["uncrossed"] == [] or image
    assert bool(actual["sparse"]) == bool(case.sparse) and "dense" not in actual["sparse"], actual["sparse"]


def test_two_processes_and_one_agree(two: dict[str, Any]) -> None:
    for name, actual in two.items():
        hold(TWO[name], actual)
        if "an image" in name and TWO[name].tp == 1:
            assert actual["gradient"] == 0 and not actual["calls"], name


def test_what_is_computed_again_is_the_same_to_the_bit(two: dict[str, Any]) -> None:
    for name, actual in ((name, two[name]) for name in SAME if name in two):
        assert actual["same"], name
        assert (actual["calls"] == actual["plain calls"]) != ("again" in name), (name, actual)


@pytest.mark.slow
def test_four_processes_and_one_agree() -> None:
    for name, actual in run_ranks(computed, 4, FOUR)[0].items():
        hold(FOUR[name], actual)


def test_layers_of_tensor_parallelism_exchange_what_the_plan_says(two: dict[str, Any]) -> None:
    """Two layers: three gathers, three sums and four norms over all heads in each, their gradients, and the gather of what comes out."""
    calls = two["tp"]["calls"]
    blocks, gathers, norms = 2, 3, 4
    assert calls["all_gather tp"] == blocks * (gathers + norms) + blocks * gathers + 1, calls
    assert calls["reduce_scatter tp"] == blocks * gathers + blocks * (gathers + norms) + 1, calls


def test_a_layer_after_joined_channels_exchanges_columns_of_its_weight(two: dict[str, Any]) -> None:
    """Of one block of one stream: once forward, and once for the gradient."""
    assert two["flux tp"]["calls"]["columns tp"] == 2 * 2
    assert "columns tp" not in two["cogvideox tp"]["calls"]
