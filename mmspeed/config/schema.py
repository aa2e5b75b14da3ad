"""The configuration of a run: one tree of typed fields, each with a sentence and its unit.

`docs/config.md` is generated from these fields (`python -m mmspeed.config.docs`), and unknown keys are errors (load.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from mmspeed.errors import UserError
from mmspeed.shapes import Bucket

from .adapters import AdapterConfig, reason_against
from .conditioning import ConditioningConfig
from .device import DeviceConfig
from .inputs import (
    DataConfig,
    DiffusersVaeConfig,
    FamilyTextConfig,
    LinearVaeConfig,
    MiniLmTextConfig,
    PreprocessConfig,
    Section,
    SourceConfig,
    TextConfig,
    TransformersTextConfig,
    VaeConfig,
)
from .known_models import videos_of
from .memory import MemoryConfig, refused
from .model import AnyModelConfig, ModelConfig
from .objective import DdpmConfig, FlowConfig, ObjectiveConfig, ObjectiveSection
from .observation import SampleConfig, TrackingConfig, ValidateConfig
from .parallel import ParallelConfig
from .places import absolute_places, base_name, is_url, mirror_folder
from .published import FamilyObjectiveConfig, PublishedModelConfig, with_repository
from .shift import ShiftConfig
from .sparse import planner_from_scratch
from .training import (
    BatchingConfig,
    CheckpointConfig,
    MethodConfig,
    StageConfig,
    TrainConfig,
    Weighting,
    WeightingSection,
    check_parts,
)

__all__ = [
    "Bucket",
    "Config",
    "DataConfig",
    "DdpmConfig",
    "DeviceConfig",
    "DiffusersVaeConfig",
    "FamilyObjectiveConfig",
    "FamilyTextConfig",
    "FlowConfig",
    "LinearVaeConfig",
    "MiniLmTextConfig",
    "ModelConfig",
    "ObjectiveConfig",
    "ObjectiveSection",
    "PublishedModelConfig",
    "RunConfig",
    "SampleConfig",
    "ShiftConfig",
    "SourceConfig",
    "TextConfig",
    "TrainConfig",
    "TransformersTextConfig",
    "ValidateConfig",
]


class RunConfig(Section):
    """The sections that every task shares."""

    # sections that a resumed run may not change, since its checkpoints would change their meaning
    fixed_on_resume: ClassVar[tuple[str, ...]] = ("seed", "task", "method", "objective")
    # (section, key) pairs of those that may change nevertheless
    free_on_resume: ClassVar[tuple[tuple[str, str], ...]] = ()
    # keys that may differ between the processes of a run (`*` for a place in a list)
    machine_local: ClassVar[tuple[str, ...]] = ("train.loader_workers", "train.prefetch")
    # paths whose folders may be mounted elsewhere on each machine: only their last part is compared
    machine_paths: ClassVar[tuple[str, ...]] = ("output", "train.start_from", "checkpoint.local")
    # reading order of the sections; unnamed ones come last
    order: ClassVar[tuple[str, ...]] = ()

    unrecorded = ("method",)
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
    method: MethodConfig = Field(
        default_factory=MethodConfig, description="How the models learn; keys beside `kind` are the method's own."
    )
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
            compiles=train.compile is True,
            clips=train.clip_norm is not None,
            accumulates=train.micro_batch_size is not None or self.batching.accumulate > 1,
            strategy=parallel.strategy,
            tp=parallel.tp,
            averages=train.ema_decay is not None,
            skips=train.skip_non_finite > 0 or train.divergence.action == "skip",
        )
        if reason is None and parallel.pp > 1 and self.memory.release_gradients:
            reason = (
                f"release_gradients is for whole models, and parallel.pp {parallel.pp} keeps several micro-batches of a stage: leave "
                "it out"
            )
        if reason is not None:
            raise ValueError(f"memory: {reason}")
        if parallel.weights_wait and train.compile is True:
            raise ValueError(
                f"parallel.schedule {parallel.schedule} computes gradients of weights later than those of inputs, and train.compile makes one "
                f"graph of both: set train.compile: false, or parallel.schedule {parallel.schedule_in_one}"
            )
        if parallel.schedule == "overlap" and not parallel.exchanges:
            raise ValueError(
                "parallel.schedule overlap hides what stages exchange within themselves, and nothing travels there: set parallel.ep (or tp, "
                "ulysses, ring), or parallel.schedule interleaved"
            )
        return self

    @property
    def adapter(self) -> AdapterConfig | None:
        """The adapters that train beside a frozen model; None where all its weights train."""
        return None

    @property
    def host_base(self) -> bool:
        """True where frozen weights of blocks lie in the host's memory."""
        return False

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


