"""The caches and runs of the exact witness (exact.py), in the keys of this checkout's configs.

A later checkout gives these to this one's code. `./` is the folder of exact.py's materials, where the configs stand.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# Parts of the names of tensors in checkpoints (whole words between dots) that the new code calls otherwise than the old.
RENAMED: dict[str, str] = {}
STEPS = 6  # that each run has at least
CLIPS, PICTURES = 8, 7  # of the clips one is held out, so that the steps of an epoch are not equally full


@dataclass(frozen=True)
class Cache:
    """A config file, and words of the command line behind it."""

    tree: dict[str, Any]
    words: str


@dataclass(frozen=True)
class Run:
    """A run: its words behind those of the cache that it reads, and the number of processes."""

    words: str = ""
    cache: str = "cache-small"
    processes: int = 1


def _videos(manifest: str, *buckets: tuple[int, int, int]) -> dict[str, Any]:
    sizes = [dict(zip(("frames", "height", "width"), bucket, strict=True)) for bucket in buckets]
    return {"data": {"sources": [{"path": f"./{manifest}.jsonl"}], "buckets": sizes}}


# The last step is always a checkpoint. Caches that the code finds stale are errors, not made again (`online`).
_BASE = (
    "train.steps=12 train.batch_size=3 train.lr=0.001 train.warmup_steps=2 train.log_every=1 validate.every=6 validate.samples=2 "
    "validate.report=false checkpoint.every=1000 device.kind=cpu device.peak_tflops=0.1 "
)
_VIDEO = f"{_BASE} validate.quantiles=2 preprocess.online=false preprocess.decode_workers=1 "
_NANO = f"{_VIDEO} vae.kind=linear vae.channels=4 model.size=nano "
_TEXTS = {"texts": {"sources": [{"path": "./sonnets.txt", "split": "blank_line"}]}}
CACHES = {
    "cache-small": Cache(_videos("clips", (5, 32, 48)), _NANO),
    "cache-long": Cache(_videos("clips", (13, 64, 96)), _NANO),
    "cache-mixed": Cache(_videos("mixed", (1, 32, 48), (5, 32, 48)), _NANO),
    "cache-texts": Cache(
        {"task": "language", **_TEXTS},
        f"{_BASE} train.steps={STEPS} texts.validation=0.1 texts.online=false sequence_length=127 tokenizer.kind=train tokenizer.size=512",
    ),
    # latents and captions of published repositories
    **{
        f"cache-{family}": Cache(
            _videos("mixed", *((count, 64, 64) for count in frames)),
            f"{_VIDEO} train.steps={STEPS} model.kind=diffusers model.pretrained=./{family}",
        )
        for family, frames in {"wan": (1, 9), "hunyuan-video": (9,), "hunyuan-video-1.5": (9,), "flux": (1,)}.items()
    },
}

_HALF = "device.dtype=bfloat16 "
_DEEPSEEK = (
    "model.shape=tiny-deepseek-v3 model.num_nextn_predict_layers=1 model.balance=sequence objective.balance_rate=0.01 model.num_experts=6 "
    "model.num_experts_per_tok=3 model.moe_intermediate_size=24 model.n_shared_experts=2 model.first_k_dense_replace=1 model.scoring_func=sigmoid "
    "model.norm_topk_prob=true model.routed_scaling_factor=1.5 model.n_group=3 model.topk_group=2 model.router_bias=true"
)
RUNS = {
    # the three of tests/golden/test_curves.py
    "factorised-flow": Run(),
    "full-ddpm-v": Run("model.arrangement=full objective.kind=ddpm"),
    "factorised-ddpm-epsilon": Run(
        "objective.kind=ddpm objective.prediction=epsilon objective.zero_terminal_snr=false objective.min_snr_gamma=5"
    ),
    "bfloat16": Run(_HALF + "train.weight_decay=0.1 train.schedule=cosine"),
    "tiers": Run(
        _HALF + "memory.master=host memory.states=host memory.ema=host memory.bucket=64KiB train.micro_batch_size=2"
    ),
    "gradient-release": Run(
        "memory.release_gradients=true memory.bucket=64KiB memory.states=host train.clip_norm=null"
    ),
    "recompute": Run("memory.activation_policy.block=recompute memory.mlp_chunk=16"),
    "offload": Run(
        "memory.activation_policy.attention=offload memory.activation_policy.cross_attention=selective "
        "memory.activation_policy.mlp=offload_selective memory.offload_from=1KiB memory.keep_last=false"
    ),
    # between the plain step and the least; which ways are chosen depends on the clock, what they compute does not
    "budget": Run("memory.budget=9MB model.arrangement=full", "cache-long"),
    "sparse": Run(
        "model.arrangement=full model.depth=3 model.sparse.planner=clusters model.sparse.keep=0.3 model.sparse.cluster_size=16 "
        "model.sparse.min_tokens=16 model.sparse.dense_first=0 model.sparse.dense_last=0 model.sparse.dense_steps=2 "
        "model.sparse.update_every=3",
        "cache-long",
    ),
    "images-with-videos": Run(
        "train.batch_size=null batching.by=tokens batching.mix=window batching.accumulate=2", "cache-mixed"
    ),
    "accumulation": Run("train.batch_size=5 train.micro_batch_size=2 objective.weighting=step"),
    "given-frames": Run("conditioning.first=0.3 conditioning.first_last=0.3 conditioning.mask=0.3", "cache-long"),
    "wan": Run("", "cache-wan"),
    "wan-experts": Run(
        "model.pretrained=./wan-experts objective.experts=both text.kind=family text.pretrained=./wan", "cache-wan"
    ),
    "qwen3": Run(
        "model.shape=tiny-qwen3-8b model.num_hidden_layers=2 model.hidden_size=48 model.num_attention_heads=6 model.num_key_value_heads=3 model.head_dim=8 model.intermediate_size=80 "
        "model.windows=[9,null] objective.z_loss=0.001",
        "cache-texts",
    ),
    "qwen3-experts": Run("model.pretrained=./qwen3-experts model.balance=global_batch", "cache-texts"),
    "deepseek": Run(_DEEPSEEK, "cache-texts"),
    # on 2 ranks
    "deepseek-2": Run(_DEEPSEEK, "cache-texts", 2),
    "fsdp": Run(_HALF + "parallel.strategy=fsdp train.batch_size=5 train.micro_batch_size=1", processes=2),
    "ddp": Run(
        "parallel.strategy=ddp train.batch_size=null batching.by=tokens batching.mix=window batching.slots=4",
        "cache-mixed",
        2,
    ),
    "fsdp-ulysses": Run(
        "parallel.strategy=fsdp parallel.ulysses=2 memory.activation_policy.block=recompute", processes=2
    ),
    "tp": Run("parallel.tp=2 train.batch_size=4 train.micro_batch_size=2", processes=2),
}
QUICK = ("cache-small", "cache-wan", "factorised-flow", "tiers", "images-with-videos", "fsdp", "wan", "deepseek")
