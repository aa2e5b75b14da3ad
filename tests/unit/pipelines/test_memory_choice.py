"""Ways chosen under a budget: measurements of a block, from shapes and on the device, the memory of a step, and a resumed run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from mmspeed.config import Config, make_config
from mmspeed.config.memory import MemoryConfig
from mmspeed.device import Device
from mmspeed.errors import UserError
from mmspeed.memory.offload.offloader import Offloader
from mmspeed.memory.planning.knapsack import Option
from mmspeed.memory.planning.measure import DeviceProfiler, FakeTensorProfiler
from mmspeed.memory.planning.options import combinations, front, single_policies, static_bytes
from mmspeed.memory.planning.peak import peak_bytes
from mmspeed.memory.recompute.regions import regions_of
from mmspeed.mesh import process_group
from mmspeed.pipelines import TrainPipeline
from mmspeed.pipelines.domains.video.domain import VideoDomain
from mmspeed.pipelines.domains.video.synthetic import EncoderShapes
from mmspeed.pipelines.tasks import Task, as_task
from mmspeed.pipelines.tuning.memory_estimate import DeviceSpeeds, _cast_of, plan_memory, shape_figures, spread
from mmspeed.pipelines.tuning.memory_measure import BlockCall, BlockProfiler, budget_bytes, capture
from mmspeed.pipelines.tuning.memory_search import (
    MEMORY_NAME,
    MeasuredModel,
    fastest_within,
    full_setting,
    host_room,
    measured_figures,
)
from mmspeed.pipelines.tuning.profile import profile
from mmspeed.pipelines.tuning.synthetic_step import SyntheticStep
from mmspeed.protocols import MicroBatchSize, RunPlace
from mmspeed.shapes import Strides
from tests.support.runs import losses, small_config, small_tree

CPU = Device("cpu", 0)
INPUTS = EncoderShapes(4, Strides(4, 8), 32)


def config_of(
    folder: Path, *overrides: str, width: int = 64, depth: int = 4, size: int = 128, frames: int = 17
) -> Config:
    tree = small_tree(folder)
    tree["model"] = {"size": "nano", "width": width, "depth": depth, "heads": width // 32, "adaln_rank": 16}
    tree["model"]["arrangement"] = "full"
    tree["data"]["buckets"] = [{"frames": frames, "height": size, "width": size}]
    tree["train"]["ema_decay"] = None
    tree["text"] = {"max_tokens": 32}
    return make_config(tree, overrides, origin="test")


def task_of(config: Config) -> Task:
    return as_task(VideoDomain(config).use(INPUTS), config)


@pytest.fixture
def alone() -> Iterator[None]:
    with process_group(CPU):
        yield


def calls_of(config: Config, blocks: int = 2) -> list[BlockCall]:
    """Calls of the first blocks, with weights that hide no gradient."""
    task = task_of(config)
    step = SyntheticStep(config, task, CPU, blocks=range(blocks))
    for name, parameter in step.parts.model.named_parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.05, generator=torch.Generator().manual_seed(len(name)))
    batch = step.batch(config.buckets[0], 1)
    return capture(lambda: task.loss(step.parts.models, batch), list(step.model.blocks))


@pytest.mark.usefixtures("alone")
def test_figures_of_branches_add_up(tmp_path: Path) -> None:
    """Bytes of any combination of ways are those of each way alone, so few runs are needed."""
    [call, _] = calls_of(config_of(tmp_path))
    bench = BlockProfiler(DeviceProfiler(CPU), Offloader(CPU, 1 << 14), with_swap=True)
    singles = [bench.weigh(call, ways) for ways in single_policies(regions_of(call.block), True)]
    every = combinations(singles)
    assert len(every) == 216 + 5 + 1  # each of 6 ways of 3 branches; 5 of the block; norm and activation
    shared = 0
    for option in every[6::9]:
        actual = bench.weigh(call, option.ways)
        # two branches may each save a tensor between them: it is counted with both
        assert actual.kept == pytest.approx(option.kept, rel=0.02, abs=call.args[0].nbytes)
        assert actual.host == pytest.approx(option.host, rel=0.02, abs=call.args[0].nbytes)
        shared += actual.kept == option.kept
    assert shared > 3
    plain = singles[0].kept
    whole = next(one for one in singles if one.ways == {"block": "recompute"})
    assert whole.kept < 0.1 * plain and whole.backward > 0.8 * plain
    assert next(one for one in singles if one.ways == {"block": "offload"}).host > 0.5 * plain


def test_the_cast_of_a_parameter_is_known_by_its_views_too() -> None:
    weight = torch.nn.Parameter(torch.ones(2, 3))
    copy = weight.to(torch.bfloat16)
    assert _cast_of(copy) is weight and _cast_of(copy.t()) is weight
    assert _cast_of(weight * 2) is None and _cast_of(torch.ones(2, 3)) is None


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("dtype", "arrangement"), [("float32", "factorised"), ("bfloat16", "full")])
def test_shapes_tell_what_is_measured(
    tmp_path: Path, dtype: str, arrangement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes kept are the same to the byte; peaks but for what operations take for themselves."""
    alone = lambda options, *_: [one for one in options if len(one.ways) < 2]  # noqa: E731  # whatever the clock says
    monkeypatch.setattr("mmspeed.pipelines.tuning.memory_measure.front", alone)
    config = config_of(
        tmp_path, f"device.dtype={dtype}", "memory.offload_from=16KiB", f"model.arrangement={arrangement}"
    )
    step = MicroBatchSize(config.buckets[0], 1, False)
    real = measured_figures(config, task_of(config), CPU, step, with_swap=True)
    shapes = shape_figures(config, task_of(config), step, DeviceSpeeds())
    assert real.static == shapes.static and real.gradients == shapes.gradients and real.kinds == shapes.kinds
    assert shapes.ends == pytest.approx(real.ends, rel=0.05)
    together, stray = 0, 0 if dtype == "float32" else 3 * 4 * 320  # 3 norms, 320 tokens
    for known, actual in zip(real.options, shapes.options, strict=True):
        by_ways = {tuple(one.ways.items()): one for one in actual}
        for one in known:
            same = by_ways.get(tuple(one.ways.items()))
            if same is not None:
                together += 1
                # in bfloat16 a norm on a CPU keeps mean and deviation of each token in float32
                assert same.kept == pytest.approx(one.kept, rel=0, abs=stray), one.ways
                assert same.host == pytest.approx(one.host, rel=0, abs=stray), one.ways
                peak, least = one.kept + one.backward, 0.85 if dtype == "float32" else 0.7  # kernels work in float32
                assert least * peak <= same.kept + same.backward <= 1.05 * peak, one.ways
    assert together >= 17 * len(real.options)
    assert any(one.host for options in shapes.options for one in options)


