"""Videos by a published model's official pipeline of diffusers, with a run's weights or those of an exported repository.

The noise is that of `mmspeed sample`, so with one seed both make the same video; all else is the pipeline's.

Legend: P videos (1), C channels, T h w latent, F frames, H W pixels.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from mmspeed import rng
from mmspeed.config import Bucket, Config
from mmspeed.config.schema import DiffusersVaeConfig, FamilyTextConfig, PublishedModelConfig, SampleConfig
from mmspeed.device import Device, parse_dtype, pick
from mmspeed.errors import UserError
from mmspeed.media.pixel_rules import NEWEST_RULES, PixelRules
from mmspeed.media.reading import first_frame, whole_window
from mmspeed.models.codecs.vae import DiffusersCodec
from mmspeed.models.diffusers.repository import INDEX, Repository, header_of
from mmspeed.models.families import family_of
from mmspeed.models.families.complete import completed, completed_sample
from mmspeed.models.sections import FamilyCounts, repository_of
from mmspeed.models.weights import first_line, quiet, resolve
from mmspeed.pipelines.diffusion.samplers import OnStep
from mmspeed.pipelines.diffusion.schedulers import generators
from mmspeed.pipelines.inference.export import OTHER_FILES, trained_models
from mmspeed.pipelines.inference.media import RATE, Video
from mmspeed.pipelines.inference.prompts import VideoRequest, noise_names
from mmspeed.pipelines.inference.text_to_video import (
    SamplerChoice,
    clean_prompt,
    find_checkpoint,
    present_weights,
    usual_size,
)
from mmspeed.pipelines.run.run_folder import RunFolder

OPTION = "--official"
OWN_SAMPLERS = (None, "auto", "family")  # the repository's own scheduler
NUMBERS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
NO_GUIDANCE = 1.0  # of a pipeline: one prediction alone


@dataclass(frozen=True)
class Defaults:
    """Settings for what a call leaves open. bucket, fps: None for those of the pipeline itself. rules: of the pixels of given files."""

    sample: SampleConfig
    bucket: Bucket | None = None
    fps: float | None = None
    rules: PixelRules = NEWEST_RULES


class OfficialSampler:
    """A function from prompts to videos by the official pipeline of a repository.

    Raises UserError for a pipeline of another family's class.
    """

    def __init__(self, pipeline: Any, repository: Repository, defaults: Defaults, device: Device) -> None:
        family = family_of(repository.class_name, repository.key)
        self.pipeline, self.device = pipeline, device
        self.name, self.sampling = str(repository.pipeline), family.sampling_of(repository.index)
        self.takes = inspect.signature(type(pipeline).__call__).parameters
        self.image_in_latents, self.control = family.image_in_latents, family.control
        self.bucket, self.fps, self.rules = defaults.bucket, defaults.fps, defaults.rules
        self.sample_config = completed_sample(defaults.sample, self.sampling)
        recipe = family.text_of(repository.index, repository.config)
        self.text_rows = None if recipe is None else recipe.encoders[0].length
        config = repository.config(repository.transformer)
        self.embedded = bool(config.get("guidance_embeds"))  # the model is given the guidance
        call = family.call_of(repository.index, repository.config)
        self.counts = FamilyCounts(call, dict(pipeline.transformer.config))
        self.codec = DiffusersCodec(pipeline.vae, OPTION)

    @classmethod
    def open(
        cls,
        place: str | Path,
        checkpoint: str | int = "latest",
        weights: Literal["ema", "model"] = "ema",
        device: str = "auto",
    ) -> OfficialSampler:
        """The pipeline around the weights of a run's checkpoint, or of an exported repository, whose folder `place` is.

        Raises UserError for a run without a published model, or with another codec or text encoder than its repository's, and where
        diffusers has no such pipeline or cannot load it.
        """
        chosen = pick(device)
        chosen.activate()
        if (Path(place) / INDEX).is_file():
            repository = Repository.open(str(place), key=OPTION)
            pipeline = load_pipeline(repository, {}, stored_dtype(repository), chosen)
            return cls(pipeline, repository, Defaults(SampleConfig()), chosen)
        folder = RunFolder.open(place)
        config = completed(folder.config())
        folder.check_generator()
        repository = repository_of(published_section(config, place))
        dtype, path = parse_dtype(config.device.dtype), find_checkpoint(folder, checkpoint)
        models = trained_models(folder, path, repository, present_weights(config, weights), dtype)
        pipeline = load_pipeline(repository, models, dtype, chosen)
        rules = PixelRules.of(config.data)
        defaults = Defaults(config.sample, usual_size(config), config.data.fps or RATE, rules)  # as mmspeed sample
        return cls(pipeline, repository, defaults, chosen)

    # -- requests -------------------------------------------------------------------------------------------------------

    def sizes(self, requests: Sequence[VideoRequest]) -> list[Bucket]:
        """The sizes of the videos of requests. Raises UserError, which names its line, for one that the pipeline cannot make."""
        return [self._checked(request) for request in requests]

    def _checked(self, request: VideoRequest) -> Bucket:
        try:
            self._check_files(request)
            return self._size(request)
        except UserError as error:
            raise UserError(f"line {request.line}: {error}") if request.line else error from None

    def _size(self, request: VideoRequest) -> Bucket:
        """The size of a request's video. Raises UserError for one that neither the request nor the run nor the pipeline names."""
        asked = {"num_frames": request.frames, "height": request.height, "width": request.width}
        own = self.bucket
        run = {} if own is None else {"num_frames": own.frames, "height": own.height, "width": own.width}
        size = {}
        for name, value in asked.items():
            usual = self.takes[name].default if name in self.takes else 1
            size[name] = value or run.get(name) or usual
            if size[name] is None:
                raise UserError(
                    f"{OPTION}: {self.name} names no size of its videos: give --frames, --height and --width"
                )
        bucket = Bucket(size["num_frames"], size["height"], size["width"])
        if bucket.frames > 1 and "num_frames" not in self.takes:
            raise UserError(f"--frames {bucket.frames}: {self.name} makes images")
        try:
            self.codec.strides.latent(bucket)
        except ValueError as error:
            raise UserError(f"a video of {bucket} (frames x height x width) cannot be made: {error}") from None
        return bucket

    def _check_files(self, request: VideoRequest) -> None:
        """Raises UserError for a request without a file that the pipeline needs, or with one that it does not take."""
        if (request.control is None) is not (self.control is None):
            what = (
                "takes no control: leave --control out"
                if self.control is None
                else "makes videos by a control: give --control"
            )
            raise UserError(f"{OPTION}: {self.name} {what}")
        if request.video is not None:
            raise UserError(f"--video: {self.name} takes no videos to go on from")
        for name in ("image", "last_image"):
            if getattr(request, name) is not None and name not in self.takes:
                option = name.replace("_", "-")
                raise UserError(f"--{option}: {self.name} takes no {'image' if name == 'image' else 'last image'}")
        if "image" in self.takes and request.image is None:
            raise UserError(f"{OPTION}: {self.name} makes videos from images: give --image")

    # -- sampling -------------------------------------------------------------------------------------------------------

    def sample(
        self, requests: Sequence[VideoRequest], choice: SamplerChoice = SamplerChoice(), on_step: OnStep | None = None
    ) -> Iterator[tuple[VideoRequest, Video]]:
        """Yield (request, video), one after another. `on_step(done, total)` counts the steps of all videos.

        Raises UserError, before the first video, for settings that the pipeline does not have.
        """
        steps, guidance = self._settings(choice)
        second = self._second_guidance(choice)
        sizes = self.sizes(requests)
        prompts = [clean_prompt(request.prompt) for request in requests]
        names = noise_names(zip(prompts, (request.seed or 0 for request in requests), strict=True))
        total = steps * len(requests)
        for place, (request, size) in enumerate(zip(requests, sizes, strict=True)):
            arguments = self._arguments(request, size, steps, guidance) | second
            arguments |= self._noise(size, request.seed or 0, names[place])
            fps = self.fps or (self.takes["frame_rate"].default if "frame_rate" in self.takes else RATE)
            if "frame_rate" in self.takes:
                arguments["frame_rate"] = fps
            try:
                with torch.no_grad():
                    pixels = self.pipeline(prompt=prompts[place], **arguments)[0]
            except ValueError as error:  # the pipelines' own checks of their arguments
                raise UserError(f"{OPTION}: {self.name}: {first_line(error)}") from None
            if on_step is not None:
                on_step(steps * (place + 1), total)
            yield request, video_of(pixels, float(fps))

    def _settings(self, choice: SamplerChoice) -> tuple[int, float]:
        """(steps, guidance) of a call. Raises UserError for a sampler or a rescale, and a guidance below 1, which no pipeline takes."""
        if choice.sampler not in OWN_SAMPLERS:
            raise UserError(f"--sampler {choice.sampler}: {self.name} has its repository's scheduler: leave it out")
        sample = self.sample_config
        rescale = sample.guidance_rescale if choice.rescale is None else choice.rescale
        if rescale and "guidance_rescale" not in self.takes:
            raise UserError(f"--guidance-rescale {rescale:g}: {self.name} has none: give 0")
        guidance = sample.guidance if choice.guidance is None else choice.guidance
        assert guidance is not None and sample.steps is not None  # it is a completed section
        if guidance < NO_GUIDANCE and not self.embedded:
            raise UserError(f"--guidance {guidance:g}: {self.name} takes {NO_GUIDANCE:g}, which is none, and more")
        return choice.steps or sample.steps, guidance

    def _second_guidance(self, choice: SamplerChoice) -> dict[str, float]:
        """The argument that carries the guidance of the expert of low noise. Raises UserError for one of a pipeline without it."""
        value = self.sample_config.guidance_2 if choice.guidance_2 is None else choice.guidance_2
        if value is None or ("guidance_scale_2" not in self.takes and choice.guidance_2 is None):
            return {}
        if "guidance_scale_2" not in self.takes:
            raise UserError(f"--guidance-2 {value:g}: {self.name} has one expert: leave it out")
        return {"guidance_scale_2": value}

    def _arguments(self, request: VideoRequest, size: Bucket, steps: int, guidance: float) -> dict[str, Any]:
        """The arguments of the pipeline's call, apart from prompt, noise and frame rate."""
        negative = self.sample_config.negative_prompt if request.negative is None else clean_prompt(request.negative)
        settings: dict[str, Any] = {
            "height": size.height,
            "width": size.width,
            "num_frames": size.frames,
            "num_inference_steps": steps,
            "max_sequence_length": self.text_rows,
            "guidance_rescale": self.sample_config.guidance_rescale,
            "output_type": "np",
            "return_dict": False,
        }
        settings |= {
            name: Image.fromarray(first_frame(Path(file), None, self.rules))
            for name, file in (("image", request.image), ("last_image", request.last_image))
            if file is not None
        }
        if self.control is not None:
            stride = self.codec.strides.temporal
            frames_FHWC = whole_window(Path(str(request.control)), size, self.fps, stride, self.rules)
            settings[self.control] = [Image.fromarray(frame) for frame in frames_FHWC]
        if not self.embedded:
            settings["negative_prompt"] = negative
        return {name: value for name, value in settings.items() if name in self.takes} | self._guided(guidance)

    def _guided(self, guidance: float) -> dict[str, Any]:
        """The argument that carries the guidance; a pipeline with an object for it is given another object."""
        guider = getattr(self.pipeline, "guider", None)
        if guider is not None:
            self.pipeline.guider = guider.new(guidance_scale=guidance)
            return {}
        # beside it, `guidance_scale` is what a guidance-distilled model is given
        true = "true_cfg_scale" in self.takes and not self.embedded
        return {"true_cfg_scale" if true else "guidance_scale": guidance}

    def _noise(self, size: Bucket, seed: int, name: str) -> dict[str, Any]:
        """The noise of `mmspeed sample`, as the pipeline holds latents; where it makes others of its own, the generator that draws them."""
        latent = self.codec.strides.latent(size)
        noise_PCThw = rng.normal((self.codec.channels, *latent), seed, "sample", name)[None]
        drawn = {"generator": generators(noise_PCThw)[0]}
        try:
            self.counts.tokens(latent)
        except ValueError:
            return drawn  # latents that the pipeline completes to the model's patch
        held = "image" in self.takes and self.image_in_latents
        sized = "height" in self.takes or "image" not in self.takes  # else the pipeline takes the image's own size
        return drawn if held or not sized else {**drawn, "latents": self._packed(noise_PCThw)}

    def _packed(self, noise_PCThw: Tensor) -> Tensor:
        return self.sampling.pack(noise_PCThw).to(self.device.torch_device, self.pipeline.transformer.dtype)


