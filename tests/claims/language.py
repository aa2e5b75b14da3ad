"""A small expert model on the texts of the package: `mmspeed train` beside transformers' Trainer, `python -m tests.claims.language`.

Both begin with the weights of one Qwen3-MoE of transformers, and take the same packs in the same order, as many steps, AdamW with the same
groups, rates and clipping. Held-out works are then scored by transformers' class, in bits per byte; the goal is at most 1.02 times the
Trainer's. In the Trainer documents of a pack are kept apart by positions that start again, which works without a cache of keys alone.

Legend: B packs, N tokens of a pack.
"""

from __future__ import annotations

import argparse
import math
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from mmspeed.compute.operators.cross_entropy import IGNORED
from mmspeed.compute.operators.document_attention import positions_of
from mmspeed.config import make_config
from mmspeed.config.language import LanguageConfig
from mmspeed.data.cache.text_cache import TextCache
from mmspeed.device import pick
from mmspeed.log import ProgressLine, get_logger, read_metrics, setup
from mmspeed.loop.optimizers.learning_rate import learning_rate
from mmspeed.loop.optimizers.make_optimizer import make_groups
from mmspeed.models.weights import quiet
from mmspeed.pipelines import TrainPipeline
from mmspeed.pipelines.domains.language.domain import LanguageDomain
from mmspeed.pipelines.inference.language import export_language_run
from mmspeed.preprocess import TextCacheBuilder
from mmspeed.preprocess.texts.preparation import shipped_texts
from mmspeed.protocols import Batch, RunPlace

log = get_logger("claim")

GOAL = 1.02
VOCABULARY = 320  # bytes, and the end of a document


@dataclass(frozen=True)
class LanguageSetting:
    """Sizes of the model and of the runs; `scored`: packs of held-out bytes."""

    steps: int = 300
    width: int = 128
    depth: int = 3
    experts: int = 8
    length: int = 256
    batch: int = 8
    scored: int = 400
    threads: int = 2


@dataclass(frozen=True)
class LanguageResult:
    """Held-out bits per byte before training and of both models, seconds of both runs, and the losses of their steps."""

    begun: float
    ours: float
    theirs: float
    our_seconds: float
    their_seconds: float
    our_losses: tuple[float, ...]
    their_losses: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """Our bits per byte over the Trainer's."""
        return self.ours / self.theirs

    def passed(self) -> bool:
        """True where the goal is met by a model that has learned."""
        return self.ratio <= GOAL and self.ours < 0.6 * self.begun

    def lines(self) -> list[str]:
        """The figures in words."""
        pairs = list(zip(self.our_losses, self.their_losses, strict=True))
        apart = [abs(ours - theirs) / theirs for ours, theirs in pairs]
        return [
            f"held-out bits per byte: {self.begun:.3f} before training; mmspeed {self.ours:.4f}, Trainer {self.theirs:.4f}, ratio "
            f"{self.ratio:.4f} (goal {GOAL})",
            f"training losses of {len(pairs)} steps: the first differ by {apart[0]:.1e}, the last by {apart[-1]:.1e}, at most "
            f"{max(apart):.1e}",
            f"seconds: mmspeed {self.our_seconds:.0f}, Trainer {self.their_seconds:.0f} (one after the other; tests.claims.lm compares)",
            "PASS" if self.passed() else "FAIL",
        ]


def save_experts(folder: Path, setting: LanguageSetting) -> None:
    """Save a random Qwen3-MoE."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    make: Any = Qwen3MoeConfig
    config = make(
        vocab_size=VOCABULARY, hidden_size=setting.width, intermediate_size=2 * setting.width, num_hidden_layers=setting.depth,
        num_attention_heads=4, num_key_value_heads=2, head_dim=setting.width // 4, num_experts=setting.experts, num_experts_per_tok=2,
        moe_intermediate_size=setting.width, norm_topk_prob=True, max_position_embeddings=1024, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = Qwen3MoeForCausalLM(config)
    with quiet():
        model.save_pretrained(folder)


def language_claim_config(folder: Path, setting: LanguageSetting) -> LanguageConfig:
    """The run: bytes, packs of the package's works, no auxiliary loss and no average, as the Trainer has none."""
    texts = shipped_texts()
    tree = {
        "task": "language",
        "name": "ours",
        "output": str(folder / "runs"),
        "texts": {
            "sources": [{"path": str(texts / "train"), "split": "blank_line"}, {"path": str(texts / "validation"), "held_out": True}],
            "cache": str(folder / "cache"),
            "validation": 0.0,
        },
        "tokenizer": {"kind": "bytes"},
        "model": {"pretrained": str(folder / "base")},
        "sequence_length": setting.length,
        "train": {
            "steps": setting.steps, "batch_size": setting.batch, "lr": 3e-3, "warmup_steps": 20, "schedule": "cosine", "weight_decay": 0.1,
            "betas": [0.9, 0.95], "clip_norm": 1.0, "ema_decay": None, "log_every": 1,
        },
        "objective": {"weighting": "step"},
        "validate": {"every": setting.steps + 1, "samples": 1, "report": False},
        "checkpoint": {"every": setting.steps},
        "device": {"kind": "cpu", "peak_tflops": 1.0},
    }  # fmt: skip
    return cast(LanguageConfig, make_config(tree, origin="claim"))


def claim_packs(config: LanguageConfig) -> Iterator[Batch]:
    """The micro-batches of the run's steps, one a step."""
    task, place = LanguageDomain(config), RunPlace(pick("cpu"))
    task.open(place)
    data = task.data(place)
    for step in data.steps(0, config.train.steps):
        (batch,) = step.batches
        yield batch
    data.close()


