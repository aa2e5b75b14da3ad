"""Images and videos that a sampled video begins with or goes by: read from files, fitted to its size, and encoded.

Legend: F frames, H W pixels, P videos of one size, C channels, T h w latent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mmspeed.config import Config
from mmspeed.config.conditioning import Mode
from mmspeed.data.loading.conditioning_mask import conditioning_mask, prefix_of
from mmspeed.errors import UserError
from mmspeed.media.pixel_rules import PixelRules
from mmspeed.media.reading import first_frame, last_frames, whole_window
from mmspeed.models.codecs.frames import frame_latents
from mmspeed.pipelines.inference.prompts import VideoRequest
from mmspeed.protocols import VideoCodec
from mmspeed.protocols.calls import BLANK, Conditioning, latents_name
from mmspeed.shapes import Bucket

OPTIONS = {
    "prefix": "--video",
    "first_last": "--last-image",
    "first": "--image",
}  # of `mmspeed sample`, by the mode that they ask for
CONTROL = "control"


@dataclass(frozen=True)
class ConditioningLatents:
    """What videos are given beside captions.

    Args:
        named: the model's inputs, by their names in a batch (`Conditioning.inputs`).
        held_PCThw: latents that hold the given frames, zeros elsewhere, which the videos have at every step and in the end; None of a
            model that takes frames as further channels, and where none are given.
        blend: share of the first frame in the noise that sampling begins with.
    """

    named: Mapping[str, Tensor]
    held_PCThw: Tensor | None = None
    blend: float = 0.0

    def begun(self, noise_PCThw: Tensor) -> Tensor:
        """The latents that sampling begins with: noise, with its share of the first frame."""
        if not self.blend:
            return noise_PCThw
        share = torch.tensor(1 - self.blend, device=noise_PCThw.device)
        given_PCThw = self.named["condition"] if self.held_PCThw is None else self.held_PCThw
        return noise_PCThw * share + given_PCThw[:, :, :1] * (1 - share)

    def to(self, device: torch.device) -> ConditioningLatents:
        held_PCThw = None if self.held_PCThw is None else self.held_PCThw.to(device)
        return replace(self, named={name: x.to(device) for name, x in self.named.items()}, held_PCThw=held_PCThw)


def mode_of(request: VideoRequest, config: Config) -> Mode:
    """The mode that a request's files ask for. Raises UserError for files that do not go together, and for a mode that the run lacks."""
    if request.video is not None and (request.image is not None or request.last_image is not None):
        raise UserError("--video goes on from the end of a video: give it, or --image, not both")
    if request.last_image is not None and request.image is None:
        raise UserError("--last-image goes with --image")
    if request.prefix_frames is not None and request.video is None:
        raise UserError("--prefix-frames goes with --video")
    if request.video is None and request.image is None:
        return "none"
    mode: Mode = "prefix" if request.video is not None else "first_last" if request.last_image is not None else "first"
    shares = config.conditioning.shares
    if mode not in shares and "mask" not in shares:
        raise UserError(
            f"{OPTIONS[mode]}: the run was trained without conditioning.{mode}, so its model takes no such frames; "
            f"train with a share of it, such as `conditioning: {{{mode}: 0.5}}`"
        )
    trained = config.conditioning.prefix_frames
    if mode == "prefix" and "mask" not in shares and request.prefix_frames not in (None, trained):
        raise UserError(f"--prefix-frames {request.prefix_frames}: the run was trained to go on from {trained} frames")
    return mode


def check_request(request: VideoRequest, config: Config, rule: Conditioning) -> None:
    """Raises UserError for files that a request lacks or that do not go together, for a mode that the run lacks, and for its control."""
    if request.control is not None and CONTROL not in rule.roles:
        raise UserError(
            "--control: the model of this run takes no control: leave it out, or sample from a run that was trained with one"
        )
    if request.control is None and CONTROL in rule.roles:
        raise UserError(
            "the model of this run makes videos by a control: give --control FILE, a video of the same frames, "
            "or a .jsonl file of --prompts with it"
        )
    if mode_of(request, config) not in rule.modes:
        files = "--image" if "first" in rule.modes else "--image and --last-image"
        raise UserError(
            f"the model of this run makes videos of given frames alone: give {files}, or a .jsonl file of --prompts with them"
        )


def pictures_of(request: VideoRequest, config: Config, size: Bucket | None) -> list[np.ndarray]:
    """The first and maybe the last picture of a request that names such, fitted to a size; None: whole. (H, W, 3), uint8.

    Raises UserError.
    """
    files = (request.image, *([request.last_image] if mode_of(request, config) == "first_last" else []))
    return [first_frame(Path(str(file)), size, PixelRules.of(config.data)) for file in files]


