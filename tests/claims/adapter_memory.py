"""How the base of a LoRA is kept on cards of several sizes: the table of docs/fine-tuning.md, from shapes alone.

Settings are those of the published repositories' transformer/config.json, where they differ from their class's defaults.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from mmspeed.config import RunConfig, make_config, video_config
from mmspeed.errors import UserError
from mmspeed.memory.planning.options import runs_of
from mmspeed.pipelines.domains.video.domain import VideoDomain
from mmspeed.pipelines.domains.video.synthetic import EncoderShapes
from mmspeed.pipelines.tasks import Task, as_task
from mmspeed.pipelines.tuning.base_choice import BaseChoice, BaseChooser
from mmspeed.shapes import Strides

DOCS = Path(__file__).resolve().parents[2] / "docs" / "fine-tuning.md"
BEGIN = "<!-- Made by `python -m tests.claims.adapter_memory`: expected from shapes, not measured. -->"
END = "<!-- end -->"
HEAD = (
    "| model | card | largest bucket | base | blocks | time | base | adapters | kept | one block | peak | host |",
    "|---|---|---|---|---|---|---|---|---|---|---|---|",
)
SIZES = (80, 48, 32, 24, 16, 12)  # GB
RANK = 32

Bucket = tuple[int, int, int]


@dataclass(frozen=True)
class Shapes:
    """A published model: its pipeline, its transformer's settings, sizes of latents and captions, and buckets, the largest first."""

    pipeline: str
    transformer: str
    settings: dict[str, Any]
    inputs: EncoderShapes
    tokens: int
    buckets: tuple[Bucket, ...]
    index: dict[str, Any] = field(default_factory=dict)
    objective: dict[str, Any] = field(default_factory=dict)


WAN = ("WanPipeline", "WanTransformer3DModel")
LATENTS = EncoderShapes(16, Strides(4, 8), 4096)
WIDE: tuple[Bucket, ...] = ((81, 720, 1280), (81, 480, 832), (49, 480, 832), (33, 480, 832), (17, 480, 832))
MODELS = {
    "Wan 2.1 1.3B": Shapes(*WAN, {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30}, LATENTS, 512, WIDE[1:]),
    "Wan 2.1 14B": Shapes(*WAN, {}, LATENTS, 512, WIDE),
    "Wan 2.2 A14B": Shapes(
        *WAN, {}, LATENTS, 512, WIDE,
        {"boundary_ratio": 0.875, "transformer_2": ["diffusers", "WanTransformer3DModel"]}, {"kind": "family", "experts": "both"},
    ),
    "Wan 2.2 5B": Shapes(
        *WAN, {"num_attention_heads": 24, "ffn_dim": 14336, "num_layers": 30, "in_channels": 48, "out_channels": 48},
        EncoderShapes(48, Strides(4, 16), 4096), 512, ((121, 704, 1280), (81, 704, 1280), (49, 704, 1280), (25, 704, 1280)),
        {"expand_timesteps": True},
    ),
    "HunyuanVideo": Shapes(
        "HunyuanVideoPipeline", "HunyuanVideoTransformer3DModel", {}, LATENTS, 256,
        ((129, 720, 1280), (129, 544, 960), (65, 544, 960), (33, 544, 960), (17, 544, 960)),
    ),
    "LTX-Video 13B": Shapes(
        "LTXPipeline", "LTXVideoTransformer3DModel", {"attention_head_dim": 128, "cross_attention_dim": 4096, "num_layers": 48},
        EncoderShapes(128, Strides(8, 32), 4096), 128, ((121, 704, 1216), (121, 512, 704), (49, 512, 704)),
    ),
}  # fmt: skip


