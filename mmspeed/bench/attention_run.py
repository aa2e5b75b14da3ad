"""`mmspeed bench attention --run`: the effect of sparse attention on the layers of a trained model.

The model runs densely on a few samples at a few noise levels. In every self-attention, each method computes the same queries, keys and
values, and its output is compared. Speed is measured on the tensors of a middle block.

Legend: B sequences, A heads, N tokens of a sequence, D head width, X position axes, T h w grid of tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmspeed import rng
from mmspeed.compute.attention import attention
from mmspeed.compute.rope import grid_positions
from mmspeed.compute.sparse import clustered_attention
from mmspeed.data import DatasetCache, Sample, SampleUse
from mmspeed.data.cache.files import write_whole
from mmspeed.data.loading.collate import assemble
from mmspeed.device import Device, pick
from mmspeed.errors import UserError
from mmspeed.log import get_logger
from mmspeed.models import SoraDiT
from mmspeed.models.sections import sora_section
from mmspeed.models.sora.model import SoraBlock
from mmspeed.pipelines.diffusion.objective import make_objective
from mmspeed.pipelines.inference.run_models import load_model
from mmspeed.pipelines.inference.text_to_video import find_checkpoint, present_weights
from mmspeed.pipelines.run.run_folder import RunFolder
from mmspeed.protocols.plan import Structure

from .attention_bench import AttentionBenchSetting, LengthBench
from .attention_data import Grid, oracle_share
from .attention_plans import Method, method
from .attention_suggest import LayerResult, MethodResult, RunResult, SparseChoice, plot, suggest

log = get_logger("bench")

LEVELS = (0.2, 0.6, 0.9)
LEAST_TOKENS = 128  # of a sequence; shorter ones have nothing to save
SEQUENCES = 2  # sampled from a span of many short ones


def bench_run(
    run: Path,
    fields: Mapping[str, Any],
    *,
    samples: int = 2,
    checkpoint: str = "latest",
    error: float = 0.1,
    output: Path | None = None,
    **common: Any,
) -> RunResult:
    """Measure the layers of a run, write attention.json and attention.png, and suggest settings.

    Args:
        fields, common: those of `AttentionBenchSetting`.
        error: the greatest error that the suggestion may have in any sparse layer.

    Raises UserError when the run has no checkpoint or no cache to take samples from.
    """
    setting = AttentionBenchSetting(**fields, **common)
    setting.check()
    folder = RunFolder.open(run)
    device = pick(setting.device)
    device.activate()
    path = find_checkpoint(folder, checkpoint)
    chosen = choose_samples(folder, samples)
    config, info = folder.config(), folder.info()
    section, widths = sora_section(config, "bench attention --run"), (info["latent_channels"], info["text_width"])
    model = load_model(config, section, widths, path, present_weights(config, "ema"), device)
    assert isinstance(model, SoraDiT)
    looks = look(model, folder, chosen, setting, device)
    layers = [each.layer() for each in looks if each.sums]
    timings, notes = time_attention_types(looks, setting, device), short_notes(looks)

    def extra(choice: SparseChoice) -> dict[str, Any]:
        return sizes(next(each for each in looks if each.sums and choice.spans in ("all", each.span)), choice, setting)

    root = output or folder.root
    result = RunResult(
        run=str(run),
        checkpoint=path.name,
        device_name=device.name,
        samples=[sample.key for sample in chosen],
        levels=list(LEVELS),
        layers=layers,
        timings=timings,
        notes=notes,
        suggestion=suggest(layers, timings, model.config.depth, error, extra),
        written=[str(root / name) for name in (("attention.json", "attention.png") if layers else ("attention.json",))],
    )
    write_whole(root / "attention.json", (result.to_json() + "\n").encode())
    if layers:
        write_whole(root / "attention.png", plot(layers))
    return result


def choose_samples(folder: RunFolder, count: int) -> list[Sample]:
    """Videos of the run's cache, the longest first; held-out ones if there are any. Raises UserError where there are no videos."""
    config = folder.config()
    try:
        cache = DatasetCache(config.cache_root)
    except UserError as error:
        raise UserError(
            f"{folder.root}: the samples for its model come from its cache, which cannot be read: {error}"
        ) from None
    for split in ("val", "train"):
        videos = [sample for sample in cache.split(split) if not sample.lost and not sample.bucket.is_image]
        if videos:
            return sorted(videos, key=lambda sample: (-sample.tokens, sample.key))[:count]
    raise UserError(f"{config.cache_root} holds no video: attention over images stays dense")


