"""`mmspeed demo --task language`: preprocess, train, sample, report and export on the texts that ship with the package, offline."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, cast

from mmspeed.config import make_config
from mmspeed.config.language import LanguageConfig
from mmspeed.log import format_seconds, get_logger
from mmspeed.preprocess.texts.preparation import TextPreparation

from .demo import clear_export, trained

log = get_logger("demo")

PROMPT = "Ham.\n"
MARKER = "generation_config.json"  # of a folder that an earlier demo exported


def language_tree(output: Path, short: bool) -> dict[str, Any]:
    """The demo's config, unchecked: a small model of experts on works of Shakespeare and Milton."""
    steps = 60 if short else 600
    return {
        "task": "language",
        "name": "short" if short else "demo",
        "output": str(output / "runs"),
        "texts": {**TextPreparation.starting_values("demo", None)["texts"], "cache": str(output / "cache")},
        "tokenizer": {"kind": "train", "size": 1024},
        "model": {
            "shape": "tiny-qwen3-30b-a3b",
            "hidden_size": 128,
            "num_hidden_layers": 3,
            "head_dim": 32,
            "tie_word_embeddings": True,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 128,
            "balance": "global_batch",
        },
        "sequence_length": 128 if short else 256,
        "objective": {"balance": 0.01},
        "train": {
            "steps": steps,
            "batch_size": 4,
            "lr": 3e-3,
            "warmup_steps": 10,
            "schedule": "cosine",
            "ema_decay": None,
            "log_every": 5 if short else 10,
        },
        "validate": {"every": max(1, steps // 4), "samples": 16},
        "checkpoint": {"every": steps},
    }


def language_demo_config(output: Path, short: bool) -> LanguageConfig:
    """The checked config of the demo."""
    return cast(LanguageConfig, make_config(language_tree(output, short), origin="demo"))


def run_language_demo(output: str | Path = "mmspeed-demo", short: bool = False) -> list[Path] | None:
    """Run the whole demo into `output`, print a sample, and return the paths of the results.

    A second run continues from the first: a finished training is not repeated, and its export is written again. None where the training
    was asked to stop.
    """
    from mmspeed.pipelines import LanguageModel, write_report
    from mmspeed.pipelines.inference.language import Writing, export_language_run
    from mmspeed.pipelines.report.run_page import save_loss_curve
    from mmspeed.preprocess import TextCacheBuilder

    started = time.monotonic()
    output = Path(output).resolve()
    config = language_demo_config(output, short)
    log.info("1/5 preprocess: train a tokenizer and encode the texts once")
    for line in TextCacheBuilder(config.texts, config.tokenizer, config.seed).run().lines():
        log.info(line)
    log.info(f"2/5 train: {config.train.steps} steps of a model of experts on {os.cpu_count()} cores")
    if not trained(config):
        return None
    log.info("3/5 export: a folder of transformers")
    folder = output / f"{config.name}-export"
    clear_export(folder, MARKER)
    exported = export_language_run(config.run_dir, folder)
    log.info(f"{exported.tensors} tensors in {folder}")
    log.info("4/5 sample: AutoModelForCausalLM loads the export and writes")
    model = LanguageModel(folder)
    log.info(f"AutoModelForCausalLM.from_pretrained({str(folder)!r}) is a {type(model.model).__name__}")
    writing = Writing(tokens=40 if short else 120, temperature=0.8, top_p=0.95, seed=1)
    text = PROMPT + model(PROMPT, writing)[0]
    sample, curve = output / "sample.txt", output / "loss.png"
    sample.write_text(text + "\n", encoding="utf-8")
    log.info("5/5 report")
    save_loss_curve(config.run_dir, curve)
    paths = [sample, curve, write_report(config.run_dir), folder]
    log.info(f"a sample:\n{text}")
    log.info(f"done in {format_seconds(time.monotonic() - started)}; look at:")
    return paths
