"""Config sections of the loop: method, steps, batches, the stages of training, checkpoints, and the rules that guard a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from mmspeed.shapes import Bucket

from .inputs import Section

Weighting = Literal["step", "sample", "token"]  # what counts alike in the gradients of an epoch
WatchedPhase = Literal["set_up", "first_step", "step", "encoding", "checkpoint", "validation"]


class WeightingSection(Section):
    """The objective of a task whose loss is its own: the weights of its steps."""

    weighting: Weighting = Field(
        "step",
        description="What counts alike in the gradients of an epoch, each step's being its own mean. `step`: steps; `sample`: samples; `token`: real tokens. Choose the one that the loss is divided by, and no key of `batching` changes the objective.",
    )


class MethodConfig(Section):
    """How the models learn; keys beside `kind` are the method's own."""

    kind: str = Field("finetune", description="Name of the method: `finetune` trains by the domain's own loss.")

    model_config = ConfigDict(extra="allow", frozen=True)


class DivergenceConfig(Section):
    """The rule for spikes: a loss or a gradient norm far above those of the steps before, or one that is not finite."""

    action: Literal["none", "stop", "skip", "roll_back"] = Field(
        "stop",
        description="`stop`: end the run after `steps` steps above the limit in a row. `skip`: do not apply the update of a step above it, and end the run after `steps` of them in a row. `roll_back`: after `steps` in a row go back to a checkpoint from before them, and leave their samples out of this epoch. `none`: no rule.",
    )
    factor: float = Field(
        10.0, gt=1, description="Multiple of the median of the last `window` calm steps that is the limit."
    )
    steps: int = Field(
        5,
        ge=1,
        description="Steps in a row above the limit that make a spike, and calm steps after a checkpoint that make it sound.",
    )
    window: int = Field(
        100,
        ge=2,
        description="Calm steps that the median is of; before as many, losses alone are judged, by the first ones and that of a model that knows nothing.",
    )
    roll_backs: int = Field(3, ge=1, description="Roll-backs of a run; the next spike ends it.")


class WatchdogConfig(Section):
    """Limits of time, past which a process says where it is and is then ended, so that its launcher starts the run again."""

    enabled: bool = Field(True, description="Watch the run.")
    least_seconds: float = Field(60.0, gt=0, description="Limit of a step, a checkpoint and a validation, at least.")
    factor: float = Field(
        10.0, ge=1, description="Multiple of the median duration of such a phase that is its limit, if that is longer."
    )
    first_seconds: float = Field(
        1800.0,
        gt=0,
        description="Limit of set-up, of the first step of each shape (compilation, connections), of steps of the first epoch that may wait for encoders, and of the first checkpoint and validation.",
    )
    limits: dict[WatchedPhase, Annotated[float, Field(gt=0)]] = Field(
        default_factory=dict, description="Limits in seconds in place of these, by phase, such as `{validation: 3600}`."
    )
    silent_seconds: float = Field(
        600.0,
        gt=0,
        description="Time without a sign of life after which a rank is killed; it is named after `least_seconds`.",
    )
    slow_factor: float = Field(
        1.25, gt=1, description="Multiple of the other ranks' median computing time from which a rank is named as slow."
    )
    slow_steps: int = Field(20, ge=1, description="Steps over which ranks are compared, at least.")
    end: bool = Field(
        True,
        description="End a process past twice its limit, where a launcher started it. False: only say where it is.",
    )


class CheckpointConfig(Section):
    """Saving of a run's state."""

    every: int = Field(500, ge=1, description="Steps between two checkpoints. The end of a run is always saved.")
    keep_last: int = Field(2, ge=1, description="Number of newest checkpoints to keep.")
    keep_best: bool = Field(True, description="Also keep the checkpoint with the lowest validation loss.")
    keep_every: int | None = Field(
        None, ge=1, description="Also keep each checkpoint whose step is a multiple of this; null: none for its step."
    )
    keep_hours: float | None = Field(
        None,
        gt=0,
        description="Also keep the first checkpoint of each period of this many hours; null: none for its time.",
    )
    asynchronous: bool = Field(True, description="Write in the background while training continues.")
    local: str | None = Field(
        None,
        description="Folder on each node's own disk where checkpoints are written first, and from which a restart reads them if every node has its part; null: none.",
    )
    keep_local: int = Field(1, ge=1, description="Number of newest checkpoints to keep in `local`.")
    grace_seconds: float | None = Field(
        None,
        gt=0,
        description="Seconds from SIGTERM or SIGUSR1 until the process is killed, near whose end a line says if nothing was saved. Null: those of torch's launcher, in a Slurm job at most 30; after SIGUSR1 those to the end of the job.",
    )