def published_section(config: Config, place: str | Path) -> PublishedModelConfig:
    """The section of a run's published model. Raises UserError for a model of our own, and for parts of another repository."""
    section, vae, text = config.model, config.vae, config.text
    if not isinstance(section, PublishedModelConfig):
        raise UserError(f"{OPTION}: {place} is a run of kind {section.kind}, which no pipeline of diffusers can sample")
    own = isinstance(vae, DiffusersVaeConfig) and vae.pretrained == section.pretrained
    if not own or not isinstance(text, FamilyTextConfig) or text.pretrained != section.pretrained:
        part = "text encoder" if own else "codec"
        raise UserError(
            f"{OPTION}: {place} was trained with another {part} than that of {section.pretrained}, which the official pipeline has"
        )
    return section


def load_pipeline(repository: Repository, models: Mapping[str, nn.Module], dtype: torch.dtype, device: Device) -> Any:
    """The pipeline that a repository names, with `models` in the place of its components, on a device.

    Raises UserError where diffusers has no such pipeline, and where files are missing or do not load.
    """
    kind = repository.pipeline_class(repository.pipeline)
    names = [name for name in repository.components if name not in models]
    root = resolve(repository.pretrained, names, repository.revision, OTHER_FILES, repository.key)
    try:
        with quiet():
            pipeline = kind.from_pretrained(
                root, **models, torch_dtype=dtype, local_files_only=True, use_safetensors=True
            )
    except Exception as error:  # wrong or missing files fail anywhere inside
        raise UserError(f"{repository.key}: {root} does not load as {kind.__name__}: {first_line(error)}") from error
    pipeline.set_progress_bar_config(disable=True)
    return pipeline.to(device.torch_device)


def stored_dtype(repository: Repository) -> torch.dtype:
    """The number type of most tensors of a repository's transformer."""
    files = [path for path in repository.weight_files() if path.suffix == ".safetensors"]
    kinds = Counter(entry["dtype"] for path in files for entry in header_of(path, repository.key).values())
    ((name, _),) = kinds.most_common(1)
    return NUMBERS.get(name, torch.float32)


def video_of(pixels: np.ndarray, fps: float) -> Video:
    """The video of a pipeline's result, (1, F, H, W, 3) or of an image (1, H, W, 3), from 0 to 1. Raises UserError for NaN."""
    frames_FHWC = pixels[0] if pixels.ndim == 5 else pixels
    if not np.isfinite(frames_FHWC).all():
        raise UserError("the decoded video holds NaN or infinity: the model has diverged, or its number type overflows")
    return Video(np.ascontiguousarray((frames_FHWC.clip(0, 1) * 255).round().astype(np.uint8)), fps)
