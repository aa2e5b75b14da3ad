"""`mmspeed demo --adapter`: a small Wan of diffusers trained whole, then an adapter on other clips, read by diffusers; offline."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from mmspeed.config import Config, make_config, video_config
from mmspeed.log import format_seconds, get_logger

from .demo import clear_export, trained, write_manifest

log = get_logger("demo")

BASE = ("bbb_000", "bbb_002", "bbb_022", "bbb_062")  # few, so that a short training shows them
ADAPTER, HELD_OUT = ("earth_000",), ("earth_001",)  # another film: nothing in the base's clips is like it
BUCKET, FPS = {"frames": 9, "height": 64, "width": 112}, 8.0
EMPTY = ("vae", "text_encoder", "tokenizer")  # of the pipeline: this package's codec and text encoder take their places
INDEX = "model_index.json"
TEXT_WIDTH, TEXT_ROWS, CHANNELS = 384, 512, 16
SEED, GUIDANCE = 0, 2.0
RANK = 64  # another film is far from the base's: a small rank shows no globe


def save_repository(folder: Path) -> None:
    """Write a repository of diffusers with a small Wan of random weights, where there is none."""
    if (folder / INDEX).is_file():
        return
    import torch
    from diffusers import UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel

    from mmspeed.models.weights import quiet

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        transformer = WanTransformer3DModel(
            num_attention_heads=4,
            attention_head_dim=32,
            in_channels=CHANNELS,
            out_channels=CHANNELS,
            text_dim=TEXT_WIDTH,
            ffn_dim=512,
            num_layers=4,
        )
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=1.0)
    pipeline: Any = WanPipeline(**dict.fromkeys(EMPTY), transformer=transformer, scheduler=scheduler)
    with quiet():
        pipeline.save_pretrained(folder)


def demo_config(output: Path, short: bool, adapter: bool) -> Config:
    """The checked config of the whole training of a small Wan, or of the adapter on what that was exported as."""
    part, steps = ("adapter", 40 if short else 600) if adapter else ("base", 60 if short else 800)
    name = f"{'short' if short else 'demo'}-{part}"
    model: dict[str, Any] = {"kind": "diffusers", "pretrained": str(output / "wan")}
    vae: dict[str, Any] = {"kind": "linear", "channels": CHANNELS}
    if adapter:
        model["pretrained"] = str(output / name.replace(part, "base-export"))
        model["adapter"] = {"kind": "lora", "rank": RANK, "targets": "attention+mlp"}
        vae["weights"] = str(output / "runs" / name.replace(part, "base") / "codec.safetensors")
    tree = {
        "name": name,
        "output": str(output / "runs"),
        "data": {
            "sources": [{"path": str(output / f"{part}.jsonl")}],
            "cache": str(output / f"cache-{part}"),
            "fps": FPS,
            "buckets": [BUCKET],
            "repeats": 2 if adapter else 1,
        },
        "vae": vae,
        "text": {"kind": "minilm"},
        "model": model,
        "train": {
            "steps": steps,
            "batch_size": 8 if adapter else len(BASE),
            "lr": 5e-3 if adapter else 2e-3,
            "warmup_steps": 20,
            "schedule": "cosine",
            "ema_decay": 0.98,
            "log_every": 5,
        },
        "validate": {"every": max(1, steps // 4), "samples": len(HELD_OUT) if adapter else 0},
        "checkpoint": {"every": steps},
    }
    return video_config(make_config(tree, origin="demo"), "demo")


def run_adapter_demo(output: str | Path = "mmspeed-demo", short: bool = False) -> list[Path] | None:
    """Run the whole demo into `output`, print the held-out losses of base and adapter, and return the paths of the results.

    A second run continues from the first: a finished training is not repeated, and exports are written again. None where a training was
    asked to stop.
    """
    from mmspeed.pipelines.inference.export import export_run
    from mmspeed.pipelines.inference.export_adapter import export_adapter
    from mmspeed.preprocess import CacheBuilder

    started = time.monotonic()
    output = Path(output).resolve()
    write_manifest(output / "base.jsonl", BASE)
    (prompt,) = write_manifest(output / "adapter.jsonl", ADAPTER, HELD_OUT)
    save_repository(output / "wan")
    folders = []
    for number, adapter in enumerate((False, True)):
        config = demo_config(output, short, adapter)
        what = f"an adapter of rank {RANK} on a clip of another film" if adapter else "all of a small Wan of diffusers"
        log.info(f"{2 * number + 1}/5 train: {config.train.steps} steps of {what} on {os.cpu_count()} cores")
        CacheBuilder(config).run()
        if not trained(config):
            return None
        folder = output / f"{config.name}-export"
        clear_export(folder, INDEX, "export.json")
        folders.append(folder)
        log.info(f"{2 * number + 2}/5 export: {folder}")
        if adapter:
            export_adapter(config.run_dir, folder, format="diffusers")
        else:
            export_run(config.run_dir, folder)
    before, after = held_out(config.run_dir)
    log.info(f"held-out loss on another clip of that film: base {before:.4f}, with the adapter {after:.4f}")
    log.info("5/5 sample: WanPipeline of diffusers, then load_lora_weights")
    base, folder = folders
    paths = [*sample(config, base, folder, prompt, output, 6 if short else 24), folder]
    log.info(f"done in {format_seconds(time.monotonic() - started)}; look at:")
    return paths


def held_out(run: Path) -> tuple[float, float]:
    """(the base's loss, the adapter's loss) on the held-out clips of the adapter's run."""
    from mmspeed.pipelines.report.evaluation import EvaluationJob, evaluate_run

    result = evaluate_run(EvaluationJob(run, requests=()))
    assert result is not None  # of a single process
    before, after = (float(row["loss"]) for row in result.rows)
    return before, after


def sample(config: Config, base: Path, adapter: Path, prompt: str, output: Path, steps: int) -> list[Path]:
    """Sample a prompt by diffusers' pipeline of the exported base, without and with the adapter's file. Returns the videos and their picture."""
    import torch
    from diffusers import WanPipeline
    from torch.nn.functional import pad

    from mmspeed.device import Device
    from mmspeed.models.codecs.vae import load_codec
    from mmspeed.models.weights import quiet
    from mmspeed.pipelines.inference.media import contact_sheet, save_image
    from mmspeed.pipelines.inference.text_to_video import decode_videos, encode_prompts

    device = Device("cpu", 0)
    codec = load_codec(config.vae, device)
    entries = encode_prompts([prompt, ""], config.text, device)
    texts = [pad(entry.embeds_LD, (0, 0, 0, TEXT_ROWS - len(entry.embeds_LD)))[None] for entry in entries]
    with quiet():
        pipe = WanPipeline.from_pretrained(base, **dict.fromkeys(EMPTY))
    pipe.set_progress_bar_config(disable=True)
    videos = []
    for adapted in (False, True):
        if adapted:
            pipe.load_lora_weights(adapter)
        latents = pipe(
            prompt_embeds=texts[0],
            negative_prompt_embeds=texts[1],
            **{"num_frames" if name == "frames" else name: size for name, size in BUCKET.items()},
            num_inference_steps=steps,
            guidance_scale=GUIDANCE,
            generator=torch.Generator().manual_seed(SEED),
            output_type="latent",
            return_dict=False,
        )[0]
        videos += decode_videos(codec, latents, FPS)
    paths = [output / "base.mp4", output / "adapter.mp4", output / "adapter.png"]
    for video, path in zip(videos, paths, strict=False):
        video.save(path)
    save_image(contact_sheet(videos, [f"base: {prompt}", f"adapter: {prompt}"]), paths[-1])
    return paths
