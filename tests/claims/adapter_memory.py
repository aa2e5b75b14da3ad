"""How the base of a LoRA is kept on cards of several sizes: the table of docs/fine-tuning.md, from shapes alone."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from mmspeed.config import RunConfig, make_config, video_config
from mmspeed.errors import UserError
from mmspeed.pipelines.domains.video.domain import VideoDomain
from mmspeed.pipelines.domains.video.synthetic import EncoderShapes
from mmspeed.pipelines.tasks import Task, as_task
from mmspeed.pipelines.tuning.base_choice import choose_base
from mmspeed.shapes import Strides

BUCKET = {"frames": 81, "height": 480, "width": 832}
INPUTS = EncoderShapes(16, Strides(4, 8), 4096)
SHARED = {"attention_head_dim": 128, "in_channels": 16, "out_channels": 16, "text_dim": 4096, "freq_dim": 256, "cross_attn_norm": True}  # fmt: skip
MODELS = {
    "wan2.1-1.3b": {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30},
    "wan2.1-14b": {"num_attention_heads": 40, "ffn_dim": 13824, "num_layers": 40},
}
SIZES = (80, 48, 32, 24, 16, 12)  # GB


def opened(config: RunConfig) -> Task:
    """The task of a config, with the sizes of Wan's latents and captions."""
    own = video_config(config, "claim")
    return as_task(VideoDomain(own).use(INPUTS), own)


def config_of(folder: Path, name: str) -> Any:
    """A run of adapters on a model of which the folder gets the settings and no weights."""
    from diffusers import UniPCMultistepScheduler

    (folder / "transformer").mkdir(parents=True)
    settings = {"_class_name": "WanTransformer3DModel", **SHARED, **MODELS[name]}
    (folder / "transformer" / "config.json").write_text(json.dumps(settings))
    scheduler: Any = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    scheduler.save_pretrained(folder / "scheduler")
    parts = {"transformer": "WanTransformer3DModel", "scheduler": "UniPCMultistepScheduler"}
    index = {"_class_name": "WanPipeline"} | {part: ["diffusers", kind] for part, kind in parts.items()}
    (folder / "model_index.json").write_text(json.dumps(index))
    adapter = {"kind": "lora", "rank": 32, "alpha": 32, "targets": "attention+mlp"}
    tree = {
        "data": {"sources": [{"path": str(folder / "clips.jsonl")}], "cache": str(folder / "cache"), "buckets": [BUCKET]},
        "model": {"kind": "diffusers", "pretrained": str(folder), "adapter": adapter},
        "vae": {"kind": "diffusers", "pretrained": str(folder / "no-codec")},
        "text": {"kind": "transformers", "pretrained": str(folder / "no-encoder"), "max_tokens": 512},
        "train": {"micro_batch_size": 1, "batch_size": 1},
        "device": {"dtype": "bfloat16", "kind": "cpu"},
    }  # fmt: skip
    return video_config(make_config(tree, origin="claim"), "claim")


def main() -> None:
    """Print a row for each model and size of a card."""
    parser = argparse.ArgumentParser(prog="python -m tests.claims.adapter_memory", description=main.__doc__)
    parser.add_argument("--model", choices=list(MODELS), action="append")
    for name in parser.parse_args().model or MODELS:
        with tempfile.TemporaryDirectory() as folder:
            config = config_of(Path(folder) / "model", name)
            for size in SIZES:
                try:
                    base, plan = choose_base(config, size * 10**9, opened)
                except UserError as error:
                    print(f"{name}, {size} GB: {error}")
                    break
                assert plan.chosen is not None
                peak, added = plan.figures.peak(plan.chosen), plan.figures.added_share(plan.chosen)
                print(
                    f"{name}, {size} GB: {base.dtype} on the {base.place}, {peak / 1e9:.1f} GB, {added:+.0%}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