def trainer_rows(batch: Batch) -> list[dict[str, Tensor]]:
    """The packs of a batch as the Trainer's rows; `labels` are shifted by the class."""
    ids_BN, targets_BN = batch["ids"], batch["targets"]
    pos_BN = positions_of(batch["bounds"], ids_BN.numel()).view_as(ids_BN)
    labels_BN = torch.where(targets_BN == IGNORED, -100, targets_BN).roll(1, 1)
    labels_BN[:, 0] = -100
    return [
        {"input_ids": ids_N, "position_ids": pos_N, "labels": labels_N}
        for ids_N, pos_N, labels_N in zip(ids_BN, pos_BN, labels_BN, strict=True)
    ]


def train_by_trainer(
    folder: Path, config: LanguageConfig, after_step: Callable[[float], None] = lambda loss: None
) -> tuple[nn.Module, list[float]]:
    """(the model, losses) of transformers' Trainer on the run's packs."""
    from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

    train = config.train
    rows = [row for batch in claim_packs(config) for row in trainer_rows(batch)]
    with quiet():
        model: Any = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    model.config.use_cache = False  # with a cache of keys, positions that start again separate nothing
    optimizer = torch.optim.AdamW(
        [{k: v for k, v in group.items() if k != "use"} for group in make_groups(model, train)],
        lr=train.lr, betas=train.betas, eps=train.eps,
    )  # fmt: skip
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(step, train) / train.lr)

    class Shown(TrainerCallback):
        def on_log(self, *args: Any, logs: dict[str, float], **kwargs: Any) -> None:  # type: ignore[override]
            if "loss" in logs:  # of a step; the last call is of the run
                line.advance()
                after_step(float(logs["loss"]))

    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"), max_steps=train.steps, per_device_train_batch_size=train.batch_size or 1,
        max_grad_norm=train.clip_norm or 0.0, train_sampling_strategy="sequential", logging_steps=1, report_to="none", save_strategy="no",
        disable_tqdm=True, use_cpu=True, remove_unused_columns=False, dataloader_pin_memory=False, logging_nan_inf_filter=False,
    )  # fmt: skip
    trainer = Trainer(
        model, arguments, train_dataset=cast(Any, rows), optimizers=(optimizer, rates), callbacks=[Shown()],
        data_collator=lambda rows: {name: torch.stack([row[name] for row in rows]) for name in rows[0]},
    )  # fmt: skip
    trainer.pop_callback(next(type(one) for one in trainer.callback_handler.callbacks if "Print" in type(one).__name__))
    with ProgressLine("Trainer", train.steps, "step") as line:
        trainer.train()
    return model, [float(row["loss"]) for row in trainer.state.log_history if "loss" in row]


@torch.no_grad()
def bits_per_byte(model: Any, config: LanguageConfig, most: int) -> float:
    """The mean over the bytes of held-out works, in parts of a pack's length; the first byte of a part is not scored."""
    cache, length = TextCache(config.cache_dir), config.sequence_length
    parts = [
        cache.ids(document, begin, length).astype(np.int64)
        for document in np.flatnonzero(cache.held_out).tolist()
        for begin in range(0, int(cache.lengths[document]) - length + 1, length)
    ]
    kept = [parts[place] for place in np.linspace(0, len(parts) - 1, min(most, len(parts))).astype(int)]
    total, count = 0.0, 0
    model.eval()
    for begin in range(0, len(kept), 16):
        ids_BN = torch.from_numpy(np.stack(kept[begin : begin + 16]))
        logits_BNV = model(input_ids=ids_BN, use_cache=False).logits[:, :-1]
        total += float(nn.functional.cross_entropy(logits_BNV.flatten(0, 1), ids_BN[:, 1:].flatten(), reduction="sum"))
        count += ids_BN[:, 1:].numel()
    return total / count / math.log(2)


def language_claim(folder: Path, setting: LanguageSetting = LanguageSetting()) -> LanguageResult:
    """Train both models in `folder`, which is emptied of earlier ones, and score them."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(setting.threads)
    for name in ("base", "runs", "trainer", "export"):
        shutil.rmtree(folder / name, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    save_experts(folder / "base", setting)
    config = language_claim_config(folder, setting)
    TextCacheBuilder(config.texts, config.tokenizer, config.seed).run()

    def scored(path: Path) -> float:
        with quiet():
            model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        return bits_per_byte(model, config, setting.scored)

    began = time.monotonic()
    TrainPipeline(config).run()
    middle = time.monotonic()
    model, their_losses = train_by_trainer(folder, config)
    ended = time.monotonic()
    export_language_run(config.run_dir, folder / "export", weights="model")
    rows = read_metrics(config.run_dir / "metrics.jsonl")
    our_losses = [float(row["loss"]) for row in rows if row["kind"] == "train"]
    log.info("scoring held-out works")
    return LanguageResult(
        scored(folder / "base"), scored(folder / "export"), bits_per_byte(model, config, setting.scored), middle - began,
        ended - middle, tuple(our_losses), tuple(their_losses),
    )  # fmt: skip


def main() -> None:
    """Run the claim and print its figures; exit with 1 where it fails."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--output", type=Path, default=Path("runs/language-claim"))
    parser.add_argument("--steps", type=int, default=LanguageSetting.steps)
    parser.add_argument("--threads", type=int, default=LanguageSetting.threads)
    chosen = parser.parse_args()
    setup()
    result = language_claim(chosen.output.resolve(), LanguageSetting(steps=chosen.steps, threads=chosen.threads))
    print("\n".join(result.lines()))
    raise SystemExit(0 if result.passed() else 1)


if __name__ == "__main__":
    main()
