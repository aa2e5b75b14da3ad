"""Held-out loss of videos at fixed (sample, timestep quantile, noise), and videos sampled while training.

Legend: B batch, C T h w latent, Q quantiles.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mmspeed import comm, rng
from mmspeed.config import Config
from mmspeed.config.conditioning import ConditioningConfig
from mmspeed.data import DatasetCache, Sample, SampleUse
from mmspeed.data.loading.collate import assemble, choose_text
from mmspeed.data.loading.frame_masks import FrameMask
from mmspeed.log import get_logger
from mmspeed.models.codecs.vae import load_codec
from mmspeed.models.text.encoders import sees_pictures
from mmspeed.pipelines.diffusion.conditioning_frames import counted_frames, held
from mmspeed.pipelines.diffusion.experts import EXPERTS, OtherExpert, TrainedExperts, objective_of_expert
from mmspeed.pipelines.diffusion.objective import Objective, make_objective, mean_error
from mmspeed.pipelines.diffusion.predictor import Predictor, conditions_of, predict
from mmspeed.pipelines.domains.base import shares
from mmspeed.pipelines.inference.conditioning_media import ConditioningLatents
from mmspeed.pipelines.inference.generate import generate_latents
from mmspeed.pipelines.inference.media import RATE, contact_sheet, save_image
from mmspeed.pipelines.inference.text_to_video import decode_videos, sampler_settings, stored_prompts, video_shape
from mmspeed.pipelines.run.run_folder import RunFolder, write_text
from mmspeed.protocols import Divisors, Models, RunPlace, Term, Terms, TextEntry
from mmspeed.protocols.calls import latents_name
from mmspeed.shapes import Bucket, Strides

log = get_logger("validate")

CLIPS = 2  # sampled of a model that is always given frames or a control


@dataclass(frozen=True)
class _Wanted:
    """A video to sample: its words (a prompt, or the name of the clip), caption, size, and the clip of which the model is given something."""

    words: str
    text: TextEntry
    size: Bucket
    clip: Sample | None = None


class VideoValidation:
    """Validation by held-out loss and sampled videos. Prompts are encoded once at the start and the encoder is freed.

    `present`: leaves out what was lost in this run of a list of samples.
    """

    def __init__(
        self,
        config: Config,
        cache: DatasetCache,
        samples: list[Sample],
        predictor: Predictor,
        objective: Objective,
        present: Callable[[list[Sample]], list[Sample]],
        place: RunPlace,
        frame_mask: FrameMask | None = None,
        conditioning: ConditioningConfig | None = None,
        experts: TrainedExperts | None = None,
    ) -> None:
        self.experts = experts
        self.config, self.cache, self.samples = config, cache, samples
        self.predictor, self.objective, self.present, self.place = predictor, objective, present, place
        self.frame_mask, self.conditioning = frame_mask, conditioning
        self.folder = RunFolder(place.folder)
        self.prompts, clips = list(config.validate_.prompts), config.validate_.clips
        if clips is None:
            always = predictor.conditioning.roles or "none" not in config.conditioning.shares
            clips = CLIPS if always and not self.prompts else 0
        self.clips = [sample for sample in samples if not sample.bucket.is_image][:clips]
        self.texts: list[TextEntry] = []
        self.strides = Strides(*cache.info["encoders"]["vae"]["strides"])
        if config.validate_.samples and not samples and place.rank == 0:
            log.info(
                "no held-out samples (set data.val_fraction, or a split column): no held-out loss, no best checkpoint"
            )
        if self.prompts:
            self._objective_of(video_shape(config, self.strides, predictor))  # refuses a size before the first step
        if self.prompts or (self.clips and config.sample.negative_prompt and not sees_pictures(config.text)):
            wanted = [*self.prompts, config.sample.negative_prompt]
            if place.rank == 0:
                stored_prompts(self.folder.prompts, wanted, config.text, place.device)
            comm.barrier()
            self.texts = stored_prompts(self.folder.prompts, wanted, config.text, place.device)

    def __bool__(self) -> bool:
        """True where there are held-out samples or prompts."""
        return bool(self.samples or self.prompts)

    def measure(self, models: Models) -> Terms:
        """The unweighted losses of this rank's held-out samples, a term for each quantile; none without samples.

        Of two experts each has its own quantiles, of the times in its range: first those of low noise.
        """
        samples = self._present()
        if not samples:
            return {}
        terms: dict[str, Term] = {}
        for name, role, objective in self._learners():
            losses, weights = held_out_losses(
                models[role],
                self.cache,
                samples,
                objective,
                self.config.validate_.quantiles,
                self.config.seed,
                self.place,
                self.predictor,
                self.frame_mask,
                self.conditioning,
            )
            terms |= {f"{name}{q}": Term(losses_B, weights, trains=False) for q, losses_B in enumerate(losses)}
        return terms

    def _learners(self) -> list[tuple[str, str, Objective]]:
        """(name before the number of a quantile, role, objective) of each model that learns, from near the data to near noise."""
        if self.experts is None:
            return [("quantile ", "model", self.objective)]
        family, roles = self.objective.family, self.experts.roles
        return [
            (f"{each} quantile ", roles[each], make_objective(objective_of_expert(self.config.objective, each), family))
            for each in reversed(EXPERTS)
        ]

    def divisors(self) -> Divisors:
        """The number of held-out samples."""
        return {"samples": float(len(self._present()))}

    def row(self, values: Mapping[str, float]) -> dict[str, Any]:
        """Mean held-out loss, over all and by timestep quantile (from near the data to near noise)."""
        values = dict(sorted(values.items(), key=lambda named: int(named[0].rpartition(" ")[2])))  # by quantile
        by_expert = {
            each: [value for name, value in values.items() if name.startswith(f"{each} ")] for each in reversed(EXPERTS)
        }
        by_quantile = list(values.values()) if self.experts is None else [*by_expert["low"], *by_expert["high"]]
        row: dict[str, Any] = {
            "loss": sum(by_quantile) / len(by_quantile),
            "by_quantile": by_quantile,
            "samples": len(self._present()),
        }
        if self.experts is not None:
            row["by_expert"] = {each: sum(part) / len(part) for each, part in by_expert.items()}
        return row

    def _objective_of(self, bucket: Bucket) -> Objective:
        return self.objective.sized(bucket, self.predictor.tokens(self.strides.latent(bucket)))

    def _present(self) -> list[Sample]:
        return self.present(self.samples)

    def sample(self, models: Models, step: int) -> None:
        """Sample this rank's prompts, and held-out clips of which the model is given frames.

        Writes samples/step-00000000/NNN.mp4 with its prompt, or the name of its clip, and a contact sheet.
        """
        if not self.prompts and not self.clips:
            return
        config, place, rule = self.config, self.place, self.predictor.conditioning
        weights = self.folder.codec_weights if config.vae.kind == "linear" else None
        codec = load_codec(config.vae, place.device, weights)
        settings = sampler_settings(config, None, None, None, config.validate_.seed)
        mine = shares(list(enumerate(self._wanted(codec.strides))), place)
        latents = [
            generate_latents(
                models["model"],
                self._objective_of(one.size),
                [one.text],
                self.texts[-1] if self.texts else self.cache.null_text(),
                [one.words],
                (codec.channels, *codec.strides.latent(one.size)),
                settings,
                place.device,
                predictor=self.predictor,
                fps=config.data.fps or RATE,
                strides=codec.strides,
                other=None
                if self.experts is None
                else OtherExpert(models[self.experts.roles["low"]], self.experts.boundary, "low"),
                conditioning=None if one.clip is None else self._given(one.clip),
            )
            for (_, one), _ in mine
        ]
        if not place.leads:  # the first of the group has the same latents
            return
        videos = [
            decode_videos(codec, each, config.data.fps or RATE, 0 if one.clip is None else rule.cut)[0]
            for each, ((_, one), _) in zip(latents, mine, strict=True)
        ]
        del codec
        place.device.empty_cache()
        folder = self.folder.samples / f"step-{step:08d}"
        folder.mkdir(parents=True, exist_ok=True)
        videos_to_save = [
            (index, one.words, video) for ((index, one), real), video in zip(mine, videos, strict=True) if real
        ]
        for index, prompt, video in videos_to_save:
            video.save(folder / f"{index:03d}.mp4")
            write_text(folder / f"{index:03d}.txt", prompt)
        if videos_to_save:
            sheet = contact_sheet([v for _, _, v in videos_to_save], [p for _, p, _ in videos_to_save])
            name = "contact-sheet.png" if place.groups == 1 else f"contact-sheet-{place.group}.png"
            save_image(sheet, folder / name)

    def _wanted(self, strides: Strides) -> list[_Wanted]:
        """The videos to sample: of the prompts, then of the clips."""
        size = video_shape(self.config, strides, self.predictor) if self.prompts else None
        wanted = [_Wanted(*both, size) for both in zip(self.prompts, self.texts, strict=False) if size is not None]
        for clip in self.clips:
            key = choose_text(clip, self.config.seed, (clip.key, 0, 0), 0.0)
            text = self.cache.null_text() if key is None else self.cache.text(key)
            wanted.append(_Wanted(clip.source, text, clip.bucket, clip))
        return wanted

    def _given(self, clip: Sample) -> ConditioningLatents | None:
        """What the model is given of a clip, with the frames of the mode that the held-out loss has; None where that is nothing."""
        rule, draws = self.predictor.conditioning, [(SampleUse(clip, 0, 0), 1.0)]
        batch = assemble(self.cache, draws, self.config.seed, 0.0, conditioning=self.conditioning, rule=rule)
        named = {name: batch[name] for name in rule.inputs if name in batch}
        mask_BT = named.get("conditioning_mask")
        if mask_BT is None or not bool(mask_BT.any()):
            named = {latents_name(role): batch[latents_name(role)] for role in rule.roles}
            return ConditioningLatents(named) if named else None
        latents, replaced = batch["latents"], rule.how == "replace"
        clean = held(torch.zeros_like(latents), latents, mask_BT) if replaced else None
        return ConditioningLatents(named, clean, rule.blend)


@torch.no_grad()
def held_out_losses(
    model: nn.Module,
    cache: DatasetCache,
    samples: Sequence[Sample],
    objective: Objective,
    quantiles: int,
    seed: int,
    place: RunPlace,
    predictor: Predictor,
    frame_mask: FrameMask | None = None,
    conditioning: ConditioningConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """The unweighted losses (Q, B) of this rank's samples at the middles of equal parts of the training distribution, and weights (B,).

    Noise is keyed by (sample, quantile), the caption is the first, nothing is dropped: the losses of two steps differ by the weights
    alone. Both are float64 on the CPU. A sample counts on the rank that leads its group.
    frame_mask: of the latent frames that count; None: all. conditioning: as in training; a sample's mode is always the same.
    """
    strides = Strides(*cache.info["encoders"]["vae"]["strides"])
    was_training, device = model.training, place.device
    model.eval()
    rows: list[list[float]] = []
    weights: list[float] = []
    for sample, real in shares(samples, place):
        batch = assemble(
            cache,
            [(SampleUse(sample, 0, 0), 1.0)],
            seed=seed,
            caption_dropout=0.0,
            fps=predictor.timed,
            frame_mask=frame_mask,
            conditioning=conditioning,
            rule=predictor.conditioning,
        )
        batch = batch.to(device.torch_device, torch.float32)
        mask_BT, conditions = counted_frames(batch, predictor.conditioning.how), conditions_of(batch, strides)
        latent = strides.latent(sample.bucket)
        objective_of_size = objective.sized(sample.bucket, predictor.tokens(latent))
        weights.append(float(real and place.leads))
        rows.append([])
        for q in range(quantiles):
            noise = rng.normal(batch["latents"].shape[1:], seed, "val_noise", sample.key, q)[None]
            noise = noise.to(batch["latents"])
            u_B = torch.tensor([(q + 0.5) / quantiles], dtype=torch.float64)
            t_B = objective_of_size.time_from_quantile(u_B).float()
            x_t, target = objective_of_size.training_pair(batch["latents"], noise, t_B)
            if conditions.conditioning_mask is not None and predictor.conditioning.how == "replace":
                x_t = held(x_t, batch["latents"], conditions.conditioning_mask)
            prediction = predict(predictor, model, x_t, device.to_device(t_B), conditions)
            rows[-1].append(mean_error(prediction, target, mask_BT).item())
    model.train(was_training)
    losses_QB = torch.tensor(rows, dtype=torch.float64).T if rows else torch.zeros(quantiles, 0, dtype=torch.float64)
    return losses_QB, torch.tensor(weights, dtype=torch.float64)
