"""What is looked at while a run trains: held-out loss and sample videos, from the EMA weights."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

from mmspeed import comm
from mmspeed.log import get_logger
from mmspeed.models.vae import load_codec
from mmspeed.pipelines.conditions import stored_prompts
from mmspeed.pipelines.generate import generate_latents
from mmspeed.pipelines.media import contact_sheet, save_image
from mmspeed.pipelines.run_folder import write_text
from mmspeed.pipelines.text_to_video import decode_videos, sampler_settings, video_shape
from mmspeed.pipelines.validate import held_out_loss, shares

if TYPE_CHECKING:
    from mmspeed.pipelines.train import TrainPipeline

log = get_logger("validate")


class Observer:
    """Validates and samples for a TrainPipeline. Prompts are encoded once at the start and the encoder is freed."""

    def __init__(self, pipeline: TrainPipeline) -> None:
        self.pipeline = pipeline
        config = pipeline.config
        self.samples = [sample for sample in pipeline.cache.split("val")[: config.validate_.samples] if not sample.lost]
        self.prompts = list(config.validate_.prompts)
        if config.validate_.samples and not self.samples and pipeline.rank == 0:
            log.info(
                "no held-out samples (set data.val_fraction, or a split column): no held-out loss, no best checkpoint"
            )
        if self.prompts:
            video_shape(
                config, pipeline.strides, pipeline.bare
            )  # a size that cannot be made is told before the first step
            wanted = [*self.prompts, config.sample.negative_prompt]
            if pipeline.rank == 0:
                stored_prompts(pipeline.folder.prompts, wanted, config.text, pipeline.device)
            comm.barrier()
            self.texts = stored_prompts(pipeline.folder.prompts, wanted, config.text, pipeline.device)

    def observe(self, step: int) -> dict[str, Any]:
        """One row for metrics.jsonl, or an empty one when there is nothing to look at."""
        if not self.samples and not self.prompts:
            return {}
        started = time.monotonic()
        row: dict[str, Any] = {"kind": "validation", "step": step}
        pipeline = self.pipeline
        with pipeline.ema.swap(pipeline.model) if pipeline.ema is not None else contextlib.nullcontext():
            loss = self._loss()
            if loss is not None:
                row |= {"loss": loss.mean, "by_quantile": list(loss.by_quantile), "samples": loss.samples}
            if self.prompts:
                self._sample(step)
        row["seconds"] = time.monotonic() - started
        if pipeline.rank == 0 and loss is not None:
            log.info(f"step {step}: held-out loss {loss.mean:.4f} on {loss.samples} samples")
        return row

    def _loss(self) -> Any:
        pipeline, config = self.pipeline, self.pipeline.config
        first = pipeline.loader.first_epoch
        lost = first.lost if first is not None else set()
        return held_out_loss(
            pipeline.model,
            pipeline.cache,
            [sample for sample in self.samples if sample.key not in lost],
            pipeline.objective,
            config.validate_.quantiles,
            config.seed,
            pipeline.device,
            pipeline.placement,
        )

    def _sample(self, step: int) -> None:
        """Sample this rank's prompts; write samples/step-00000000/NNN.mp4 with its prompt, and rank 0's contact sheet."""
        pipeline, config = self.pipeline, self.pipeline.config
        codec = load_codec(
            config.vae, pipeline.device, pipeline.folder.codec_weights if config.vae.kind == "linear" else None
        )
        bucket = video_shape(config, codec.strides, pipeline.bare)
        settings = sampler_settings(config, None, None, None, config.validate_.seed)
        mine = shares(list(enumerate(self.prompts)), pipeline.placement)
        latents = generate_latents(
            pipeline.model,
            pipeline.objective,
            [self.texts[index] for (index, _), _ in mine],
            self.texts[-1],
            [prompt for (_, prompt), _ in mine],
            (codec.channels, *codec.strides.latent(bucket)),
            settings,
            pipeline.device,
        )
        if not pipeline.placement.first:  # the first of the group has the same latents
            return
        videos = decode_videos(codec, latents, config.data.fps or 24.0)
        del codec
        pipeline.device.empty_cache()
        folder = pipeline.folder.samples / f"step-{step:08d}"
        folder.mkdir(parents=True, exist_ok=True)
        kept = [(index, prompt, video) for ((index, prompt), real), video in zip(mine, videos, strict=True) if real]
        for index, prompt, video in kept:
            video.save(folder / f"{index:03d}.mp4")
            write_text(folder / f"{index:03d}.txt", prompt)
        if kept:
            sheet = contact_sheet([v for _, _, v in kept], [p for _, p, _ in kept])
            reader = pipeline.placement.reader
            name = "contact-sheet.png" if reader.count == 1 else f"contact-sheet-{reader.index}.png"
            save_image(sheet, folder / name)
