"""Layouts that cannot be are refused early, and what meets in a step of a given size knows nothing of layouts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mmspeed.axes import AxisSizes, mesh_table
from mmspeed.comm import Axis
from mmspeed.config.parallel import ParallelConfig
from mmspeed.config.training import BatchingConfig, TrainConfig
from mmspeed.data import BatchSampler
from mmspeed.data.sampling.batch_sizes import SampleCosts, make_batching
from mmspeed.errors import UserError
from mmspeed.mesh import Mesh
from mmspeed.models import SoraDiT, SoraDiTConfig
from mmspeed.models.language.shapes import SHAPES, tiny_twin
from mmspeed.models.language.weights import on_meta
from mmspeed.parallel import TokenLayout, check_layout, parallelize, sequence_parallel
from mmspeed.parallel.sequence.hybrid_attention import SequenceAxes
from mmspeed.preprocess.report.schedule import forecast_schedule
from mmspeed.protocols.plan import ModelPlan, Split, declare_plan
from mmspeed.shapes import Bucket
from tests.support.runs import small_config
from tests.unit.data.test_sampler import BUCKETS, make_samples

COSTS = SampleCosts(lambda bucket: bucket.frames * bucket.height, lambda bucket: 1e9 * bucket.frames * bucket.height)


@pytest.mark.parametrize("by", ["samples", "tokens", "flops"])
def test_steps_of_a_given_size_are_the_same_in_any_layout(by: str) -> None:
    train = TrainConfig(batch_size=4) if by == "samples" else TrainConfig(batch_size=None)
    rule = BatchingConfig(by=by, mix="window", slots=None if by == "samples" else 4)  # type: ignore[arg-type]
    layouts = [
        None,
        ParallelConfig(ulysses=2),
        ParallelConfig(ring=3),
        ParallelConfig(dsp=3, ulysses=2),
        ParallelConfig(ulysses=2, tp=2),
    ]
    samples = make_samples(9, 14, 5)
    results = set()
    for parallel in layouts:
        batching = make_batching(rule, train, BUCKETS, COSTS, 12, parallel)
        sampler = BatchSampler(samples, batching, seed=0)
        steps = [tuple(draw.name for draw in sampler.draws(step)) for step in range(sampler.steps_per_epoch)]
        results.add((sampler.order_fingerprint, tuple(steps)))
        video = next(bucket for bucket in BUCKETS if not bucket.is_image)
        if parallel is not None:  # and each device's part of it is smaller
            alone = make_batching(rule, train, BUCKETS, COSTS, 12).dp_group_cost(video).each
            assert batching.dp_group_cost(video).each == pytest.approx(alone / parallel.group)
    assert len(results) == 1


def test_steps_sized_by_the_devices_count_groups() -> None:
    rule = BatchingConfig(by="tokens")
    train, video, image = TrainConfig(batch_size=None), Bucket(9, 32, 32), Bucket(1, 32, 32)
    batching = make_batching(rule, train, [video, image], COSTS, 8, ParallelConfig(ring=2, tp=2))
    assert batching.supply(video, 100).slots == 2 and batching.supply(image, 100).slots == 4


def test_models_that_split_nothing_are_reported() -> None:
    model = on_meta(tiny_twin(SHAPES["qwen3-30b-a3b"].settings))
    declare_plan(model, replace(model.plan, inputs={}, linears={}))
    layout = TokenLayout(whole=replace(Axis.alone("sequence"), size=2))
    with pytest.raises(UserError, match="splits no tokens and no layers, so 2 processes would all compute the same"):
        parallelize(model, None, "none", layout=layout)


def test_an_axis_without_a_technique_is_refused_by_name() -> None:
    views: Any = (None, None)  # no process group is asked
    mesh = Mesh(mesh_table(4, AxisSizes(pp=2)), 0, *views)
    model = SoraDiT(SoraDiTConfig(48, 2, 4, 3, 10, adaln_rank=4))
    with pytest.raises(UserError, match="no technique for the axis pp of the mesh, so its 2 processes"):
        parallelize(model, mesh, "none")


def test_heads_that_do_not_fit_are_reported() -> None:
    def model(arrangement: str) -> SoraDiT:
        return SoraDiT(SoraDiTConfig(48, 2, 4, 3, 10, adaln_rank=4, arrangement=arrangement))  # type: ignore[arg-type]

    with pytest.raises(UserError, match="tp 3 does not divide the model's 4 heads: use one of 1, 2, 4"):
        check_layout(model("full"), ParallelConfig(tp=3))
    for arrangement in ("full", "factorised"):
        with pytest.raises(UserError, match=r"parallel.ulysses 5 is more than the 4 heads of a device: use ring"):
            check_layout(model(arrangement), ParallelConfig(ulysses=5))
    with pytest.raises(UserError, match=r"the 2 heads of a device \(of 4, with parallel.tp 2\)"):
        check_layout(model("full"), ParallelConfig(ulysses=3, tp=2))
    check_layout(model("factorised"), ParallelConfig(dsp=5))  # moves tokens, not heads
    with pytest.raises(
        UserError, match=r"parallel.dsp 2: every block of SoraDiT attends over all tokens.*use ulysses or ring"
    ):
        check_layout(model("full"), ParallelConfig(dsp=2))


def test_dsp_of_a_full_model_is_refused_where_a_config_is_read(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"parallel.dsp 2 re-shards.*model.arrangement: full has none: use parallel.ulysses"
    ):
        small_config(tmp_path, "parallel.dsp=2", "model.arrangement=full")
    assert small_config(tmp_path, "parallel.dsp=2", "parallel.ulysses=2").parallel.sequence == 4


def test_degrees_that_do_not_make_the_devices_are_refused() -> None:
    parallel = ParallelConfig(dsp=3, ulysses=2)
    with pytest.raises(UserError, match="dsp 3 x ulysses 2 does not divide the 8 processes"):
        parallel.check_world(8)
    with pytest.raises(ValueError, match="greater than or equal to 1"):
        ParallelConfig(dsp=0)


def test_tensor_parallelism_wants_sharding() -> None:
    with pytest.raises(ValueError, match="tp goes with strategy fsdp or auto, not with ddp"):
        ParallelConfig(tp=2, strategy="ddp")
    with pytest.raises(ValueError, match="ring_window 2 must divide ring 3"):
        ParallelConfig(ring=3, ring_window=2)


def test_a_schedule_is_for_whole_groups(tmp_path: Path) -> None:
    config = small_config(tmp_path, "parallel.ring=2", "parallel.ulysses=2")
    groups = {(Bucket(5, 32, 48), config.data.dataset_names[0]): 20}
    with pytest.raises(UserError, match="6 devices are not a multiple of the 4 of ring 2 x ulysses 2"):
        forecast_schedule(config, groups, COSTS, (6,))
    assert forecast_schedule(config, groups, COSTS, (4, 8)).worlds == (4, 8)


def test_plans_with_misspelt_arguments_are_reported() -> None:
    model = SoraDiT(SoraDiTConfig(48, 2, 4, 3, 10, adaln_rank=4))
    plan = ModelPlan((), inputs={"": {"text_BLDD": Split("text", 1)}})
    with pytest.raises(UserError, match=r"has no argument 'text_BLDD'.*text_BLD"):
        sequence_parallel(model, SequenceAxes.alone(), plan)
    with pytest.raises(UserError, match="the plan is a str, not a ModelPlan"):
        sequence_parallel(model, SequenceAxes.alone(), "ulysses")  # type: ignore[arg-type]
