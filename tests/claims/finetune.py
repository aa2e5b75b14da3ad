"""Fine-tuning a Wan-shaped model: `mmspeed train` beside a plain loop of diffusers and accelerate, on the same batches.

All weights train; or, with `--adapter`, a LoRA of peft's on attentions and MLPs.

Each of the two runs in a process of its own, and takes a step on request: pairs of steps alternate, so that both meet the same
machine. A step of `mmspeed train` is all that happens between two steps of a run: reading, logging and watching included.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import shutil
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from mmspeed import rng
from mmspeed.config import Config, make_config, video_config
from mmspeed.data import CacheWriter, Sample
from mmspeed.data.cache.keys import entry_key, number_duplicates, sample_key
from mmspeed.data.cache.tables import write_info, write_rejects, write_samples
from mmspeed.data.cache.writer import latent_tensors, text_tensors
from mmspeed.log import setup
from mmspeed.models.adapters import adapter_values
from mmspeed.pipelines import TrainCallback, TrainPipeline
from mmspeed.pipelines.training.events import StepEvent
from mmspeed.protocols import TextEntry
from mmspeed.shapes import Bucket

from .turns import Pace, in_turns

HEAD = 64
CHANNELS, TEXT_WIDTH, TEXT_TOKENS = 16, 1024, 64
BUCKET = Bucket(17, 128, 192)
LATENT = (5, 16, 24)
WARM = 2  # pairs that are not counted
STEP_GOAL, ADAPTER_STEP_GOAL, MEMORY_GOAL = 1.05, 1.03, 1.02
LAYERS = ["to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2"]
RATE, BETAS, DECAY, EPS, CLIP = 1e-5, (0.9, 0.999), 0.01, 1e-8, 1.0


@dataclass(frozen=True)
class FinetuneSetting:
    """Sizes of the model and of the measurement: `width` in heads of 64, `pairs` of steps, `batch` samples a step, `threads` of each, `rank` of adapters (0: none)."""

    width: int = 1024
    layers: int = 16
    pairs: int = 15
    batch: int = 1
    threads: int = 2
    rank: int = 0


@dataclass(frozen=True)
class FinetuneResult:
    """Seconds of each counted step, losses, and peak memory (bytes) of the two processes."""

    parameters: int
    tokens: int
    ours: tuple[float, ...]
    plain: tuple[float, ...]
    our_losses: tuple[float, ...]
    plain_losses: tuple[float, ...]
    our_peak: int
    plain_peak: int
    goal: float = STEP_GOAL

    @property
    def ratios(self) -> list[float]:
        """Our time over the plain loop's, of each pair."""
        return [ours / plain for ours, plain in zip(self.ours, self.plain, strict=True)]

    @property
    def upper(self) -> float:
        """The upper bound, at 90 %, of the median of the ratios."""
        return upper_of_median(self.ratios)

    @property
    def loss_difference(self) -> float:
        """The greatest relative difference of two losses of one step."""
        pairs = zip(self.our_losses, self.plain_losses, strict=True)
        return max(abs(ours - plain) / abs(plain) for ours, plain in pairs)

    def passed(self) -> bool:
        """True where both goals are met and the losses are the same."""
        return (
            self.upper <= self.goal and self.our_peak <= MEMORY_GOAL * self.plain_peak and self.loss_difference < 1e-3
        )

    def lines(self) -> list[str]:
        """The figures in words."""
        return [
            f"a Wan-shaped model of {self.parameters / 1e9:.2f} B parameters, {self.tokens} tokens a step, float32, {len(self.ours)} pairs",
            f"seconds of a step (medians): mmspeed train {statistics.median(self.ours):.3f}, "
            f"diffusers + accelerate {statistics.median(self.plain):.3f}",
            f"ratio of step times: median {statistics.median(self.ratios):.4f}, upper bound at 90 % {self.upper:.4f} (goal {self.goal})",
            f"peak memory: {self.our_peak / 1e9:.2f} GB, {self.plain_peak / 1e9:.2f} GB, ratio {self.our_peak / self.plain_peak:.4f} "
            f"(goal {MEMORY_GOAL})",
            f"losses differ by at most {self.loss_difference:.1e}",
        ]


def upper_of_median(values: Sequence[float]) -> float:
    """The upper end of the two-sided 90 % confidence interval of a median, by order statistics (binomial)."""
    ordered, count = sorted(values), len(values)
    below, place = 0.0, 0
    while place < count and below < 0.95:
        below += math.comb(count, place) / 2**count
        place += 1
    return ordered[min(place, count) - 1]