@dataclass
class ErrorSums:
    """Error and kept share of a method in a layer, summed over calls, by head."""

    wrong: Tensor
    kept: Tensor


@dataclass
class LayerBench:
    """The self-attention of one block: dense attention, with which the methods are compared."""

    block: int
    span: str
    asked: AttentionBenchSetting
    grid: Grid = (0, 0, 0)  # of the current sample
    timed: bool = False  # True: the tensors of the next call are kept for timing
    calls: int = 0
    size: Tensor | None = None
    entropy: Tensor | None = None
    mass_share: Tensor | None = None
    tokens: int = 0
    sums: dict[tuple[str, str, float], ErrorSums] = field(default_factory=dict)
    tensors: tuple[Tensor, Tensor, Tensor, Tensor] | None = None  # q, k, v, positions

    def span_grid(self) -> Grid:
        """The grid of tokens that a query sees."""
        t, h, w = self.grid
        return {"full": (t, h, w), "spatial": (1, h, w), "temporal": (t, 1, 1)}[self.span]  # type: ignore[return-value]

    def methods(self) -> list[Method]:
        asked = self.asked
        return [
            method(planner, tail, keep, self.span_grid(), asked.cluster_size)
            for planner in asked.planners
            for tail in asked.tails
            for keep in asked.keeps
        ]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, key_mask_BM: Tensor | None) -> Tensor:
        """Dense attention; the methods are compared with it on some sequences."""
        out = attention(q, k, v, key_mask_BM)
        self.tokens = max(self.tokens, q.shape[2])
        if q.shape[2] >= LEAST_TOKENS:
            some = torch.linspace(0, len(q) - 1, min(SEQUENCES, len(q)), device=q.device).long()
            q, k, v = (x[some].to(out.dtype) for x in (q, k, v))
            self.compare(q, k, v, out[some])
        return out

    @torch.no_grad()
    def compare(self, q: Tensor, k: Tensor, v: Tensor, exact: Tensor) -> None:
        """Add the error of every method."""
        positions = grid_positions(self.span_grid(), q.device)
        for chosen in self.methods():
            plan = chosen.plan(q, k, positions)
            tail: Any = chosen.tail
            out = clustered_attention(q, k, v, plan, tail=tail, backend=self.asked.backend).out_BAND
            key = (chosen.planner, chosen.tail, chosen.keep)
            zeros = torch.zeros(q.shape[1], dtype=torch.float64)
            sums = self.sums.setdefault(key, ErrorSums(zeros, zeros.clone()))
            sums.wrong += _squares(out.float() - exact.float())
            sums.kept += plan.kept_share().mean(dim=0).double().cpu()
        self.size = _squares(exact.float()) + (0 if self.size is None else self.size)
        self.entropy = _entropy(q, k) + (0 if self.entropy is None else self.entropy)
        self.mass_share = oracle_share(q, k).cpu() + (0 if self.mass_share is None else self.mass_share)
        self.calls += 1
        if self.timed:
            self.tensors, self.timed = (q, k, v, positions), False

    def layer(self) -> LayerResult:
        """The layer's results, as means over the calls."""
        assert self.size is not None and self.entropy is not None and self.mass_share is not None
        points = []
        for (planner, tail, keep), sums in self.sums.items():
            errors = (sums.wrong / self.size.clamp(min=1e-30)).sqrt()
            whole = math.sqrt(float(sums.wrong.sum()) / max(float(self.size.sum()), 1e-30))
            kept = sums.kept / self.calls
            points.append(MethodResult(planner, tail, keep, kept.tolist(), errors.tolist(), whole))
        entropy, share = (self.entropy / self.calls).tolist(), (self.mass_share / self.calls).tolist()
        return LayerResult(self.block, self.span, self.tokens, entropy, share, points)


class WatchedAttention(nn.Module):
    """A module that replaces a block's attention."""

    def __init__(self, bench: LayerBench) -> None:
        super().__init__()
        self.bench = bench

    def forward(self, q_BAND: Tensor, k_BAND: Tensor, v_BAND: Tensor, structure: Structure) -> Tensor:
        if q_BAND.dim() == 5:  # columns that attend apart
            q, k, v = (x.flatten(0, 1) for x in (q_BAND, k_BAND, v_BAND))
            return self.forward(q, k, v, structure).unflatten(0, q_BAND.shape[:2])
        return self.bench.attend(q_BAND, k_BAND, v_BAND, structure.key_mask_BN)