def chooser(folder: Path, shapes: Shapes, bucket: Bucket) -> BaseChooser:
    """The choices of a run of adapters on a model of which the folder gets the settings and no weights."""
    from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler

    parts = {"transformer": ["diffusers", shapes.transformer], **shapes.index}
    for part in ("transformer", "transformer_2"):
        if part in parts:
            (folder / part).mkdir(parents=True)
            settings = {"_class_name": shapes.transformer, **shapes.settings}
            (folder / part / "config.json").write_text(json.dumps(settings))
    scheduler: Any = FlowMatchEulerDiscreteScheduler(shift=7.0)
    if shapes.pipeline == "WanPipeline":
        scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    scheduler.save_pretrained(folder / "scheduler")
    parts["scheduler"] = ["diffusers", type(scheduler).__name__]
    (folder / "model_index.json").write_text(json.dumps({"_class_name": shapes.pipeline, **parts}))
    adapter = {"kind": "lora", "rank": RANK, "alpha": RANK, "targets": "attention+mlp"}
    frames, height, width = bucket
    tree = {
        "data": {
            "sources": [{"path": str(folder / "clips.jsonl")}], "cache": str(folder / "cache"),
            "buckets": [{"frames": frames, "height": height, "width": width}],
        },
        "model": {"kind": "diffusers", "pretrained": str(folder), "adapter": adapter},
        "vae": {"kind": "diffusers", "pretrained": str(folder / "no-codec")},
        "text": {"kind": "transformers", "pretrained": str(folder / "no-encoder"), "max_tokens": shapes.tokens},
        "train": {"micro_batch_size": 1, "batch_size": 1},
        "device": {"dtype": "bfloat16", "kind": "cpu"},
        **({"objective": shapes.objective} if shapes.objective else {}),
    }  # fmt: skip

    def opened(config: RunConfig) -> Task:
        own = video_config(config, "claim")
        return as_task(VideoDomain(own).use(shapes.inputs), own)

    return BaseChooser(video_config(make_config(tree, origin="claim"), "claim"), opened)


def row(name: str, size: int, bucket: Bucket, choice: BaseChoice) -> str:
    """A row of the table; bytes in GB, of 10^9."""
    figures, static, chosen = choice.plan.figures, choice.plan.figures.static, choice.chosen
    taken = [options[option] for options, option in zip(figures.blocks(), chosen, strict=True)]
    swapped = choice.base.place == "host"
    base = static.frozen + (2 * max(figures.frozen) if swapped else 0)
    learned = static.parameters + static.states + static.average + static.gradients
    again = max(max(option.forward, option.backward) for option in taken)
    numbers = (base, learned, sum(option.kept for option in taken), again, figures.peak(chosen), choice.host)
    (words, count), *others = runs_of(figures.ways(chosen))
    blocks = f"{count} of {len(chosen)}: {words}" if others else words
    cells = (
        name, f"{size} GB", "x".join(map(str, bucket)), f"{choice.base.dtype}, {choice.base.place}", blocks,
        f"{figures.added_share(chosen):+.0%}", *(f"{number / 1e9:.1f}" for number in numbers),
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def rows(name: str) -> list[str]:
    """The rows of a model, for each size of a card the largest bucket that fits."""
    shapes, found, left = MODELS[name], list[str](), list(SIZES)
    for bucket in sorted(MODELS[name].buckets, key=prod, reverse=True):
        with tempfile.TemporaryDirectory() as folder:
            choices = chooser(Path(folder) / "model", shapes, bucket)
            reason = ""
            while left and not reason:
                try:
                    found.append(row(name, left[0], bucket, choices.choose(left[0] * 10**9)))
                    print(found[-1], flush=True)
                    left.pop(0)
                except UserError as error:
                    reason = str(error)
                    print(f"{name}, {bucket}: {reason}", flush=True)
    empty = " | ".join(["none of these"] + ["-"] * 9)
    return found + [f"| {name} | {size} GB | {empty} |" for size in left]


def write(made: dict[str, list[str]]) -> None:
    """Write rows into the page, beside those of the other models that it has."""
    before, _, rest = DOCS.read_text().partition(BEGIN)
    block, _, after = rest.partition(END)
    own = {name: [line for line in block.splitlines() if line.startswith(f"| {name} |")] for name in MODELS} | made
    lines = [BEGIN, "", *HEAD, *(line for name in MODELS for line in own[name]), "", END]
    DOCS.write_text(before + "\n".join(lines) + after)


def main() -> None:
    """Write the table into docs/fine-tuning.md; with --model the rows of that one alone."""
    parser = argparse.ArgumentParser(prog="python -m tests.claims.adapter_memory", description=main.__doc__)
    parser.add_argument("--model", choices=list(MODELS), action="append")
    for name in parser.parse_args().model or MODELS:
        write({name: rows(name)})


if __name__ == "__main__":
    main()