def test_a_roofline_counts_as_the_model_does(tmp_path: Path) -> None:
    """Matrix products and attention of a forward pass, on fake tensors."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.nn.functional import scaled_dot_product_attention

    with FakeTensorMode():
        gauge = FakeTensorProfiler(1e9, 1e30)
        x, w = torch.empty(100, 64, requires_grad=True), torch.empty(64, 32, requires_grad=True)
        [seconds] = gauge.seconds([(lambda: None, lambda: (x @ w).sum().backward())], 1)
        assert seconds == pytest.approx(3 * 2 * 100 * 64 * 32 / 1e9)
        q = torch.empty(2, 3, 50, 16, requires_grad=True)
        [seconds] = gauge.seconds([(lambda: None, lambda: scaled_dot_product_attention(q, q, q).sum().backward())], 1)
        assert seconds == pytest.approx(3.5 * 4 * 6 * 50 * 50 * 16 / 1e9)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("memory.states=host", "train.ema_decay=0.9", "memory.ema=host"),
        ("device.dtype=bfloat16", "memory.master=split", "memory.states=device"),
    ],
)
def test_static_bytes_are_those_between_steps(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    config = config_of(tmp_path, *overrides, depth=2, size=64, frames=1)
    steps = SyntheticStep(config, task_of(config), CPU)
    steps.run(config.buckets[0], 1)
    numbers = sum(parameter.numel() for parameter in steps.model.parameters())
    formula = static_bytes(numbers, config.memory, average=config.train.ema_decay is not None)
    assert steps.state_bytes == pytest.approx(formula.between, rel=0.01)


@pytest.mark.usefixtures("alone")
def test_a_step_takes_what_is_planned(tmp_path: Path) -> None:
    """Arguments of blocks that need no gradient, such as tables of positions, keep nothing for one."""
    config = config_of(tmp_path, "train.batch_size=1", depth=3, size=64)
    plan = plan_memory(config, task=task_of(config), world=1, options=False)
    trial = SyntheticStep(config, task_of(config), CPU)
    step = (plan.step.shape, plan.step.items)
    trial.run(*step)
    peak = peak_bytes(CPU, trial.state_bytes, partial(trial.run, *step))
    assert plan.figures.plain_peak() == pytest.approx(peak, rel=0.005)


def test_options_that_nothing_speaks_for_are_left_out() -> None:
    options = [
        Option(10, seconds=1.0),
        Option(10, seconds=2.0),
        Option(5, seconds=1.5),
        Option(5, seconds=1.5),
        Option(9, seconds=9.0),
    ]
    assert front(options) == [options[2], options[0]]
    many = [Option(i, seconds=100.0 - i) for i in range(100)]
    few = front(many, 5)
    assert len(few) == 5 and few[0] == many[0] and few[-1] == many[-1]
    peaks = [Option(10, backward=9, seconds=1.0), Option(11, backward=1, seconds=1.0)]
    assert len(front(peaks)) == 1


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.usefixtures("alone")
def test_what_does_not_fit_is_reported(tmp_path: Path) -> None:
    config = config_of(tmp_path, depth=2, size=64)
    step = MicroBatchSize(config.buckets[0], 1, False)
    figures = measured_figures(config, task_of(config), CPU, step)
    assert figures.choose(figures.least()) is not None and figures.choose(figures.least() - 1) is None
    tried = MeasuredModel(config, task_of(config), CPU, step, figures.ways([0, 0]))
    with pytest.raises(UserError, match=r"at least .* more than the budget of 1.0 MB.*memory.states.*fsdp.*smaller"):
        fastest_within(figures, 1_000_000, tried)


def test_fractions_are_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "free_memory_bytes", lambda self: 10**9)
    assert budget_bytes(MemoryConfig(fraction=0.5), CPU) == 5 * 10**8
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert budget_bytes(MemoryConfig(fraction=0.5), CPU) == 125 * 10**6
    assert budget_bytes(MemoryConfig(budget="2GB"), CPU) == 2 * 10**9
    monkeypatch.setattr(Device, "total_memory_bytes", lambda self: 8 * 10**9)
    assert budget_bytes(MemoryConfig(fraction=0.5), Device("cuda", 0)) == 4 * 10**9


@pytest.mark.usefixtures("alone")
def test_what_is_offloaded_fits_on_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "free_memory_bytes", lambda self: 10**9)
    config = config_of(tmp_path, "memory.offload_from=16KiB")
    task, step = task_of(config), MicroBatchSize(config.buckets[0], 1, False)
    figures = plan_memory(config, task=task, step=step, speeds=DeviceSpeeds(flops=1e10, host=1e15)).figures
    assert host_room(config, figures, CPU) is None and host_room(config, figures, Device("cuda", 0)) == 8 * 10**8
    budget = int(0.7 * figures.plain_peak())
    choices = [figures.choose(budget), figures.choose(budget, 10**5)]
    assert None not in choices
    for choice, most in zip(choices, (None, 10**5), strict=True):
        hosts = [options[option].host for options, option in zip(figures.blocks(), choice or [], strict=True)]
        assert sum(hosts) > 10**5 if most is None else sum(hosts) <= most
        assert figures.peak(choice or []) <= budget


def test_what_a_choice_depends_on_is_of_jsons_types(tmp_path: Path) -> None:
    """It is written down, and compared with what was read."""
    config = config_of(tmp_path, "memory.budget=1GB", "model.sparse={dense_first: 0, dense_last: 0, keep: 0.25}")
    task, place = task_of(config), RunPlace(CPU)
    setting = full_setting(config, task, place, task.domain.largest_micro_batch(place))
    assert json.loads(json.dumps(setting)) == setting
    assert setting["model.sparse"]["keep"] == 0.25 and setting["vae.strides"] == [4, 8]


@pytest.mark.slow
def test_a_plan_of_several_devices_divides(tmp_path: Path) -> None:
    config = config_of(tmp_path, "parallel.strategy=fsdp", "parallel.ulysses=2")
    step = MicroBatchSize(config.buckets[0], 1, False)
    whole = shape_figures(config, task_of(config), step, DeviceSpeeds(), with_swap=False)
    part = spread(whole, config, 8)
    assert part.static.between == pytest.approx(whole.static.between / 8, rel=0.01)
    assert part.options[0][0].kept == pytest.approx(whole.options[0][0].kept / 2, rel=0.01)
    assert spread(whole, config_of(tmp_path), 1) is whole


@pytest.mark.slow
def test_a_plan_offloads_where_copies_hide(tmp_path: Path) -> None:
    config = config_of(tmp_path, "memory.offload_from=16KiB")
    step, task = MicroBatchSize(config.buckets[0], 1, False), task_of(config)
    fast = plan_memory(config, task=task, step=step, speeds=DeviceSpeeds(flops=1e10, host=1e15))
    slow = plan_memory(config, task=task, step=step, speeds=DeviceSpeeds(flops=1e10, host=1e3))
    budget = int(0.7 * fast.figures.plain_peak())
    ways = [plan.figures.ways(plan.figures.choose(budget) or []) for plan in (fast, slow)]
    offloading = [sum("offload" in way for block in each for way in block.values()) for each in ways]
    assert offloading[0] > 0 == offloading[1]
    assert not any("offload" in way for way in ways[0][-1].values())  # keep_last
    text = "\n".join(replace(fast, budget=budget, chosen=fast.figures.choose(budget)).lines())
    assert "estimated from shapes" in text and "offload" in text and "TFLOP/s" in text
    assert "nothing fits" in "\n".join(replace(fast, budget=1000, chosen=None).lines())


@pytest.mark.slow
def test_a_run_under_a_budget_learns_the_same_and_goes_on(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    TrainPipeline(small_config(home, "name=plain")).run()
    plain = plan_memory(small_config(home), with_swap=False)
    middle = (plain.figures.plain_peak() + plain.figures.least()) // 2
    budget = f"memory.budget={middle}"
    first = small_config(home, "name=chosen", budget, "train.steps=3")
    TrainPipeline(first).run()
    path = first.run_dir / MEMORY_NAME
    contents = json.loads(path.read_text(encoding="utf-8"))
    assert contents["measured"]["peak_bytes"] <= contents["budget_bytes"] == middle
    assert len(contents["blocks"]) == len(plain.figures.kinds) and contents["options"] and contents["tries"]
    written = path.stat().st_mtime_ns
    with monkeypatch.context() as patch:  # on resume nothing is measured
        patch.setattr(
            "mmspeed.pipelines.tuning.memory_search.measured_figures", lambda *_: pytest.fail("measured again")
        )
        TrainPipeline(small_config(home, "name=chosen", budget)).run()
    assert path.stat().st_mtime_ns == written
    assert losses(small_config(home, "name=chosen")) == losses(small_config(home, "name=plain"))
    other = small_config(home, "name=chosen", f"memory.budget={2 * plain.figures.plain_peak()}", "train.steps=7")
    TrainPipeline(other).run()
    contents = json.loads(path.read_text(encoding="utf-8"))
    assert contents["blocks"] == [{}] * len(plain.figures.kinds)  # another budget, another choice


def test_too_small_a_budget_ends_a_run_before_it_begins(home: Path) -> None:
    config = small_config(home, "name=too-small", "memory.budget=100KB")
    with pytest.raises(UserError, match=r"more than the budget of 100\.0 kB"):
        TrainPipeline(config).run()
    assert not (config.run_dir / MEMORY_NAME).exists()


def test_measured_batches_and_a_budget_exclude_each_other(home: Path) -> None:
    with pytest.raises(UserError, match="of a budget"):
        profile(small_config(home, "memory.budget=1GB"))
