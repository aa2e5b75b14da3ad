"""Published video transformers train through the pipeline on one process: gradients of a loop by hand, policies, runs, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mmspeed.device import Device
from mmspeed.errors import UserError
from mmspeed.log import read_metrics
from mmspeed.memory.offload.offloader import PooledOffloadGroup
from mmspeed.models.adapters import is_adapter
from mmspeed.pipelines import TrainPipeline
from mmspeed.pipelines.diffusion.objective import make_objective
from mmspeed.pipelines.domains.video.domain import VideoDomain
from mmspeed.pipelines.domains.video.published import PublishedVideoDomain
from mmspeed.pipelines.run.assembly import Assembly
from mmspeed.pipelines.tasks import as_task
from mmspeed.pipelines.tuning.memory_estimate import plan_memory
from mmspeed.protocols import Conditions, RunPlace, blocks_of
from mmspeed.shapes import Strides
from tests.support.checkpoints import whole_checkpoint
from tests.support.published import (
    FPS,
    MODELS,
    STRIDES,
    called_by_hand,
    load,
    one_step,
    prepare,
    published_config,
    task_of,
    train_published,
)
from tests.support.runs import losses
from tests.support.video_transformers import make_model


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published")
    prepare(folder)
    return folder


def by_hand(home: Path, name: str, batches: list[Any]) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of micro-batches of a step of three samples, in a loop that knows the class."""
    model = load(home, name).train()
    objective = make_objective(published_config(home, name).objective)
    total = 0.0
    for batch in batches:
        t_B = objective.time_from_quantile(batch["quantiles"]).float()
        x_BCThw, target_BCThw = objective.training_pair(batch["latents"].float(), batch["noise"].float(), t_B)
        fps_B = torch.tensor(
            [
                1.0 if item.source in ("3.mp4", "7.mp4", "11.mp4") else FPS + int(item.source[:-4])
                for item in batch.items
            ]
        )
        conditions = Conditions(batch["text"], batch["text_mask"], batch["text_pooled"], fps_B, Strides(*STRIDES))
        out = called_by_hand(name, model, x_BCThw.float(), t_B, conditions)
        loss = ((out - target_BCThw).square().mean((1, 2, 3, 4)) * batch.weights_I).sum() / 3
        loss.backward()
        total += loss.item()
    return total, {key: p.grad for key, p in model.named_parameters() if p.grad is not None}


def assert_equal(actual: dict[str, Tensor], truth: dict[str, Tensor], within: float = 0.0) -> None:
    assert actual.keys() == truth.keys()
    far = {key: (actual[key] - value).abs().max().item() for key, value in truth.items()}
    largest = max(value.abs().max().item() for value in truth.values())
    assert max(far.values()) <= within * largest, sorted(far.items(), key=lambda item: -item[1])[:5]


@pytest.mark.parametrize("name", MODELS)
def test_a_step_has_the_gradients_of_a_loop_by_hand(home: Path, name: str) -> None:
    loss, actual, batches = one_step(str(home), name)
    assert {batch.shape for batch in batches} and all(batch.size for batch in batches)
    expected, truth = by_hand(home, name, batches)
    assert loss == pytest.approx(expected, rel=1e-6)
    # LTX by hand goes sample by sample: sums in another order
    assert_equal(actual, truth, within=1e-5)
    assert all(gradient.abs().max() > 0 for key, gradient in actual.items() if "bias" not in key)


