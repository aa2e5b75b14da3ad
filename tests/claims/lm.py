"""Language models beside transformers' Trainer and `datasets`, ratios in one run, medians.

Steps: each trainer runs in a process of its own and takes a step on request, so that all meet the same machine. Batches hold
about as many real tokens; the Trainer pads documents to the longest of a batch, or joins them without padding. A step is all that happens
between two steps of a run. Memory: the loss of a large vocabulary by torch's MemTracker. Data: reading an epoch of packs, and of batches.

Legend: B packs, N tokens of a pack, T tokens, V vocabulary, E width.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from mmspeed.compute.registry import OPERATORS
from mmspeed.config import make_config
from mmspeed.config.language import LanguageConfig
from mmspeed.data.cache.text_cache import TextCache
from mmspeed.device import pick
from mmspeed.log import setup
from mmspeed.models.weights import quiet
from mmspeed.pipelines import TrainCallback, TrainPipeline
from mmspeed.pipelines.domains.language.data import PackCollate
from mmspeed.pipelines.domains.language.domain import LanguageDomain
from mmspeed.pipelines.inference.language import load_tokenizer
from mmspeed.pipelines.training.events import StepEvent
from mmspeed.preprocess import TextCacheBuilder
from mmspeed.preprocess.texts.preparation import shipped_texts
from mmspeed.protocols import RunPlace

from .turns import Pace, in_turns

IDS = 2048  # of the tokenizer
READS = {
    "blank_line": "speeches and paragraphs",
    "file": "whole works",
}  # documents of the texts, by how files are split
WARM = 1  # rounds that are not counted
LOSS_GOAL, DATA_GOAL = 0.15, 5.0
OURS, PADDED, JOINED = "mmspeed", "Trainer, padded", "Trainer, padding-free"
CACHE = "packs of the mapped cache"  # without the loader


@dataclass(frozen=True)
class LmSetting:
    """Sizes of the model and of the measurement."""

    rounds: int = 9  # steps of each trainer
    width: int = 256
    depth: int = 4
    length: int = 512
    packs: int = 4
    vocabulary: int = 131_072  # of the loss
    tokens: int = 1024  # of the loss
    reads: int = 3  # epochs that are read
    threads: int = 1


@dataclass
class LmResult:
    """Tokens a second of each trainer and step, bytes of both losses, and tokens a second of readers by kind of documents; none without
    `datasets`.
    """

    rates: dict[str, list[float]] = field(default_factory=dict)
    loss_bytes: int = 0
    full_bytes: int = 0
    reads: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def ratio(self, other: str) -> float:
        """Our tokens a second over another trainer's: the median of the rounds' ratios."""
        return statistics.median(a / b for a, b in zip(self.rates[OURS], self.rates[other], strict=True))

    def lines(self) -> list[str]:
        """The figures in words, with those that are worse."""
        lines = [
            f"training, real tokens/s (medians of {len(self.rates[OURS])} steps in turns): "
            + "; ".join(f"{name} {statistics.median(rates):,.0f}" for name, rates in self.rates.items())
        ]
        for other in (PADDED, JOINED):
            ratio = self.ratio(other)
            lines.append(f"  mmspeed over {other}: {ratio:.2f} x{'' if ratio >= 1 else ' (worse)'}")
        share = self.loss_bytes / self.full_bytes
        lines.append(
            f"peak memory of the loss beyond parameters and gradients: {self.loss_bytes / 2**20:,.0f} MiB, logits in full "
            f"{self.full_bytes / 2**20:,.0f}, ratio {share:.3f} (goal {LOSS_GOAL}){'' if share <= LOSS_GOAL else ' (worse)'}"
        )
        if not self.reads:
            return [*lines, "data: `datasets` is not installed, so it was not compared: pip install datasets"]
        for split, reads in self.reads.items():
            lines.append(
                f"data, tokens per processor second, {READS[split]}: "
                + "; ".join(f"{name} {statistics.median(rates):,.0f}" for name, rates in reads.items())
            )
            for ours, other in ((own, name) for own in (CACHE, OURS) for name in reads if name not in (CACHE, OURS)):
                ratio = statistics.median(reads[ours]) / statistics.median(reads[other])
                missed = "" if ratio >= DATA_GOAL else " (missed)" if ratio >= 1 else " (worse)"
                lines.append(f"  {ours} over {other}: {ratio:.1f} x (goal {DATA_GOAL:g}){missed}")
        return lines


def bench_lm(folder: Path, setting: LmSetting = LmSetting()) -> LmResult:
    """Measure in `folder`, which is emptied of earlier measurements. Raises UserError where a trainer fails."""
    for name in ("base", "runs", "trainer", "datasets"):
        shutil.rmtree(folder / name, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    save_dense(folder / "base", setting)
    config = lm_config(folder, setting)
    for split in READS:
        texts = lm_config(folder, setting, split).texts
        TextCacheBuilder(texts, config.tokenizer, config.seed).run()
    result = LmResult()
    sides = {name: partial(_train, name=name) for name in (OURS, PADDED, JOINED)}
    told = in_turns(sides, (str(folder), asdict(setting)), setting.rounds, WARM)
    result.rates = {name: [tokens / seconds for seconds, tokens in steps] for name, steps in told.items()}
    result.loss_bytes, result.full_bytes = (
        loss_peak(run, setting)
        for run in (OPERATORS["linear_cross_entropy"], OPERATORS["linear_cross_entropy"].eager.run)
    )
    result.reads = {split: read_rates(folder, setting, split) for split in READS} if datasets_found() else {}
    return result


def save_dense(folder: Path, setting: LmSetting) -> None:
    """Save a random Qwen3."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=IDS, hidden_size=setting.width, intermediate_size=3 * setting.width, num_hidden_layers=setting.depth,
        num_attention_heads=setting.width // 64, num_key_value_heads=max(1, setting.width // 128), head_dim=64,
        max_position_embeddings=4096, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = Qwen3ForCausalLM(config)
    with quiet():
        model.save_pretrained(folder)


