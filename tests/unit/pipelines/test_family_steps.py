"""Training of published models is that of a plain loop: diffusers' classes and schedulers, peft's adapters, torch's AdamW; and it learns.

Legend: B batch, C channels, T h w latent, L caption tokens, D text width.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mmspeed.config import Config, make_config
from mmspeed.initialize import materialize, read_weights
from mmspeed.log import read_metrics
from mmspeed.models.adapters import adapter_values, is_adapter
from mmspeed.models.sections import call_of, with_weights
from mmspeed.pipelines import TrainPipeline
from mmspeed.pipelines.diffusion.predictor import conditions_of
from mmspeed.pipelines.domains.video.domain import VideoDomain
from mmspeed.pipelines.tasks import maker_of
from mmspeed.protocols import Batch, Inputs, LearningPart, source_of
from tests.support.covers import slow_but
from tests.support.experts import SEED
from tests.support.published import called_by_hand
from tests.support.runs import pictures, small_tree
from tests.support.tiny_repositories import (
    save_cogvideox,
    save_flux,
    save_hunyuan_video,
    save_hunyuan_video15,
    save_hunyuan_video15_images,
    save_hunyuan_video_images,
    save_ltx,
    save_mochi,
    save_qwen_image,
    save_wan,
    save_wan_5b,
    save_wan_experts,
    save_wan_images,
    save_wan_vace,
)

STEPS = 20
CPU = torch.device("cpu")
ADAPTER = {"kind": "lora", "rank": 3, "alpha": 6, "targets": "attention+mlp"}
# the layers of `attention+mlp` as one writes them for peft
LAYERS = (
    r"((single_transformer_|transformer_|vace_)?blocks\.\d+\.(attn\d?\.(to_[qkv]|to_out\.0|add_[qkv]_proj|to_add_out)"
    r"|(ff|ffn|ff_context|img_mlp|txt_mlp)\.net\.(0\.proj|2)))|single_transformer_blocks\.\d+\.proj_(mlp|out)"
)


@dataclass(frozen=True)
class Case:
    """A family's repository, its name for `called_by_hand`, and what its runs have beside those of Wan."""

    save: Callable[[Path], Path]
    name: str
    bucket: tuple[int, int, int] = (5, 32, 48)
    sections: Mapping[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float64  # HunyuanVideo 1.5 embeds times in their own type, which is float32


IMAGE = (1, 32, 48)
FIRST = {"conditioning": {"first": 1.0}}
CASES: dict[str, Case] = {
    "wan": Case(save_wan, "wan"),
    "wan, experts": Case(save_wan_experts, "wan", sections={"objective": {"kind": "family", "experts": "both"}}),
    "wan, images": Case(save_wan_images, "wan", sections=FIRST),
    "wan, first and last": Case(
        partial(save_wan_images, last=True), "wan", (9, 32, 48), {"conditioning": {"first_last": 1.0}}
    ),
    "wan, 36 channels": Case(partial(save_wan, in_channels=36), "wan", sections=FIRST),
    "wan 5b": Case(save_wan_5b, "wan 5b"),
    "wan 5b, first frame": Case(save_wan_5b, "wan 5b", sections=FIRST),
    "wan vace": Case(save_wan_vace, "wan vace"),
    "ltx": Case(save_ltx, "ltx", (17, 32, 64)),
    "ltx, first frame": Case(save_ltx, "ltx", (17, 32, 64), FIRST),
    "cogvideox-2b": Case(partial(save_cogvideox, kind="2b"), "cogvideox", (9, 32, 48)),
    "cogvideox-5b": Case(save_cogvideox, "cogvideox"),
    "cogvideox-1.5": Case(partial(save_cogvideox, kind="1.5"), "cogvideox"),
    "cogvideox-5b, images": Case(partial(save_cogvideox, images=True), "cogvideox", sections=FIRST),
    "cogvideox-1.5, images": Case(partial(save_cogvideox, kind="1.5", images=True), "cogvideox 1.5", sections=FIRST),
    "hunyuan-video": Case(save_hunyuan_video, "hunyuan"),
    "hunyuan-video, images": Case(save_hunyuan_video_images, "hunyuan", sections=FIRST),
    "hunyuan-video, frame replaced": Case(partial(save_hunyuan_video_images, replaces=True), "hunyuan", sections=FIRST),
    "hunyuan-video-1.5": Case(save_hunyuan_video15, "hunyuan 1.5", (5, 32, 64), dtype=torch.float32),
    "hunyuan-video-1.5, images": Case(save_hunyuan_video15_images, "hunyuan 1.5", (5, 32, 64), FIRST, torch.float32),
    "mochi": Case(save_mochi, "mochi", (13, 32, 48)),
    "flux": Case(save_flux, "flux", IMAGE),
    "qwen-image": Case(save_qwen_image, "qwen", IMAGE),
}


def filled(*arguments: Any, moved: bool = False) -> Any:
    """The published model of a section, with the weights of its files, in memory; `moved`: no matrix of its adapters is zero."""
    model = with_weights(*arguments)
    materialize(model, CPU)
    source = source_of(model)
    assert source is not None
    read_weights(model, source)
    seeded = torch.Generator().manual_seed(1)
    for parameter, value in adapter_values(model, 0):
        zero = moved and not value.any()
        parameter.data.copy_(0.1 * torch.randn(value.shape, generator=seeded) if zero else value)
    return model


class DoubleTask(VideoDomain):
    """The video task in float64 or another type: the model's weights, and all that a batch gives it.

    By the name of a learning part it keeps the model, the batches that it trains on, the tensors that it begins with, and the gradients
    of its first step, which has one micro-batch.
    """

    def __init__(
        self, config: Config, maker: Any = None, dtype: torch.dtype = torch.float64, moved: bool = False
    ) -> None:
        build = partial(filled, moved=moved)
        super().__init__(config, maker, lambda *arguments: build(*arguments).to(dtype), call_of(config.model))
        self.dtype = dtype
        self.models: dict[str, nn.Module] = {}
        self.batches: dict[str, list[Batch]] = defaultdict(list)
        self.start: dict[str, dict[str, Tensor]] = {}
        self.gradients: dict[str, dict[str, Tensor]] = defaultdict(dict)

    def inputs(self, model: nn.Module, batch: Batch, part: LearningPart, *others: Any, **given: Any) -> Inputs:
        if part.name not in self.models:
            self.models[part.name] = model
            self.start[part.name] = {name: value.detach().clone() for name, value in model.state_dict().items()}
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(partial(self._keep, part.name, name))
        self.batches[part.name].append(batch)
        return super().inputs(model, batch.to(CPU, self.dtype), part, *others, **given)

    def _keep(self, part: str, name: str, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self.gradients[part].setdefault(name, parameter.grad.clone())


def configured(case: Case, folder: Path, adapter: dict[str, Any] | None, steps: int) -> Config:
    tree = small_tree(folder, clips=5)
    del tree["vae"], tree["model"]
    frames, height, width = case.bucket
    tree["data"]["buckets"] = [{"frames": frames, "height": height, "width": width}]
    if case.bucket == IMAGE:
        tree["data"]["sources"] = [{"path": str(pictures(folder / "pictures"))}]
    # the next clip is a clip's control; words in quotation marks are what HunyuanVideo 1.5 draws
    rows = [json.loads(line) for line in (folder / "clips.jsonl").read_text().splitlines()]
    for number, row in enumerate(rows):
        row |= {"depth": rows[(number + 1) % 5]["video"], "caption": f'{row["caption"]} and "STOP {number}"'}
    (folder / "clips.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if case.name == "wan vace":
        tree["data"] |= {"fps": 2.0, "sources": [{"path": str(folder / "clips.jsonl"), "roles": {"control": "depth"}}]}
    steady = {"steps": steps, "batch_size": 2, "lr": 1e-3, "weight_decay": 0.01, "ema_decay": None, "clip_norm": 1.0}
    return make_config(
        {
            **tree,
            "seed": SEED,
            "model": {"kind": "diffusers", "pretrained": str(case.save(folder / "base")), "adapter": adapter},
            "train": {**tree["train"], **steady},
            "validate": {"samples": 0},
            "checkpoint": {"every": 1000},
            **case.sections,
        }
    )


def trained(case: Case, config: Config, moved: bool = False) -> DoubleTask:
    """The task of a run, from files of videos to its last step."""
    task = DoubleTask(config, maker_of(config), case.dtype, moved)
    TrainPipeline(config, task=task).run()
    return task


def nonzero(gradients: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """The gradients that are there and not zero."""
    return {name: value for name, value in gradients.items() if value is not None and value.any()}


# -- by hand ------------------------------------------------------------------------------------------------------------


class ByHand:
    """Training of a repository's transformer as diffusers loads it; where the run has adapters, with peft's, which begin as they did."""

    def __init__(self, case: Case, task: DoubleTask, part: str) -> None:
        import diffusers
        from peft import LoraConfig

        self.case, self.part, self.strides = case, part, task.sizes.strides
        self.folder = Path(task.config.model.pretrained)  # type: ignore[union-attr]
        self.index = json.loads((self.folder / "model_index.json").read_text())
        where = "transformer_2" if part == "low" else "transformer"
        kind = getattr(diffusers, self.index[where][1])
        self.model: Any = kind.from_pretrained(self.folder, subfolder=where).train()
        adapters = {name: value for name, value in task.start[part].items() if is_adapter(name)}
        if adapters:
            self.model.requires_grad_(False)
            self.model.add_adapter(LoraConfig(r=3, lora_alpha=6, target_modules=LAYERS))
        self.model.to(case.dtype)
        assert not self.model.load_state_dict(adapters, strict=False).unexpected_keys

    def times(self, batch: Batch) -> Tensor:
        """Logit-normal times under the scheduler's own shift, those of an expert in its range."""
        from diffusers import FlowMatchEulerDiscreteScheduler
        from diffusers.pipelines.flux.pipeline_flux import calculate_shift

        own = json.loads((self.folder / "scheduler" / "scheduler_config.json").read_text())
        scheduler, u_B = FlowMatchEulerDiscreteScheduler(), batch["quantiles"]
        shift = own.get("flow_shift") or own.get("shift")
        if own.get("use_dynamic_shifting"):
            _, _, t, h, w = batch["latents"].shape
            tokens = t * h * w // (1 if self.case.name == "ltx" else 4)
            sizes = (own[f"{name}_image_seq_len"] for name in ("base", "max"))
            shift = float(
                torch.tensor(calculate_shift(tokens, *sizes, own["base_shift"], own["max_shift"])).double().exp()
            )
        if self.part in ("high", "low"):
            edge = torch.tensor(self.index["boundary_ratio"], dtype=torch.float64)
            below = torch.special.ndtr(torch.logit(edge / (shift - (shift - 1) * edge)))
            u_B = below * u_B if self.part == "low" else below + (1 - below) * u_B
        sigma_B = torch.sigmoid(torch.special.ndtri(u_B))
        return torch.as_tensor(scheduler._time_shift_linear(shift, 1.0, sigma_B)).float()

    def loss(self, batch: Batch) -> Tensor:
        """The mean over a batch's clips, by diffusers' scheduler and the class called as its pipeline calls it."""
        import diffusers

        wide = batch.to(CPU, self.case.dtype)
        latents, noise = wide["latents"], wide["noise"]
        if self.case.name.startswith("cogvideox"):
            scheduler: Any = getattr(diffusers, self.index["scheduler"][1]).from_pretrained(self.folder / "scheduler")
            index_B = (1000 * batch["quantiles"]).long()
            t_B, target = index_B / 999, scheduler.get_velocity(latents, noise, index_B)
            x_t = scheduler.add_noise(latents, noise, index_B)
        else:
            scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
            t_B, target = self.times(batch), noise - latents
            scheduler.sigmas, scheduler.timesteps = t_B.double(), 1000 * t_B
            x_t = scheduler.scale_noise(latents, scheduler.timesteps, noise)
        replaced = "conditioning_mask" in batch and "condition" not in batch
        if replaced:  # the first frame is given in its place, and does not count
            x_t[:, :, 0] = latents[:, :, 0]
        out = called_by_hand(self.case.name, self.model, x_t, t_B, conditions_of(wide, self.strides))
        return (out - target)[:, :, int(replaced) :].square().flatten(1).mean(1).mean()

    def gradients(self, batch: Batch) -> dict[str, Tensor]:
        """Those of one step that are not zero."""
        self.loss(batch).backward()  # type: ignore[no-untyped-call]
        return nonzero({name: parameter.grad for name, parameter in self.model.named_parameters()})

    def train(self, batches: list[Batch], config: Config) -> list[float]:
        """Train by torch's AdamW with a linear warm-up and clipping; returns the losses. Matrices decay, vectors do not."""
        train = config.train
        weights, others = (
            [p for name, p in self.model.named_parameters() if (p.ndim > 1 and name.endswith(".weight")) is wanted]
            for wanted in (True, False)
        )
        groups = [{"params": weights, "weight_decay": train.weight_decay}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=train.lr, betas=train.betas, eps=train.eps, foreach=False)
        losses = []
        for step, batch in enumerate(batches):
            for group in optimizer.param_groups:
                group["lr"] = train.lr * min(1.0, (step + 1) / (train.warmup_steps + 1))
            value = self.loss(batch)
            value.backward()  # type: ignore[no-untyped-call]
            assert train.clip_norm is not None
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), train.clip_norm)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(value.item())
        return losses


# -- tests --------------------------------------------------------------------------------------------------------------


WAYS = {"adapter": ADAPTER, "whole": None}  # what trains


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("wan", "adapter"),
        ("cogvideox-5b", "adapter"),
        ("wan", "whole"),
        pytest.param("cogvideox-5b", "whole", marks=pytest.mark.slow),
    ],
)
def test_twenty_steps_are_those_of_a_plain_loop(tmp_path: Path, name: str, way: str) -> None:
    """In float64, bit for bit, through preprocessing, cache, loader and loop: losses and all tensors; a base stays as it is."""
    config = configured(CASES[name], tmp_path, WAYS[way], STEPS)
    task = trained(CASES[name], config)
    last, start, batches = task.models["model"].state_dict(), task.start["model"], task.batches["model"]
    assert len(batches) == STEPS
    reference = ByHand(CASES[name], task, "model")
    assert all(torch.equal(value, start[each]) for each, value in reference.model.state_dict().items())
    losses = reference.train(batches, config)
    truth = reference.model.state_dict()
    assert last.keys() == truth.keys() and all(torch.equal(value, last[each]) for each, value in truth.items())
    moved = {each for each, value in last.items() if not torch.equal(value, start[each])}
    assert moved == {each for each in last if way == "whole" or is_adapter(each)}
    rows = [row["loss"] for row in read_metrics(config.run_dir / "metrics.jsonl") if row["kind"] == "train"]
    assert max(abs(one - other) for one, other in zip(rows, losses, strict=True)) < 1e-9


@pytest.mark.parametrize("way", slow_but(WAYS, {"adapter"}))
@pytest.mark.parametrize("name", slow_but(CASES, {"wan, experts", "hunyuan-video, frame replaced", "qwen-image"}))
def test_a_steps_gradients_are_those_by_hand(tmp_path: Path, name: str, way: str) -> None:
    """Within 1e-6 of each one's norm, of two experts each one's; and no other weight that would train by hand has a gradient."""
    config = configured(CASES[name], tmp_path, WAYS[way], 3 if name == "wan, experts" else 1)
    task = trained(CASES[name], config, moved=True)
    assert set(task.models) == ({"high", "low"} if name == "wan, experts" else {"model"})
    for part, gradients in task.gradients.items():
        actual = nonzero(gradients)
        truth = ByHand(CASES[name], task, part).gradients(task.batches[part][0])
        assert actual.keys() == truth.keys() and all(is_adapter(each) for each in actual) == (way == "adapter")
        assert way == "whole" or actual.keys() == gradients.keys()
        far = {each: float((actual[each] - value).norm() / value.norm()) for each, value in truth.items()}
        assert max(far.values()) < 1e-6, sorted(far.items(), key=lambda item: -item[1])[:5]