class Watch:
    """Counts the calls of each block's first norm or projection, and stored bytes."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, parts: Assembly) -> None:
        for _, block in blocks_of(parts.model):
            first = next(module for module in block.modules() if isinstance(module, torch.nn.Linear))
            first.register_forward_pre_hook(lambda *_: self._count())

    def _count(self) -> None:
        self.calls += 1


POLICIES = ["recompute", "selective", "offload", "offload_selective"]
# each model and each policy, and the model whose blocks are of two kinds under all
MEETINGS = [
    (name, policy)
    for place, name in enumerate(MODELS)
    for at, policy in enumerate(POLICIES)
    if name == "hunyuan" or at == place
]


@pytest.mark.parametrize(("name", "policy"), MEETINGS)
def test_policies_of_whole_blocks_change_no_gradient(
    home: Path, name: str, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = [0]
    store = PooledOffloadGroup.store

    def counted(self: PooledOffloadGroup, tensor: Tensor) -> Any:
        stored[0] += tensor.nbytes
        return store(self, tensor)

    monkeypatch.setattr(PooledOffloadGroup, "store", counted)
    plain, kept = Watch(), Watch()
    loss, truth, _ = one_step(str(home), name, watch=plain)
    assert stored[0] == 0
    found_loss, actual, batches = one_step(str(home), name, (f"memory.activation_policy.block={policy}",), watch=kept)
    assert found_loss == loss
    assert_equal(actual, truth)
    blocks = 4 if name == "hunyuan" else 2
    assert plain.calls == blocks * len(batches)
    assert kept.calls == plain.calls * (1 if policy == "offload" else 2)
    latent = batches[0]["latents"]
    tokens = latent.shape[0] * latent[0, 0].numel() // (1 if name == "ltx" else 4)
    if policy.startswith("offload"):  # each block's running tokens, whatever way they come in
        assert stored[0] >= blocks * tokens * 32 * 4
    else:
        assert stored[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wan", "ltx"])
def test_compiled_blocks_are_recomputed(home: Path, name: str) -> None:
    _, truth, _ = one_step(str(home), name)
    watched: list[int] = []

    def watch(parts: Assembly) -> None:
        watched.append(sum("Compiled" in type(block).__name__ for _, block in blocks_of(parts.model)))

    _, actual, _ = one_step(
        str(home), name, ("train.compile=true", "memory.activation_policy.block=recompute"), watch=watch
    )
    assert watched == [2]
    assert_equal(actual, truth, within=1e-5)


@pytest.fixture(scope="module")
def trained(home: Path) -> str:
    """A run of six steps of one process."""
    train_published(str(home), "wan")
    return "wan"


def test_a_run_trains_saves_and_averages(home: Path, trained: str) -> None:
    config = published_config(home, trained)
    curve = losses(config)
    assert len(curve) == 6 and len(set(curve)) == 6
    start = load(home, trained)
    state = whole_checkpoint(config.run_dir)
    for prefix in ("model.", "ema."):
        assert {name.removeprefix(prefix) for name in state if name.startswith(prefix)} == {*start.state_dict()}
    moved = {name: (state[f"model.{name}"] - value).abs().max().item() for name, value in start.named_parameters()}
    assert all(0 < far < 6e-3 for far in moved.values()), moved
    # the weights load into the class, by its own names
    start.load_state_dict(
        {name.removeprefix("model."): value for name, value in state.items() if name.startswith("model.")}
    )
    validations = [row for row in read_metrics(config.run_dir / "metrics.jsonl") if row["kind"] == "validation"]
    assert len(validations) == 2 and all(row["loss"] > 0 for row in validations)


def test_the_weights_are_read_once(home: Path) -> None:
    """Sizes are asked before the model is handed out; the same one then trains."""
    config, reads = published_config(home, "wan", "name=once", "train.steps=1"), []

    def counted() -> Any:
        reads.append(load(home, "wan"))
        return reads[-1]

    TrainPipeline(config, task=PublishedVideoDomain(config, counted)).run()
    assert len(reads) == 1 and reads[0].training


def test_a_model_in_half_precision_trains_in_float32(home: Path) -> None:
    config = published_config(home, "wan", "name=half")
    task = PublishedVideoDomain(config, lambda: load(home, "wan").bfloat16())
    task.open(RunPlace(Device("cpu", 0)))
    assert {p.dtype for p in task.build()["model"].parameters()} == {torch.float32}


def test_bfloat16_computation_trains(home: Path) -> None:
    loss, truth, _ = one_step(str(home), "hunyuan")
    found_loss, actual, _ = one_step(str(home), "hunyuan", ("device.dtype=bfloat16",))
    assert found_loss == pytest.approx(loss, rel=0.05)
    far = sum((actual[key] - value).square().sum() for key, value in truth.items())
    size = sum(value.square().sum() for value in truth.values())
    assert 0 < far / size < 0.05


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("wan", ("objective.kind=ddpm",), r"objective.kind is ddpm: WanTransformer3DModel predicts the velocity"),
        ("cogvideox", ("objective.kind=flow",), r"objective.kind is flow: CogVideoXTransformer3DModel predicts v"),
    ],
)
def test_what_does_not_fit_is_said(home: Path, name: str, overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        one_step(str(home), name, overrides)


def test_an_adapter_is_put_on_where_the_model_is_loaded(home: Path) -> None:
    """It trains alone; one in the config, which would train the whole model, is refused."""
    from peft import LoraConfig

    def adapted() -> Any:
        model: Any = load(home, "wan").requires_grad_(False)
        model.add_adapter(LoraConfig(r=2, target_modules=["to_q"]))
        return model

    key = "model={kind: diffusers, pretrained: owner/base, adapter: {kind: lora}}"
    with pytest.raises(UserError, match=r"model.adapter: PublishedVideoDomain trains the model that its program loads"):
        one_step(str(home), "wan", (key,))
    config = published_config(home, "wan", "name=adapted", "train.steps=2")
    TrainPipeline(config, task=PublishedVideoDomain(config, adapted)).run()
    state = {name: value for name, value in whole_checkpoint(config.run_dir).items() if name.startswith("model.")}
    assert len(state) == 8 and all(is_adapter(name) and value.any() for name, value in state.items())


def test_another_class_is_answered_with_what_to_say(home: Path) -> None:
    config = published_config(home, "wan")
    other = "chronoedit, by its own declaration"
    task = VideoDomain(config, build=lambda *_: make_model(other))
    with pytest.raises(UserError, match=r"known are WanTransformer3DModel.*give call="):
        TrainPipeline(config, task=task).run()


def test_another_class_trains_by_a_call_of_ones_own(home: Path) -> None:
    """ChronoEdit is called as Wan is, and names its blocks in an attribute."""
    from mmspeed.models.families.wan import WanCall

    config = published_config(home, "wan", "name=own-call", "train.steps=2")
    other = "chronoedit, by its own declaration"
    TrainPipeline(config, task=PublishedVideoDomain(config, lambda: make_model(other), call=WanCall())).run()
    assert len(losses(config)) == 2


@pytest.mark.parametrize("name", ["wan", pytest.param("hunyuan", marks=pytest.mark.slow)])
def test_memory_is_planned_from_shapes(home: Path, name: str) -> None:
    """Blocks that are called by name and that return several tensors are measured too; less is kept the less is asked for."""
    config = published_config(home, name)
    task = task_of(home, name, config)
    task.open(RunPlace(Device("cpu", 0)))
    plan = plan_memory(config, task=as_task(task, config), with_swap=False)
    blocks = 4 if name == "hunyuan" else 2
    assert len(plan.figures.kinds) == blocks and len(plan.figures.options) == (2 if name == "hunyuan" else 1)
    for options in plan.figures.options:
        kept = {str(dict(option.ways)): option.kept for option in options}
        assert kept["{'block': 'recompute'}"] == min(kept.values()) < kept["{}"]  # also of regions within blocks
    assert plan.figures.least() <= plan.figures.plain_peak()  # of these tiny ones weights may be the most