def lm_config(folder: Path, setting: LmSetting, split: str = "blank_line") -> LanguageConfig:
    """The run: speeches and paragraphs of the package's works, whose lengths differ much; with `file` whole works."""
    steps = WARM + setting.rounds + 1
    texts = shipped_texts()
    tree = {
        "task": "language",
        "name": "lm",
        "output": str(folder / "runs"),
        "texts": {"sources": [{"path": str(texts / "train"), "split": split}], "cache": str(folder / f"cache-{split}"), "validation": 0.0},
        "tokenizer": {"kind": "train", "size": IDS},
        "model": {"pretrained": str(folder / "base")},
        "sequence_length": setting.length,
        "train": {"steps": steps, "batch_size": setting.packs, "lr": 1e-4, "warmup_steps": 0, "weight_decay": 0.01, "ema_decay": None},
        "validate": {"every": steps + 1, "samples": 1, "report": False},
        "checkpoint": {"every": steps + 1},
        "device": {"kind": "cpu", "peak_tflops": 1.0},
    }  # fmt: skip
    return cast(LanguageConfig, make_config(tree, origin="lm claim"))


# -- steps in turns ---------------------------------------------------------------------------------------------------------


def _train(pipe: Connection, folder: str, setting: dict[str, Any], name: str) -> None:
    """A side, in a process of its own."""
    own, pace = LmSetting(**setting), Pace(pipe)
    torch.set_num_threads(own.threads)
    config = lm_config(Path(folder), own)
    if name != OURS:
        _by_trainer(Path(folder), config, name, own, pace)
        return

    class Paced(TrainCallback):
        def on_step(self, event: StepEvent) -> None:
            pace.step(event.outcome.data.tokens or 0)

    TrainPipeline(config, callbacks=[Paced()]).run()


def _by_trainer(folder: Path, config: LanguageConfig, name: str, setting: LmSetting, pace: Pace) -> None:
    """transformers' Trainer on the cache's documents, shuffled, in batches of about as many real tokens."""
    from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

    rows = document_rows(config)
    with quiet():
        model: Any = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    model.config.use_cache = False
    counts: list[int] = []

    class Counted(Trainer):
        def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
            mask = inputs.get("attention_mask")
            counts.append(inputs["input_ids"].numel() if mask is None else int(mask.sum()))
            return super().training_step(model, inputs, *args, **kwargs)

    class Paced(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            pace.step(counts[-1])

    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"), max_steps=config.train.steps, per_device_train_batch_size=documents_of_a_batch(rows, setting),
        learning_rate=config.train.lr, weight_decay=config.train.weight_decay, logging_strategy="no", report_to="none", save_strategy="no",
        disable_tqdm=True, use_cpu=True, dataloader_pin_memory=False, seed=0,
    )  # fmt: skip
    trainer = Counted(
        model, arguments, train_dataset=cast(Any, rows), data_collator=collator(name, config), callbacks=[Paced()]
    )
    trainer.train()


def document_rows(config: LanguageConfig) -> list[dict[str, list[int]]]:
    """The documents of the cache, longer ones cut to a pack's length."""
    cache, length = TextCache(config.cache_dir), config.sequence_length
    return [
        {"input_ids": cache.ids(document, begin, min(length, int(cache.lengths[document]) - begin)).tolist()}
        for document in range(len(cache))
        for begin in range(0, int(cache.lengths[document]), length)
    ]


