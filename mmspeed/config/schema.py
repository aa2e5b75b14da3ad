"""The configuration of a run: one tree of typed fields, each with a sentence and its unit.

`docs/config.md` is generated from these fields (`python -m mmspeed.config.docs`), and unknown keys are errors (load.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from mmspeed.errors import UserError
from mmspeed.shapes import Bucket

from .conditioning import ConditioningConfig
from .inputs import (
    BucketConfig,
    DataConfig,
    DiffusersVaeConfig,
    FamilyTextConfig,
    LinearVaeConfig,
    MiniLmTextConfig,
    PreprocessConfig,
    ScenesConfig,
    Section,
    SourceConfig,
    TextConfig,
    TransformersTextConfig,
    VaeConfig,
)
from .memory import MemoryConfig, refused
from .parallel import ParallelConfig
from .places import absolute_places, base_name, is_url, mirror_folder
from .published import FamilyObjectiveConfig, PublishedModelConfig, with_repository
from .shift import ShiftConfig, checked_range, checked_shift
from .sparse import SparseConfig, planner_from_scratch
from .training import BatchingConfig, StageConfig, TrainConfig, Weighting, WeightingSection

__all__ = [
    "BatchingConfig",
    "Bucket",
    "BucketConfig",
    "CheckpointConfig",
    "ConditioningConfig",
    "Config",
    "DataConfig",
    "DdpmConfig",
    "DeviceConfig",
    "DiffusersVaeConfig",
    "FamilyObjectiveConfig",
    "FamilyTextConfig",
    "FlowConfig",
    "LinearVaeConfig",
    "MemoryConfig",
    "MiniLmTextConfig",
    "ModelConfig",
    "ObjectiveConfig",
    "ObjectiveSection",
    "ParallelConfig",
    "PreprocessConfig",
    "PublishedModelConfig",
    "RunConfig",
    "SampleConfig",
    "ScenesConfig",
    "Section",
    "ShiftConfig",
    "SourceConfig",
    "SparseConfig",
    "StageConfig",
    "TextConfig",
    "TrackingConfig",
    "TrainConfig",
    "TransformersTextConfig",
    "VaeConfig",
    "ValidateConfig",
]


# Keys of data, and of its sources, that older caches do not record.
_LATER_KEYS = (
    *("background", "caption_prefix", "caption_suffix", "default_caption", "max_repeated", "missing_caption"),
    *("mirror", "mirror_words", "untagged", "min", "max", "scenes"),
)
_LATER_SOURCE_KEYS = ("caption_prefix", "caption_suffix")


class ModelConfig(Section):
    """SoraDiT, trained from its beginning. `size` names a preset; every other field that is set overrides it."""

    kind: Literal["sora"] = Field("sora", description="SoraDiT, our own diffusion transformer.")
    size: str = Field("tiny", description="Named size: see `mmspeed.models.SIZES`.")
    arrangement: Literal["factorised", "full"] = Field(
        "factorised",
        description="`factorised`: spatial and temporal blocks in turn. `full`: every block attends over all tokens.",
    )
    width: int | None = Field(None, ge=16, description="Model width E.")
    depth: int | None = Field(None, ge=1, description="Number of blocks.")
    heads: int | None = Field(None, ge=1, description="Attention heads; width / heads must be even and at least 12.")
    mlp_ratio: float | None = Field(None, gt=0, description="Hidden width of the MLP as a multiple of the model width.")
    patch: tuple[int, int, int] | None = Field(None, description="Latent frames, rows and columns that make one token.")
    adaln_rank: int | None = Field(None, ge=1, description="Rank of each block's own part of the timestep modulation.")
    sparse: SparseConfig | None = Field(None, description="Sparse self-attention; null: all attention is dense.")


class ObjectiveSection(WeightingSection):
    """Base of the sections of objectives of diffusion."""

    samplers: ClassVar[tuple[str, ...]]  # names of `sample.sampler` that fit; `auto` takes the first

    weighting: Weighting = Field(
        "sample",
        description="What counts alike in the gradients of an epoch. `sample`: samples, whatever their buckets and whatever `batching` is; `token`: tokens of the model, so that a sample counts by its length; `step`: steps, so that a sample's share depends on `batching` (and, without `slots`, on the number of devices). Runs from before this key have `step`.",
    )
    range: tuple[float, float] | None = Field(
        None,
        description="Lowest and highest model time that is trained, from 0 (data) to 1 (noise): the distribution of times is cut there. Null: all.",
    )
    guidance: float | None = Field(
        None,
        ge=0,
        description="Scale that a guidance-distilled model is given in training; null: its pipeline's own. Other models take none.",
    )

    boundary: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Model time from which on a step trains the expert in `model.subfolder`; below it that in `model.second_subfolder`. `experts: both` of a published model's own objective sets it. Null: one model for all times.",
    )
    high_share: float = Field(
        0.5, gt=0, lt=1, description="With `boundary`, the share of steps that train the expert of times above it."
    )

    _range = field_validator("range")(checked_range)

    @model_validator(mode="after")
    def _experts(self) -> ObjectiveSection:
        if self.boundary is not None and self.range is not None:
            raise ValueError("boundary divides all times between two experts: leave range out")
        return self


class FlowConfig(ObjectiveSection):
    """Rectified flow: straight lines from data to noise, velocity prediction."""

    samplers: ClassVar[tuple[str, ...]] = ("euler", "heun", "unipc", "dpm++")

    kind: Literal["flow"] = Field(description="Rectified flow.")
    timesteps: Literal["uniform", "logit_normal"] = Field(
        "logit_normal", description="Distribution that training times are drawn from."
    )
    logit_mean: float = Field(0.0, description="Mean of the logit-normal distribution.")
    logit_std: float = Field(1.0, gt=0, description="Standard deviation of the logit-normal distribution.")
    shift: float | Literal["auto"] | dict[str, float] = Field(
        1.0,
        description="Timestep shift s > 0: t' = s t / (1 + (s - 1) t), in training and in sampling. Above 1, more timesteps are near noise, as large videos need. `auto`: by the number of tokens of the model (`auto_shift`). `{13x96x160: 3.0, ...}`: a number for each bucket.",
    )
    auto_shift: ShiftConfig | None = Field(
        None,
        description="Formula of `shift: auto`; null: the square root of the number of tokens of the model, 1 at 256.",
    )

    _shift = field_validator("shift", mode="before")(checked_shift)

    @model_validator(mode="after")
    def _auto(self) -> FlowConfig:
        if self.shift != "auto" and self.auto_shift is not None:
            raise ValueError("auto_shift goes with shift: auto")
        return self

    def shift_of(self, bucket: Bucket, tokens: int) -> float:
        """The shift of samples of a bucket, of `tokens` tokens each. Raises UserError for a bucket without one."""
        if isinstance(self.shift, float):
            return self.shift
        if isinstance(self.shift, dict):
            if str(bucket) not in self.shift:
                raise UserError(
                    f"objective.shift has no number for {bucket}: add it, use one of {', '.join(self.shift)}, or shift: auto"
                )
            return self.shift[str(bucket)]
        try:
            return (self.auto_shift or ShiftConfig()).shift(tokens)
        except ValueError as error:
            raise UserError(f"objective.shift: auto has no shift for {bucket}: {error}") from None


class DdpmConfig(ObjectiveSection):
    """Discrete diffusion with epsilon- or v-prediction."""

    samplers: ClassVar[tuple[str, ...]] = ("ddim", "unipc", "dpm++")

    kind: Literal["ddpm"] = Field(description="Denoising diffusion.")
    steps: int = Field(1000, ge=2, description="Number of training timesteps.")
    schedule: Literal["linear", "scaled_linear", "cosine"] = Field(
        "scaled_linear", description="Noise schedule, as diffusers names it (`cosine` is its squaredcos_cap_v2)."
    )
    beta_start: float = Field(0.00085, gt=0, lt=1, description="First beta of the linear schedules.")
    beta_end: float = Field(0.012, gt=0, lt=1, description="Last beta of the linear schedules.")
    prediction: Literal["v", "epsilon"] = Field("v", description="Quantity that the model predicts.")
    zero_terminal_snr: bool = Field(
        True, description="Rescale the schedule so that the last timestep is pure noise (needs v-prediction)."
    )
    snr_shift_scale: float = Field(
        1.0,
        gt=0,
        description="Divisor of the signal-to-noise ratio of every timestep, before it is rescaled: above 1 there is more noise. CogVideoX-2b has 3.",
    )
    min_snr_gamma: float | None = Field(
        None,
        gt=0,
        description="Cap of the signal-to-noise weight of the loss (min-SNR, often 5); null: no weighting.",
    )
    allow_zero_weight: bool = Field(
        False,
        description="Take `min_snr_gamma` with `zero_terminal_snr` and v-prediction although its weight at pure noise is 0, so that the first step of sampling is not trained.",
    )

    @model_validator(mode="after")
    def _terminal(self) -> DdpmConfig:
        if self.zero_terminal_snr and self.prediction == "epsilon":
            raise ValueError(
                "zero_terminal_snr needs prediction: v (epsilon carries no information about the data at pure noise); set zero_terminal_snr: false"
            )
        return self

    @model_validator(mode="after")
    def _noise_is_trained(self) -> DdpmConfig:
        untrained = self.min_snr_gamma is not None and self.zero_terminal_snr and self.prediction == "v"
        if untrained and not self.allow_zero_weight:
            raise ValueError(
                "min_snr_gamma with zero_terminal_snr and prediction: v has the weight 0 at pure noise, where sampling begins; "
                "leave min_snr_gamma out, set zero_terminal_snr: false, or force it by allow_zero_weight: true"
            )
        if self.allow_zero_weight and not untrained:
            raise ValueError("allow_zero_weight goes with min_snr_gamma, zero_terminal_snr and prediction: v")
        return self


ObjectiveConfig = Annotated[FlowConfig | DdpmConfig | FamilyObjectiveConfig, Field(discriminator="kind")]
AnyModelConfig = Annotated[ModelConfig | PublishedModelConfig, Field(discriminator="kind")]


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


class ValidateConfig(Section):
    """Held-out loss and samples during training, from the EMA weights."""

    every: int = Field(500, ge=1, description="Steps between two validations. The end of a run is always validated.")
    report: bool = Field(True, description="Write `report.html` at each validation.")
    samples: int = Field(16, ge=0, description="Held-out samples that the loss is computed on; 0: no held-out loss.")
    quantiles: int = Field(
        4,
        ge=1,
        le=100,
        description="Fixed timesteps a sample is evaluated at: the middles of this many equal parts of the training distribution.",
    )
    prompts: tuple[str, ...] = Field(
        (), description="Prompts to generate samples for during training, such as captions of videos."
    )
    seed: int = Field(0, description="Seed of the samples.")


class SampleConfig(Section):
    """Defaults of `mmspeed sample` and of the videos sampled during training."""

    steps: int | None = Field(
        None, ge=1, description="Steps of the sampler; null: 30, and for a published model its pipeline's own number."
    )
    guidance: float | None = Field(
        None,
        ge=0,
        description="Classifier-free guidance scale, or the scale that a guidance-distilled model is given; 1: none. Null: 4, and for a published model its pipeline's own.",
    )
    guidance_2: float | None = Field(
        None,
        ge=0,
        description="Guidance scale of the expert of low noise, of a published model with two; null: that of `guidance`. `guidance: 1` means none for both.",
    )
    guidance_rescale: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Share by which a guided prediction gets the spread of the prediction with the caption, against overexposure (Lin et al. 2023, who use 0.7); 0: none.",
    )
    sampler: Literal["auto", "family", "euler", "heun", "ddim", "unipc", "dpm++"] = Field(
        "auto",
        description="`euler` or `heun` for flow, `ddim` for ddpm; `unipc` and `dpm++` (of diffusers) for both; `family`: the scheduler of a published model's repository; `auto`: euler or ddim, and for a published model `family`.",
    )
    negative_prompt: str = Field("", description="Prompt that guidance steers away from.")
    frames: int | None = Field(None, ge=1, description="Frames of the video; null: those of the first video bucket.")
    height: int | None = Field(None, ge=8, description="Height in pixels; null: that of the first video bucket.")
    width: int | None = Field(None, ge=8, description="Width in pixels; null: that of the first video bucket.")


class DeviceConfig(Section):
    """The device that the run computes on."""

    kind: Literal["auto", "cpu", "cuda", "npu", "mps"] = Field(
        "auto",
        description="Kind of device; `auto` takes npu, else cuda, else cpu. `mps` is the GPU of an Apple machine, one of which one process uses.",
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="Number type of forward and backward. Parameters, optimizer and EMA stay in float32."
    )
    peak_tflops: float | None = Field(
        None,
        gt=0,
        description="Peak TFLOP/s of one device that MFU is measured against; null: the data sheet's, or measured.",
    )


class TrackingConfig(Section):
    """The name and contents of a run at its trackers."""

    project: str = Field(
        "mmspeed", min_length=1, description="Project of the run, at trackers that have projects (not TensorBoard)."
    )
    run: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        description="Name of the run at the trackers; null: `name`. A resumed run goes on under its id, which `trackers.json` in its folder holds.",
    )
    videos: bool = Field(True, description="Log the videos sampled during training, with their prompts.")


class RunConfig(Section):
    """The sections that every task shares."""

    # sections that a resumed run may not change, since its checkpoints would change their meaning
    fixed_on_resume: ClassVar[tuple[str, ...]] = ("seed", "task", "objective")
    # (section, key) pairs of those that may change nevertheless
    free_on_resume: ClassVar[tuple[tuple[str, str], ...]] = ()
    # keys that may differ between the processes of a run (`*` for a place in a list)
    machine_local: ClassVar[tuple[str, ...]] = ("train.loader_workers", "train.prefetch")
    # paths whose folders may be mounted elsewhere on each machine: only their last part is compared
    machine_paths: ClassVar[tuple[str, ...]] = ("output", "train.start_from", "checkpoint.local")
    # reading order of the sections; unnamed ones come last
    order: ClassVar[tuple[str, ...]] = ()

    task: str = Field("video", description="Name of the task.")
    name: str = Field(
        "run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="Name of the run; its folder is `output`/`name`."
    )
    output: str = Field(
        "runs", description="Folder that run folders are created in. Relative paths are taken from the config file."
    )
    seed: int = Field(0, ge=0, description="Seed that every random draw is derived from.")
    objective: WeightingSection = Field(default_factory=WeightingSection, description="The training objective.")
    train: TrainConfig = Field(default_factory=TrainConfig, description="The loop.")
    batching: BatchingConfig = Field(
        default_factory=BatchingConfig,
        description="The samples of each bucket in a step, and the buckets that share one.",
    )
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig, description="Saving of a run's state.")
    validate_: ValidateConfig = Field(
        default_factory=ValidateConfig, alias="validate", description="Held-out loss and samples during training."
    )
    parallel: ParallelConfig = Field(
        default_factory=ParallelConfig, description="Distribution of the model over devices."
    )
    memory: MemoryConfig = Field(
        default_factory=MemoryConfig,
        description="Tensors that training keeps in device memory, and storage of the rest.",
    )
    device: DeviceConfig = Field(default_factory=DeviceConfig, description="The device that the run computes on.")
    trackers: tuple[Literal["tensorboard", "wandb", "swanlab", "trackio"], ...] = Field(
        (), description="Trackers beside `metrics.jsonl`, through accelerate; each needs its package."
    )
    tracking: TrackingConfig = Field(
        default_factory=TrackingConfig, description="Project, name and contents of the run at its trackers."
    )

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False, populate_by_name=True
    )

    @model_validator(mode="after")
    def _batching_fits(self) -> RunConfig:
        batching = self.batching
        if batching.by == "samples":
            conflicts = [
                name
                for name, is_set in (
                    ("budget", batching.budget),
                    ("slots", batching.slots),
                    ("max_batch", batching.max_batch),
                    ("accumulate", batching.accumulate > 1),
                )
                if is_set
            ]
            if conflicts:
                raise ValueError(
                    f"batching.{conflicts[0]} goes with batching.by: tokens, flops or time, not with samples"
                )
        elif self.train.batch_size is not None:
            raise ValueError(f"train.batch_size goes with batching.by: samples; with {batching.by} leave it out")
        if batching.slots is not None and batching.accumulate > 1:
            raise ValueError("batching.slots and batching.accumulate both set the size of a step: use one of them")
        return self

    @model_validator(mode="after")
    def _memory_fits(self) -> RunConfig:
        train, parallel = self.train, self.parallel
        reason = refused(
            self.memory,
            dtype=self.device.dtype,
            compiles=train.compile,
            clips=train.clip_norm is not None,
            accumulates=train.micro_batch_size is not None or self.batching.accumulate > 1,
            strategy=parallel.strategy,
            tp=parallel.tp,
            averages=train.ema_decay is not None,
            skips=train.skip_non_finite > 0 or train.divergence.action == "skip",
        )
        if reason is not None:
            raise ValueError(f"memory: {reason}")
        return self

    @property
    def weighting(self) -> Weighting:
        """The unit that counts alike in the gradients of an epoch: steps, where a task has an `objective` of another kind."""
        return self.objective.weighting if isinstance(self.objective, WeightingSection) else "step"

    @property
    def run_dir(self) -> Path:
        """Folder of the run."""
        return Path(self.output) / self.name

    def absolute(self, base: Path) -> RunConfig:
        """The config with every relative path taken from `base`."""
        changes: dict[str, Any] = {"output": joined(base, self.output)}
        if self.train.start_from is not None:
            changes["train"] = self.train.model_copy(update={"start_from": joined(base, self.train.start_from)})
        if self.checkpoint.local is not None:
            changes["checkpoint"] = self.checkpoint.model_copy(update={"local": joined(base, self.checkpoint.local)})
        return self.model_copy(update=changes)


def joined(base: Path, path: str) -> str:
    """`path` relative to `base`, with the home folder expanded."""
    return str(base / Path(path).expanduser())


class Config(RunConfig):
    """The config of a run of the video task."""

    fixed_on_resume: ClassVar[tuple[str, ...]] = ("seed", "task", "model", "objective", "vae", "text")
    free_on_resume: ClassVar[tuple[tuple[str, str], ...]] = (("model", "sparse"),)  # no part of the weights
    machine_local: ClassVar[tuple[str, ...]] = (*RunConfig.machine_local, "preprocess.decode_workers")
    machine_paths: ClassVar[tuple[str, ...]] = (
        *RunConfig.machine_paths,
        "data.cache",
        "data.sources.*.path",
        "vae.pretrained",
        "vae.weights",
        "text.pretrained",
        "model.pretrained",
        "model.weights",
    )
    order: ClassVar[tuple[str, ...]] = (
        "task", "name", "output", "seed", "data", "vae", "text", "preprocess", "model", "objective", "conditioning", "train", "batching", "curriculum",
        "checkpoint", "validate", "sample", "parallel", "memory", "device", "trackers", "tracking",
    )  # fmt: skip

    task: Literal["video"] = Field("video", description="Name of the task: training on videos with captions.")
    data: DataConfig = Field(description="The media to train on, and how they are cut into samples.")
    vae: VaeConfig = Field(
        default_factory=lambda: LinearVaeConfig(kind="linear"),
        description="The video codec whose latents are trained on.",
    )
    text: TextConfig = Field(default_factory=lambda: MiniLmTextConfig(kind="minilm"), description="The text encoder.")
    preprocess: PreprocessConfig = Field(default_factory=PreprocessConfig, description="Settings of preprocessing.")
    model: AnyModelConfig = Field(default_factory=ModelConfig, description="The diffusion transformer.")
    objective: ObjectiveConfig = Field(
        default_factory=lambda: FlowConfig(kind="flow"), description="The training objective."
    )
    conditioning: ConditioningConfig = Field(
        default_factory=ConditioningConfig,
        description="Frames that the model is trained to be given, such as the first one of a video from an image.",
    )
    curriculum: tuple[StageConfig, ...] = Field(
        (),
        description="Stages of training one after another, such as images, then short videos, then long ones; empty: one stage of everything.",
    )
    sample: SampleConfig = Field(default_factory=SampleConfig, description="Defaults of sampling.")

    @model_validator(mode="before")
    @classmethod
    def _repository(cls, tree: Any) -> Any:
        """Take codec, text encoders and objective from the model's repository, where the config names no others."""
        return with_repository(tree) if isinstance(tree, dict) else tree

    @model_validator(mode="before")
    @classmethod
    def _planner(cls, tree: Any) -> Any:
        """Write the planner into the config, so that a resumed run keeps it."""
        model, train = (tree.get(name) for name in ("model", "train")) if isinstance(tree, dict) else (None, None)
        if not isinstance(model, dict) or not isinstance(model.get("sparse"), dict):
            return tree
        if isinstance(train, dict) and train.get("start_from") is not None:
            return tree
        return {**tree, "model": {**model, "sparse": planner_from_scratch(model["sparse"])}}

    @field_validator("data")
    @classmethod
    def _distinct_buckets(cls, data: DataConfig) -> DataConfig:
        buckets = [b.bucket() for b in data.buckets]
        repeated = next((b for b in buckets if buckets.count(b) > 1), None)
        if repeated is not None:
            raise ValueError(f"bucket {repeated} is listed twice")
        return data

    @model_validator(mode="after")
    def _stages_fit(self) -> Config:
        for number, stage in enumerate(self.curriculum, start=1):
            if stage.steps is None and number < len(self.curriculum):
                raise ValueError(f"curriculum: stage {number} is not the last, so it needs `steps`")
            if not any(stage.takes(bucket) for bucket in self.buckets):
                raise ValueError(f"curriculum: stage {number} takes none of data.buckets")
            unknown = [name for name in stage.weights or () if name not in self.data.dataset_names]
            if unknown:
                names = ", ".join(self.data.dataset_names)
                raise ValueError(
                    f"curriculum: stage {number} has a weight for {unknown[0]}, which is not a source (known: {names})"
                )
            if stage.weights is not None and not any(stage.weights.values()):
                raise ValueError(f"curriculum: stage {number} gives every source the weight 0")
        total = sum(stage.steps or 0 for stage in self.curriculum)
        if self.curriculum and self.curriculum[-1].steps is not None and total < self.train.steps:
            raise ValueError(
                f"curriculum: the stages are {total} steps, train.steps {self.train.steps}; leave `steps` out of the last stage"
            )
        return self

    @model_validator(mode="after")
    def _degrees_fit(self) -> Config:
        full = not isinstance(self.model, ModelConfig) or self.model.arrangement == "full"
        if self.parallel.dsp > 1 and full:
            named = (
                "model.arrangement: full" if isinstance(self.model, ModelConfig) else f"model.kind: {self.model.kind}"
            )
            raise ValueError(
                f"parallel.dsp {self.parallel.dsp} re-shards tokens between spatial and temporal blocks, and {named} "
                "has none: use parallel.ulysses or parallel.ring"
            )
        return self

    @model_validator(mode="after")
    def _sampler_fits(self) -> Config:
        own = ("family",) if isinstance(self.model, PublishedModelConfig) else ()
        fitting = ("auto", *own, *self.objective.samplers)
        if self.sample.sampler not in fitting:
            raise ValueError(
                f"sample.sampler {self.sample.sampler} does not go with objective {self.objective.kind}: use {' or '.join(fitting)}"
            )
        return self

    @model_validator(mode="after")
    def _shifts_fit(self) -> Config:
        shifts = self.objective.shift if isinstance(self.objective, FlowConfig) else None
        missing = next((b for b in self.buckets if isinstance(shifts, dict) and str(b) not in shifts), None)
        if missing is not None:
            raise ValueError(f"objective.shift has no number for {missing}, which is one of data.buckets")
        return self

    def absolute(self, base: Path) -> Config:
        """The config with every relative path taken from `base`; hub ids and URLs stay as they are."""

        def pretrained(name: str) -> str:
            is_path = name.startswith((".", "~", "/")) or (base / Path(name).expanduser()).exists()
            return joined(base, name) if is_path else name

        data, vae, text, model = self.data, self.vae, self.text, self.model
        places = [absolute_places(base, source.path) for source in data.sources]
        sources = tuple(
            source.model_copy(update={"path": place}) for source, place in zip(data.sources, places, strict=True)
        )
        cache = data.cache if is_url(data.cache) else joined(base, data.cache)
        changes: dict[str, Any] = {"data": data.model_copy(update={"sources": sources, "cache": cache})}
        if isinstance(vae, DiffusersVaeConfig):
            changes["vae"] = vae.model_copy(update={"pretrained": pretrained(vae.pretrained)})
        elif isinstance(vae, LinearVaeConfig) and vae.weights:
            changes["vae"] = vae.model_copy(update={"weights": joined(base, vae.weights)})
        if isinstance(text, TransformersTextConfig | FamilyTextConfig):
            changes["text"] = text.model_copy(update={"pretrained": pretrained(text.pretrained)})
        if isinstance(model, PublishedModelConfig):
            weights = model.weights if model.weights is None else joined(base, model.weights)
            changes["model"] = model.model_copy(update={"pretrained": pretrained(model.pretrained), "weights": weights})
        shared = super().absolute(base)
        changes |= {"output": shared.output, "train": shared.train, "checkpoint": shared.checkpoint}
        return self.model_copy(update=changes)

    @property
    def cache_dir(self) -> Path:
        """Folder of the dataset cache; for a remote one, the local folder that holds its tables once it has been opened."""
        return mirror_folder(self.data.cache) if is_url(self.data.cache) else Path(self.data.cache)

    @property
    def cache_root(self) -> Path | str:
        """The location of the dataset cache, a folder or a URL: the argument of `DatasetCache`."""
        return self.data.cache if is_url(self.data.cache) else Path(self.data.cache)

    def local_cache_dir(self) -> Path:
        """Folder of the dataset cache, to write to. Raises UserError if the location is a URL."""
        if is_url(self.data.cache):
            raise UserError(
                f"data.cache is {self.data.cache}: a cache is built in a local folder; build it there and copy it to the URL"
            )
        return self.cache_dir

    def sample_settings(self) -> dict[str, Any]:
        """The settings that the cache's table of samples depends on.

        Only the last part of a source's path counts: caches and data sets move between machines.
        """
        data = self.data.model_dump(mode="json", exclude={"cache", "local_mb", "repeats", "sources", "temperature"})
        data["sources"] = [
            source.model_dump(mode="json", exclude={"repeats", "weight"})
            | {"path": base_name(source.path), "name": name}
            for source, name in zip(self.data.sources, self.data.dataset_names, strict=True)
        ]
        if self.data.val_fraction > 0:
            data["val_fraction"] = [self.data.val_fraction, self.seed]  # the draw depends on both
        for bucket in data["buckets"]:
            if bucket["keep"] < 1:
                bucket["keep"] = [bucket["keep"], self.seed]  # so does this one
        return data

    @staticmethod
    def recorded_settings(recorded: dict[str, Any]) -> dict[str, Any]:
        """The `sample_settings` that a cache records, with the defaults of keys that came after it."""
        defaults = {name: DataConfig.model_fields[name].default for name in _LATER_KEYS}
        later = {name: list(value) if isinstance(value, tuple) else value for name, value in defaults.items()}
        of_sources = {name: SourceConfig.model_fields[name].default for name in _LATER_SOURCE_KEYS}
        settings = later | recorded
        if "sources" in settings:
            settings["sources"] = [of_sources | source for source in settings["sources"]]
        return settings

    @property
    def codec_weights(self) -> Path | None:
        """The file of the linear codec's weights: the one the config names, else the cache's. None for other codecs."""
        if self.vae.kind != "linear":
            return None
        return (
            Path(self.vae.weights)
            if self.vae.weights
            else self.cache_dir / "codec" / f"linear-{self.vae.channels}.safetensors"
        )

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The buckets, in the order they are listed."""
        return tuple(b.bucket() for b in self.data.buckets)
