"""What sequence parallelism by a plan does on one process: masks, lengths, configs, plans that do not fit."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import mmspeed
from mmspeed.comm import Axis
from mmspeed.config.parallel import ParallelConfig
from mmspeed.config.schema import Config
from mmspeed.errors import UserError
from mmspeed.models.diffusers.plans import PLANS, converted, plan_for
from mmspeed.parallel import TokenLayout, sequence_parallel
from mmspeed.parallel.boundaries.attention_sites import key_mask
from mmspeed.parallel.boundaries.boundary import ModuleBoundary
from mmspeed.parallel.boundaries.record import ForwardRecord, Sequences
from mmspeed.parallel.sequence.hybrid_attention import SequenceAxes
from mmspeed.parallel.sequence.zigzag import zigzag_order
from mmspeed.pipelines.accelerate import parallel_config
from mmspeed.protocols.plan import Leading, ModelPlan, Split
from tests.support.video_transformers import CASES, make_model


class Place:
    """A group seen from one place; no process group is behind it, so that only local work can be done."""

    def __init__(self, ring: int, ulysses: int, place: int, causal: bool = False) -> None:
        axes = SequenceAxes(
            Axis("ring", None, ring, place // ulysses), Axis("ulysses", None, ulysses, place % ulysses)
        )  # fmt: skip
        whole = Axis("sequence", None, ring * ulysses, place)
        sequences = Sequences(ModelPlan((), causal=causal), TokenLayout(axes, whole, whole=whole))
        self.boundary = ModuleBoundary(sequences, "here", "columns", (), "columns")
        self.record = ForwardRecord(sequences)

    def part(self, value: Any, what: Split | Leading, where: str) -> Any:
        return self.boundary.piece(self.record, value, what, where)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 30), st.integers(0, 30), st.booleans())
def test_parts_of_all_ranks_are_the_whole(ring: int, ulysses: int, video: int, text: int, causal: bool) -> None:
    x, mask = torch.arange(2 * video).view(2, video), torch.arange(video + text)[None]
    parts, masks, lead = [], [], 0
    for place in range(ring * ulysses):
        group = Place(ring, ulysses, place, causal)
        parts.append(group.part(x, Split("video", 1), "x"))
        text_part = group.part(torch.arange(video, video + text)[None], Split("text", 1), "text")
        masks.append(group.part(mask, Split(("video", "text"), -1), "mask"))
        assert torch.equal(masks[-1], torch.cat([parts[-1][:1], text_part], 1))
        lead += group.part(min(video, 7), Leading("video"), "first")
    order = zigzag_order(video, ring) if causal else torch.arange(video)
    assert torch.equal(torch.cat(parts, 1), x[:, order])
    assert max(p.shape[1] for p in parts) - min(p.shape[1] for p in parts) <= (2 if causal else 1)
    assert torch.equal(torch.cat(masks, 1).sort().values, mask)
    assert lead == min(video, 7)


def test_a_part_does_not_keep_the_whole_in_memory() -> None:
    part = Place(2, 1, 0).part(torch.zeros(1, 8, 4), Split("video", 1), "x")
    assert part.untyped_storage().nbytes() == 4 * 4 * 4


def test_what_is_left_whole() -> None:
    group = Place(2, 1, 0)
    timestep, one = torch.zeros(3), torch.zeros(3, 1)
    assert group.part(timestep, Split("video", 1, ndim=2), "t") is timestep
    assert group.part(one, Split("video", 1, broadcast=True), "t") is one
    assert group.part(None, Split("video", 1), "t") is None
    pair = group.part((torch.zeros(4, 2), torch.zeros(4, 2)), Split("video", 0), "rotary")
    assert [tuple(x.shape) for x in pair] == [(2, 2), (2, 2)]
    with pytest.raises(UserError, match="is a str"):
        group.part("x", Split("video", 0), "rotary")
    with pytest.raises(UserError, match="'video' has 5 tokens here and had 4 before"):
        group.part(torch.zeros(5), Split("video", 0), "rotary")


KEYS = torch.tensor([[True, False, True], [True, True, False]])


@pytest.mark.parametrize(
    "mask",
    [
        KEYS[:, None, None],
        KEYS[:, None, None].expand(2, 4, 5, 3)[:, :, :1],
        torch.zeros(2, 3).masked_fill(~KEYS, float("-inf"))[:, None, None],
        torch.zeros(2, 3).masked_fill(~KEYS, -10000.0)[:, None, None].repeat(1, 4, 1, 1),
        torch.zeros(2, 3, dtype=torch.bfloat16).masked_fill(~KEYS, torch.finfo(torch.bfloat16).min)[:, None, None],
    ],
    ids=["bool", "expanded over heads", "-inf", "-10000 and heads", "lowest bfloat16"],
)
def test_masks_of_keys(mask: torch.Tensor) -> None:
    assert torch.equal(key_mask(mask, 2, 3), KEYS)


def test_one_row_of_keys_is_for_every_sample() -> None:
    assert torch.equal(key_mask(KEYS[:1], 2, 3), KEYS[:1].expand(2, 3))


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (torch.ones(3, 3, dtype=torch.bool), "only masks of keys work"),
        (torch.zeros(2, 4, 5, 3), "only masks of keys work"),
        (torch.ones(2, 1, 1, 4, dtype=torch.bool), "only masks of keys work"),
        (torch.tensor([[0.0, 0.5, 0.0]])[None, None], "adds a bias"),
        (torch.stack([KEYS, ~KEYS], 1)[:, :, None], "differs from head to head"),
    ],
)
def test_masks_that_do_not_fit(mask: torch.Tensor, words: str) -> None:
    with pytest.raises(UserError, match=words):
        key_mask(mask, 2, 3)


def test_config_of_any_kind() -> None:
    section = ParallelConfig(ring=2, ulysses=2)
    assert parallel_config(section) is section
    assert parallel_config(Config.model_construct(parallel=section)) is section
    assert parallel_config("ulysses=2, ring=2") == section
    assert (
        parallel_config({"ring": 2, "ulysses": 2})
        == parallel_config({"parallel": {"ring": 2, "ulysses": 2}})
        == section
    )
    assert parallel_config("ring=4,ring_window=2,exchange=point_to_point").exchange == "point_to_point"
    with pytest.raises(UserError, match=r"parallel\.ulyses: no such key; did you mean 'ulysses'"):
        parallel_config("ulyses=2")
    with pytest.raises(UserError, match=r"parallel\.ring: Input should be greater than or equal to 1"):
        parallel_config("ring=0")
    with pytest.raises(UserError, match="config is a int"):
        parallel_config(2)  # type: ignore[arg-type]


def test_degree_one_changes_nothing() -> None:
    model = nn.Linear(1, 1)
    assert mmspeed.accelerate_model(model, "ring=1") is model and type(model) is nn.Linear


def test_without_processes_it_says_how_to_start() -> None:
    with pytest.raises(UserError, match="start the script by torchrun"):
        mmspeed.accelerate_model(nn.Linear(1, 1), "ring=2")


def test_models_of_others_have_no_dsp() -> None:
    with pytest.raises(UserError, match=r"parallel.dsp is 2: .* Linear takes ring and ulysses"):
        mmspeed.accelerate_model(nn.Linear(1, 1), "dsp=2")


def test_plans_fit_their_models() -> None:
    axes = SequenceAxes(Axis.alone("ring"), Axis.alone("ulysses"))
    for case in CASES:
        model = make_model(case)
        own = type(model)
        assert sequence_parallel(model, axes, plan_for(model)) is model and type(model) is own  # one rank: only checked


def test_declarations_that_leave_questions_open_are_refused() -> None:
    with pytest.raises(UserError, match="splits 'encoder_hidden_states' too"):
        converted(make_model("ltx"))
    with pytest.raises(UserError, match="no plan is known"):
        converted(make_model("hunyuan"))
    bare: Any = nn.Linear(1, 1)
    bare._cp_plan = {"": {"x": SimpleNamespace(split_dim=1, expected_dims=3, split_output=False)}}
    with pytest.raises(UserError, match="none of its attention modules"):
        converted(bare)


def test_subclasses_have_their_parents_plan() -> None:
    model = make_model("wan")
    model.__class__ = type("MyWan", (type(model),), {})
    assert plan_for(model) == PLANS["WanTransformer3DModel"](model)


@pytest.mark.slow
def test_the_name_loads_nothing_before_it_is_used() -> None:
    code = "import sys, mmspeed; assert not {'torch', 'diffusers'} & set(sys.modules); mmspeed.accelerate_model"
    assert subprocess.run([sys.executable, "-c", code], timeout=100).returncode == 0
    with pytest.raises(AttributeError, match="has no attribute 'accelerate'"):
        mmspeed.accelerate  # type: ignore[attr-defined]  # noqa: B018