class TrainConfig(Section):
    """The training loop."""

    steps: int = Field(1000, ge=1, description="Optimizer steps of the run.")
    batch_size: int | None = Field(
        None,
        ge=1,
        description="Samples of one optimizer step over all devices, the same for every bucket; the last steps of an epoch may hold fewer. Null: 8. Only with `batching.by: samples`.",
    )
    micro_batch_size: int | None = Field(
        None,
        ge=1,
        description="Most samples that one device computes at a time; null: its whole share of a step, or the size set by `batching`. The rest is accumulated.",
    )
    start_from: str | None = Field(
        None,
        description="Run folder (its latest checkpoint) or checkpoint folder whose weights a new run begins with (the moving average, if there is one); null: drawn from `seed`. With `model.adapter` such a run has adapters of the same rank, scale and targets beside the same base; or an adapter file of diffusers, peft or the authors' names (or its folder), whose effect is kept where its scale is another.",
    )
    resume: Literal["newest", "strict"] = Field(
        "newest",
        description="Where the newest checkpoint of a run is damaged: `newest`: rename it to `.damaged` and go on from the newest sound one; `strict`: end with an error.",
    )
    optimizer: Literal["adamw", "adamw8bit", "muon"] = Field(
        "adamw",
        description="`adamw`; `adamw8bit`: with moments of 8 bits (needs the package torchao); `muon`: Muon for the blocks' matrices, those of experts each by itself, with updates as large as AdamW's so that `lr` means the same, and AdamW for the rest (needs whole matrices: not with shards or tp).",
    )
    lr: float = Field(1e-4, gt=0, le=10, description="Peak learning rate: about what a weight moves in a step.")
    warmup_steps: int = Field(50, ge=0, description="Steps over which the learning rate rises from 0.")
    schedule: Literal["constant", "cosine", "wsd"] = Field(
        "constant",
        description="Course of the learning rate after warm-up. `wsd`: constant, then straight down over the last steps (warm-up, stable, decay; Hu et al. 2024).",
    )
    decay_share: float = Field(0.1, gt=0, le=1, description="Share of all steps in which `wsd` goes down.")
    min_lr_ratio: float = Field(
        0.0, ge=0, le=1, description="Learning rate at the end of `cosine` and `wsd`, as a share of `lr`."
    )
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        (0.9, 0.99), description="AdamW's decay rates of the first and second moment."
    )
    eps: float = Field(1e-8, gt=0, description="AdamW's epsilon.")
    weight_decay: float = Field(
        0.0,
        ge=0,
        description="Decoupled weight decay of the weights of linear layers, convolutions, experts and embeddings; not of biases, norms and tables such as Wan's `scale_shift_table`.",
    )
    clip_norm: float | None = Field(
        1.0, gt=0, description="Global gradient norm above which gradients are scaled down; null: no clipping."
    )
    caption_dropout: float = Field(
        0.1, ge=0, le=1, description="Share of the samples that get the empty caption, for classifier-free guidance."
    )
    loss_frames: Literal["all", "distinct"] = Field(
        "all",
        description="Latent frames that count in a sample's loss. `distinct`: those in which the source shows something new; not those made only of repeated frames, as of a source of fewer frames per second than `data.fps`.",
    )
    ema_decay: float | None = Field(
        0.999,
        ge=0,
        lt=1,
        description="Decay of the moving average of the weights, warmed up as min(decay, (1 + n) / (10 + n)); null: none.",
    )
    compile: bool | Literal["auto"] = Field(
        "auto",
        description="Compile the blocks with torch.compile. `auto`: on accelerators that Triton serves, where one process computes a sample and `memory` chooses nothing that graphs cannot follow; a line at the start says why, or why not.",
    )
    skip_non_finite: int = Field(
        0,
        ge=0,
        description="Steps with a non-finite loss or gradient that are skipped (and counted) before the run stops with an error.",
    )
    log_every: int = Field(10, ge=1, description="Steps between two lines of `metrics.jsonl`.")
    prefetch: int = Field(
        4,
        ge=0,
        description="Most micro-batches in memory ahead of the current one; with `loader_workers` at least one for each worker, one waiting, and one on the accelerator. 0: read when needed.",
    )
    loader_workers: int = Field(
        0,
        ge=0,
        le=64,
        description="Processes that read and assemble batches beside each training process, from the second epoch on if the first builds the cache; 0: a thread does, which is enough for most runs.",
    )

    watchdog: WatchdogConfig = Field(default_factory=WatchdogConfig, description="Limits of time.")
    divergence: DivergenceConfig = Field(default_factory=DivergenceConfig, description="Rule for spikes.")

    @property
    def samples_per_step(self) -> int:
        """The value of `batch_size`, or its default."""
        return self.batch_size or 8