def conditioning_latents(
    requests: Sequence[VideoRequest],
    config: Config,
    codec: VideoCodec,
    size: Bucket,
    rule: Conditioning,
    embeddings: Sequence[Tensor] = (),
) -> ConditioningLatents | None:
    """The given inputs of requests of one size, on the CPU; None where they name no files.

    rule: of the model. embeddings: (K, L, D) of the pictures of each request, for a model that takes them.
    Raises UserError for a file that cannot be read, and for given frames that leave nothing to make.
    """
    named: dict[str, Tensor] = {}
    if rule.roles:
        controls = [control_latents(codec, rule, control_of(request, config, codec, size)) for request in requests]
        named = {name: torch.stack([latents[name] for latents in controls]) for name in controls[0]}
    modes = [mode_of(request, config) for request in requests]
    if set(modes) == {"none"}:
        return ConditioningLatents(named) if named else None
    masks, latents = [], []
    frames = codec.strides.latent(size)[0]
    for request, mode in zip(requests, modes, strict=True):
        count = request.prefix_frames or config.conditioning.prefix_frames
        prefix = prefix_of(count, codec.strides) if mode == "prefix" else 0
        mask_T = conditioning_mask(mode, frames, prefix, 0, ("", 0, 0))
        if mode != "none" and bool(mask_T.all() | ~mask_T.any()):
            raise UserError(
                f"a video of {size} has {frames} latent frames: with those that are given none is to be made"
            )
        if mode == "prefix":
            rules = PixelRules.of(config.data)
            pixels = last_frames(Path(str(request.video)), count, config.data.fps, size, rules)
        elif mode == "none":
            pixels = np.zeros((0, size.height, size.width, 3), np.uint8)
        else:
            pixels = np.stack(pictures_of(request, config, size))
        encode = further_channels if rule.how == "grey" else clean_latents
        masks.append(mask_T)
        latents.append(encode(codec, mode, pixels, size))
    named["conditioning_mask"], latents_PCThw = torch.stack(masks), torch.stack(latents)
    if embeddings:
        named["image"] = torch.stack(list(embeddings))
    if rule.how == "replace":
        return ConditioningLatents(named, latents_PCThw, rule.blend)
    return ConditioningLatents({**named, "condition": latents_PCThw}, blend=rule.blend)


def control_of(request: VideoRequest, config: Config, codec: VideoCodec, size: Bucket) -> np.ndarray:
    """The frames (F, H, W, 3), uint8, of a request's control, cut and scaled to a size. Raises UserError."""
    rules, stride = PixelRules.of(config.data), codec.strides.temporal
    return whole_window(Path(str(request.control)), size, config.data.fps, stride, rules)


def control_latents(codec: VideoCodec, rule: Conditioning, frames_FHWC: np.ndarray) -> dict[str, Tensor]:
    """The latents (C, T, h, w) of a control (F, H, W, 3), uint8, and of a grey video beside it, where a model takes that, by their names."""
    control_1CFHW = in_model_range(frames_FHWC)
    videos = {CONTROL: control_1CFHW, BLANK: torch.zeros_like(control_1CFHW)}
    return {latents_name(role): encoded(codec, videos[role]) for role in rule.roles}


def clean_latents(codec: VideoCodec, mode: Mode, pixels_FHWC: np.ndarray, size: Bucket) -> Tensor:
    """Latents (C, T, h, w) of a video of a size whose given frames are these, zeros elsewhere.

    pixels_FHWC: none, the frames of a prefix, or the first and maybe the last frame, uint8. A last frame is encoded as the end of a video
    that stands still after the first one, since a latent frame holds several frames.
    """
    clean_CThw = torch.zeros(codec.channels, *codec.strides.latent(size))
    front_CThw = (
        encoded(codec, in_model_range(pixels_FHWC[: 1 if mode == "first_last" else len(pixels_FHWC)]))
        if mode != "none"
        else clean_CThw[:, :0]
    )
    clean_CThw[:, : front_CThw.shape[1]] = front_CThw
    if mode == "first_last":
        stay = size.frames - codec.strides.temporal
        still_FHWC = np.repeat(pixels_FHWC, [stay, size.frames - stay], axis=0)
        clean_CThw[:, -1:] = encoded(codec, in_model_range(still_FHWC))[:, -1:]
    return clean_CThw


def further_channels(codec: VideoCodec, mode: Mode, pixels_FHWC: np.ndarray, size: Bucket) -> Tensor:
    """The latents (C, T, h, w) that a model takes as further channels for a mode: of a video whose other frames are grey.

    pixels_FHWC: the first and maybe the last frame, uint8.
    """
    video_1CFHW = torch.zeros(1, 3, size.frames, size.height, size.width)
    pixels_1CFHW = in_model_range(pixels_FHWC)
    video_1CFHW[:, :, 0], video_1CFHW[:, :, -1] = pixels_1CFHW[:, :, 0], pixels_1CFHW[:, :, -1]
    name = f"grey_{mode}"
    return frame_latents(video_1CFHW, [name], codec.encode)[name][0].float().cpu()


def in_model_range(frames_FHWC: np.ndarray) -> Tensor:
    """Frames (F, H, W, 3), uint8, as a video (1, 3, F, H, W) in [-1, 1]."""
    video_FHWC = torch.from_numpy(frames_FHWC.astype(np.float32)) / 127.5 - 1
    return video_FHWC.permute(3, 0, 1, 2)[None]


def encoded(codec: VideoCodec, video_1CFHW: Tensor) -> Tensor:
    """The mean of the latents (C, T, h, w) of a video (1, 3, F, H, W) in [-1, 1], on the CPU."""
    return codec.encode(video_1CFHW).mean_BCThw[0].float().cpu()