def look(
    model: SoraDiT, folder: RunFolder, samples: Sequence[Sample], asked: AttentionBenchSetting, device: Device
) -> list[LayerBench]:
    """Run the model on the samples at every noise level, with measurements in each block."""
    config = folder.config()
    cache, objective = DatasetCache(config.cache_root), make_objective(config.objective)
    looks = []
    for place, block in enumerate(model.blocks):
        assert isinstance(block, SoraBlock)
        one = LayerBench(place, model.config.span(place), asked)
        block.self_attention.attend = WatchedAttention(one)
        looks.append(one)
    for span in dict.fromkeys(one.span for one in looks):
        of_span = [one for one in looks if one.span == span]
        of_span[len(of_span) // 2].timed = True
    for number, sample in enumerate(samples):
        batch = assemble(cache, [(SampleUse(sample, 0, 0), 1.0)], seed=config.seed, caption_dropout=0.0)
        batch = batch.to(device.torch_device, torch.float32)
        latents = batch["latents"]
        for one in looks:
            one.grid = model.config.grid(tuple(latents.shape[2:]))  # type: ignore[arg-type]
        for level in LEVELS:
            log.info(f"sample {number + 1} of {len(samples)} ({sample.bucket}), noise {level:g}")
            noise = rng.normal(latents.shape[1:], config.seed, "bench attention", sample.key, level)[None].to(latents)
            t_B = torch.tensor([level])
            x_t, _ = objective.training_pair(latents, noise, t_B)
            with torch.no_grad():
                model(x_t.float(), device.to_device(t_B), batch["text"], batch["text_mask"])
    return looks


def time_attention_types(looks: Sequence[LayerBench], asked: AttentionBenchSetting, device: Device) -> dict[str, Any]:
    """Timings of each span that is long enough."""
    timings = {}
    for one in looks:
        if one.tensors is not None:
            q, k, v, positions = one.tensors
            timings[one.span] = LengthBench(q, k, v, positions, device, asked.backend).run(one.methods(), asked.rounds)
            one.tensors = None
    return timings


def short_notes(looks: Sequence[LayerBench]) -> list[str]:
    """Notes on spans that were left out."""
    notes = {}
    for one in looks:
        if not one.sums:
            kind = {"full": "attention", "spatial": "attention within frames", "temporal": "attention along time"}[
                one.span
            ]
            notes[one.span] = (
                f"{kind} sees {one.tokens:,} tokens: too few for sparse attention, which begins to pay at several thousand"
            )
    return list(notes.values())


def sizes(one: LayerBench, choice: SparseChoice, asked: AttentionBenchSetting) -> dict[str, Any]:
    """The sizes among the planner's settings."""
    chosen = method(*choice.method, choice.keep, one.span_grid(), asked.cluster_size)
    planner = choice.method[0]
    if planner == "skip":
        return {"stride": max(1, round(1 / choice.keep))}
    if planner in ("tiles", "window"):
        window = {"window": list(chosen.window)} if planner == "window" else {}
        return {"tile": list(chosen.tile), **window}
    return {"cluster_size": chosen.cluster_size}


def _squares(x_BAND: Tensor) -> Tensor:
    """Sums of squares by head, on the host."""
    return x_BAND.square().sum(dim=(0, 2, 3)).double().cpu()


def _entropy(q_BAND: Tensor, k_BAND: Tensor, queries: int = 256) -> Tensor:
    """The mean entropy of some queries' attention, relative to that of uniform attention, by head."""
    some = torch.linspace(0, q_BAND.shape[2] - 1, min(queries, q_BAND.shape[2]), device=q_BAND.device).long()
    total = torch.zeros(q_BAND.shape[1])
    for q_AND, k_AND in zip(q_BAND[:, :, some].float(), k_BAND.float(), strict=True):
        p_ANM = ((q_AND * q_AND.shape[-1] ** -0.5) @ k_AND.mT).softmax(dim=-1)
        total += torch.special.entr(p_ANM).sum(dim=-1).mean(dim=-1).cpu()
    return total / len(q_BAND) / math.log(k_BAND.shape[2])
