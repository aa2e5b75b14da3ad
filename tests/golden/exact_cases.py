"""The runs of the exact witness (exact.py) and the caches that they read, in dotted keys of this checkout's configs.

Paths are those of exact.py's materials, seen from a side's folder. A later checkout gives these configs to this one's code.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Tree = dict[str, Any]

# Parts of the names of tensors in checkpoints (whole words between dots) that the new code calls otherwise than the old.
RENAMED: dict[str, str] = {}

CLIPS, PICTURES = 8, 7  # of the clips one is held out, so that the steps of an epoch are not equally full
BASE: Tree = {
    "train.steps": 12,
    "train.batch_size": 3,
    "train.lr": 1e-3,
    "train.warmup_steps": 2,
    "train.log_every": 1,
    "validate.every": 6,
    "validate.samples": 2,
    "validate.quantiles": 2,
    "validate.report": False,
    "checkpoint.every": 1000,  # the last step is always written
    "device.kind": "cpu",
    "device.peak_tflops": 0.1,
}
# `online`: a cache that the code finds stale is an error, not made again
VIDEO: Tree = {**BASE, "preprocess.online": False, "preprocess.decode_workers": 1}
NANO: Tree = {**VIDEO, "vae.kind": "linear", "vae.channels": 4, "model.size": "nano"}


def _videos(manifest: str, *buckets: tuple[int, int, int]) -> Tree:
    sizes = [dict(zip(("frames", "height", "width"), bucket, strict=True)) for bucket in buckets]
    return {"data.sources": [{"path": f"./{manifest}.jsonl"}], "data.buckets": sizes}


CACHES: dict[str, Tree] = {
    "cache-small": {**NANO, **_videos("clips", (5, 32, 48))},
    "cache-long": {**NANO, **_videos("clips", (13, 64, 96))},
    "cache-mixed": {**NANO, **_videos("mixed", (1, 32, 48), (5, 32, 48))},
    "cache-published": {
        **VIDEO,
        **_videos("mixed", (1, 32, 48), (5, 32, 48)),
        "model.kind": "diffusers",
        "model.pretrained": "./wan",
        "train.steps": 6,
    },
    "cache-texts": {
        **BASE,
        "task": "language",
        "texts.sources": [{"path": "./sonnets.txt", "split": "blank_line"}],
        "texts.validation": 0.1,
        "texts.online": False,
        "tokenizer": {"kind": "train", "size": 512},
        "sequence_length": 127,
        "train.steps": 6,
    },
}


@dataclass(frozen=True)
class Run:
    """A run: what differs from the config of the cache that it reads, and the number of processes."""

    changes: Tree = field(default_factory=dict)
    cache: str = "cache-small"
    processes: int = 1


HALF = {"device.dtype": "bfloat16"}
RUNS: dict[str, Run] = {
    # the three of tests/golden/test_curves.py
    "factorised-flow": Run(),
    "full-ddpm-v": Run({"model.arrangement": "full", "objective.kind": "ddpm"}),
    "factorised-ddpm-epsilon": Run(
        {
            "objective.kind": "ddpm",
            "objective.prediction": "epsilon",
            "objective.zero_terminal_snr": False,
            "objective.min_snr_gamma": 5,
        }
    ),
    "bfloat16": Run({**HALF, "train.weight_decay": 0.1, "train.schedule": "cosine"}),
    "tiers": Run(
        {
            **HALF,
            "memory.master": "host",
            "memory.states": "host",
            "memory.ema": "host",
            "memory.bucket": "64KiB",
            "train.micro_batch_size": 2,
        }
    ),
    "gradient-release": Run(
        {"memory.release_gradients": True, "memory.bucket": "64KiB", "train.clip_norm": None, "memory.states": "host"}
    ),
    "recompute": Run({"memory.activation_policy.block": "recompute", "memory.mlp_chunk": 16}),
    "offload": Run(
        {
            "memory.activation_policy.attention": "offload",
            "memory.activation_policy.cross_attention": "selective",
            "memory.activation_policy.mlp": "offload_selective",
            "memory.offload_from": "1KiB",
            "memory.keep_last": False,
        }
    ),
    # between the plain step and the least; which ways are chosen depends on the clock, what they compute does not
    "budget": Run({"memory.budget": "9MB", "model.arrangement": "full"}, "cache-long"),
    "sparse": Run(
        {
            "model.arrangement": "full",
            "model.depth": 3,
            "model.sparse.planner": "clusters",
            "model.sparse.keep": 0.3,
            "model.sparse.cluster_size": 16,
            "model.sparse.min_tokens": 16,
            "model.sparse.dense_first": 0,
            "model.sparse.dense_last": 0,
            "model.sparse.dense_steps": 2,
            "model.sparse.update_every": 3,
        },
        "cache-long",
    ),
    "images-with-videos": Run(
        {"train.batch_size": None, "batching.by": "tokens", "batching.mix": "window", "batching.accumulate": 2},
        "cache-mixed",
    ),
    "accumulation": Run({"train.batch_size": 5, "train.micro_batch_size": 2, "objective.weighting": "step"}),
    "given-frames": Run(
        {"conditioning.first": 0.3, "conditioning.first_last": 0.3, "conditioning.mask": 0.3}, "cache-long"
    ),
    "wan": Run({}, "cache-published"),
    "wan-experts": Run(
        {
            "model.pretrained": "./wan-experts",
            "objective.experts": "both",
            "text.kind": "family",
            "text.pretrained": "./wan",
        },
        "cache-published",
    ),
    "qwen3": Run(
        {
            "model.shape": "tiny-qwen3-8b",
            "model.width": 48,
            "model.heads": 6,
            "model.key_heads": 3,
            "model.head_width": 8,
            "model.hidden": 80,
            "model.depth": 2,
            "model.windows": [9, None],
            "objective.z_loss": 1e-3,
        },
        "cache-texts",
    ),
    "qwen3-experts": Run({"model.pretrained": "./qwen3-experts", "model.balance": "global_batch"}, "cache-texts"),
    # on 2 ranks
    "fsdp": Run({"parallel.strategy": "fsdp", "train.batch_size": 5, "train.micro_batch_size": 1, **HALF}, processes=2),
    "ddp": Run(
        {
            "parallel.strategy": "ddp",
            "train.batch_size": None,
            "batching.by": "tokens",
            "batching.mix": "window",
            "batching.slots": 4,
        },
        "cache-mixed",
        processes=2,
    ),
    "fsdp-ulysses": Run(
        {
            "parallel.strategy": "fsdp",
            "parallel.ulysses": 2,
            "memory.activation_policy.block": "recompute",
        },
        processes=2,
    ),
    "tp": Run({"parallel.tp": 2, "train.batch_size": 4, "train.micro_batch_size": 2}, processes=2),
}
DEEPSEEK: Tree = {
    "model.shape": "tiny-deepseek-v3",
    "model.further": 1,
    "model.balance": "sequence",
    "model.experts": {
        "count": 6,
        "per_token": 3,
        "width": 24,
        "shared": 2,
        "first_dense": 1,
        "scores": "sigmoid",
        "normalised": True,
        "scaling": 1.5,
        "groups": 3,
        "chosen_groups": 2,
        "bias": True,
    },
    "objective.balance_rate": 0.01,
}
RUNS |= {
    "deepseek": Run(DEEPSEEK, "cache-texts"),
    "deepseek-2": Run(DEEPSEEK, "cache-texts", processes=2),
}
QUICK = ("factorised-flow", "tiers", "images-with-videos", "fsdp", "deepseek", "wan")