class BatchingConfig(Section):
    """The samples of each bucket in a step, and the buckets that share one."""

    by: Literal["samples", "tokens", "flops", "time"] = Field(
        "samples",
        description="Measure of a batch. `samples`: every bucket has `train.batch_size`. Otherwise one device computes as many samples of a bucket at a time as fit the budget: `tokens`, `flops` (the model's own count) or `time` (measured by `mmspeed bench buckets`).",
    )
    budget: float | None = Field(
        None,
        gt=0,
        description="Budget of one device for a micro-batch: tokens, TFLOP of forward and backward, or seconds. Null: the cost of one sample of the costliest bucket (by `time`: each bucket takes as many samples as fitted in memory during the measurement).",
    )
    accumulate: int = Field(
        1,
        ge=1,
        description="Micro-batches of each device in one optimizer step. Not with `by: samples`, which has `train.micro_batch_size`.",
    )
    slots: int | None = Field(
        None,
        ge=1,
        description="Device batches of one optimizer step over all devices; if set, a step holds the same samples on any number of devices. Null: devices x `accumulate`. Not with `by: samples`.",
    )
    mix: Literal["same", "matched", "window"] = Field(
        "same",
        description="Buckets that share a step. `same`: a single one, except in the last steps of an epoch. `matched`: those whose device batches cost the same within `tolerance`. `window`: any; devices are balanced over the accumulated micro-batches.",
    )
    tolerance: float = Field(
        0.02,
        ge=0,
        lt=1,
        description="Share by which the cost of a device batch may be below another's and still count as the same.",
    )
    max_batch: int | None = Field(
        None, ge=1, description="Most samples of a device batch; null: only the budget limits it."
    )


class PartConfig(Section):
    """A part of training: its steps and the shares of the sources."""

    steps: int | None = Field(
        None, ge=1, description="Optimizer steps of this stage; null: all remaining ones (the last stage)."
    )
    weights: dict[str, Annotated[float, Field(ge=0)]] | None = Field(
        None,
        description="Shares of the sources in this stage, by their names, in place of those of the sources themselves; a source that is not named has none.",
    )


def check_parts(parts: Sequence[PartConfig], sources: Sequence[str], steps: int) -> None:
    """Raise ValueError for stages without a length, with weights of no source, or with fewer steps than the run."""
    for number, part in enumerate(parts, start=1):
        if part.steps is None and number < len(parts):
            raise ValueError(f"curriculum: stage {number} is not the last, so it needs `steps`")
        unknown = [name for name in part.weights or () if name not in sources]
        if unknown:
            raise ValueError(
                f"curriculum: stage {number} has a weight for {unknown[0]}, which is not a source (known: {', '.join(sources)})"
            )
        if part.weights is not None and not any(part.weights.values()):
            raise ValueError(f"curriculum: stage {number} gives every source the weight 0")
    total = sum(part.steps or 0 for part in parts)
    if parts and parts[-1].steps is not None and total < steps:
        raise ValueError(
            f"curriculum: the stages are {total} steps, train.steps {steps}; leave `steps` out of the last stage"
        )


class StageConfig(PartConfig):
    """A part of training that uses only some of the buckets."""

    min_frames: int = Field(1, ge=1, description="Fewest frames of the buckets used.")
    max_frames: int | None = Field(None, ge=1, description="Most frames of the buckets used; 1: images only.")
    max_pixels: int | None = Field(None, ge=1, description="Most pixels (height x width) of the buckets used.")

    def takes(self, bucket: Bucket) -> bool:
        """True if this stage uses the samples of a bucket."""
        return (
            self.min_frames <= bucket.frames
            and (self.max_frames is None or bucket.frames <= self.max_frames)
            and (self.max_pixels is None or bucket.height * bucket.width <= self.max_pixels)
        )
