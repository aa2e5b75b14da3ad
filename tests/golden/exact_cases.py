"""The configurations of the exact witness (exact.py), in the keys of commit e6bf4be, and what newer code calls those keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

STEPS = 12


# What the new code calls the keys below: an old key, or the beginning of several, to the new one.
NEW_KEYS: dict[str, str] = {
    "memory.spans": "memory.activation_policy",
    "memory.swap_from": "memory.offload_from",
    "train.checkpointing": "memory.activation_policy.block",
    "parallel.scheme": "parallel.dsp",
}
# Values that the new code spells otherwise, by the old key: {"train.checkpointing": {True: "recompute"}}.
_POLICIES: dict[Any, Any] = {"swap": "offload", "swap_cheap": "offload_selective", "recompute_cheap": "selective"}
NEW_VALUES: dict[str, dict[Any, Any]] = {
    "memory.spans.attention": _POLICIES,
    "memory.spans.cross_attention": _POLICIES,
    "memory.spans.mlp": _POLICIES,
    "train.checkpointing": {True: "recompute", False: "save"},
    "parallel.scheme": {"ulysses": 1},  # with `switch` the degrees beside it would change too: no case has it
}
# Keys that the old code does not have, at the values by which the new code computes as the old one did.
NEW_ONLY: dict[str, Any] = {"objective.weighting": "step"}
# Parts of the names of tensors in checkpoints (whole words between dots) that the new code calls otherwise.
RENAMED: dict[str, str] = {}

Tree = dict[str, Any]

BASE: Tree = {
    "vae.kind": "linear",
    "vae.channels": 4,
    "preprocess.online": False,  # a cache that the new code finds stale is an error, not encoded again
    "preprocess.decode_workers": 1,
    "model.size": "nano",
    "train.steps": STEPS,
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


def _bucket(frames: int, height: int, width: int) -> dict[str, int]:
    return {"frames": frames, "height": height, "width": width}


# Data sets, each with a cache of its own: of 8 clips one is held out, so that the steps of an epoch are not equally full.
CLIPS, PICTURES = 8, 7
DATA: dict[str, Tree] = {
    "small": {"data.sources": [{"path": "../clips.jsonl"}], "data.buckets": [_bucket(5, 32, 48)]},
    "long": {"data.sources": [{"path": "../clips.jsonl"}], "data.buckets": [_bucket(13, 64, 96)]},
    "mixed": {"data.sources": [{"path": "../mixed.jsonl"}], "data.buckets": [_bucket(1, 32, 48), _bucket(5, 32, 48)]},
}


@dataclass(frozen=True)
class Case:
    """A configuration: what differs from BASE, the data set that it trains on, and the number of processes."""

    changes: Tree = field(default_factory=dict)
    data: str = "small"
    processes: int = 1


HALF = {"device.dtype": "bfloat16"}
CASES: dict[str, Case] = {
    # the three of tests/golden/test_curves.py
    "factorised-flow": Case(),
    "full-ddpm-v": Case({"model.arrangement": "full", "objective.kind": "ddpm"}),
    "factorised-ddpm-epsilon": Case(
        {
            "objective.kind": "ddpm",
            "objective.prediction": "epsilon",
            "objective.zero_terminal_snr": False,
            "objective.min_snr_gamma": 5,
        }
    ),
    "bfloat16": Case({**HALF, "train.weight_decay": 0.1, "train.schedule": "cosine"}),
    "tiers": Case(
        {
            **HALF,
            "memory.master": "host",
            "memory.states": "host",
            "memory.ema": "host",
            "memory.bucket": "64KiB",
            "train.micro_batch_size": 2,
        }
    ),
    "gradient-release": Case(
        {"memory.release_gradients": True, "memory.bucket": "64KiB", "train.clip_norm": None, "memory.states": "host"}
    ),
    "recompute": Case({"train.checkpointing": True}),
    "swap": Case(
        {
            "memory.spans.attention": "swap",
            "memory.spans.cross_attention": "recompute_cheap",
            "memory.spans.mlp": "swap_cheap",
            "memory.swap_from": "1KiB",
            "memory.keep_last": False,
        }
    ),
    # between the plain step and the least; which ways are chosen depends on the clock, what they compute does not
    "budget": Case({"memory.budget": "9MB", "model.arrangement": "full"}, data="long"),
    "sparse": Case(
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
        data="long",
    ),
    "images-with-videos": Case(
        {"train.batch_size": None, "batching.by": "tokens", "batching.mix": "window", "batching.accumulate": 2},
        data="mixed",
    ),
    "accumulation": Case({"train.batch_size": 5, "train.micro_batch_size": 2}),
    # on 2 ranks
    "fsdp": Case(
        {"parallel.strategy": "fsdp", "train.batch_size": 5, "train.micro_batch_size": 1, **HALF}, processes=2
    ),
    "ddp": Case(
        {
            "parallel.strategy": "ddp",
            "train.batch_size": None,
            "batching.by": "tokens",
            "batching.mix": "window",
            "batching.slots": 4,
        },
        data="mixed",
        processes=2,
    ),
    "fsdp-ulysses": Case(
        {"parallel.strategy": "fsdp", "parallel.ulysses": 2, "parallel.scheme": "ulysses", "train.checkpointing": True},
        processes=2,
    ),
    "tp": Case({"parallel.tp": 2, "train.batch_size": 4, "train.micro_batch_size": 2}, processes=2),
}
CACHE, OWN_CACHE = "cache", "mixed"  # the line that compares a cache which the new code builds, and its data set
QUICK = ("factorised-flow", "tiers", "images-with-videos", "fsdp")


def translated(tree: Mapping[str, Any], keys: Mapping[str, str], values: Mapping[str, Mapping[Any, Any]]) -> Tree:
    """`tree` of dotted keys with the new names of keys (the longest old one that fits) and values."""
    results = {}
    for key, value in tree.items():
        fits = [old for old in keys if key == old or key.startswith(old + ".")]
        old = max(fits, key=len, default="")
        changes = values.get(key, {})
        same = not isinstance(value, str | bool | int) or value not in changes
        results[keys[old] + key[len(old) :] if fits else key] = value if same else changes[value]
    return results


def nested(tree: Mapping[str, Any]) -> Tree:
    """The mapping of sections that a tree of dotted keys means."""
    root: Tree = {}
    for key, value in tree.items():
        *sections, last = key.split(".")
        node = root
        for section in sections:
            node = node.setdefault(section, {})
        node[last] = value
    return root
