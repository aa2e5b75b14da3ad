"""What sparse attention costs in loss, from scratch and fine-tuned from a dense model.

A small model with attention over all tokens trains on the demo clips with dense attention, and with each planner and tail, on the same
samples, noise and times; the loss on held-out clips is compared seed by seed. Every run is a run folder: what is finished is not trained
again, so a measurement that was broken off goes on.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmspeed.cli.demo import CLIPS, write_manifest
from mmspeed.config import Config, make_config, video_config
from mmspeed.errors import UserError
from mmspeed.log import get_logger, setup

log = get_logger("bench")

# planner, tail; the first is the dense attention that the others are compared with
VARIANTS: dict[str, dict[str, Any] | None] = {
    "dense": None,
    "clusters+summary": {"planner": "clusters", "tail": "summary"},
    "clusters+zero": {"planner": "clusters", "tail": "zero"},
    "tiles+summary": {"planner": "tiles", "tail": "summary"},
    "tiles+zero": {"planner": "tiles", "tail": "zero"},
}
GOALS = {"fine-tuned": 0.01, "from scratch": 0.03}


@dataclass(frozen=True)
class TrainedVariant:
    """One trained model."""

    start: str  # "from scratch" or "fine-tuned"
    variant: str
    seed: int
    loss: float  # held-out, as it was trained
    kept: float  # share of pairs in the last watched step, mean over layers; 1 for dense
    error: float  # relative, of the layers' outputs in that step; 0 for dense
    seconds: float  # of training


@dataclass(frozen=True)
class SparseTrainingSetting:
    """What is trained."""

    steps: int = 300
    tune_steps: int = 100
    seeds: int = 3
    keep: float = 0.15
    cluster_size: int = 64
    width: int = 96
    depth: int = 4
    frames: int = 33
    height: int = 128
    pixels: int = 224
    batch: int = 4


@dataclass(frozen=True)
class SparseTrainingResult:
    """All trials of a setting."""

    setting: SparseTrainingSetting
    tokens: int
    trials: list[TrainedVariant]

    def table(self) -> list[str]:
        """A Markdown table: means over seeds, and the largest difference to dense attention of one seed."""
        lines = [
            "| start | attention | held-out loss | against dense, mean | worst seed | kept | error | time |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for start in ("from scratch", "fine-tuned"):
            for variant in VARIANTS:
                rows = self._of(start, variant)
                if not rows:
                    continue
                gaps = self.gaps(start, variant)
                lines.append(
                    f"| {start} | {variant} | {_mean(rows, 'loss'):.4f} | {statistics.mean(gaps):+.2%} | {max(gaps):+.2%} "
                    f"| {_mean(rows, 'kept'):.1%} | {_mean(rows, 'error'):.3f} "
                    f"| {_mean(rows, 'seconds'):.0f} s |"
                )
        return lines

    def gaps(self, start: str, variant: str) -> list[float]:
        """How much larger the loss is than that of dense attention, by seed, as a share."""
        dense = {trial.seed: trial.loss for trial in self._of(start, "dense")}
        rows = [trial for trial in self._of(start, variant) if trial.seed in dense]
        return [trial.loss / dense[trial.seed] - 1.0 for trial in rows]

    def verdicts(self) -> list[tuple[bool, str]]:
        """Whether the best variant of each start is as near to dense attention as it should be."""
        said = []
        for start, goal in GOALS.items():
            means = {v: statistics.mean(gaps) for v in VARIANTS if v != "dense" and (gaps := self.gaps(start, v))}
            if not means:
                continue
            best = min(means, key=lambda variant: means[variant])
            said.append(
                (
                    means[best] <= goal,
                    f"{start}: {best} is at {means[best]:+.2%} of dense attention's loss (goal {goal:+.0%})",
                )
            )
        return said

    def lines(self) -> list[str]:
        s = self.setting
        head = (
            f"{s.width} x {s.depth}, {self.tokens} tokens, batch {s.batch}, keep {s.keep:.0%}, clusters of {s.cluster_size}; "
            f"{s.steps} steps from scratch, {s.tune_steps} fine-tuned; {s.seeds} seeds"
        )
        return [
            head,
            "",
            *self.table(),
            "",
            *(f"{'PASSED' if ok else 'FAILED'}: {text}" for ok, text in self.verdicts()),
        ]

    def _of(self, start: str, variant: str) -> list[TrainedVariant]:
        return [trial for trial in self.trials if trial.start == start and trial.variant == variant]


def _mean(rows: list[TrainedVariant], name: str) -> float:
    return statistics.mean(getattr(row, name) for row in rows)


def bench_sparse_training(
    output: str | Path, setting: SparseTrainingSetting, variants: tuple[str, ...] = tuple(VARIANTS)
) -> SparseTrainingResult:
    """Train all that is not trained yet, and compare."""
    from mmspeed.preprocess import CacheBuilder

    output = Path(output).resolve()
    stems = [Path(json.loads(line)["video"]).stem for line in CLIPS.read_text(encoding="utf-8").splitlines()]
    held_out = stems[::5]
    write_manifest(output / "clips.jsonl", [stem for stem in stems if stem not in held_out], held_out)
    first = trial_config(output, setting, "from scratch", "dense", 0)
    CacheBuilder(first).run()
    trials = []
    for seed in range(setting.seeds):
        for start in ("from scratch", "fine-tuned"):
            for variant in dict.fromkeys(("dense", *variants)):
                trials.append(_trial(trial_config(output, setting, start, variant, seed), start, variant, seed))
    return SparseTrainingResult(setting, _tokens(first), trials)


def trial_config(output: Path, setting: SparseTrainingSetting, start: str, variant: str, seed: int) -> Config:
    """The config of one trial."""
    tuned = start == "fine-tuned"
    name = f"{'tuned' if tuned else 'scratch'}-{variant.replace('+', '-')}-{seed}"
    steps = setting.tune_steps if tuned else setting.steps
    sparse = VARIANTS[variant]
    model: dict[str, Any] = {
        "size": "nano",
        "arrangement": "full",
        "width": setting.width,
        "depth": setting.depth,
        "heads": max(1, setting.width // 32),
    }
    if sparse is not None:
        model["sparse"] = sparse | {
            "keep": setting.keep,
            "cluster_size": setting.cluster_size,
            "tail_clusters": 64,
            "dense_first": 0,
            "dense_last": 0,
            "dense_steps": 1 if tuned else max(1, setting.steps // 10),
            "min_tokens": 256,
        }
    tree: dict[str, Any] = {
        "name": name,
        "output": str(output / "runs"),
        "seed": seed,
        "data": {
            "sources": [{"path": str(output / "clips.jsonl")}],
            "cache": str(output / "cache"),
            "fps": None,
            "buckets": [{"frames": setting.frames, "height": setting.height, "width": setting.pixels}],
        },
        "model": model,
        "train": {
            "steps": steps,
            "batch_size": setting.batch,
            "lr": 3e-4 if tuned else 1e-3,
            "warmup_steps": min(30, steps // 5),
            "schedule": "cosine",
            "min_lr_ratio": 0.1,
            "ema_decay": 0.98,
            "log_every": 10,
            "start_from": str(output / "runs" / f"scratch-dense-{seed}") if tuned else None,
        },
        "validate": {"every": 1_000_000, "samples": 16, "quantiles": 6},
        "checkpoint": {"every": 1_000_000, "keep_last": 1},
    }
    return video_config(make_config(tree, origin="sparse training bench"), "sparse training bench")


def _trial(config: Config, start: str, variant: str, seed: int) -> TrainedVariant:
    from mmspeed.log import read_metrics
    from mmspeed.pipelines import TrainPipeline

    if not TrainPipeline(config).run().finished:
        raise UserError(f"stopped in {config.name}: the same command goes on")
    rows = read_metrics(config.run_dir / "metrics.jsonl")
    train = [row for row in rows if row["kind"] == "train"]
    held_out = [row for row in rows if row["kind"] == "validation"]
    if not held_out or held_out[-1]["step"] != config.train.steps:
        raise UserError(f"{config.run_dir} is a run of other settings: choose another --output")
    loss = held_out[-1]["loss"]
    layers = train[-1].get("attention") or []
    kept = [layer["kept"] for layer in layers if layer["kept"] is not None]
    errors = [layer["error"] for layer in layers if layer["error"] is not None]
    trial = TrainedVariant(
        start,
        variant,
        seed,
        loss,
        statistics.mean(kept) if kept else 1.0,
        statistics.mean(errors) if errors else 0.0,
        train[-1]["elapsed_seconds"],
    )
    log.info(f"{config.name}: held-out loss {trial.loss:.4f}, kept {trial.kept:.1%}, {trial.seconds:.0f} s")
    return trial


def _tokens(config: Config) -> int:
    from mmspeed.data import DatasetCache
    from mmspeed.models import build_model
    from mmspeed.models.sections import sora_section
    from mmspeed.shapes import Strides

    encoders = DatasetCache(config.cache_root).info["encoders"]
    model = build_model(
        sora_section(config, "this claim"), encoders["vae"]["channels"], encoders["text"]["width"], device="meta"
    )
    return model.tokens(Strides(*encoders["vae"]["strides"]).latent(config.buckets[0]))


def main() -> int:
    """Train, and compare the loss on held-out clips; 1 where it is too far from dense attention's."""
    parser = argparse.ArgumentParser(prog="python -m tests.claims.sparse_training", description=main.__doc__)
    parser.add_argument(
        "--output", type=Path, default=Path("runs/sparse-training"), help="finished runs are not repeated"
    )
    for name in ("steps", "tune-steps", "seeds"):
        default = getattr(SparseTrainingSetting, name.replace("-", "_"))
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--keep", type=float, default=SparseTrainingSetting.keep, help="share of pairs to keep")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    chosen = parser.parse_args()
    setup()
    setting = SparseTrainingSetting(chosen.steps, chosen.tune_steps, chosen.seeds, chosen.keep)
    result = bench_sparse_training(chosen.output, setting, tuple(chosen.variants))
    print("\n".join(result.lines()))
    return 0 if all(passed for passed, _ in result.verdicts()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
