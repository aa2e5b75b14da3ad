"""Memory of a run of adapters: what `check` expects is what a step takes, and no way of saving memory changes what is learned."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mmspeed.config import Config
from mmspeed.config.adapters import BaseConfig
from mmspeed.config.memory import MemoryConfig
from mmspeed.device import Device
from mmspeed.errors import UserError
from mmspeed.log import format_bytes
from mmspeed.mesh import process_group
from mmspeed.models.adapters import is_adapter
from mmspeed.pipelines import TrainCallback, TrainPipeline
from mmspeed.pipelines.domains.video.domain import VideoDomain
from mmspeed.pipelines.domains.video.synthetic import EncoderShapes
from mmspeed.pipelines.tasks import as_task
from mmspeed.pipelines.training.events import EndEvent
from mmspeed.pipelines.tuning.base_choice import BASES, BaseChooser, device_for, for_tensors
from mmspeed.pipelines.tuning.memory_estimate import plan_memory
from mmspeed.pipelines.tuning.synthetic_step import SyntheticStep
from mmspeed.protocols import MicroBatchSize
from mmspeed.shapes import Strides
from tests.claims.adapter_memory import MODELS, chooser
from tests.support.checkpoints import whole_checkpoint
from tests.support.published import published_config, write_cache
from tests.support.runs import losses
from tests.support.video_transformers import make_model

CPU = Device("cpu", 0)
WIDE = {"num_attention_heads": 8, "attention_head_dim": 64, "ffn_dim": 2048, "num_layers": 4, "freq_dim": 256}
HALF = ("device.dtype=bfloat16", "model.base.dtype=bfloat16")
INT8 = ("device.dtype=bfloat16", "model.base.dtype=int8")


def save_base(folder: Path, **changes: Any) -> None:
    """A repository of a Wan whose encoders are not at hand, and the cache."""
    from diffusers import UniPCMultistepScheduler

    model: Any = make_model("wan", **changes)
    model.save_pretrained(folder / "base" / "transformer")
    scheduler: Any = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    scheduler.save_pretrained(folder / "base" / "scheduler")
    parts = {"transformer": "WanTransformer3DModel", "scheduler": "UniPCMultistepScheduler"}
    index = {"_class_name": "WanPipeline"} | {part: ["diffusers", name] for part, name in parts.items()}
    (folder / "base" / "model_index.json").write_text(json.dumps(index))
    write_cache(published_config(folder, "wan"))


def adapted(folder: Path, name: str, *overrides: str) -> Config:
    adapter = "adapter: {kind: lora, rank: 4, alpha: 8, targets: attention+mlp}"
    model = f"model={{kind: diffusers, pretrained: {folder / 'base'}, {adapter}}}"
    return published_config(folder, "wan", model, f"name={name}", *overrides)


class Frozen(TrainCallback):
    """The frozen tensors at the end of a run."""

    def on_end(self, event: EndEvent) -> None:
        [model] = event.models.values()
        self.tensors = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapted")
    save_base(folder)
    return folder


@cache
def trained(folder: Path, *overrides: str) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """The losses of six steps, the frozen tensors after them, and the checkpoint."""
    config, frozen = adapted(folder, f"run-{abs(hash(overrides))}", "train.lr=1e-2", *overrides), Frozen()
    TrainPipeline(config, callbacks=[frozen]).run()
    return losses(config), frozen.tensors, whole_checkpoint(config.run_dir)


WAYS: list[tuple[tuple[str, ...], tuple[str, ...]]] = [
    (("memory.fraction=0.5",), ()),
    *(((f"memory.activation_policy={{block: {way}}}",), ()) for way in ("recompute", "selective", "offload", "offload_selective", "offload_recompute")),
    (("memory.activation_policy={attention: recompute, mlp: offload}",), ()),
    (("memory.mlp_chunk=7",), ()),
    (("memory.states=host",), ()),
    (("memory.ema=host", "train.ema_decay=0.9"), ("train.ema_decay=0.9",)),
    (("memory.release_gradients=true", "train.clip_norm=null", "train.micro_batch_size=null", "train.skip_non_finite=0"), ("train.clip_norm=null",)),
    (("memory.activation_policy={block: recompute}", "train.optimizer=muon"), ("train.optimizer=muon",)),
    *(((f"memory.master={where}", *HALF), HALF) for where in ("float32", "split", "host")),
    (("train.compile=true",), ()),
]  # fmt: skip
FAST = ("memory.fraction=0.5", "memory.activation_policy={block: recompute}")


@pytest.mark.parametrize(
    ("way", "beside"),
    [pytest.param(*each, id=each[0][0], marks=() if each[0][0] in FAST else pytest.mark.slow) for each in WAYS],
)
def test_ways_of_memory_change_nothing_that_is_learned(
    home: Path, way: tuple[str, ...], beside: tuple[str, ...]
) -> None:
    """Losses are those of the plain run, the base stays as it is, and adapters of the first block learn."""
    (actual, frozen, saved), (plain, same, _) = trained(home, *way), trained(home, *beside)
    assert actual == pytest.approx(plain, rel=1e-5) and len(set(actual)) > 1
    assert frozen.keys() == same.keys() and all(torch.equal(value, same[name]) for name, value in frozen.items())
    first = [value for name, value in saved.items() if "model.blocks.0." in name and ".lora_B." in name]
    assert len(first) == 10 and all(value.any() for value in first)


@pytest.mark.parametrize("policy", ["save", pytest.param("recompute", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "more",
    [
        pytest.param((), id="float32", marks=pytest.mark.slow),
        pytest.param(HALF, id="bfloat16"),
        pytest.param(INT8, id="int8"),
    ],
)
def test_a_step_takes_what_a_check_expects(tmp_path: Path, policy: str, more: tuple[str, ...]) -> None:
    save_base(tmp_path, **WIDE)
    ways = f"memory.activation_policy={{block: {policy}}}"
    large = "data.buckets=[{frames: 17, height: 128, width: 192}]"
    config = adapted(tmp_path, "wide", large, ways, "train.ema_decay=0.9", "text.max_tokens=64", *more)
    step = MicroBatchSize(config.buckets[0], 1, False)
    with process_group(CPU):
        task = as_task(VideoDomain(config).use(EncoderShapes(4, Strides(4, 8), 8)), config)
        plan = plan_memory(config, task=task, step=step, options=False)
        trial = SyntheticStep(config, task, CPU)
        trial.run(step.shape, 1)
        between, peak = trial.state_bytes, trial.peak(step.shape, 1)
        numbers = sum(p.numel() for name, p in trial.model.named_parameters() if is_adapter(name))
    assert plan.figures.static.between == pytest.approx(between, rel=0.01)
    assert plan.figures.plain_peak() == pytest.approx(peak, rel=0.05)
    assert plan.figures.static.parameters == 4 * numbers


@pytest.mark.slow
def test_a_checkpoint_holds_the_adapters_alone(tmp_path: Path) -> None:
    """Weights, two moments and the average of each number, and nothing of the base."""
    save_base(tmp_path, **WIDE)
    config = adapted(tmp_path, "wide", "train.ema_decay=0.9", "train.steps=1")
    TrainPipeline(config).run()
    saved = whole_checkpoint(config.run_dir)
    numbers = sum(value.numel() for name, value in saved.items() if name.startswith("model."))
    [folder] = (config.run_dir / "checkpoints").glob("step-*")
    nbytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert numbers == 4 * 4 * (8 * (512 + 512) + 2 * (512 + 2048)) and nbytes == pytest.approx(16 * numbers, rel=0.05)


def test_a_base_is_fitted_into_a_memory_the_least_slow_way_first(home: Path) -> None:
    config = adapted(home, "fitted", "train.micro_batch_size=1", "device.dtype=bfloat16", "memory.offload_from=1MB")
    choices = BaseChooser(config, lambda one: as_task(VideoDomain(one).use(EncoderShapes(4, Strides(4, 8), 8)), one))
    roomy = choices.choose(10**9)
    assert (roomy.base.dtype, roomy.base.place, roomy.refused) == ("bfloat16", "device", ())
    assert roomy.memory == {"budget": f"{for_tensors(10**9) // 10**6}MB"} and for_tensors(10**9) == 475 * 10**6
    with pytest.raises(
        UserError, match=r"--memory 0 B: no step fits; the least is a base of (.*), which needs"
    ) as error:
        choices.choose(0)
    least = min(device_for(plan.figures.least()) for plan in (choices.plan(*base) for base in BASES))
    tight = choices.choose(least)  # the error names a device that does
    assert tight.plan.figures.peak(tight.chosen) <= for_tensors(least) and format_bytes(least) in str(error.value)
    assert [way for way, _ in tight.refused] == [BaseConfig(dtype=d, place=p) for d, p in BASES[: len(tight.refused)]]
    assert (
        all(f"{way.dtype} " in tight.line() for way, _ in tight.refused) and "the least slow that fits" in tight.line()
    )


def test_two_experts_get_the_same_ways_in_all_blocks(tmp_path: Path) -> None:
    """A budget chooses for one model alone."""
    tiny = {"num_attention_heads": 2, "attention_head_dim": 12, "text_dim": 16, "ffn_dim": 32, "num_layers": 3}
    shapes = replace(MODELS["Wan 2.2 A14B"], settings=tiny, inputs=EncoderShapes(16, Strides(4, 8), 16), tokens=16)
    choices = chooser(tmp_path / "model", shapes, (17, 128, 192))
    roomy = choices.choose(10**10)
    assert roomy.memory == {} and not any(roomy.chosen)
    tight = choices.choose(device_for(roomy.plan.figures.peak(roomy.chosen) - 10))
    assert len(set(tight.chosen)) == 1 and tight.memory["activation_policy"]
    assert MemoryConfig.model_validate(tight.memory).chooses is False
