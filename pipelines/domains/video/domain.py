"""The video task: latents and captions from a cache, a diffusion transformer, a flow or ddpm objective.

Legend: B samples of a micro-batch, C channels, T h w latent, L caption tokens, D text width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic_core import to_jsonable_python
from torch import Tensor, nn

from mmspeed.compute.sparse.module import clustered_layers
from mmspeed.config import Config
from mmspeed.config.schema import ModelConfig, PublishedModelConfig
from mmspeed.data import Batching, BatchSampler, DatasetCache, Loader, Sample
from mmspeed.data.loading.collate import VideoCollate
from mmspeed.data.loading.conditioning_mask import check_conditioning
from mmspeed.data.loading.first_epoch import OnlineEncoder
from mmspeed.data.loading.frame_masks import FRAME_MASKS, FrameMask
from mmspeed.data.sampling.batch_sizes import (
    COUNTED_TEXT_TOKENS,
    MEASURED_NAME,
    SampleCosts,
    make_batching,
    make_stages,
    sample_costs,
)
from mmspeed.device import parse_dtype, without_waiting
from mmspeed.errors import UserError
from mmspeed.log import get_logger
from mmspeed.mesh import patient_group
from mmspeed.models.codecs.vae import codec_geometry
from mmspeed.models.diffusers.plans import declare_known_plan
from mmspeed.models.diffusers.repository import Repository
from mmspeed.models.families.complete import completed, objective_warnings
from mmspeed.models.sections import call_of, opened_of, own_arguments, repository_of, size_warnings, with_weights
from mmspeed.models.text.encoders import caption_limit, text_width
from mmspeed.parallel import unwrap
from mmspeed.pipelines.diffusion.conditioning_frames import (
    check_modes,
    check_prompts,
    check_roles,
    counted_frames,
    held,
)
from mmspeed.pipelines.diffusion.experts import EXPERTS, Expert, experts_of, objective_of_expert
from mmspeed.pipelines.diffusion.objective import Objective, make_objective
from mmspeed.pipelines.diffusion.predictor import (
    FamilyPredictor,
    Predictor,
    conditions_of,
    make_predictor,
    prepare_training,
)
from mmspeed.pipelines.diffusion.schedulers import family_sampler
from mmspeed.pipelines.domains.base import DomainDefaults, largest_batch
from mmspeed.pipelines.domains.open_cache import open_cache
from mmspeed.pipelines.domains.video.data import VideoData
from mmspeed.pipelines.domains.video.held_out_loss import VideoValidation
from mmspeed.pipelines.domains.video.small import small_sora
from mmspeed.pipelines.domains.video.small_published import PublishedModel, small_published
from mmspeed.pipelines.domains.video.start import other_shape
from mmspeed.pipelines.domains.video.synthetic import EncoderShapes, synthetic_batch
from mmspeed.pipelines.domains.video.unused import freeze, freeze_unused, unused_lines
from mmspeed.pipelines.domains.video.values import VideoValues
from mmspeed.pipelines.run.measured import load_measured, setting_of
from mmspeed.protocols import (
    Batch,
    BlockWork,
    Data,
    Divisors,
    Given,
    Inputs,
    LearningPart,
    MicroBatchSize,
    ModelCall,
    Models,
    RunPlace,
    ShapeClass,
    SmallRun,
    StepData,
    StepUsage,
    Term,
    Validation,
    Work,
)
from mmspeed.protocols.model import HasHeads
from mmspeed.shapes import Bucket, Strides, as_bucket

log = get_logger("train")

ZERO_LOSS = 2.0  # of a prediction of zeros for noise minus data of variance 1; of other targets it is about half

# (section, latent channels, text width, device)
BuildModel = Callable[[ModelConfig | PublishedModelConfig, int, int, str], nn.Module]


class VideoDomain(DomainDefaults):
    """The task of training diffusion transformers on cached latents and captions.

    With a `maker` (`mmspeed.preprocess.OnlineBuilder`) an incomplete cache is completed during the first epoch. `build` makes the model of
    a config section; by default SoraDiT, or the published class of the section's repository. It may return a published class of diffusers,
    with its weights: see `PublishedVideoDomain`. `call`: the call of such a class's forward; None: found by its name or repository.
    `opened`: the section's repository, where it is open already.
    """

    name = "video"
    gives = ("errors", "prediction")

    def __init__(
        self,
        config: Config,
        maker: OnlineEncoder | None = None,
        build: BuildModel | None = None,
        call: ModelCall | None = None,
        opened: Repository | None = None,
    ) -> None:
        opened = opened_of(config.model) if opened is None else opened
        self._objective_warnings = objective_warnings(config, opened)
        config = completed(config, opened)
        self.config, self.maker, self._build = config, maker, build or partial(with_weights, opened=opened)
        self._call = call_of(config.model, opened) if call is None and build is None else call
        self._opened, self.weighting = opened, config.weighting
        family = family_sampler(config, opened)
        self.objective: Objective = make_objective(config.objective, family)
        self.experts = experts_of(config)
        self._of_part: dict[str, Objective] = {}  # of experts, by name
        if self.experts is not None:
            self._of_part = {
                each: make_objective(objective_of_expert(config.objective, each), family) for each in EXPERTS
            }
        self.frame_mask: FrameMask | None = FRAME_MASKS[config.train.loss_frames]
        self.conditioning = config.conditioning if config.conditioning.gives_frames else None
        self._inputs: EncoderShapes | None = None
        self._cache: DatasetCache | None = None
        self.whole = True
        self.group: dist.ProcessGroup | None = None
        self._predictor: Predictor | None = None
        self._unused: list[str] | None = None  # weights that training never reaches
        self._spare: nn.Module | None = None  # a model with weights, built for its sizes, that `build` will return

    # -- opening --------------------------------------------------------------------------------------------------------

    def open(self, place: RunPlace) -> None:
        """Open the config's cache. Raises UserError when it cannot be used and there is no maker."""
        self.group = patient_group() if self.maker is not None else None
        self._cache, self.whole = open_cache(self.config, self.maker, place, self.group)
        encoders = self._cache.info["encoders"]
        self.use(
            EncoderShapes(encoders["vae"]["channels"], Strides(*encoders["vae"]["strides"]), encoders["text"]["width"])
        )

    def open_without_data(self) -> None:
        """Take sizes from the config's codec and text encoder. Raises UserError where they are not available."""
        if self._inputs is None:
            self.use(EncoderShapes(*codec_geometry(self.config.vae), text_width(self.config.text)))

    def use(self, inputs: EncoderShapes) -> VideoDomain:
        """Use these sizes; returns the task."""
        self._inputs = inputs
        return self

    def with_config(self, config: Config) -> VideoDomain:
        """The task of another config over the same data and sizes."""
        other = VideoDomain(config, self.maker, self._build, self._call, self._opened)
        other._inputs, other._cache, other.whole, other.group = self._inputs, self._cache, self.whole, self.group
        other._unused = self._unused
        return other

    @property
    def sizes(self) -> EncoderShapes:
        """Sizes of latents and captions."""
        if self._inputs is None:
            raise RuntimeError("the task has no sizes yet: call open or open_without_data first")
        return self._inputs

    @property
    def cache(self) -> DatasetCache:
        """The opened cache."""
        if self._cache is None:
            raise RuntimeError("this task was opened without data")
        return self._cache

    # -- models ---------------------------------------------------------------------------------------------------------

    def build(self) -> dict[str, nn.Module]:
        """The model, under the role "model"; of two experts that of low noise under the name of its folder.

        Raises UserError for one that is no diffusion model, or of another objective or sizes, and for experts of unlike settings.
        """
        model, predictor = self._make()
        if self.experts is None:
            return {"model": model}
        low, other = self._make(self._section_of_low())
        assert isinstance(predictor, FamilyPredictor) and isinstance(other, FamilyPredictor)
        if own_arguments(other.config) != own_arguments(predictor.config):
            raise UserError(
                f"model.second_subfolder: {self.experts.roles['low']} has other settings than its fellow expert"
            )
        return {"model": model, self.experts.roles["low"]: low}

    def _section_of_low(self) -> PublishedModelConfig:
        """The section of the expert of low noise alone."""
        section = self.config.model
        assert isinstance(section, PublishedModelConfig)
        return section.model_copy(update={"subfolder": section.second_subfolder, "second_subfolder": None})

    def outlines(self) -> dict[str, nn.Module]:
        """The model, under the role "model", without data: of our own with sizes of captions and latents that may be others."""
        model, self._spare = self._spare, None
        if model is None:
            model = self._build(self.config.model, 1, 1, "meta")
        declare_known_plan(model)
        if not any(
            parameter.is_meta for parameter in model.parameters()
        ):  # it came with its weights, which are read once
            self._spare = model
        if self.experts is None:
            return {"model": model}
        low = self._build(self._section_of_low(), 1, 1, "meta")
        declare_known_plan(low)
        return {"model": model, self.experts.roles["low"]: low}

    def _make(self, section: PublishedModelConfig | None = None) -> tuple[nn.Module, Predictor]:
        """The model of a section, None: of the config's, ready to train, and its predictor."""
        model: nn.Module | None = None
        if section is None:
            model, self._spare = self._spare, None
        if model is None:
            model = self._build(section or self.config.model, self.sizes.channels, self.sizes.text_width, "meta")
        sizes = self.sizes.channels, self.sizes.text_width
        predictor = make_predictor(model, self.config.objective, *sizes, self._call)
        check_modes(self.config.conditioning, predictor.conditioning.modes, type(model).__name__)
        check_prompts(self.config.validate_.prompts, predictor.conditioning)
        check_roles(self.config.data.roles, predictor.conditioning, type(model).__name__)
        if isinstance(predictor, FamilyPredictor) and not predictor.seeded:
            prepare_training(model)
            if self._unused is None:
                self._unused = freeze_unused(model, predictor.config, predictor.call)
            freeze(model, self._unused)
            self._predictor = predictor  # it holds no model
        return model, predictor

    @property
    def predictor(self) -> Predictor:
        """The predictor of the task's model, which also counts its work; it holds no model that computes."""
        if self._predictor is None:
            model, self._predictor = self._make()
            if isinstance(self._predictor, FamilyPredictor) and not self._predictor.seeded:
                self._spare = model
        return self._predictor

    def parts(self) -> Sequence[LearningPart]:
        """The model; or each of two experts, at the steps that are drawn for it."""
        if self.experts is None:
            return (LearningPart(baseline=ZERO_LOSS),)
        return tuple(
            LearningPart(role, expert, partial(self._is_drawn, expert), rests=True, baseline=ZERO_LOSS)
            for expert, role in self.experts.roles.items()
        )

    def _is_drawn(self, expert: Expert, step: int) -> bool:
        assert self.experts is not None
        return self.experts.drawn(self.config.seed, step) == expert

    def inputs(
        self, model: nn.Module, batch: Batch, part: LearningPart, entry: str | None = None, given: Given | None = None
    ) -> Inputs:
        """The noisy latents at the time that was drawn at reading: of an expert in its range. As `mmspeed.protocols.Domain.inputs`.

        A batch with a tensor `loss_mask` (B, T) counts its latent frames by it; frames in `conditioning_mask` (B, T) carry no noise
        and do not count.
        """
        batch = batch if entry is None else batch.entry(entry)
        latents_BCThw, how = batch["latents"], self.predictor.conditioning.how
        device, objective = latents_BCThw.device, self._objective(part, batch)
        if given is None:
            t_B = objective.time_from_quantile(batch["quantiles"]).float()  # computed on the CPU
            x_BCThw, target_BCThw = objective.training_pair(latents_BCThw, batch["noise"], t_B)
            given = Given(x_BCThw, t_B, target_BCThw)
        x_BCThw, t_B, target = given
        tensors = {"x": x_BCThw, "time": t_B}
        if target is not None:
            tensors |= {"target": target, "weight": without_waiting(objective.weight(t_B), device)}
        conditions = conditions_of(batch, None if self._inputs is None else self._inputs.strides)
        if conditions.conditioning_mask is not None and how == "replace":
            x_BCThw = held(x_BCThw, latents_BCThw, conditions.conditioning_mask)
        mask_BT = counted_frames(batch, how)
        if mask_BT is not None:
            tensors["mask"] = mask_BT
        asked = self.predictor.arguments(model, x_BCThw, without_waiting(t_B, device), conditions)
        return replace(asked, tensors=tensors | {"x": x_BCThw}, part=part)

    def values(self, output: Any, inputs: Inputs, batch: Batch) -> VideoValues:
        """The values of each clip."""
        prediction_BCThw = self.predictor.prediction(output, inputs.tensors["x"])
        objective = partial(self._objective, inputs.part, batch)
        return VideoValues(prediction_BCThw, inputs.tensors, batch, self.term, objective)

    def _objective(self, part: LearningPart, batch: Batch) -> Objective:
        """The objective of a part for the size of a batch's latents."""
        frames, height, width = batch["latents"].shape[2:]
        return self._of_part.get(part.name, self.objective).sized(
            as_bucket(batch.shape), self.predictor.tokens((frames, height, width))
        )

    def term(self, loss_B: Tensor, batch: Batch, trains: bool = True) -> Term:
        """The term of the losses of a batch's samples (B,), in which a sample counts as `objective.weighting` says."""
        if self.weighting == "token":
            return Term(loss_B, batch.weights_I * self.tokens(batch.shape), "tokens", trains)
        return Term(loss_B, batch.weights_I, trains=trains)

    def prepare(self, models: Models, place: RunPlace) -> None:
        """Try out the kernel of sparse attention. Raises UserError where the kernel does not support this device."""
        model, dtype = unwrap(models["model"]), parse_dtype(self.config.device.dtype)
        if isinstance(model, HasHeads):
            for layer in list(clustered_layers(model).values())[:1]:
                layer.try_out(place.device.torch_device, dtype, model.head_width)

    def notes(self) -> tuple[list[str], list[str]]:
        """Lines and warnings: of sparse attention, of weights that stay frozen, of an objective and sizes unlike a published model's."""
        latents = {bucket: self.latent(bucket) for bucket in sorted(self.cache.samples.buckets())}
        lines, warnings = self.predictor.notes(latents, self.config)
        size = size_warnings(self.config.model, sorted(latents))
        return [*unused_lines(self._unused or []), *lines], [*self._objective_warnings, *size, *warnings]

    def compare_start(self, start: str) -> list[str]:
        """The differences between the model of `start` (a run or a checkpoint) and this task's that the weights do not show."""
        return other_shape(start, self.config.model)

    # -- data -----------------------------------------------------------------------------------------------------------

    def data(self, place: RunPlace) -> VideoData:
        """The order of the run's steps, and this rank's share of them."""
        config, cache = self.config, self.cache
        batching = self.batching(place, tell=True)
        sampler = BatchSampler(
            cache.split("train"), batching, seed=config.seed, stages=make_stages(config.data, config.curriculum)
        )
        loader = Loader(
            sampler,
            rank=place.number,
            world=place.dealt,
            prefetch=config.train.prefetch,
            workers=config.train.loader_workers,
            device=place.device,
            collate=VideoCollate(
                cache,
                config.seed,
                config.train.caption_dropout,
                self.predictor.timed,
                self.frame_mask,
                self.conditioning,
                self.predictor.conditioning,
            ),
        )
        return VideoData(self, sampler, loader)

    def batching(self, place: RunPlace, tell: bool = False) -> Batching:
        """The samples of each bucket in a step: for the buckets of the cache's training samples, or of the config without a cache."""
        config, measured = self.config, None
        batching = config.batching
        if (
            batching.by == "time" and self._cache is not None
        ):  # by the results of `mmspeed bench buckets` in the run's folder
            setting = setting_of(config, self.setting(), place)
            measured, message = load_measured(config.run_dir / MEASURED_NAME, setting)
            if message and tell and place.rank == 0:
                log.warning(message)
        elif batching.by == "time":  # no measurements without a cache
            batching = batching.model_copy(update={"by": "tokens", "budget": None})
        return make_batching(
            batching, config.train, self.buckets(), self.costs, place.dealt, config.parallel, measured=measured
        )

    def buckets(self) -> list[Bucket]:
        """The buckets of the training samples; without a cache those of the config, in their order."""
        if self._cache is not None:
            return sorted(as_bucket(bucket) for bucket in self._cache.split("train").buckets())
        return list(self.config.buckets)

    def shapes(self) -> Sequence[ShapeClass]:
        """The config's buckets. Raises UserError for one that fits neither codec nor model."""
        for bucket in self.config.buckets:
            self.latent(bucket)
        return self.config.buckets

    def latent(self, shape: ShapeClass) -> tuple[int, int, int]:
        """The latent (T, h, w) of a bucket. Raises UserError for one that fits neither codec nor model."""
        bucket = as_bucket(shape)
        try:
            latent = self.sizes.strides.latent(bucket)
        except ValueError as error:
            raise UserError(f"bucket {bucket} does not fit the codec: {error}") from None
        try:
            self.sizes.strides.tokens(bucket, self.predictor.tokens)
        except ValueError as error:
            raise UserError(f"bucket {bucket} does not fit the model: {error}") from None
        check_conditioning(self.config.conditioning, bucket, self.sizes.strides)
        if bucket.is_image and "none" not in self.predictor.conditioning.modes:
            raise UserError(f"bucket {bucket} is of images, and the model is always given a video's first frame")
        return latent

    def synthetic_batch(self, shape: ShapeClass, items: int, place: RunPlace, tokens: int | None = None) -> Batch:
        """A batch of random latents with captions of half to all of `tokens` (None: the usual number), on the device."""
        length = min(COUNTED_TEXT_TOKENS if tokens is None else tokens, self.caption_limit)
        batch = synthetic_batch(
            self.sizes,
            self.predictor,
            as_bucket(shape),
            self.latent(shape),
            items,
            length,
            self.config.seed,
            self.conditioning is not None,
        )
        return batch.to(place.device.torch_device, torch.float32)

    @cached_property
    def caption_limit(self) -> int:
        """Tokens of the longest caption of the text encoder."""
        return caption_limit(self.config.text)

    def longest_text(self) -> int | None:
        """Tokens of the longest caption of the text encoder."""
        return self.caption_limit

    def synthetic_divisors(self, batch: Batch, batches: int) -> Divisors:
        """The number of samples, and their tokens."""
        samples = batch.size * batches
        return {"samples": float(samples), "tokens": float(samples * self.tokens(batch.shape))}

    def largest_micro_batch(self, place: RunPlace) -> MicroBatchSize:
        """The micro-batch with the most tokens, and its bucket."""
        return largest_batch(self.batching(place), self.buckets(), self.tokens, place.groups)

    # -- work -----------------------------------------------------------------------------------------------------------

    @cached_property
    def costs(self) -> SampleCosts:
        """Tokens and FLOPs of a sample of each bucket."""
        return sample_costs(self.predictor, self.sizes.strides, self.caption_limit)

    def tokens(self, shape: ShapeClass) -> int:
        """Tokens of a sample."""
        return self.costs.tokens(shape)

    def cost(self, shape: ShapeClass) -> float:
        """FLOPs of forward and backward of a sample."""
        return self.costs.flops(shape)

    def work(self, shape: ShapeClass, text_tokens: int | None = None) -> Work:
        """Work of a sample's forward pass, as if all attention were dense."""
        latent = self.sizes.strides.latent(as_bucket(shape))
        length = min(COUNTED_TEXT_TOKENS, self.caption_limit) if text_tokens is None else text_tokens
        return self.predictor.work(latent, length)

    def block_work(self) -> BlockWork | None:
        """Work of each block for the config's largest bucket; what is around blocks is little."""
        largest = max(self.config.buckets, key=self.tokens)
        length = min(COUNTED_TEXT_TOKENS, self.caption_limit)
        predictor, latent = self.predictor, self.sizes.strides.latent(largest)
        return predictor.block_work(latent, length) if isinstance(predictor, FamilyPredictor) else None

    def usage(self, step: StepData) -> StepUsage:
        """The usage of a step. Captions count as the longest of this rank."""
        length = step.batches.extents.get("text_mask", (0, 0))[1]
        forward = Work()
        for shape, count in step.counts.items():
            forward = forward + self.work(shape, length) * count
        tokens = sum(count * self.tokens(shape) for shape, count in step.counts.items())
        return StepUsage(sum(step.counts.values()), tokens, forward, self.config.adapter is not None)

    # -- looking at a run -----------------------------------------------------------------------------------------------

    def describe(self, step: StepData) -> dict[str, Any]:
        """Samples and buckets of a step."""
        return {
            "samples": sum(step.counts.values()),
            "bucket": "+".join(str(bucket) for bucket in sorted(map(as_bucket, step.counts))),
        }

    @cached_property
    def held_out(self) -> list[Sample]:
        """The samples that validation reads."""
        return [sample for sample in self.cache.split("val")[: self.config.validate_.samples] if not sample.lost]

    def validation(self, models: Models, data: Data, place: RunPlace) -> Validation | None:
        """Held-out loss and sampled videos; None where neither is requested."""
        present = data.present if isinstance(data, VideoData) else list[Sample]
        held_out, predictor = self.held_out, self.predictor
        validation = VideoValidation(
            self.config,
            self.cache,
            held_out,
            predictor,
            self.objective,
            present,
            place,
            self.frame_mask,
            self.conditioning,
            self.experts,
        )
        return validation or None

    def info(self) -> dict[str, Any]:
        """Sizes and fingerprints of the encoders."""
        encoders = self.cache.info["encoders"]
        return {
            "latent_channels": encoders["vae"]["channels"],
            "strides": encoders["vae"]["strides"],
            "text_width": encoders["text"]["width"],
            "encoders": encoders,
        }

    def files(self) -> Mapping[str, Path]:
        """The weights of a codec that was fitted here."""
        weights = self.config.codec_weights
        return {} if weights is None else {"codec.safetensors": weights}

    def setting(self) -> dict[str, Any]:
        """The model's sizes and the codec's strides."""
        strides, predictor = self.sizes.strides, self.predictor
        sizes = self.config.model.model_dump(mode="json")
        if isinstance(predictor, FamilyPredictor):
            sizes = own_arguments(predictor.config)
            sizes |= {} if predictor.seeded else {"class": predictor.name}
        named = {f"model.{name}": to_jsonable_python(value) for name, value in sizes.items()}
        return {**named, "vae.strides": [strides.temporal, strides.spatial]}

    def small(self, folder: Path) -> SmallRun:
        """A small run of the same class of model on a synthetic cache, for comparing layouts."""
        section = self.config.model
        if isinstance(section, ModelConfig):
            return small_sora(self.config, folder)
        repository = repository_of(section, self._opened)
        return small_published(self.config, PublishedModel.of_repository(repository, self._call), folder)
