"""Training of the toy on images and videos, and the gradients that its optimizer gets; used as `from tests.support.mixed_runs import ...`.

The learning rate is so small that no weight moves: gradients of all steps are those of the same weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from mmspeed import rng
from mmspeed.config import Config
from mmspeed.data import BatchSampler, CacheWriter, Sample
from mmspeed.data.cache.keys import entry_key, number_duplicates, sample_key
from mmspeed.data.cache.tables import write_info, write_rejects, write_samples
from mmspeed.data.cache.writer import latent_tensors, text_tensors
from mmspeed.device import Device
from mmspeed.loop.optimizers.make_optimizer import make_optimizer
from mmspeed.pipelines import TrainPipeline
from mmspeed.pipelines.domains.base import values_of
from mmspeed.pipelines.domains.video.domain import VideoDomain
from mmspeed.protocols import RunPlace, TextEntry
from mmspeed.shapes import Bucket
from tests.support.toy import C, D
from tests.support.toy_runs import build_toy, toy_config

IMAGE, VIDEO = Bucket(1, 16, 24), Bucket(9, 16, 24)
LATENTS = {IMAGE: (C, 1, 2, 3), VIDEO: (C, 3, 2, 3)}
TOKENS = {IMAGE: 6, VIDEO: 18}
IMAGES, VIDEOS = 13, 4
BUCKETS = [{"frames": one.frames, "height": one.height, "width": one.width} for one in (IMAGE, VIDEO)]
STILL = (
    "train.lr=1e-30",
    "train.clip_norm=null",
    "train.warmup_steps=0",
    "validate.samples=0",
)
BY_TOKENS = ("batching.by=tokens", "train.batch_size=null")
Gradients = list[Tensor]  # of each parameter, in the optimizer's order


def mixed_config(folder: Path, *overrides: str) -> Config:
    """A run over 13 images and 4 videos, each a third of a video's tokens; by samples 3 a step."""
    return toy_config(folder, f"data.buckets={json.dumps(BUCKETS)}", *STILL, *overrides)


def write_mixed_cache(config: Config) -> None:
    """A cache of the images and videos, in the toy's sizes."""
    root, samples = config.local_cache_dir(), []
    with CacheWriter(root) as writer:
        texts = []
        for length, section in ((3, "texts"), (4, "texts"), (1, "null")):
            parts = {"kind": "text", "length": length, "section": section}
            texts += [entry_key(parts)] if section == "texts" else []
            entry = TextEntry(rng.normal((length, D), 0, "text", length).bfloat16())
            writer.add(section, entry_key(parts), text_tensors(entry), {"caption": "x" * (length - 1)}, tokens=length)
        for number in range(IMAGES + VIDEOS):
            bucket = IMAGE if number < IMAGES else VIDEO
            parts, sizes = {"kind": "latent", "number": number}, LATENTS[bucket]
            mean, spread = rng.normal(sizes, 0, "latent", number), rng.normal(sizes, 0, "spread", number) - 5
            latent, tokens = entry_key(parts), TOKENS[bucket]
            writer.add(
                "latents", latent, latent_tensors(mean, spread), parts, bucket=bucket, tokens=tokens,
                content_id=f"c{number}", frames=range(bucket.frames), fps=8.0, source=f"{number}.mp4",
            )  # fmt: skip
            caption = (texts[number % 2],)
            samples.append(
                Sample(sample_key([latent], caption), (latent,), caption, "train", bucket, f"{number}.mp4", tokens, f"c{number}")
            )  # fmt: skip
    assert len(set(number_duplicates(sample.key for sample in samples))) == len(samples)
    write_samples(root, samples)
    write_rejects(root, [])
    encoders = {
        "vae": {"channels": C, "strides": [4, 8], "fingerprint": "made up"},
        "text": {"width": D, "fingerprint": "made up"},
    }
    write_info(root, {"encoders": encoders, "fps": 8.0, "made_for": config.sample_settings()})


def toy_task(config: Config) -> VideoDomain:
    """The video task of the toy with its own weights."""
    return VideoDomain(config, build=build_toy)


def opened_task(config: Config, world: int = 1) -> tuple[VideoDomain, RunPlace]:
    """The task with its cache, and the place of the first of `world` ranks."""
    place = RunPlace(Device("cpu", 0), world=world, groups=world, dealt=world, folder=config.run_dir)
    task = toy_task(config)
    task.open(place)
    return task, place


def sampler_of(config: Config, world: int = 1) -> BatchSampler[Sample]:
    """The order of a run on `world` ranks."""
    task, place = opened_task(config, world)
    return task.data(place).sampler


def sums_by_bucket(config: Config) -> dict[Bucket, Gradients]:
    """The sums over each bucket's samples, in epoch 0, of the gradients of their losses: by autograd alone, in the optimizer's order."""
    task, place = opened_task(config)
    data, models = task.data(place), task.build()
    groups = make_optimizer(models["model"], config.train).param_groups
    parameters = [p for group in groups for p in group["params"]]
    sums = {bucket: [torch.zeros_like(p) for p in parameters] for bucket in LATENTS}
    for step in data.steps(0, data.sampler.steps_per_epoch):
        for batch in step.batches:
            loss_B = values_of(task, models, batch).loss.loss_I
            for row in range(batch.size):
                grads = torch.autograd.grad(loss_B[row], parameters, retain_graph=True)
                for total, grad in zip(sums[batch.shape], grads, strict=True):  # type: ignore[index]
                    total += grad * batch.weights_I[row]
    return sums


@contextmanager
def recorded_gradients() -> Iterator[list[Gradients]]:
    """The gradients of each optimizer step inside, whole, as the optimizer gets them."""
    steps: list[Gradients] = []

    def record(optimizer: Optimizer, *_: Any) -> None:
        grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
        if any(grad.any() for grad in grads):  # loading a checkpoint makes a step of zeros, for the optimizer's state
            steps.append([(g.full_tensor() if isinstance(g, DTensor) else g).detach().clone() for g in grads])

    handle = register_optimizer_step_pre_hook(record)
    try:
        yield steps
    finally:
        handle.remove()


def trained_gradients(folder: str, overrides: Sequence[str], steps: int) -> list[list[Any]]:
    """The gradients of each step of a run, as arrays; called on however many ranks take part."""
    config = mixed_config(Path(folder), *overrides, f"train.steps={steps}")
    with recorded_gradients() as recorded:
        TrainPipeline(config, task=toy_task(config)).run()
    return [[grad.numpy() for grad in grads] for grads in recorded]


def mean_gradients(recorded: Sequence[Sequence[Any]]) -> list[Any]:
    """The means over steps."""
    return [sum(grads) / len(recorded) for grads in zip(*recorded, strict=True)]


def mixed_home(folder: Path) -> Path:
    """The folder, with the cache of images and videos in it."""
    write_mixed_cache(mixed_config(folder))
    return folder