def bench_finetune(folder: Path, setting: FinetuneSetting = FinetuneSetting()) -> FinetuneResult:
    """Run both loops in turn, in `folder`, which is emptied of earlier ones. Raises UserError where one of them fails."""
    for name in ("base", "cache", "runs"):
        shutil.rmtree(folder / name, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    parameters = save_base(folder / "base", setting)
    config = finetune_config(folder, setting)
    write_finetune_cache(config, setting)
    told = in_turns({"mmspeed": _ours, "the plain loop": _plain}, (str(folder), asdict(setting)), setting.pairs, WARM)
    (ours, our_losses, our_peaks), (plain, plain_losses, plain_peaks) = (
        zip(*steps, strict=True) for steps in told.values()
    )
    tokens = setting.batch * math.prod(LATENT) // 4
    peaks, goal = (max(our_peaks), max(plain_peaks)), ADAPTER_STEP_GOAL if setting.rank else STEP_GOAL
    return FinetuneResult(parameters, tokens, ours, plain, our_losses, plain_losses, *peaks, goal)


def save_base(folder: Path, setting: FinetuneSetting) -> int:
    """Save the random Wan-shaped transformer and its scheduler as a repository; returns the number of parameters."""
    from diffusers import UniPCMultistepScheduler, WanTransformer3DModel

    torch.manual_seed(0)
    model: Any = WanTransformer3DModel(
        num_attention_heads=setting.width // HEAD, attention_head_dim=HEAD, in_channels=CHANNELS, out_channels=CHANNELS,
        text_dim=TEXT_WIDTH, ffn_dim=4 * setting.width, num_layers=setting.layers,
    )  # fmt: skip
    model.save_pretrained(folder / "transformer")
    scheduler: Any = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    scheduler.save_pretrained(folder / "scheduler")
    index = {
        "_class_name": "WanPipeline",
        "transformer": ["diffusers", "WanTransformer3DModel"],
        "scheduler": ["diffusers", "UniPCMultistepScheduler"],
    }
    (folder / "model_index.json").write_text(json.dumps(index))
    return sum(parameter.numel() for parameter in model.parameters())


def finetune_config(folder: Path, setting: FinetuneSetting) -> Config:
    """The run: one step a sample, no validation, no average, a checkpoint at the end alone."""
    steps = WARM + setting.pairs + 1
    adapter = {"kind": "lora", "rank": setting.rank, "targets": "attention+mlp"} if setting.rank else None
    config = make_config(
        {
            "name": "finetune",
            "output": str(folder / "runs"),
            "data": {
                "sources": [{"path": str(folder / "clips.jsonl")}],
                "cache": str(folder / "cache"),
                "buckets": [{"frames": BUCKET.frames, "height": BUCKET.height, "width": BUCKET.width}],
            },
            "model": {"kind": "diffusers", "pretrained": str(folder / "base"), "adapter": adapter},
            "vae": {"kind": "diffusers", "pretrained": str(folder / "no-codec")},
            "text": {"kind": "transformers", "pretrained": str(folder / "no-encoder"), "max_tokens": 512},
            "train": {
                "steps": steps, "batch_size": setting.batch, "lr": RATE, "warmup_steps": 0, "betas": list(BETAS), "eps": EPS,
                "weight_decay": DECAY, "clip_norm": CLIP, "ema_decay": None, "caption_dropout": 0.0,
            },
            "validate": {"every": steps + 1, "samples": 0, "report": False},
            "checkpoint": {"every": steps + 1},
            "device": {"kind": "cpu", "peak_tflops": 1.0},
        },
        origin="finetune claim",
    )  # fmt: skip
    return video_config(config, "finetune claim")


def write_finetune_cache(config: Config, setting: FinetuneSetting) -> None:
    """A cache of random latents and captions, a sample for each step and more."""
    root = config.local_cache_dir()
    count = (WARM + setting.pairs + 1) * setting.batch
    latents, texts = [], []
    with CacheWriter(root) as writer:
        for number in range(count):
            parts = {"kind": "latent", "number": number}
            latents.append(entry_key(parts))
            writer.add(
                "latents", latents[-1], latent_tensors(rng.normal((CHANNELS, *LATENT), 0, "latent", number)), parts,
                bucket=BUCKET, tokens=math.prod(LATENT), content_id=f"c{number}", frames=range(BUCKET.frames), fps=16.0,
                source=f"{number}.mp4",
            )  # fmt: skip
        for section in ("texts", "null"):
            parts = {"kind": "text", "section": section}
            texts.append(entry_key(parts))
            entry = TextEntry(rng.normal((TEXT_TOKENS, TEXT_WIDTH), 0, "text", section))
            writer.add(section, texts[-1], text_tensors(entry), {"caption": section}, tokens=TEXT_TOKENS)
    keys = number_duplicates(sample_key([key], texts[:1]) for key in latents)
    rows = [
        Sample(key, (latents[row],), tuple(texts[:1]), "train", BUCKET, f"{row}.mp4", math.prod(LATENT), f"c{row}")
        for row, key in enumerate(keys)
    ]
    write_samples(root, rows)
    write_rejects(root, [])
    encoders = {
        "vae": {"channels": CHANNELS, "strides": [4, 8], "fingerprint": "made up"},
        "text": {"width": TEXT_WIDTH, "fingerprint": "made up"},
    }
    write_info(root, {"encoders": encoders, "fps": 16.0, "made_for": config.sample_settings()})


class _Paced(TrainCallback):
    """Takes a step of the run when the other side asks for it."""

    def __init__(self, pipe: Connection) -> None:
        self.pace = Pace(pipe)

    def on_step(self, event: StepEvent) -> None:
        self.pace.step(event.loss, _peak())


def _peak() -> int:
    """The most memory that this process has had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _ours(pipe: Connection, folder: str, setting: dict[str, Any]) -> None:
    """`mmspeed train`, in a process of its own."""
    own = FinetuneSetting(**setting)
    torch.set_num_threads(own.threads)
    TrainPipeline(finetune_config(Path(folder), own), callbacks=[_Paced(pipe)]).run()


def _plain(pipe: Connection, folder: str, setting: dict[str, Any]) -> None:
    """The loop that one would write with diffusers and accelerate, on the batches of the run."""
    from accelerate import Accelerator
    from diffusers import WanTransformer3DModel

    own = FinetuneSetting(**setting)
    torch.set_num_threads(own.threads)
    batches = list(_batches(Path(folder), own))
    accelerator = Accelerator(cpu=True)
    model = WanTransformer3DModel.from_pretrained(Path(folder) / "base" / "transformer").train()
    if own.rank:
        from peft import LoraConfig

        model.requires_grad_(False)
        model.add_adapter(LoraConfig(r=own.rank, lora_alpha=own.rank, target_modules=LAYERS))
        for parameter, value in adapter_values(model, 0):  # those that the run begins with
            parameter.data.copy_(value)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, betas=BETAS, weight_decay=DECAY, eps=EPS)
    model, optimizer = accelerator.prepare(model, optimizer)
    pace = Pace(pipe)
    for batch in batches:
        time_B, latents, noise = batch["time"], batch["latents"], batch["noise"]
        share = time_B.view(-1, 1, 1, 1, 1)
        out = model(
            hidden_states=(1 - share) * latents + share * noise, timestep=1000 * time_B,
            encoder_hidden_states=batch["text"], return_dict=False,
        )[0]  # fmt: skip
        loss = torch.nn.functional.mse_loss(out, noise - latents)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(trained, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        pace.step(loss.item(), _peak())


def _batches(folder: Path, setting: FinetuneSetting) -> Iterator[dict[str, torch.Tensor]]:
    """The batches of the run's steps: latents, noise, times and padded captions."""
    from mmspeed.device import pick
    from mmspeed.pipelines.domains.video.domain import VideoDomain
    from mmspeed.protocols import RunPlace

    task, place = VideoDomain(finetune_config(folder, setting)), RunPlace(pick("cpu"))
    task.open(place)
    for step in task.data(place).steps(0, WARM + setting.pairs + 1):
        for batch in step.batches:
            text = torch.nn.functional.pad(batch["text"].float(), (0, 0, 0, 512 - batch["text"].shape[1]))
            times = task.objective.time_from_quantile(batch["quantiles"]).float()
            yield {"latents": batch["latents"].float(), "noise": batch["noise"].float(), "time": times, "text": text}


def main() -> int:
    """Train beside a plain loop, and compare time and memory; 1 where one misses its goal."""
    parser = argparse.ArgumentParser(prog="python -m tests.claims.finetune", description=main.__doc__)
    parser.add_argument("--output", type=Path, default=Path("runs/finetune"), help="made anew")
    for name in ("pairs", "width", "layers"):
        parser.add_argument(f"--{name}", type=int, default=getattr(FinetuneSetting, name))
    parser.add_argument("--adapter", dest="rank", action="store_const", const=32, default=0, help="a LoRA of rank 32")
    chosen = parser.parse_args()
    setup()
    setting = FinetuneSetting(width=chosen.width, layers=chosen.layers, pairs=chosen.pairs, rank=chosen.rank)
    result = bench_finetune(chosen.output.resolve(), setting)
    print("\n".join(result.lines()))
    return 0 if result.passed() else 1


if __name__ == "__main__":
    raise SystemExit(main())