def path_or_id(base: Path, name: str) -> str:
    """A path relative to `base`; a hub id as it is."""
    is_path = name.startswith((".", "~", "/")) or (base / Path(name).expanduser()).exists()
    return joined(base, name) if is_path else name


class Config(RunConfig):
    """The config of a run of the video task."""

    fixed_on_resume: ClassVar[tuple[str, ...]] = ("seed", "task", "method", "model", "objective", "vae", "text")
    free_on_resume: ClassVar[tuple[tuple[str, str], ...]] = (
        ("model", "sparse"),  # no part of the weights
        ("model", "base"),  # whose number type its fingerprint tells
    )
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
            if not any(stage.takes(bucket) for bucket in self.buckets):
                raise ValueError(f"curriculum: stage {number} takes none of data.buckets")
        check_parts(self.curriculum, self.data.dataset_names, self.train.steps)
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
    def _base_fits(self) -> Config:
        model = self.model
        if isinstance(model, PublishedModelConfig):
            reason = reason_against(
                model.adapter, model.base, self.device.dtype, self.parallel.strategy, self.parallel.tp
            )
            if reason is not None:
                raise ValueError(reason)
        return self

    @property
    def adapter(self) -> AdapterConfig | None:
        return self.model.adapter if isinstance(self.model, PublishedModelConfig) else None

    @property
    def host_base(self) -> bool:
        return isinstance(self.model, PublishedModelConfig) and self.model.base.place == "host"

    @model_validator(mode="after")
    def _shifts_fit(self) -> Config:
        shifts = self.objective.shift if isinstance(self.objective, FlowConfig) else None
        missing = next((b for b in self.buckets if isinstance(shifts, dict) and str(b) not in shifts), None)
        if missing is not None:
            raise ValueError(f"objective.shift has no number for {missing}, which is one of data.buckets")
        return self

    def absolute(self, base: Path) -> Config:
        """The config with every relative path taken from `base`; hub ids and URLs stay as they are."""
        data, vae, text, model = self.data, self.vae, self.text, self.model
        places = [absolute_places(base, source.path) for source in data.sources]
        sources = tuple(
            source.model_copy(update={"path": place}) for source, place in zip(data.sources, places, strict=True)
        )
        cache = data.cache if is_url(data.cache) else joined(base, data.cache)
        changes: dict[str, Any] = {"data": data.model_copy(update={"sources": sources, "cache": cache})}
        if isinstance(vae, DiffusersVaeConfig):
            changes["vae"] = vae.model_copy(update={"pretrained": path_or_id(base, vae.pretrained)})
        elif isinstance(vae, LinearVaeConfig) and vae.weights:
            changes["vae"] = vae.model_copy(update={"weights": joined(base, vae.weights)})
        if isinstance(text, TransformersTextConfig | FamilyTextConfig):
            changes["text"] = text.model_copy(update={"pretrained": path_or_id(base, text.pretrained)})
        if isinstance(model, PublishedModelConfig):
            weights = model.weights if model.weights is None else joined(base, model.weights)
            place = path_or_id(base, model.pretrained)
            if "/" not in place and not Path(place).is_dir():
                raise UserError(
                    f"model.pretrained: {place} is a short name: write {videos_of(place, 'model.pretrained')[0]}"
                )
            changes["model"] = model.model_copy(update={"pretrained": place, "weights": weights})
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
        unused = {"allow_addresses", "cache", "local_mb", "repeats", "sources", "temperature"}
        data = self.data.model_dump(mode="json", exclude=unused)
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
