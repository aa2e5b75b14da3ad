"""The loads of 64 experts over 1,000 steps of a small model on the texts of the package, kept for `tests.claims.balance`.

python -m tests.claims.expert_trace FOLDER

trains in FOLDER, going on where an earlier call stopped, and writes `expert_trace.safetensors` beside this file once it is done.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import cast

import numpy as np
import torch
from safetensors.numpy import load_file, save_file

from mmspeed.config import make_config
from mmspeed.config.language import LanguageConfig
from mmspeed.log import setup
from mmspeed.pipelines import TrainCallback, TrainPipeline
from mmspeed.pipelines.training.events import StepEvent
from mmspeed.preprocess import TextCacheBuilder
from mmspeed.preprocess.texts.preparation import shipped_texts

FILE = Path(__file__).with_suffix(".safetensors")
STEPS, LAYERS, EXPERTS = 1000, 2, 64


def trace_config(folder: Path) -> LanguageConfig:
    """The run: 16 packs of 256 tokens a step, four experts a token."""
    texts = shipped_texts()
    tree = {
        "task": "language",
        "name": "trace",
        "output": str(folder / "runs"),
        "texts": {"sources": [{"path": str(texts / "train")}], "cache": str(folder / "cache"), "validation": 0.01},
        "tokenizer": {"kind": "train", "size": 1024},
        "model": {
            "shape": "tiny-qwen3-30b-a3b", "hidden_size": 64, "head_dim": 32, "num_hidden_layers": LAYERS, "num_experts": EXPERTS,
            "num_experts_per_tok": 4, "moe_intermediate_size": 32, "tie_word_embeddings": True, "balance": "global_batch",
        },
        "sequence_length": 256,
        "train": {
            "steps": STEPS, "batch_size": 16, "lr": 3e-3, "warmup_steps": 50, "schedule": "cosine", "ema_decay": None, "log_every": 50,
        },
        "validate": {"every": STEPS + 1, "samples": 1, "report": False},
        "checkpoint": {"every": 100},
        "device": {"kind": "cpu", "peak_tflops": 1.0},
    }  # fmt: skip
    return cast(LanguageConfig, make_config(tree, origin="trace"))


class Recorded(TrainCallback):
    """Keeps the counts of each step in a file, by the step's number."""

    def __init__(self, path: Path) -> None:
        mode = "r+" if path.exists() else "w+"
        self.counts_NLG = np.memmap(path, np.uint16, mode, shape=(STEPS, LAYERS, EXPERTS))  # type: ignore[call-overload]

    def on_step(self, event: StepEvent) -> None:
        assert event.outcome.result is not None
        self.counts_NLG[event.step - 1] = torch.stack([*event.outcome.result.counts.values()]).numpy()


def counts() -> np.ndarray:
    """The loads (N steps, L layers, G experts)."""
    return load_file(FILE)["counts"].astype(np.int64)


def main() -> None:
    """Train, and write the counts once all steps are done."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder.resolve()
    setup()
    folder.mkdir(parents=True, exist_ok=True)
    config, recorded = trace_config(folder), Recorded(folder / "counts.raw")
    TextCacheBuilder(config.texts, config.tokenizer, config.seed).run()
    TrainPipeline(config, callbacks=[recorded]).run()
    if recorded.counts_NLG.sum(2).all():
        save_file({"counts": np.array(recorded.counts_NLG)}, FILE)


if __name__ == "__main__":
    main()
