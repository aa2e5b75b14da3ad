"""Training of published models is that of a plain loop: diffusers' scheduler, torch's AdamW; and it learns.

Legend: B batch, C channels, T h w latent, L caption tokens, D text width.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmspeed.config import Config, make_config
from mmspeed.initialize import materialize, read_weights
from mmspeed.log import read_metrics
from mmspeed.models.adapters import adapter_values, is_adapter
from mmspeed.models.sections import with_weights
from mmspeed.pipelines import TrainPipeline
from mmspeed.pipelines.domains.video.domain import VideoDomain
from mmspeed.pipelines.tasks import maker_of
from mmspeed.protocols import Batch, Inputs, source_of
from tests.support.runs import small_tree
from tests.support.tiny_repositories import save_wan

STEPS = 20


def filled(*arguments: Any) -> Any:
    """The published model of a section, with the weights of its files, in memory."""
    model = with_weights(*arguments)
    materialize(model, torch.device("cpu"))
    source = source_of(model)
    assert source is not None
    read_weights(model, source)
    for parameter, value in adapter_values(model, 0):
        parameter.data.copy_(value)
    return model


class DoubleTask(VideoDomain):
    """The video task in float64: the model's weights, and all that a batch gives it. Keeps the batches that it trains on."""

    def __init__(self, config: Config, maker: Any = None) -> None:
        super().__init__(config, maker, lambda *arguments: filled(*arguments).double())
        self.batches: list[Batch] = []
        self.start: dict[str, Tensor] = {}
        self.model: nn.Module | None = None

    def inputs(self, model: nn.Module, batch: Batch, *others: Any) -> Inputs:
        self.model = model
        if not self.batches:
            self.start = {name: value.detach().clone() for name, value in self.model.state_dict().items()}
        self.batches.append(batch)
        return super().inputs(model, batch.to(torch.device("cpu"), torch.float64), *others)


def configured(folder: Path, base: Path, adapter: dict[str, Any] | None = None) -> Config:
    tree = small_tree(folder, clips=5)
    del tree["vae"], tree["model"]
    steady = {"steps": STEPS, "batch_size": 2, "lr": 1e-3, "weight_decay": 0.01, "ema_decay": None, "clip_norm": 1.0}
    return make_config(
        {
            **tree,
            "model": {"kind": "diffusers", "pretrained": str(base), "adapter": adapter},
            "train": {**tree["train"], **steady},
            "validate": {"samples": 0},
            "checkpoint": {"every": 1000},
        }
    )


def quantile_to_time(u_B: Tensor, scheduler: Any, shift: float) -> Tensor:
    """Logit-normal times under the scheduler's own shift, in float32 as models get them."""
    sigma_B = torch.sigmoid(torch.special.ndtri(u_B))
    return torch.as_tensor(scheduler._time_shift_linear(shift, 1.0, sigma_B)).float()


def wan_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Loss of Wan by hand: diffusers' flow scheduler, captions with zeros to 512 tokens, times up to 1000."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    scheduler: Any = FlowMatchEulerDiscreteScheduler()
    latents, noise, text = (batch[name].double() for name in ("latents", "noise", "text"))
    t_B = quantile_to_time(batch["quantiles"], scheduler, 3.0)
    scheduler.sigmas, scheduler.timesteps = t_B.double(), 1000 * t_B
    x_t = scheduler.scale_noise(latents, scheduler.timesteps, noise)
    text = text * batch["text_mask"][..., None]
    text_BLD = nn.functional.pad(text, (0, 0, 0, 512 - text.shape[1]))
    (velocity,) = model(x_t, 1000 * t_B, text_BLD, return_dict=False)
    return (velocity - (noise - latents)).square().flatten(1).mean(1)


def plain_loop(model: nn.Module, batches: list[Batch], config: Config) -> list[float]:
    """Train by torch's AdamW with a linear warm-up and clipping; returns the losses. Matrices decay, vectors do not."""
    train = config.train
    weights, others = (
        [p for name, p in model.named_parameters() if (p.ndim > 1 and name.endswith(".weight")) is wanted]
        for wanted in (True, False)
    )
    groups = [{"params": weights, "weight_decay": train.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=train.lr, betas=train.betas, eps=train.eps, foreach=False)
    losses = []
    for step, batch in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = train.lr * min(1.0, (step + 1) / (train.warmup_steps + 1))
        value = wan_loss(model, batch).mean()
        value.backward()  # type: ignore[no-untyped-call]
        assert train.clip_norm is not None
        torch.nn.utils.clip_grad_norm_(model.parameters(), train.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    return losses


def under_peft(config: Config) -> Any:
    """The base in float64 with an adapter of peft's, by diffusers, that begins with the run's values."""
    from peft import LoraConfig

    model = filled(config.model.model_copy(update={"adapter": None}), 16, 16, "cpu")
    layers = ["to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2"]
    model.requires_grad_(False)
    model.add_adapter(LoraConfig(r=3, lora_alpha=6, target_modules=layers))
    for parameter, value in adapter_values(model, 0):
        parameter.data.copy_(value)
    return model.double()


def test_twenty_steps_of_an_adapter_are_those_of_peft(tmp_path: Path) -> None:
    """In float64, bit for bit: losses and all tensors; the base stays as it is."""
    adapter = {"kind": "lora", "rank": 3, "alpha": 6, "targets": "attention+mlp"}
    config = configured(tmp_path, save_wan(tmp_path / "wan"), adapter)
    task = DoubleTask(config, maker_of(config))
    TrainPipeline(config, task=task).run()
    reference = under_peft(task.config)
    losses = plain_loop(reference, task.batches, config)
    assert task.model is not None
    trained = task.model.state_dict()
    assert trained.keys() == reference.state_dict().keys()
    assert all(torch.equal(value, trained[name]) for name, value in reference.state_dict().items())
    moved = {name for name, value in trained.items() if not torch.equal(value, task.start[name])}
    assert moved == {name for name in trained if is_adapter(name)}
    rows = [row["loss"] for row in read_metrics(config.run_dir / "metrics.jsonl") if row["kind"] == "train"]
    assert max(abs(one - other) for one, other in zip(rows, losses, strict=True)) < 1e-6  # recorded in float32


def test_twenty_steps_are_those_of_a_plain_loop(tmp_path: Path) -> None:
    """In float64, through preprocessing, cache, loader and loop: parameters agree within 1e-9, and all of them move."""
    config = configured(tmp_path, save_wan(tmp_path / "wan"))
    task = DoubleTask(config, maker_of(config))
    TrainPipeline(config, task=task).run()
    assert task.model is not None and len(task.batches) == STEPS
    reference = filled(task.config.model, 16, 16, "cpu").double()
    assert all(torch.equal(value, task.start[name]) for name, value in reference.state_dict().items())
    losses = plain_loop(reference, task.batches, config)
    trained = task.model.state_dict()
    error = max(float((value - trained[name]).abs().max()) for name, value in reference.state_dict().items())
    moved = [float((value - task.start[name]).abs().max()) for name, value in trained.items()]
    rows = [row["loss"] for row in read_metrics(config.run_dir / "metrics.jsonl") if row["kind"] == "train"]
    apart = max(abs(one - other) for one, other in zip(rows, losses, strict=True))
    assert error < 1e-9 and apart < 1e-9
    assert max(moved) >= 1e-3