def documents_of_a_batch(rows: list[dict[str, list[int]]], setting: LmSetting) -> int:
    """The number of documents with about the tokens of our batch."""
    mean = statistics.fmean(len(row["input_ids"]) for row in rows)
    return max(1, round(setting.packs * setting.length / mean))


def collator(name: str, config: LanguageConfig) -> Callable[[Any], Any]:
    """transformers' collator that pads, or that joins."""
    from transformers import DataCollatorForLanguageModeling, DataCollatorWithFlattening

    if name == JOINED:
        return DataCollatorWithFlattening()
    folder = TextCache(config.cache_dir).tokenizer_folder
    assert folder is not None
    tokenizer = load_tokenizer(folder)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return DataCollatorForLanguageModeling(tokenizer, mlm=False)


# -- memory and data --------------------------------------------------------------------------------------------------------


def loss_peak(run: Callable[..., Any], setting: LmSetting) -> int:
    """Bytes at the peak of a loss, forward and backward, beyond its inputs and their gradients."""
    from torch.distributed._tools.mem_tracker import MemTracker

    generator = torch.Generator().manual_seed(0)
    x_TE = torch.randn(setting.tokens, 64, generator=generator).requires_grad_()
    weight_VE = (0.1 * torch.randn(setting.vocabulary, 64, generator=generator)).requires_grad_()
    tracker = MemTracker()
    tracker.track_external(x_TE, weight_VE)
    with tracker:
        run(x_TE, weight_VE, torch.arange(setting.tokens))[0].sum().backward()
    (by_kind,) = tracker.get_tracker_snapshot("peak").values()
    return int(by_kind["Total"]) - 2 * 4 * (x_TE.numel() + weight_VE.numel())


def datasets_found() -> bool:
    """True where the package `datasets` is installed."""
    return importlib.util.find_spec("datasets") is not None


def read_rates(folder: Path, setting: LmSetting, split: str) -> dict[str, list[float]]:
    """Tokens a processor second of reading an epoch, one reader after the other."""
    import datasets
    import pyarrow as pa

    config = lm_config(folder, setting, split)
    rows = document_rows(config)
    datasets.disable_progress_bars()
    table = datasets.table.InMemoryTable(pa.Table.from_pylist(rows))
    # with a name of its own: datasets would pickle the table for one, which fails in the process of a command
    datasets.Dataset(table, fingerprint=split).save_to_disk(folder / "datasets" / split)
    stored = datasets.load_from_disk(str(folder / "datasets" / split))  # mapped, too
    batch = documents_of_a_batch(rows, setting)

    def by_datasets(name: str) -> Iterator[int]:
        loader = torch.utils.data.DataLoader(cast(Any, stored), batch, shuffle=True, collate_fn=collator(name, config))
        for read in loader:
            yield int(read["attention_mask"].sum()) if name == PADDED else read["input_ids"].numel()

    task, place = LanguageDomain(config), RunPlace(pick("cpu"))
    task.open(place)
    opened, cache = task.data(place), task.cache

    def by_us() -> Iterator[int]:
        for step in opened.steps(0, opened.size.steps_per_epoch):
            for _ in step.batches:
                pass
            yield step.tokens or 0

    def by_cache() -> Iterator[int]:
        collate = PackCollate(cache)
        for step in range(opened.size.steps_per_epoch):
            draws = opened.sampler.draws(step)
            collate([(draw, 1.0) for draw in draws])
            yield sum(draw.sample.tokens for draw in draws)

    readers: dict[str, Callable[[], Iterator[int]]] = {
        CACHE: by_cache,
        OURS: by_us,
        "datasets + collator that pads": lambda: by_datasets(PADDED),
        "datasets + collator that joins": lambda: by_datasets(JOINED),
    }
    rates: dict[str, list[float]] = {name: [] for name in readers}
    for number in range(WARM + setting.reads):
        for name, read in readers.items():
            began = time.process_time()  # of all threads: the loader reads in one of its own
            tokens = sum(read())
            if number >= WARM:
                rates[name].append(tokens / (time.process_time() - began))
    return rates


def main() -> int:
    """Measure beside transformers' Trainer, and print the figures."""
    parser = argparse.ArgumentParser(prog="python -m tests.claims.lm", description=main.__doc__)
    parser.add_argument("--output", type=Path, default=Path("runs/lm"), help="made anew")
    for name in ("rounds", "width", "depth", "threads"):
        parser.add_argument(f"--{name}", type=int, default=getattr(LmSetting, name))
    chosen = parser.parse_args()
    setup()
    setting = LmSetting(rounds=chosen.rounds, width=chosen.width, depth=chosen.depth, threads=chosen.threads)
    print("\n".join(bench_lm(chosen.output.resolve(), setting).lines()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
