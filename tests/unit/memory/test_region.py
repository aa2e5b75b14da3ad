"""Ways of a block's spans: the gradients are those of the plain step to the bit, and counters show what was kept and made again."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn

from mmspeed.compute.sparse.module import clustered_layers
from tests.support.covers import checkered
from tests.support.memory_ways import (
    BLOCKS,
    LARGE,
    Step,
    assert_same,
    combinations,
    each_way,
    make_inputs,
    make_model,
    name_of,
    step_of,
)

KINDS = [(arrangement, dtype) for arrangement in ("factorised", "full") for dtype in (torch.float32, torch.bfloat16)]
PER_BLOCK = 9  # products of a block's forward pass: modulation 2, attention 2, cross-attention 3, MLP 2
# products of one block's forward pass that backward makes again; the last of a span, whose result backward does not need, is not
AGAIN = {"block": PER_BLOCK, "attention": 2, "cross_attention": 2, "mlp": 2, "norm": 0, "activation": 0}


@cache
def plain(arrangement: str, dtype: torch.dtype) -> Step:
    return step_of({}, partial(make_model, arrangement), dtype=dtype)


def meetings() -> list[Any]:
    """Each way with one arrangement and one number type, in turn."""
    results = []
    for place, ways in enumerate(each_way()):
        arrangement, dtype = KINDS[place % len(KINDS)]
        named = f"{arrangement}-{str(dtype).removeprefix('torch.')}-{name_of(ways)}"
        results.append(pytest.param(arrangement, dtype, ways, id=named))
    return results


@pytest.mark.parametrize(("arrangement", "dtype", "ways"), meetings())
def test_every_way_gives_the_gradients_of_the_plain_step(arrangement: str, dtype: torch.dtype, ways: Any) -> None:
    actual, wanted = step_of(ways, partial(make_model, arrangement), dtype=dtype), plain(arrangement, dtype)
    assert_same(actual, wanted)
    ((name, way),) = ways.items()
    again = AGAIN[name] * BLOCKS if "recompute" in way else 0
    assert actual.forward == wanted.forward and actual.backward == wanted.backward + again
    assert (actual.moved > 0) == ("offload" in way)


@pytest.mark.parametrize("ways", [*combinations()][::4], ids=name_of)
def test_combinations_give_the_gradients_of_the_plain_step(ways: Any) -> None:
    actual, wanted = step_of(ways), plain("factorised", torch.float32)
    assert_same(actual, wanted)
    again = sum(AGAIN[name] for name, way in ways.items() if "recompute" in way) * BLOCKS
    assert actual.backward == wanted.backward + again


INPUTS = {"masked": {"masked": True}, "times of frames": {"frames": True}, "both": {"masked": True, "frames": True}}


@pytest.mark.parametrize(
    ("kind", "ways"),
    checkered([*INPUTS], [{"block": way} for way in LARGE] + [{"norm": "recompute", "activation": "recompute"}]),
    ids=lambda value: value if isinstance(value, str) else name_of(value),
)
def test_masks_and_times_of_frames(kind: str, ways: Any) -> None:
    inputs = make_inputs(**INPUTS[kind])
    for arrangement in ("factorised", "full"):
        make = partial(make_model, arrangement)
        assert_same(step_of(ways, make, inputs), step_of({}, make, inputs))


SPARSE_WAYS: list[Any] = (
    [{"block": way} for way in LARGE] + [{"attention": way} for way in LARGE] + [{"norm": "recompute"}]
)


SPARSE_SETTINGS: dict[str, dict[str, Any]] = {
    "clusters": {},
    "no tail": {"tail": "zero"},
    "tiles": {"planner": "tiles", "tau": None, "tile": (2, 2, 2)},
    "masked": {"backend": "masked"},
    "dense": {"dense_steps": 1},
}


def sparse_meetings() -> list[Any]:
    """Every third way with clusters, and with each other setting one or two ways in turn."""
    return [
        pytest.param(settings, ways, id=f"{name}-{name_of(ways)}")
        for row, (name, settings) in enumerate(SPARSE_SETTINGS.items())
        for column, ways in enumerate(SPARSE_WAYS)
        if not (column - row) % (8 if row else 3)
    ]


@pytest.mark.parametrize(("settings", "ways"), sparse_meetings())
def test_sparse_attention(settings: dict[str, Any], ways: Any) -> None:
    """Plans are made once and their products are no part of what is kept; a kernel of its own gradients is run once, where it is kept."""
    models = []

    def make() -> nn.Module:
        models.append(make_model("full", True, **settings))
        return models[-1]

    actual, wanted = step_of(ways, make), step_of({}, make)
    assert_same(actual, wanted)
    counters = [[dict(layer.counter) for layer in clustered_layers(model).values()] for model in models]
    assert all(counters[1]) and len(counters[1]) == BLOCKS
    runs_again = any("recompute" in way for way in ways.values()) and "norm" not in ways
    if settings.get("backend") != "masked" and "dense_steps" not in settings:
        assert (
            counters[0] == [{"sparse_grouped": 1 + runs_again}] * BLOCKS
            and counters[1] == [{"sparse_grouped": 1}] * BLOCKS
        )
    if "offload" in ways.values() or "selective" in ways.values():
        assert actual.backward == wanted.backward
